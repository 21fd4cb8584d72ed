"""AWQ linears in AutoAWQ's GEMM version, at 4 bits.

    qweight  int32 [K, N/8]       nibble i of word (k, c) = q[k, 8c + ORDER[i]]
    qzeros   int32 [⌈K/G⌉, N/8]   the same order; z itself
    scales   float [⌈K/G⌉, N]

W = (q − z)·scale. The other versions (gemv, gemv_fast, marlin, exllama) have other layouts under the same names, so
the version must say gemm, and the shapes must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import FormatError, UnsupportedError
from .parts import Parameters, Part, Remarks, flag, group_of, integer_parameters, lanes, setting, stated
from .shards import FLOATS, Shards

Tensor = torch.Tensor
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def open_awq(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised. Raises UnsupportedError for settings that are not read."""
    version = stated(values, "version", "format", default="gemm")
    if str(version).lower() != "gemm":
        raise UnsupportedError(f"AWQ version {version!r} is not read; of AWQ, read is the version gemm")
    bits = values.get("bits", values.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedError(f"bits={bits!r} is not read; codes have 4 bits")
    group_size = values.get("group_size", values.get("q_group_size", 128))
    kept = [str(name) for name in setting(values, "modules_to_not_convert", list)]
    symmetric = not flag(values, "zero_point", True)

    def part(module: str) -> Part | None:
        if f"{module}.qweight" not in shards:
            return None
        if any(name in module for name in kept):
            remarks.add("modules_to_not_convert names it, the file has codes: read as codes", module)
        return _part(module, group_size, symmetric, shards)

    return part


def _part(module: str, group_size: Any, symmetric: bool, shards: Shards) -> Part:
    words = shards.expect(f"{module}.qweight", (torch.int32,), None, "a linear of 4-bit codes")
    if words.dim() != 2:
        raise FormatError(f"{shards.where(f'{module}.qweight')} has shape {list(words.shape)}; it must have two sizes")
    K, N = words.shape[0], 8 * words.shape[1]
    G = group_of(module, group_size, K)
    groups, why = -(-K // G), f"K={K}, N={N}, group {G}"
    shards.expect(f"{module}.scales", FLOATS, [groups, N], why)
    shards.expect(f"{module}.qzeros", (torch.int32,), [groups, N // 8], why)

    def parameters() -> Parameters:
        z = in_order(lanes(shards.get(f"{module}.qzeros")))
        if symmetric and bool((z != 8).any()):
            raise FormatError(
                f"{module}: zero_point is false, but qzeros are not all 8; the settings or the file is wrong"
            )
        return integer_parameters(module, shards.get(f"{module}.scales"), z)

    return Part(module, K, N, G, parameters, lambda: _codes(shards.get(f"{module}.qweight")))


def in_order(nibbles: Tensor) -> Tensor:  # uint8 [R, N] as they lie in words → columns in order
    out = torch.empty_like(nibbles)
    for i, column in enumerate(ORDER):
        out[:, column::8] = nibbles[:, i::8]
    return out


def _codes(words: Tensor) -> Tensor:  # int32 [K, N/8] → uint8 [⌈K/2⌉, N]
    """Two rows of bytes become two of pairs: the low nibbles of both, and the high ones."""
    K, columns = words.shape
    octets = words.contiguous().view(torch.uint8).view(K, columns, 4).numpy()
    upper, lower = octets[0::2], octets[1::2]
    if K % 2:
        lower = np.concatenate((lower, np.zeros_like(octets[:1])))
    low, high = upper & 15 | lower << 4, upper >> 4 | lower & 0xF0
    out = np.empty((len(upper), columns, 8), np.uint8)
    for b in range(4):  # nibble 2b is the low one of byte b, 2b + 1 the high one
        out[..., ORDER[2 * b]], out[..., ORDER[2 * b + 1]] = low[..., b], high[..., b]
    return torch.from_numpy(out.reshape(len(upper), 8 * columns))
