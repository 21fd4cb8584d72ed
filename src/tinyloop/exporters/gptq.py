"""QuantWeight → the tensors of a GPTQ linear, format gptq_v2: `importers/gptq.py` has the layout.

v2 stores zero points as they are. v1, which stores z − 1, has two ways of storing 0, so it is read but not written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError
from ..weight import DenseWeight, LinearWeight, QuantWeight
from .columns import codes_in_order, group_index, words, zero_points

Tensor = torch.Tensor


def check(name: str, w: QuantWeight) -> None:
    """Raises InputError, naming the linear, where the format cannot hold it without loss."""
    if w.K % 8 or w.N % 8:
        raise InputError(f"{name} has K={w.K}, N={w.N}; GPTQ packs eight codes and eight zeros a word: both must be "
                         "multiples of 8")  # fmt: skip
    zero_points(name, w)
    if not torch.equal(w.scale.half().to(w.scale.dtype), w.scale):
        raise InputError(f"{name} has scales that fp16 does not hold; export as compressed-tensors, which keeps them")


def tensors(name: str, w: QuantWeight, symmetric: bool) -> Iterator[tuple[str, Tensor]]:
    rows = codes_in_order(w).view(w.K // 8, 4, w.N).permute(0, 2, 1).contiguous()  # bytes of a word side by side
    yield f"{name}.qweight", rows.view(torch.int32).view(w.K // 8, w.N)
    yield f"{name}.qzeros", words(zero_points(name, w))
    yield f"{name}.scales", w.scale.half()
    yield f"{name}.g_idx", group_index(w)


def settings(weights: Mapping[str, LinearWeight], symmetric: Mapping[str, bool]) -> dict[str, Any]:
    """What config.json says: the most common group, and others by name."""
    groups = {name: _group(w) for name, w in weights.items() if isinstance(w, QuantWeight)}
    common = Counter(groups.values()).most_common(1)[0][0] if groups else -1
    ordered = any(isinstance(w, QuantWeight) and w.perm is not None for w in weights.values())
    values: dict[str, Any] = {
        "quant_method": "gptq", "bits": 4, "group_size": common, "desc_act": ordered,
        "sym": all(symmetric.values()), "checkpoint_format": "gptq_v2", "format": "gptq_v2", "pack_dtype": "int32",
        "lm_head": isinstance(weights.get("lm_head"), QuantWeight), "true_sequential": True,
    }  # fmt: skip
    own: dict[str, Any] = {f"+:^{re.escape(n)}$": {"group_size": G} for n, G in groups.items() if common != G}
    own |= {f"-:^{re.escape(n)}$": {} for n, w in weights.items() if isinstance(w, DenseWeight) and ".layers." in n}
    return values | ({"dynamic": own} if own else {})


def _group(w: QuantWeight) -> int:
    return -1 if w.group_size == w.K else w.group_size
