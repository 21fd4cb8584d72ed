"""One quantised linear of a checkpoint, whatever its format, and several of them as one weight.

A format's module says what a linear is (`Part`) from headers alone; its parameters and codes are read when asked for.
`stacked` puts parts beside each other along N, which is how q, k and v become one weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import FormatError
from ..weight import QuantWeight, narrow, pack_nibbles

Tensor = torch.Tensor


@dataclass(frozen=True)
class Parameters:
    """scale and zero fp32 [⌈K/G⌉, N], with `zero = −z·scale` for whole z where `integer_zero`; see `QuantWeight` for
    `perm`."""

    scale: Tensor
    zero: Tensor
    integer_zero: bool
    perm: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """`codes` are uint8 [⌈K/2⌉, N], packed as `QuantWeight.packed`, rows in the order of the inputs."""

    module: str
    K: int
    N: int
    group_size: int
    parameters: Callable[[], Parameters]
    codes: Callable[[], Tensor]


class Remarks(dict[str, list[str]]):
    """What was decided for many modules: sentence → modules."""

    def add(self, sentence: str, module: str) -> None:
        if module not in self.setdefault(sentence, []):
            self[sentence].append(module)

    def lines(self) -> list[str]:
        def names(modules: list[str]) -> str:
            return modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")

        return [f"{sentence}: {names(modules)}." for sentence, modules in self.items()]


def integer_parameters(module: str, scale: Tensor, z: Tensor, perm: Tensor | None = None) -> Parameters:
    """scale any float [⌈K/G⌉, N], z uint8, as scale. fp32 holds each −z·scale exactly: 4 + 11 bits, fp16 would not."""
    scale = finite(module, "scales", scale)
    return Parameters(scale, -(z * scale), True, perm)


def finite(module: str, what: str, t: Tensor) -> Tensor:
    """In fp32. Raises FormatError for NaN and infinity."""
    if bad := int((~torch.isfinite(t)).sum()):
        raise FormatError(f"{module}: {bad} {what} are NaN or infinite; the checkpoint is damaged")
    return t.to(torch.float32)


def group_of(module: str, group_size: object, K: int) -> int:
    """The group that a configuration means: −1 and None are one group per column."""
    if group_size in (-1, None):
        return K
    if type(group_size) is not int or group_size < 1:
        raise FormatError(f"{module}: group_size={group_size!r} must be a whole number ≥ 1, or -1 for one group")
    return min(group_size, K)


def stackable(parts: Sequence[Part], parameters: Sequence[Parameters]) -> bool:
    """Whether parts can be one weight of codes: one order of inputs, and then one group size."""
    first = parameters[0].perm
    same = all(_equal(first, p.perm) for p in parameters[1:])
    return same and (first is None or len({part.group_size for part in parts}) == 1)


def stacked(
    parts: Sequence[Part], parameters: Sequence[Parameters], packed: Tensor, bias: Tensor | None
) -> QuantWeight:
    """Parts beside each other along N; `packed` from `stacked_codes`, or without numbers on the meta device. Groups of
    different sizes become groups of their greatest common divisor, with repeated parameters."""
    G = math.gcd(*(part.group_size for part in parts))
    fine = [_finer(p, part, G) for p, part in zip(parameters, parts, strict=True)]
    scale, zero = narrow(*(torch.cat([pair[i] for pair in fine], dim=1) for i in (0, 1)))
    integer, perm = all(p.integer_zero for p in parameters), parameters[0].perm
    return QuantWeight(packed, scale, zero, parts[0].K, G, 4, integer, bias, perm=perm)


def stacked_codes(parts: Sequence[Part], perm: Tensor | None) -> Tensor:  # uint8 [⌈K/2⌉, N]
    packed = torch.cat([part.codes() for part in parts], dim=1) if len(parts) > 1 else parts[0].codes()
    return packed if perm is None else reordered(packed, perm)


def _finer(p: Parameters, part: Part, G: int) -> tuple[Tensor, Tensor]:
    if part.group_size == G:
        return p.scale, p.zero
    index = torch.arange(0, part.K, G) // part.group_size
    return p.scale[index], p.zero[index]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def reordered(packed: Tensor, perm: Tensor) -> Tensor:  # uint8 [⌈K/2⌉, N] → the same in stored order
    """Row i of the result is the code of input perm[i]; by slabs, since unpacked codes take twice the memory."""
    K, N = len(perm), packed.shape[1]
    out = torch.empty_like(packed)
    step = max(2, (1 << 24) // N // 2 * 2)
    for k in range(0, K, step):
        rows = perm[k : k + step].long()
        codes = packed[rows // 2] >> (4 * (rows % 2)).to(torch.uint8)[:, None] & 15
        out[k // 2 : (k + step) // 2] = pack_nibbles(codes)
    return out


# --- words of eight codes ---


def lanes(words: Tensor) -> Tensor:  # int32 [..., C] → uint8 [..., 8·C]
    """Code j of word c, bits 4j … 4j+3, becomes element 8c + j."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words.to(torch.int32)[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def codes_along_rows(words: Tensor, K: int) -> Tensor:  # int32 [N, ⌈K/8⌉], lanes along K → uint8 [⌈K/2⌉, N]
    """Byte i of a row is already our pair (2i, 2i + 1): a transpose of bytes."""
    packed = words.contiguous().view(torch.uint8)[:, : -(-K // 2)].t().contiguous()
    if K % 2:
        packed[-1] &= 15
    return packed


def codes_along_columns(words: Tensor) -> Tensor:  # int32 [K/8, N], lanes along K → uint8 [K/2, N]
    """Byte b of word (r, n) is our pair of rows 8r + 2b and 8r + 2b + 1."""
    rows, N = words.shape
    return words.contiguous().view(torch.uint8).view(rows, N, 4).permute(0, 2, 1).reshape(4 * rows, N)
