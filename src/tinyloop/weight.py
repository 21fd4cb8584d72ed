"""One linear weight in canonical form: codes, scale and zero, with `W = q·scale + zero`.

    q      uint4 (or uint8) [K, N]   stored as `packed`: byte (i, n) = q[2i, n] | q[2i+1, n] << 4, shape [⌈K/2⌉, N]
    scale  fp16 or fp32 [⌈K/G⌉, N]   row g belongs to inputs g·G … g·G+G−1; the last group may be short
    zero   as scale

Rows run along K so that a product streams whole rows and every parameter of a group lies beside its neighbours along
N; two codes of one column share a byte, so that unpacking needs a mask and a shift but no shuffle. Eight-bit codes
(one a byte, [K, N]) exist for embedding tables that come as eight bits; the algebra is the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

import torch

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

    @property
    def N(self) -> int:
        return self.packed.shape[1]

    @property
    def groups(self) -> int:
        return self.scale.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, parameters and bias."""
        tensors = [self.packed, self.scale, self.zero] + ([] if self.bias is None else [self.bias])
        return sum(t.nbytes for t in tensors)

    def codes(self) -> Tensor:  # uint8 [K, N], 0..15 (0..255 at 8 bits)
        if self.bits == 8:
            return self.packed
        pair = torch.stack((self.packed & 15, self.packed >> 4), dim=1)  # [⌈K/2⌉, 2, N]
        return pair.flatten(0, 1)[: self.K]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [K, N]
        """`q·scale + zero`, product and sum each rounded once to fp32, then cast to `dtype`.

        Works in slabs of rows, so that the extra memory stays near 32 MB however large the weight or its groups are.
        """
        W = torch.empty(self.K, self.N, dtype=dtype)
        slab = max(1, (1 << 21) // max(1, self.N))  # rows per slab
        for k in range(0, self.K, slab):
            end = min(self.K, k + slab)
            W[k:end] = self.rows(k, end)
        return W

    def rows(self, k: int, end: int) -> Tensor:  # fp32 [end − k, N]
        """Rows k..end−1 of W, exact as `dequantize`."""
        group = torch.arange(k, end) // self.group_size
        if self.bits == 8:
            codes = self.packed[k:end]
        else:
            rows = self.packed[k // 2 : (end + 1) // 2]
            codes = torch.stack((rows & 15, rows >> 4), dim=1).flatten(0, 1)[k % 2 :][: end - k]
        return codes.to(torch.float32).mul_(self.scale[group]).add_(self.zero[group])

    def columns(self, n: Tensor) -> Tensor:  # n int64 [...] → fp32 [..., K]
        """Columns of W, which for an embedding table are the rows of its lookup: exact as `dequantize`."""
        flat = n.reshape(-1)
        part = dataclasses.replace(
            self, packed=self.packed[:, flat], scale=self.scale[:, flat], zero=self.zero[:, flat], bias=None
        )
        return part.dequantize().t().reshape(*n.shape, self.K)

    @staticmethod
    def from_codes(
        q: Tensor,  # integer [K, N], every value in 0..15 (0..255 at 8 bits)
        scale: Tensor,  # float [⌈K/G⌉, N]
        zero: Tensor,  # as scale
        group_size: int,
        bits: int = 4,
        bias: Tensor | None = None,
        integer_zero: bool = False,
    ) -> QuantWeight:
        """Pack codes; scale and zero become fp16 where that is exact for all of them, else fp32.

        Raises FormatError where a code leaves its range, a parameter is not finite in fp32, shapes disagree, or
        `integer_zero` is not true.
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
        w = QuantWeight(q, *_narrow(scale, zero), K, group_size, bits, integer_zero, bias)
        if integer_zero:
            _check_integer_zero(w)
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

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [K, N]
        """The weight in the orientation of `QuantWeight.dequantize`."""
        return self.weight.t().to(dtype)

    def columns(self, n: Tensor) -> Tensor:  # n int64 [...] → fp32 [..., K]
        """Rows of an embedding table."""
        return self.weight[n].float()


LinearWeight: TypeAlias = QuantWeight | DenseWeight


def pack_nibbles(q: Tensor) -> Tensor:  # uint8 [K, N] → uint8 [⌈K/2⌉, N]
    """Byte (i, n) = q[2i, n] | q[2i+1, n] << 4; the missing partner of an odd K is 0."""
    if q.shape[0] % 2:
        q = torch.cat((q, q.new_zeros(1, q.shape[1])))
    packed = q[0::2] | q[1::2] << 4
    assert packed.shape[0] * 2 == q.shape[0]
    return packed


def _check_bias(bias: Tensor | None, N: int) -> None:
    if bias is not None and (list(bias.shape) != [N] or not bias.is_floating_point()):
        raise FormatError(f"bias is {bias.dtype} {list(bias.shape)}; N={N} needs floats [{N}]")


def _check_integer_zero(w: QuantWeight) -> None:
    """Export writes z = −zero/scale back, which is lossless only if every zero is such a product, rounded once."""
    scale, zero = w.scale.float(), w.zero.float()
    z = torch.where(scale == 0, 0, -zero / scale).round().clamp(0, (1 << w.bits) - 1)
    if bad := int((zero != -(z * scale)).sum()):
        raise FormatError(
            f"integer_zero=True, but {bad} zeros are not −z·scale for a z in 0..{(1 << w.bits) - 1}; leave it out"
        )


def _narrow(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp16 where neither loses a bit, else both in fp32."""
    halves = scale.to(torch.float16), zero.to(torch.float16)
    if all(torch.equal(h.to(t.dtype), t) for h, t in zip(halves, (scale, zero), strict=True)):
        return halves
    return scale.to(torch.float32), zero.to(torch.float32)
