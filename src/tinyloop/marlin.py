"""Canonical codes → the device format of the tensor-core kernels ("Marlin order"), and back.

    q [K, N] → B int32 [Kp/16, 2·Np]     Kp is K on the next multiple of 128, Np is N on the next multiple of 64

A tile of 16 (k) × 64 (n) is 128 words side by side: word 4·lane + j of them is lane 4r + t's share of columns
16j … 16j + 15. It holds the codes k = 2t + 8h + p, n = 16j + 8b + r, that of (h, p, b) from bit 16p + 8b + 4h on:

    bit    31     28     24     20     16     12      8      4      0
    h p b  │ 1 1 1│ 0 1 1│ 1 1 0│ 0 1 0│ 1 0 1│ 0 0 1│ 1 0 0│ 0 0 0│      code (0 0 0) is k = 2t, n = 16j + r

so that one mask takes a pair that neighbours along k out of a word, and a lane's four words are one 16-byte load. A
canonical byte holds a pair along k too: of two bytes, eight rows apart, the low nibbles make byte b of a word and the
high nibbles byte 2 + b. Packing is therefore two byte operations and one transposition of bytes.

Parameters are permuted along N: by groups, each run of 64 columns is an 8 × 8 matrix, transposed; with one group over
K, each run of 32 columns is a 4 × 4 matrix of pairs, transposed.

The format is symmetric, W_sym = (q − 8)·scale; `delta` = zero + 8·scale is what it lacks: W = W_sym + delta. It is
fp32, but a `MarlinWeight` whose scales are fp16 and whose groups are no multiple of 64 has it in two parts, as 16-bit
arithmetic takes it, z being the whole number next to −zero/scale:

    delta = (8 − z)·scale + rest        int32: 8 − z in fp16 in the upper half, rest in fp16 in the lower one

rest is half a scale at most. No bit is lost where fp16 holds zero, or where −zero/scale is whole, elsewhere 2⁻¹² of a
scale at most, or the scales stay in fp32. In fp16 it saves a division and sixteen exchanges between lanes a group, in
bf16 the division, which counts where groups are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from . import devices
from .cuda.config import in_halves
from .errors import InputError
from .weight import LinearWeight, QuantWeight, pack_nibbles

if TYPE_CHECKING:
    from .model import Model

Tensor = torch.Tensor
ONE_GROUP = -1
"""Group size of a weight whose one group spans K: its parameters have an order of their own."""

_K_STEP, _N_STEP = 128, 64
_GROUP_STEP = 32
_SLAB = 1 << 18  # bytes, of two codes each, packed at a time: as fast as 4 MB, and small beside a weight
_SLAB_CUDA = 1 << 23  # a GPU wants more at a time


@dataclass(frozen=True)
class MarlinWeight:
    """A `QuantWeight` in device order. K and N are the true sizes, `group_size` is −1 where one group spans K. Rows are
    the weight's stored ones: where it has a `perm`, its product is that of `x[..., perm]`.

    S is fp16 where that is exact for every scale, else fp32. S and delta have a row for every group of the padded K,
    so those from `groups` on are 0; B's padding is code 8, so that padded rows and columns of W_sym are 0. delta is not
    0 for padded rows of a group that has true ones: whoever adds it to W reads activations as 0 from K on.
    """

    B: Tensor  # int32 [Kp/16, 2·Np]
    S: Tensor  # fp16 | fp32 [⌈Kp/G⌉, Np], permuted
    delta: Tensor  # int32 in two parts, where `of` makes it so, or fp32; as S
    K: int
    N: int
    group_size: int
    canonical_bytes: int = 0  # of codes, scale and zero that this was made from
    coarse: bool = False  # whether bf16 holds every scale, which makes products in bf16 faster

    @property
    def Kp(self) -> int:
        return 16 * self.B.shape[0]

    @property
    def Np(self) -> int:
        return self.B.shape[1] // 2

    @property
    def groups(self) -> int:
        """Groups of the true K."""
        return _groups(self.K, self.group_size)

    @property
    def in_parts(self) -> bool:
        """Whether delta is in two parts."""
        return self.delta.dtype == torch.int32

    @property
    def nbytes(self) -> int:
        return self.B.nbytes + self.S.nbytes + self.delta.nbytes

    @property
    def overhead(self) -> int:
        """Bytes beyond those of the canonical codes, scale and zero; below 0 where their parameters are wider."""
        return self.nbytes - self.canonical_bytes

    @classmethod
    def of(cls, weight: QuantWeight, device: torch.device | str | None = None) -> MarlinWeight:
        """Pack on `device` (default: where the weight is), slab by slab from the packed nibbles, and wait for it.

        Raises InputError where `refusal` has a reason.
        """
        if reason := refusal(weight):
            raise InputError(f"the weight cannot be packed in device order: {reason}")
        device = weight.packed.device if device is None else torch.device(device)
        group = marlin_group_size(weight.group_size, weight.K)
        B = _pack(lambda i, end: weight.packed[i:end].to(device), weight.K, weight.N, device)
        scale, zero = weight.scale.to(device), weight.zero.to(device)
        S = _permuted(Tensor.half if _in_halves(weight) else Tensor.float, weight.K, group, scale)
        in_parts = S.dtype == torch.float16 and in_halves(group)
        delta = _permuted(_parts if in_parts else _delta, weight.K, group, scale, zero)
        devices.settle(device)
        coarse = _holds(torch.bfloat16, weight.scale)
        return cls(B, S, delta, weight.K, weight.N, group, _canonical_bytes(weight), coarse)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:  # uint8 [K, N], S's dtype [groups, N], fp32 [groups, N]
        """(q, scale, zero) in canonical order; zero = delta − 8·scale, as exact as delta is."""
        if not self.in_parts:
            return marlin_unpack_asymmetric(self.B, self.S, self.delta, self.group_size, self.K, self.N)
        q, scale = marlin_unpack_symmetric(self.B, self.S, self.group_size, self.K, self.N)
        halves = self.delta.view(torch.float16).view(*self.delta.shape, 2).unbind(2)
        rest, eight = (_unpermuted(t, "delta", self.B, self.K, self.N, self.group_size).double() for t in halves)
        return q, scale, ((eight - 8) * scale + rest).float()


@dataclass(frozen=True)
class PackReport:
    """What packing a model in device order gives; prints. `device` is None where it is only foreseen: a model on a CPU
    reads other layouts.
    """

    device: str | None
    packed: Mapping[str, int]  # weight → bytes in device order
    canonical: int  # bytes of codes, scale and zero of the packed weights
    refused: Mapping[str, str]  # weight → why it is not packed

    @property
    def nbytes(self) -> int:
        return sum(self.packed.values())

    @property
    def overhead(self) -> int:
        """Bytes beyond those of the canonical form."""
        return self.nbytes - self.canonical

    def __str__(self) -> str:
        where = "would be packed on a GPU" if self.device is None else f"packed on {self.device}"
        more = f"{self.overhead / 1e6:+.1f} MB beside the canonical {self.canonical / 1e6:.1f} MB"
        lines = [f"{len(self.packed)} weights {where}: {self.nbytes / 1e6:.1f} MB, {more}"]
        for reason in dict.fromkeys(self.refused.values()):
            first, *others = (name for name, why in self.refused.items() if why == reason)
            lines.append(f"{first}{f' and {len(others)} more' if others else ''} not packed: {reason}")
        return "\n".join(lines)


def pack_model_for_marlin(model: Model) -> PackReport:
    """Pack every weight that the tensor-core kernels can read and say which, how large, and why not the others.

    A model on a GPU is packed at once (`tinyloop.load` has done so already); for one on a CPU nothing is made, and the
    report says what a GPU would hold.
    """
    packed: dict[str, int] = {}
    canonical, refused = 0, {}
    for name, w in model.weights.items():
        if (reason := _model_refusal(model, name)) is not None:
            refused[name] = reason
            continue
        weight = w.weight
        assert isinstance(weight, QuantWeight)
        packed[name] = packed_bytes(weight) if model.device.type == "cpu" else w.marlin().nbytes
        canonical += _canonical_bytes(weight)
    return PackReport(None if model.device.type == "cpu" else str(model.device), packed, canonical, refused)


def _model_refusal(model: Model, name: str) -> str | None:
    from .dispatch import chip
    from .dispatch_cuda import int4_refusal
    from .ops import problem

    if name == "embed" and not model.config.tie_word_embeddings:
        return "its rows are looked up, never multiplied"
    w = model.weights[name]
    if model.device.type == "cpu":
        return w.unpackable
    return int4_refusal(problem(w, 1, model.dtype), chip(model.device))


def packed_bytes(weight: QuantWeight) -> int:
    """Bytes of `MarlinWeight.of(weight)`, from the shapes and a look at the scales."""
    Kp, Np = _up(weight.K, _K_STEP), _up(weight.N, _N_STEP)
    rows = _groups(Kp, marlin_group_size(weight.group_size, weight.K))
    return Kp * Np // 2 + rows * Np * ((2 if _in_halves(weight) else 4) + 4)


def refusal(weight: LinearWeight) -> str | None:
    """Why `weight` cannot be packed in device order, in a sentence; None where it can."""
    if not isinstance(weight, QuantWeight):
        return "the weight is dense: there are no codes to pack"
    if weight.bits != 4:
        return f"codes have {weight.bits} bits; the device format holds 4-bit codes"
    if reason := _group_refusal(weight.group_size, weight.K):
        return reason
    if _not_finite(_delta(*parts) for parts in zip(_slabs(weight.scale), _slabs(weight.zero), strict=True)):
        return "zero + 8·scale is NaN or infinite in fp32 for at least one group"
    return None


def marlin_group_size(group_size: int, K: int) -> int:
    """The device format's name for a group size: −1 where the group spans K, else the same.

    Raises InputError for a size that the format does not have.
    """
    if reason := _group_refusal(group_size, K):
        raise InputError(reason)
    return ONE_GROUP if group_size == K else group_size


def _group_refusal(group_size: int, K: int) -> str | None:
    if group_size in (ONE_GROUP, K) or (0 < group_size < K and group_size % _GROUP_STEP == 0):
        return None
    return f"group_size={group_size} is neither a multiple of {_GROUP_STEP} below K={K}, nor K or −1 for one group"


def marlin_pack_symmetric(
    q: Tensor,  # uint8 [K, N], every value in 0..15
    scale: Tensor,  # float [⌈K/G⌉, N]
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # B int32 [Kp/16, 2·Np], S fp16 [⌈Kp/G⌉, Np]
    """Codes and scales in device order, bit for bit the published Marlin format where K and N need no padding.

    `group_size` is a multiple of 32, the last group may be short; −1 or K is one group over K, whose S has an order of
    its own. None derives it from the shapes: one row of scales is −1, several are K / rows, which must then be a whole
    multiple of 32.

    Scales are rounded to fp16. Raises InputError for codes out of range, wrong dtypes, shapes or devices, and where
    rounding makes a scale infinite, 0, or subnormal.
    """
    group = _checked(q, {"scale": scale}, group_size)
    _check_halves(scale)
    B = _pack(lambda i, end: pack_nibbles(q[2 * i : 2 * end]), q.shape[0], q.shape[1], q.device)
    return B, _permuted(Tensor.half, q.shape[0], group, scale)


def marlin_pack_asymmetric(
    q: Tensor,  # uint8 [K, N], every value in 0..15
    scale: Tensor,  # float [⌈K/G⌉, N]
    zero: Tensor,  # float, as scale
    group_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # B, S as marlin_pack_symmetric, delta fp32 as S
    """As `marlin_pack_symmetric`, with delta = zero + 8·scale in fp32, permuted as the scales are.

    delta takes the scale before its rounding, so that code 8 is exact and the error of a rounded scale is |q − 8|
    times it.
    """
    group = _checked(q, {"scale": scale, "zero": zero}, group_size)
    B, S = marlin_pack_symmetric(q, scale, group)
    return B, S, _permuted(_delta, q.shape[0], group, scale, zero)


def marlin_unpack_symmetric(
    B: Tensor, S: Tensor, group_size: int, K: int | None = None, N: int | None = None
) -> tuple[Tensor, Tensor]:  # uint8 [K, N], S's dtype [⌈K/G⌉, N]
    """Inverse of `marlin_pack_symmetric`. K and N are the true sizes; None takes the padded ones."""
    K, N = _true_sizes(B, K, N)
    return _unpack(B)[:K, :N], _unpermuted(S, "S", B, K, N, group_size)


def marlin_unpack_asymmetric(
    B: Tensor, S: Tensor, delta: Tensor, group_size: int, K: int | None = None, N: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # uint8 [K, N], S's dtype [⌈K/G⌉, N], fp32 [⌈K/G⌉, N]
    """Inverse of `marlin_pack_asymmetric`: zero = delta − 8·scale, exact where delta is and S was not rounded."""
    K, N = _true_sizes(B, K, N)
    q, scale = marlin_unpack_symmetric(B, S, group_size, K, N)
    if delta.dtype != torch.float32:
        raise InputError(f"delta is {delta.dtype}; it is float32, as marlin_pack_asymmetric returns it")
    return q, scale, _unpermuted(delta, "delta", B, K, N, group_size) - 8 * scale.float()


def _pack(pairs: Callable[[int, int], Tensor], K: int, N: int, device: torch.device) -> Tensor:  # int32 [Kp/16, 2·Np]
    """B from `pairs(i, end)`, canonical bytes uint8 [≤ end − i, N]: extra memory is a few slabs."""
    Kp, Np = _up(K, _K_STEP), _up(N, _N_STEP)
    B = torch.empty(Kp // 16, 2 * Np, dtype=torch.int32, device=device)
    step = max(1, (_SLAB_CUDA if B.is_cuda else _SLAB) // (8 * Np))
    for tile in range(0, Kp // 16, step):
        end = min(Kp // 16, tile + step)
        B[tile:end] = _words(_with_padding(pairs(8 * tile, 8 * end), 8 * tile, 8 * end, K, Np))
    return B


def _with_padding(pairs: Tensor, first: int, end: int, K: int, Np: int) -> Tensor:  # uint8 → uint8 [end − first, Np]
    """Bytes first … end − 1 of each column, code 8 wherever there is no weight."""
    if pairs.shape == (end - first, Np) and 2 * end <= K:
        return pairs
    full = pairs.new_full((end - first, Np), 0x88)
    rows, N = pairs.shape
    full[:rows, :N] = pairs
    if K % 2 and first <= K // 2 < end:
        full[K // 2 - first, :N] = pairs[K // 2 - first] & 15 | 0x80
    return full


def _words(pairs: Tensor) -> Tensor:  # uint8 [8·R, Np] → int32 [R, 2·Np]
    R, Np = pairs.shape[0] // 8, pairs.shape[1]
    low, high = pairs.view(R, 2, 4, Np).unbind(1)  # h = 0, 1: uint8 [R, t, Np]
    planes = torch.stack((low & 15 | high << 4, low >> 4 | high & 0xF0))  # [p, R, t, Np]
    planes = planes.view(2, R, 4, Np // 64, 4, 2, 8)  # [p, R, t, n/64, j, b, r]
    words = planes.permute(1, 3, 6, 2, 4, 0, 5).contiguous()  # [R, n/64, r, t, j, p, b]
    return words.view(R, 8 * Np).view(torch.int32)  # the lowest byte first: every device torch runs on


def _unpack(B: Tensor) -> Tensor:  # int32 [Kp/16, 2·Np] → uint8 [Kp, Np]
    R, Np = B.shape[0], B.shape[1] // 2
    q = torch.empty(R, 2, 4, 2, Np, dtype=torch.uint8, device=B.device)  # k = 8h + 2t + p
    step = max(1, _SLAB // (8 * Np))
    for tile in range(0, R, step):
        slab = slice(tile, tile + step)
        words = B[slab].contiguous().view(torch.uint8).view(-1, Np // 64, 8, 4, 4, 2, 2)  # [R, n/64, r, t, j, p, b]
        planes = words.permute(0, 3, 5, 1, 4, 6, 2).reshape(-1, 4, 2, Np)  # [R, t, p, Np]
        q[slab, 0], q[slab, 1] = planes & 15, planes >> 4
    return q.view(16 * R, Np)


def _permuted(make: Callable[..., Tensor], K: int, group: int, *source: Tensor) -> Tensor:
    """`make(*source)` of [⌈K/G⌉, N], padded with 0 to [⌈Kp/G⌉, Np] and brought into the order of the device format."""
    N, parts = source[0].shape[1], [*zip(*map(_slabs, source), strict=True)]
    Np, first = _up(N, _N_STEP), 0
    out = make(*(t[:0] for t in source)).new_zeros(_groups(_up(K, _K_STEP), group), Np)
    for part in parts:
        made = _other_order(F.pad(make(*part), (0, Np - N)), group)
        out[first : first + len(made)] = made
        first += len(made)
    return out


def _unpermuted(t: Tensor, name: str, B: Tensor, K: int, N: int, group_size: int) -> Tensor:  # → [⌈K/G⌉, N]
    group = marlin_group_size(group_size, K)
    want = [_groups(16 * B.shape[0], group), B.shape[1] // 2]
    if list(t.shape) != want or not t.is_floating_point() or t.device != B.device:
        raise InputError(
            f"{name} is {t.dtype} {list(t.shape)} on {t.device}; B {list(B.shape)} with group_size={group_size} goes "
            f"with floats {want} on {B.device}"
        )
    return _other_order(t, group)[: _groups(K, group), :N]


def _other_order(t: Tensor, group: int) -> Tensor:  # [rows, Np] → [rows, Np]
    """From the canonical order of columns to the device format's, or back: a transposition undoes itself."""
    runs = t.reshape(t.shape[0], -1, 4, 4, 2) if group == ONE_GROUP else t.reshape(t.shape[0], -1, 8, 8)
    return runs.transpose(2, 3).reshape(t.shape).contiguous()


