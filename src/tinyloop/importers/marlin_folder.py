"""GPTQ linears that AutoGPTQ stored in Marlin's order, at 4 bits, symmetric.

    B  int32 [K/16, 2·N]   codes in device order, see `tinyloop.marlin`
    s  fp16  [⌈K/G⌉, N]    scales, permuted likewise

W = (q − 8)·scale. K is a multiple of 128 and N of 256, as its kernel asks; G is 128, or all of K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import FormatError, UnsupportedError
from ..marlin import marlin_group_size, marlin_unpack_symmetric
from ..weight import pack_nibbles
from .parts import Parameters, Part, Remarks, group_of, integer_parameters
from .shards import Shards

Tensor = torch.Tensor


def open_marlin(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised. Raises UnsupportedError for settings that are not read."""
    if values.get("bits", 4) != 4:
        raise UnsupportedError(f"bits={values['bits']!r} is not read; codes have 4 bits")

    def part(module: str) -> Part | None:
        return _part(module, values.get("group_size", -1), shards) if f"{module}.B" in shards else None

    return part


def _part(module: str, group_size: object, shards: Shards) -> Part:
    words = shards.expect(f"{module}.B", (torch.int32,), None, "a linear in Marlin's order")
    if words.dim() != 2 or words.shape[0] % 8 or words.shape[1] % 128:
        raise FormatError(
            f"{shards.where(f'{module}.B')} has shape {list(words.shape)}; "
            "it needs [a multiple of 8, a multiple of 128]"
        )
    if f"{module}.workspace" in shards:
        shards.outline(f"{module}.workspace")  # locks of its kernel, no data
    K, N = 16 * words.shape[0], words.shape[1] // 2
    G = group_of(module, group_size, K)
    shards.expect(f"{module}.s", (torch.float16,), [-(-K // G), N], f"K={K}, N={N}, group {G}")

    def unpacked() -> tuple[Tensor, Tensor]:
        return marlin_unpack_symmetric(shards.get(f"{module}.B"), shards.get(f"{module}.s"), marlin_group_size(G, K))

    def parameters() -> Parameters:
        scale = unpacked()[1]
        return integer_parameters(module, scale, torch.full_like(scale, 8))

    return Part(module, K, N, G, parameters, lambda: pack_nibbles(unpacked()[0]))
