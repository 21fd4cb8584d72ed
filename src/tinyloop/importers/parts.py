"""One quantised linear of a checkpoint, whatever its format, and several of them as one weight.

A format's module says what a linear is (`Part`) from headers alone; its parameters and codes are read when asked for.
`stacked` puts parts beside each other along N, which is how q, k and v become one weight.

What touches every code is numpy, in one thread: on a busy machine torch's team waits for its other thread at the end
of each of many small operations, and was 20 times slower than its work (log, 2026-11-30).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import FormatError
from ..weight import QuantWeight, narrow

Tensor = torch.Tensor
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])


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
    if K < 1:
        raise FormatError(f"{module} has codes for K={K} inputs; the checkpoint is damaged")
    if group_size in (-1, None):
        return K
    if type(group_size) is not int or group_size < 1:
        raise FormatError(f"{module}: group_size={group_size!r} must be a whole number ≥ 1, or -1 for one group")
    return min(group_size, K)


def setting(values: Mapping[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    """The object or the list under `key`; empty where there is none, or null."""
    value = values.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise FormatError(
            f"quantisation key {key}={value!r} must be {'an object' if kind is dict else 'a list'}; correct it, or "
            "copy the file again"
        )
    return value


def flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """A setting that is true or false. As text, "false" would count as true."""
    value = default if values.get(key) is None else values[key]
    if value not in (True, False):
        raise FormatError(f"key {key}={value!r} must be true or false; correct it, or copy the file again")
    return bool(value)


def stated(values: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """What the first of `keys` says that is there and not null."""
    return next((value for key in keys if (value := values.get(key)) is not None), default)


def fits_start(pattern: str, module: str) -> bool:
    """Whether a regular expression of a configuration fits the start of a module's name."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise FormatError(f"quantisation pattern {pattern!r} is no regular expression: {error}; correct it") from error


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
    """Row i of the result is the code of input perm[i]. Bytes that hold the two codes of a row are fetched as they are,
    64 rows at a time, so that what is made of them stays in the cache. x86 shifts no single bytes, so eight are
    shifted at a time where N allows (log, 2026-11-30)."""
    word, K = np.uint8 if packed.shape[1] % 8 else np.uint64, len(perm)
    source, mask = packed.contiguous().numpy().view(word), word(0x0F0F0F0F0F0F0F0F & np.iinfo(word).max)
    inputs = np.zeros((len(source), 2), np.int64)
    inputs.reshape(-1)[:K] = perm.numpy()
    byte, shift = inputs // 2, (inputs % 2 * 4).astype(word)[:, :, None]
    out = np.empty_like(source)
    for first in range(0, len(out), 64):
        cut = slice(first, first + 64)
        low, high = source[byte[cut, 0]], source[byte[cut, 1]]
        low >>= shift[cut, 0]
        low &= mask
        high >>= shift[cut, 1]
        high &= mask
        high <<= word(4)
        np.bitwise_or(low, high, out=out[cut])
    if K % 2:
        out[-1] &= mask
    return torch.from_numpy(out.view(np.uint8))


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
    octets = words.contiguous().view(torch.uint8).view(rows, N, 4).numpy()
    out = np.empty((rows, 4, N), np.uint8)
    for b in range(4):
        out[:, b] = octets[:, :, b]
    return torch.from_numpy(out.reshape(4 * rows, N))