def _checked(q: Tensor, parameters: dict[str, Tensor], group_size: int | None) -> int:
    """The group size in the device format's terms, once everything is what it must be."""
    if q.dtype != torch.uint8 or q.dim() != 2 or 0 in q.shape:
        raise InputError(f"q is {q.dtype} {list(q.shape)}; codes are uint8 [K, N], one a byte, with K and N ≥ 1")
    if (largest := int(q.max())) > 15:
        raise InputError(f"q goes up to {largest}; codes lie in 0..15: one a byte, not two")
    K, N = q.shape
    group = marlin_group_size(_derived(K, parameters["scale"]) if group_size is None else group_size, K)
    want = [_groups(K, group), N]
    for name, t in parameters.items():
        if not t.is_floating_point() or list(t.shape) != want:
            raise InputError(
                f"{name} is {t.dtype} {list(t.shape)}; q {list(q.shape)} with group_size={group} needs floats {want}: "
                "one row per group, one column per output (an integer zero point z is zero = −z·scale)"
            )
        if t.device != q.device:
            raise InputError(f"{name} is on {t.device}, q on {q.device}; move one of them")
        if bad := _not_finite(part.float() for part in _slabs(t)):
            raise InputError(f"{name} has {bad} values that are NaN or infinite in fp32; the source weight is damaged")
    return group


