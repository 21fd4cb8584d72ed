"""One linear weight in canonical form: codes, scale and zero, with `W = q·scale + zero`.

    q      uint4 (or uint8) [K, N]   stored as `packed`: byte (i, n) = q[2i, n] | q[2i+1, n] << 4, shape [⌈K/2⌉, N]
    scale  fp16 or fp32 [⌈K/G⌉, N]   row g belongs to inputs g·G … g·G+G−1; the last group may be short
    zero   as scale

Rows run along K so that a product streams whole rows and every parameter of a group lies beside its neighbours along
N; two codes of one column share a byte, so that unpacking needs a mask and a shift but no shuffle. Eight-bit codes
(one a byte, [K, N]) exist for embedding tables that come as eight bits; the algebra is the same.

A weight of a loop may carry one channel beside its codes, which says how other iterations round (see channel.py):

    frac4     uint8 [⌈K/2⌉, N]   s in −8..7, packed as q is
    sign_bit  uint8 [⌈K/8⌉, N]   bit j of byte (i, n) belongs to q[8i + j, n]

A weight quantised in the order of its inputs' importance has groups of inputs that do not lie beside each other. Its
rows are stored so that they do, and a permutation says where each belongs:

    perm   int32 [K]   row i of q is that of input perm[i]

`packed`, `codes` and `rows` are in stored order, which is what kernels read, given `x[..., perm]`; W, as `dequantize`,
`columns` and `mean` give it, is in the order of the inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from . import channel
from .channel import FRAC4, SIGN_BIT
from .errors import FormatError

Tensor = torch.Tensor


@dataclass(frozen=True)
class QuantWeight:
    """Immutable; built by `from_codes` (from codes) or by the file (already packed). See the module for the layout.

    `integer_zero` says that the source had integer zero points, `zero = −z·scale` with z in 0..15, so that writing
    them back is lossless.
    """

    packed: Tensor  # uint8 [⌈K/2⌉, N], or [K, N] at 8 bits
    scale: Tensor  # fp16 | fp32 [⌈K/G⌉, N]
    zero: Tensor  # as scale
    K: int
    group_size: int
    bits: int = 4
    integer_zero: bool = False
    bias: Tensor | None = None  # [N]
    frac4: Tensor | None = None  # uint8 [⌈K/2⌉, N]
    sign_bit: Tensor | None = None  # uint8 [⌈K/8⌉, N]
    perm: Tensor | None = None  # int32 [K]

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise FormatError(f"bits={self.bits} is not supported; codes have 4 bits, or 8 in embedding tables")
        if self.K < 1 or not 1 <= self.group_size <= self.K:
            raise FormatError(f"group_size={self.group_size} must be in 1..K={self.K} (K itself: one group per column)")
        rows = (self.K + 1) // 2 if self.bits == 4 else self.K
        if self.packed.dtype != torch.uint8 or self.packed.dim() != 2 or self.packed.shape[0] != rows:
            raise FormatError(
                f"packed codes are {self.packed.dtype} {list(self.packed.shape)}; K={self.K} at {self.bits} bits needs "
                f"uint8 [{rows}, N]"
            )
        want = [-(-self.K // self.group_size), self.N]
        for name, t in (("scale", self.scale), ("zero", self.zero)):
            if t.dtype not in (torch.float16, torch.float32) or list(t.shape) != want:
                raise FormatError(
                    f"{name} is {t.dtype} {list(t.shape)}; K={self.K}, N={self.N}, group {self.group_size} needs "
                    f"float16 or float32 {want}"
                )
        if self.scale.dtype != self.zero.dtype:
            raise FormatError(f"scale is {self.scale.dtype} but zero is {self.zero.dtype}; store both alike")
        _check_bias(self.bias, self.N)
        _check_channel_shape(self)
        _check_perm_shape(self)

    @property
    def N(self) -> int:
        return self.packed.shape[1]

    @property
    def channel(self) -> str | None:
        """Which channel there is: "frac4", "sign_bit" or None."""
        return FRAC4 if self.frac4 is not None else SIGN_BIT if self.sign_bit is not None else None

    @property
    def groups(self) -> int:
        return self.scale.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, parameters, bias, channel and permutation."""
        tensors = (self.packed, self.scale, self.zero, self.bias, self.frac4, self.sign_bit, self.perm)
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def stored(self) -> QuantWeight:
        """The weight of `x[..., perm]`: the same rows as they are stored, without a permutation."""
        return self if self.perm is None else dataclasses.replace(self, perm=None)

    def to(self, device: torch.device | str) -> QuantWeight:
        """The same weight with all its tensors on `device`; itself where they are there already."""
        names = ("packed", "scale", "zero", "bias", "frac4", "sign_bit", "perm")
        return _moved(self, names, torch.device(device))

    def codes(self) -> Tensor:  # uint8 [K, N], 0..15 (0..255 at 8 bits), in stored order
        if self.bits == 8:
            return self.packed
        pair = torch.stack((self.packed & 15, self.packed >> 4), dim=1)  # [⌈K/2⌉, 2, N]
        return pair.flatten(0, 1)[: self.K]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [K, N]
        """`q·scale + zero`, product and sum each rounded once to fp32, then cast to `dtype`.

        Works in slabs of rows, so that the extra memory stays near 32 MB however large the weight or its groups are.
        """
        W = torch.empty(self.K, self.N, dtype=dtype, device=self.packed.device)
        slab = max(1, (1 << 21) // max(1, self.N))  # rows per slab
        for k in range(0, self.K, slab):
            end = min(self.K, k + slab)
            W[slice(k, end) if self.perm is None else self.perm[k:end]] = self.rows(k, end).to(dtype)
        return W

    def rows(self, k: int, end: int) -> Tensor:  # fp32 [end − k, N]
        """Stored rows k..end−1 of W, exact as `dequantize`."""
        return self._values(k, self._codes(k, end).to(torch.float32))

    def _codes(self, k: int, end: int) -> Tensor:  # uint8 [end − k, N]
        return self.packed[k:end] if self.bits == 8 else _nibbles(self.packed, k, end)

    def _values(self, k: int, codes: Tensor) -> Tensor:  # fp32 [R, N], overwritten → fp32 [R, N]
        """`codes·scale + zero` for rows from k on."""
        group = torch.arange(k, k + codes.shape[0], device=codes.device) // self.group_size
        return codes.mul_(self.scale[group]).add_(self.zero[group])

    def columns(self, n: Tensor) -> Tensor:  # n int64 [...] → fp32 [..., K]
        """Columns of W, which for an embedding table are the rows of its lookup: exact as `dequantize`."""
        flat = n.reshape(-1)
        part = QuantWeight(
            self.packed[:, flat], self.scale[:, flat], self.zero[:, flat], self.K, self.group_size, self.bits,
            perm=self.perm,
        )  # fmt: skip
        return part.dequantize().t().reshape(*n.shape, self.K)

    def rounding(self, iteration: int) -> QuantWeight:
        """The weight as loop iteration `iteration` ≥ 0 has it: an ordinary one, with codes of its own."""
        if self.channel is None:
            return self
        packed = torch.empty_like(self.packed)
        for k, end in self._slabs():
            step = channel.steps(self.channel, self._channel(k, end), k, iteration)
            packed[k // 2 : (end + 1) // 2] = pack_nibbles(self._codes(k, end) + step.view(torch.uint8))
        return dataclasses.replace(self, packed=packed, frac4=None, sign_bit=None)

    def mean(self) -> Tensor:  # fp32 [K, N]
        """What the roundings tend to on average over iterations; without a channel, W."""
        if self.channel is None:
            return self.dequantize()
        W = torch.empty(self.K, self.N, dtype=torch.float32, device=self.packed.device)
        for k, end in self._slabs():
            code = self._codes(k, end) + channel.means(self.channel, self._channel(k, end), k)
            W[k:end] = self._values(k, code)
        return W

    def with_channel(self, name: str, values: Tensor) -> QuantWeight:  # uint8 [K, N]
        """The same codes with a channel: frac4 takes s mod 16, sign_bit takes b.

        Raises FormatError where a value is out of range or would lead to a code outside of 0..15.
        """
        limit = {FRAC4: 15, SIGN_BIT: 1}.get(name)
        if limit is None:
            raise FormatError(f"channel={name!r} is none of {FRAC4!r}, {SIGN_BIT!r}")
        if values.dtype != torch.uint8 or list(values.shape) != [self.K, self.N] or int(values.max()) > limit:
            raise FormatError(
                f"{name} is {values.dtype} {list(values.shape)} up to {int(values.max())}; "
                f"K={self.K}, N={self.N} needs uint8 [{self.K}, {self.N}] in 0..{limit}"
            )
        if name == FRAC4:
            w = dataclasses.replace(self, frac4=pack_nibbles(values), sign_bit=None)
        else:
            w = dataclasses.replace(self, frac4=None, sign_bit=channel.pack_bits(values))
        w.check_channel()
        return w

    def check_channel(self) -> None:
        """Raises FormatError where a rounding would have a code outside of 0..15: kernels would take it for another."""
        if self.channel is None:
            return
        for k, end in self._slabs():
            code = self._codes(k, end) + channel.means(self.channel, self._channel(k, end), k)
            if bad := int(((code < 0) | (code > 15)).sum()):
                raise FormatError(f"{self.channel} leads from {bad} codes in rows {k} to {end - 1} out of 0..15")

    def check_perm(self) -> None:
        """Raises FormatError where `perm` does not name every input once: values would be lost or read from beyond."""
        if self.perm is None or self.perm.is_meta:
            return
        every = torch.arange(self.K, dtype=torch.int32, device=self.perm.device)
        if not torch.equal(self.perm.sort().values, every):
            raise FormatError(f"perm is no permutation of 0..{self.K - 1}; every input has one row")

    def _channel(self, k: int, end: int) -> Tensor:  # uint8 [end − k, N]; k is a multiple of 8
        if self.frac4 is not None:
            return _nibbles(self.frac4, k, end)
        assert self.sign_bit is not None
        return channel.unpack_bits(self.sign_bit[k // 8 : (end + 7) // 8], end - k)

    def _slabs(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows of about a million weights, each from a multiple of 8."""
        step = max(8, (1 << 20) // self.N // 8 * 8)
        return ((k, min(self.K, k + step)) for k in range(0, self.K, step))

    @staticmethod
    def from_codes(
        q: Tensor,  # integer [K, N], every value in 0..15 (0..255 at 8 bits)
        scale: Tensor,  # float [⌈K/G⌉, N]
        zero: Tensor,  # as scale
        group_size: int,
        bits: int = 4,
        bias: Tensor | None = None,
        integer_zero: bool = False,
        perm: Tensor | None = None,  # int32 [K]: q's rows are in stored order
    ) -> QuantWeight:
        """Pack codes; scale and zero become fp16 where that is exact for all of them, else fp32.

        Raises FormatError where a code leaves its range, a parameter is not finite in fp32, shapes disagree, `perm` is
        no permutation, or `integer_zero` is not true.
        """
        if q.dim() != 2 or q.is_floating_point():
            raise FormatError(f"q is {q.dtype} {list(q.shape)}; codes are integers [K, N]")
        if q.numel() and not 0 <= int(q.min()) <= int(q.max()) < 1 << bits:
            raise FormatError(f"q spans {int(q.min())}..{int(q.max())}; {bits}-bit codes lie in 0..{(1 << bits) - 1}")
        for name, t in (("scale", scale), ("zero", zero)):
            if not t.is_floating_point():
                raise FormatError(f"{name} is {t.dtype}; give floats (zero = −z·scale for integer zero points z)")
            bad = int((~torch.isfinite(t.float())).sum())
            if bad:
                raise FormatError(f"{name} has {bad} values that are NaN or infinite; the source weight is damaged")
        K = q.shape[0]
        q = q.to(torch.uint8)
        q = pack_nibbles(q) if bits == 4 else q.contiguous()
        w = QuantWeight(q, *narrow(scale, zero), K, group_size, bits, integer_zero, bias, perm=perm)
        w.check_perm()
        if integer_zero:
            check_integer_zero(w)
        return w


@dataclass(frozen=True)
class DenseWeight:
    """A linear weight kept in floating point, in the orientation of `torch.nn.Linear`."""

    weight: Tensor  # fp16 | bf16 | fp32 [N, K]
    bias: Tensor | None = None  # [N]

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or self.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise FormatError(
                f"weight is {self.weight.dtype} {list(self.weight.shape)}; dense weights are fp16, bf16 or fp32 [N, K]"
            )
        _check_bias(self.bias, self.N)

    @property
    def N(self) -> int:
        return self.weight.shape[0]

    @property
    def K(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def to(self, device: torch.device | str) -> DenseWeight:
        """The same weight on `device`; itself where it is there already."""
        return _moved(self, ("weight", "bias"), torch.device(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [K, N]
        """The weight in the orientation of `QuantWeight.dequantize`."""
        return self.weight.t().to(dtype)

    def columns(self, n: Tensor) -> Tensor:  # n int64 [...] → fp32 [..., K]
        """Rows of an embedding table."""
        return self.weight[n].float()


LinearWeight: TypeAlias = QuantWeight | DenseWeight
_Weight = TypeVar("_Weight", QuantWeight, DenseWeight)


def _moved(w: _Weight, names: tuple[str, ...], device: torch.device) -> _Weight:
    tensors: dict[str, Tensor] = {name: t for name in names if (t := getattr(w, name)) is not None}
    if all(t.device == device for t in tensors.values()):
        return w
    return dataclasses.replace(w, **{name: t.to(device) for name, t in tensors.items()})  # type: ignore[arg-type]


def pack_nibbles(q: Tensor) -> Tensor:  # uint8 [K, N] → uint8 [⌈K/2⌉, N]
    """Byte (i, n) = q[2i, n] | q[2i+1, n] << 4; the missing partner of an odd K is 0."""
    if q.shape[0] % 2:
        q = torch.cat((q, q.new_zeros(1, q.shape[1])))
    packed = (q[0::2] | q[1::2] << 4).contiguous()  # of a transposed weight the codes lie by columns
    assert packed.shape[0] * 2 == q.shape[0]
    return packed


def _nibbles(packed: Tensor, k: int, end: int) -> Tensor:  # uint8 [⌈K/2⌉, N] → uint8 [end − k, N]
    rows = packed[k // 2 : (end + 1) // 2]
    return torch.stack((rows & 15, rows >> 4), dim=1).flatten(0, 1)[k % 2 :][: end - k]


def _check_channel_shape(w: QuantWeight) -> None:
    if w.frac4 is not None and w.sign_bit is not None:
        raise FormatError("frac4 and sign_bit are both given; a weight has one channel or none")
    t = w.frac4 if w.frac4 is not None else w.sign_bit
    if t is None or w.channel is None:
        return
    if w.bits != 4:
        raise FormatError(f"{w.channel} beside {w.bits}-bit codes; a channel goes with 4-bit codes")
    want = [-(-w.K // channel.PER_BYTE[w.channel]), w.N]
    if t.dtype != torch.uint8 or list(t.shape) != want:
        raise FormatError(f"{w.channel} is {t.dtype} {list(t.shape)}; K={w.K}, N={w.N} needs uint8 {want}")


def _check_perm_shape(w: QuantWeight) -> None:
    if w.perm is None:
        return
    if w.perm.dtype != torch.int32 or list(w.perm.shape) != [w.K]:
        raise FormatError(f"perm is {w.perm.dtype} {list(w.perm.shape)}; K={w.K} needs int32 [{w.K}]")
    if w.channel:
        raise FormatError(f"{w.channel} beside perm; a channel goes with inputs in their own order")


def _check_bias(bias: Tensor | None, N: int) -> None:
    if bias is not None and (list(bias.shape) != [N] or not bias.is_floating_point()):
        raise FormatError(f"bias is {bias.dtype} {list(bias.shape)}; N={N} needs floats [{N}]")


def check_integer_zero(w: QuantWeight) -> None:
    """Export writes z = −zero/scale back, which is lossless only if every zero is such a product, rounded once."""
    scale, zero = w.scale.float(), w.zero.float()
    z = torch.where(scale == 0, 0, -zero / scale).round().clamp(0, (1 << w.bits) - 1)
    if bad := int((zero != -(z * scale)).sum()):
        raise FormatError(
            f"integer_zero=True, but {bad} zeros are not −z·scale for a z in 0..{(1 << w.bits) - 1}; leave it out"
        )


def narrow(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp16 where neither loses a bit, else both in fp32."""
    halves = scale.to(torch.float16), zero.to(torch.float16)
    if all(torch.equal(h.to(t.dtype), t) for h, t in zip(halves, (scale, zero), strict=True)):
        return halves
    return scale.to(torch.float32), zero.to(torch.float32)
