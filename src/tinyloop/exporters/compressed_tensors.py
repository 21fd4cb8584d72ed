"""QuantWeight → the tensors of a compressed-tensors linear, pack-quantized: `importers/compressed_tensors.py` has the
layout. Scales are of any float type, so every weight with whole zero points can be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError
from ..weight import DenseWeight, LinearWeight, QuantWeight
from .columns import codes_in_order, group_index, narrowest, words, zero_points

Tensor = torch.Tensor


def check(name: str, w: QuantWeight) -> None:
    """Raises InputError, naming the linear, where the format cannot hold it without loss."""
    if w.K % w.group_size:
        raise InputError(f"{name} has K={w.K}, no multiple of its group {w.group_size}, as compressed-tensors needs; "
                         "export as fp16 or bf16")  # fmt: skip
    zero_points(name, w)


def tensors(name: str, w: QuantWeight, symmetric: bool) -> Iterator[tuple[str, Tensor]]:
    octets = codes_in_order(w).t()  # [N, ⌈K/2⌉]
    missing = -octets.shape[1] % 4
    filled = torch.cat((octets, octets.new_full((w.N, missing), 0x88)), dim=1) if missing else octets
    yield f"{name}.weight_packed", filled.contiguous().view(torch.int32)
    yield f"{name}.weight_scale", narrowest(w.scale).t().contiguous()
    yield f"{name}.weight_shape", torch.tensor([w.N, w.K])
    if not symmetric:
        z = torch.nn.functional.pad(zero_points(name, w), (0, -w.N % 8), value=8)
        yield f"{name}.weight_zero_point", words(z).t().contiguous()
    if w.perm is not None:
        yield f"{name}.weight_g_idx", group_index(w)


def settings(weights: Mapping[str, LinearWeight], symmetric: Mapping[str, bool]) -> dict[str, Any]:
    """What config.json says: a scheme for every kind of weight, its linears by name."""
    schemes: dict[tuple[Any, ...], list[str]] = {}
    for name, w in weights.items():
        if isinstance(w, QuantWeight):
            G = None if w.group_size == w.K else w.group_size
            schemes.setdefault((symmetric[name], G, w.perm is not None), []).append(name)
    groups = {
        f"group_{i}": {"targets": names, "weights": _weights(*kind), "input_activations": None,
                       "output_activations": None}
        for i, (kind, names) in enumerate(schemes.items())
    }  # fmt: skip
    kept = [name for name, w in weights.items() if isinstance(w, DenseWeight) and "embed_tokens" not in name]
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": groups, "ignore": kept}  # fmt: skip


def _weights(symmetric: bool, group: int | None, ordered: bool) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    about = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}
    return about | ({"actorder": "group"} if ordered else {})