def _derived(K: int, scale: Tensor) -> int:
    rows = scale.shape[0] if scale.dim() == 2 else 0
    if rows == 1:
        return ONE_GROUP
    if rows < 1 or K % rows or K // rows % _GROUP_STEP:
        raise InputError(
            f"no group size follows from K={K} and scale {list(scale.shape)}: K / rows must be a whole multiple of "
            f"{_GROUP_STEP}; give group_size, or transpose what is [N, groups]"
        )
    return K // rows


def _true_sizes(B: Tensor, K: int | None, N: int | None) -> tuple[int, int]:
    if B.dtype != torch.int32 or B.dim() != 2 or not B.numel() or B.shape[0] % 8 or B.shape[1] % 128:
        raise InputError(f"B is {B.dtype} {list(B.shape)}; packed codes are int32 [a multiple of 8, a multiple of 128]")
    Kp, Np = 16 * B.shape[0], B.shape[1] // 2
    K, N = Kp if K is None else K, Np if N is None else N
    if not 0 < Kp - K + 1 <= _K_STEP or not 0 < Np - N + 1 <= _N_STEP:
        raise InputError(f"K={K}, N={N} do not pad to B {list(B.shape)}, which holds K={Kp}, N={Np} with padding")
    return K, N


def _check_halves(scale: Tensor) -> None:
    """Raises InputError where rounding to fp16 takes a value out of the normal range and changes it."""
    lost = torch.cat([part[_lost(part)] for part in _slabs(scale)]).double()
    if len(lost):
        worst = float(lost[lost.abs().log2().abs().argmax()])
        raise InputError(
            f"scale has {len(lost)} values that fp16 cannot hold in its normal range, 6.1e-05..65504, the worst is "
            f"{worst:.4g}; MarlinWeight.of keeps such scales in fp32, or multiply them by a power of two and divide "
            "the product by it"
        )


