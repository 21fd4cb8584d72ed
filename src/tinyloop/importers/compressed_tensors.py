"""Linears of compressed-tensors in its format pack-quantized, at 4 bits: symmetric or not, in groups or per column.

    weight_packed      int32 [N, ⌈K/8⌉]         lane j of word (n, c) = q[8c + j, n] + 8, with q and z in −8..7
    weight_zero_point  int32 [⌈N/8⌉, groups]    lane j of word (r, g) = z[g, 8r + j] + 8; older: int8 [N, groups] of z
    weight_scale       float [N, groups]
    weight_shape       int   [2]                (N, K)
    weight_g_idx       int   [K]                where groups do not lie in order

W = (q − z)·scale: the two +8 cancel, so words are read without sign. A symmetric weight has no zero point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import FormatError, UnsupportedError
from .gptq import group_order
from .parts import (
    Parameters,
    Part,
    Remarks,
    codes_along_rows,
    fits_start,
    flag,
    group_of,
    integer_parameters,
    lanes,
    setting,
)  # fmt: skip
from .shards import FLOATS, Shards

Tensor = torch.Tensor
FORMAT = "pack-quantized"


def open_compressed(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised. Raises UnsupportedError for settings that are not read."""
    if values.get("format") not in (FORMAT, None):
        raise UnsupportedError(f"compressed-tensors format {values['format']!r} is not read; read is {FORMAT}")
    for key in ("transform_config", "sparsity_config", "kv_cache_scheme"):
        harmless = key == "sparsity_config" and setting(values, key, dict).get("format") == "dense"
        if values.get(key) and not harmless:
            raise UnsupportedError(f"compressed-tensors {key} is set, which is not read; only plain weights are")
    groups = setting(values, "config_groups", dict)
    schemes, ignored = [setting(groups, name, dict) for name in groups], setting(values, "ignore", list)
    if not schemes:
        raise FormatError("quantization_config has no config_groups; the file is incomplete")

    def part(module: str) -> Part | None:
        if f"{module}.weight_packed" not in shards:
            return None
        if _fits(module, ignored):
            remarks.add("The list ignore names it, the file has codes: read as codes", module)
        return _part(module, _weights(module, schemes), shards)

    return part


def _fits(module: str, targets: Sequence[Any]) -> bool:
    """Targets are names, or patterns after "re:" that fit the start of the name."""
    return any(fits_start(t[3:], module) if t.startswith("re:") else t == module for t in map(str, targets))


def _weights(module: str, schemes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The settings of a module's weight: of the scheme that names it, or else of the one for all linears."""
    named = [s for s in schemes if _fits(module, setting(s, "targets", list))]
    found = named or [s for s in schemes if "Linear" in setting(s, "targets", list)]
    if not found:
        raise FormatError(f"{module} has codes, but no config_groups target fits it; its group size is not known")
    scheme = found[0]
    weights = setting(scheme, "weights", dict)
    if scheme.get("format", FORMAT) not in (FORMAT, None):
        raise UnsupportedError(
            f"{module}: compressed-tensors format {scheme['format']!r} is not read; read is {FORMAT}"
        )
    if scheme.get("input_activations"):
        raise UnsupportedError(f"{module}: input_activations are quantised, which is not read; only weights may be")
    if weights.get("num_bits") != 4 or weights.get("type", "int") != "int":
        raise UnsupportedError(
            f"{module}: num_bits={weights.get('num_bits')}, type={weights.get('type', 'int')} is not read; codes are "
            "integers of 4 bits"
        )
    if weights.get("strategy", "group") not in ("group", "channel"):
        raise UnsupportedError(f"{module}: strategy={weights['strategy']!r} is not read; read are group and channel")
    return dict(weights)


def _part(module: str, weights: Mapping[str, Any], shards: Shards) -> Part:
    name = f"{module}.weight"
    shards.expect(f"{name}_shape", (torch.int64, torch.int32), [2], "weight_shape (N, K)")
    N, K = shards.get(f"{name}_shape").tolist()
    G = group_of(module, None if weights.get("strategy") == "channel" else weights.get("group_size"), K)
    groups, why = -(-K // G), f"weight_shape N={N}, K={K}, group {G}"
    shards.expect(f"{name}_packed", (torch.int32,), [N, -(-K // 8)], why)
    shards.expect(f"{name}_scale", FLOATS, [N, groups], why)
    symmetric = flag(weights, "symmetric", True)
    if symmetric and f"{name}_zero_point" in shards:
        raise FormatError(
            f"{module} is labelled symmetric, but has a weight_zero_point; the settings or the file is wrong"
        )
    if not symmetric:
        _expect_zeros(f"{name}_zero_point", N, groups, why, shards)
    if has_order := f"{name}_g_idx" in shards:
        shards.expect(f"{name}_g_idx", (torch.int32, torch.int64), [K], why)

    def parameters() -> Parameters:
        scale = shards.get(f"{name}_scale").t().contiguous()
        z = torch.full_like(scale, 8) if symmetric else _zeros(f"{name}_zero_point", N, shards)
        perm = group_order(shards.get(f"{name}_g_idx"), G, module) if has_order else None
        return integer_parameters(module, scale, z, perm)

    return Part(module, K, N, G, parameters, lambda: codes_along_rows(shards.get(f"{name}_packed"), K))


def _expect_zeros(name: str, N: int, groups: int, why: str, shards: Shards) -> None:
    if shards.outline(name).dtype == torch.int8:
        shards.expect(name, (torch.int8,), [N, groups], why)
    else:
        shards.expect(name, (torch.int32,), [-(-N // 8), groups], why)


def _zeros(name: str, N: int, shards: Shards) -> Tensor:  # int32 [⌈N/8⌉, groups] | int8 [N, groups] → uint8 [groups, N]
    stored = shards.get(name)
    if stored.dtype == torch.int8:
        if (outside := stored[(stored < -8) | (stored > 7)]).numel():
            raise FormatError(
                f"{shards.where(name)} holds {int(outside[0])}; zero points of 4 bits lie in -8..7: copy the file "
                "again, or quantise the model again"
            )
        return (stored.t() + 8).to(torch.uint8)
    return lanes(stored.t().contiguous())[:, :N].contiguous()
