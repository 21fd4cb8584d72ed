"""Inputs that the links of the chain share: weights and activations on the GPU, and how errors are measured."""

from __future__ import annotations

import torch
from tests.helpers import random_quant_weight

from tinyloop.weight import QuantWeight

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16)


def weight(K: int, N: int, G: int, *, seed: int = 0, integer_zero: bool = False, bias: bool = False) -> QuantWeight:
    """G = −1 is one group over K. Zeros lie on either side of the codes' middle, so δ is as large as a weight."""
    G = K if G == -1 else min(G, K)
    return random_quant_weight(K, N, G, seed=seed, integer_zero=integer_zero, bias=bias).to("cuda")


def activations(M: int, K: int, mean: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows aligned to sixteen bytes, whatever K is."""
    g = torch.Generator("cuda").manual_seed(1000 * seed + M + K)
    x = mean + torch.randn(M, -(-K // 8) * 8, generator=g, device="cuda")
    return x.to(dtype)[:, :K]


def want64(x: Tensor, w: QuantWeight) -> Tensor:
    """x @ W (+ bias) in float64."""
    group = torch.arange(w.K, device=w.packed.device) // w.group_size
    W = w.codes().double() * w.scale.double()[group] + w.zero.double()[group]
    y = x.double() @ W
    return y if w.bias is None else y + w.bias.double()


def error(y: Tensor, want: Tensor) -> float:
    """‖y − want‖ / ‖want‖; infinite for anything that is not finite."""
    e = float((y.double() - want).norm() / want.norm())
    return e if e == e else float("inf")


def plain_error(x: Tensor, W: Tensor, want: Tensor) -> float:
    """The error of torch's product with the dequantised weight in x's dtype."""
    return error(x @ W.to(x.dtype), want)