def _lost(scale: Tensor) -> Tensor:  # bool
    half = scale.half()
    outside = torch.isinf(half) | (half.abs() < torch.finfo(torch.float16).tiny)
    return outside & (half.to(scale.dtype) != scale)


def _delta(scale: Tensor, zero: Tensor) -> Tensor:  # → fp32, rounded once: 8·scale is exact
    return torch.add(zero.float(), scale.float(), alpha=8)


def _crossing(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:  # → fp32 z, a whole number, and rest
    """Where W crosses zero: −zero/scale to the next whole number, and what W is there."""
    s, zero = scale.float(), zero.float()
    z = torch.div(zero, s).neg_().masked_fill_(s == 0, 0).round_()
    return z, (z * s).add_(zero)  # exact: z·s has 18 bits, and is next to −zero


def _parts(scale: Tensor, zero: Tensor) -> Tensor:  # → int32, delta beside scales in fp16
    z, rest = _crossing(scale, zero)
    halves = torch.empty(*z.shape, 2, dtype=torch.float16, device=z.device)
    halves[..., 0], halves[..., 1] = rest, 8 - z
    return halves.view(torch.int32).squeeze(-1)


def _holds(dtype: torch.dtype, scale: Tensor) -> bool:
    """Whether a 16-bit type holds every scale exactly."""
    return all(torch.equal(part.to(dtype).to(part.dtype), part) for part in _slabs(scale))


def _in_halves(weight: QuantWeight) -> bool:
    """Whether the device format keeps scales in fp16: where it holds them exactly, where W crosses zero within a
    hundred scales of the middle, as arithmetic in 16 bits needs it (weight.cuh), and where of a delta in two parts
    2⁻¹² of a scale is lost at most. It would be more only where a scale is 0, or below 2⁻¹³."""
    if not _holds(torch.float16, weight.scale):
        return False
    parts = in_halves(marlin_group_size(weight.group_size, weight.K))

    def fits(s: Tensor, zero: Tensor) -> bool:
        size = s.float().abs()
        if bool(((_delta(s, zero).abs() > 100 * size) & (s != 0)).any()):
            return False
        if not parts:
            return True
        _, rest = _crossing(s, zero)
        return bool(((rest.half().float() - rest).abs() <= 2.0**-12 * size).all())

    return all(map(fits, _slabs(weight.scale), _slabs(weight.zero)))


def _canonical_bytes(weight: QuantWeight) -> int:
    return weight.packed.nbytes + weight.scale.nbytes + weight.zero.nbytes


def _not_finite(parts: Iterable[Tensor]) -> int:
    return sum(int((~torch.isfinite(part)).sum()) for part in parts)


def _slabs(t: Tensor) -> tuple[Tensor, ...]:
    """Runs of rows, so that what is made of them, several floats for each, stays small: at group 32, parameters weigh a
    quarter of the codes."""
    return torch.split(t, max(1, _SLAB // 4 // t.shape[1]))


def _groups(K: int, group: int) -> int:
    return 1 if group == ONE_GROUP else -(-K // group)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
