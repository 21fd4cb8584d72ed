"""Linears and embeddings of MLX in its mode affine, at 4 bits: our own formula, with float zeros.

weight  uint32 [N, K/8]   lane j of word (n, c) = q[8c + j, n]
scales  float  [N, K/G]
biases  float  [N, K/G]   W = q·scale + bias
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import FormatError, UnsupportedError
from .parts import Parameters, Part, Remarks, codes_along_rows, finite, group_of
from .shards import FLOATS, Shards


def open_mlx(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised. A module's own settings stand under its name."""

    def part(module: str) -> Part | None:
        if f"{module}.scales" not in shards:
            return None
        own = values.get(module)
        if own is False:
            remarks.add("The settings say not quantised, the file has codes: read as codes", module)
        return _part(module, {**values, **(own if isinstance(own, dict) else {})}, shards)

    return part


def _part(module: str, settings: Mapping[str, Any], shards: Shards) -> Part:
    if settings.get("mode", "affine") != "affine":
        raise UnsupportedError(f"{module}: MLX mode {settings['mode']!r} is not read; read is affine")
    if settings.get("bits") != 4:
        raise UnsupportedError(f"{module}: bits={settings.get('bits')!r} is not read; codes have 4 bits")
    words = shards.expect(f"{module}.weight", (torch.uint32,), None, "a linear of 4-bit codes")
    if words.dim() != 2:
        raise FormatError(f"{shards.where(f'{module}.weight')} has shape {list(words.shape)}; it must have two sizes")
    N, K = words.shape[0], 8 * words.shape[1]
    G = group_of(module, settings.get("group_size", 64), K)
    why = f"K={K}, N={N}, group {G}"
    for name in ("scales", "biases"):
        shards.expect(f"{module}.{name}", FLOATS, [N, -(-K // G)], why)

    def parameters() -> Parameters:
        scale, zero = (finite(module, name, shards.get(f"{module}.{name}")) for name in ("scales", "biases"))
        return Parameters(scale.t().contiguous(), zero.t().contiguous(), False)

    return Part(module, K, N, G, parameters, lambda: codes_along_rows(shards.get(f"{module}.weight"), K))
