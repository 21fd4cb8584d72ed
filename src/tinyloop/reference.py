"""The yardstick: the same products in float64, straight from the definition. Slow, obvious; tests compare with it."""

from __future__ import annotations

import torch

from .weight import QuantWeight


def dequantize64(w: QuantWeight) -> torch.Tensor:  # float64 [K, N]
    """`W = q·scale + zero` in float64 from the stored scale and zero."""
    codes = w.codes().to(torch.float64)
    group = torch.arange(w.K, device=codes.device) // w.group_size
    rows = codes * w.scale.to(torch.float64)[group] + w.zero.to(torch.float64)[group]
    return rows if w.perm is None else rows[w.perm.argsort()]  # row i belongs to input perm[i]


def matmul64(x: torch.Tensor, w: QuantWeight) -> torch.Tensor:  # x [..., K] → float64 [..., N]
    """`x @ W + bias` in float64."""
    y = x.to(torch.float64) @ dequantize64(w)
    return y if w.bias is None else y + w.bias.to(torch.float64)
