"""Inputs that tests on a GPU share: weights and activations there, how errors are measured, and memory between
canaries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import random_quant_weight

from tinyloop import devices
from tinyloop.weight import QuantWeight

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16)


def weight(K: int, N: int, G: int, *, seed: int = 0, integer_zero: bool = False, bias: bool = False) -> QuantWeight:
    """G = −1 is one group over K. Zeros lie on either side of the codes' middle, so δ is as large as a weight. Scales
    are those of fp16, which kernels decode in 16-bit arithmetic; but at G = 96 of fp32, which they decode in 32."""
    w = random_quant_weight(K, N, K if G == -1 else min(G, K), seed=seed, integer_zero=integer_zero, bias=bias)
    if G == 96:
        return w.to("cuda")
    scale = w.scale.half().float()
    zero = (w.zero / w.scale).round() * scale if integer_zero else w.zero
    return replace(w, scale=scale, zero=zero).to("cuda")


def large_weight(K: int, N: int, G: int) -> QuantWeight:
    """As `weight` with G ≤ K, drawn on the GPU: a host takes seconds for a hundred million codes. K is even."""
    g = torch.Generator("cuda").manual_seed(K + N)
    groups = -(-K // G)
    packed = torch.randint(0, 256, (K // 2, N), generator=g, device="cuda", dtype=torch.uint8)
    scale = ((0.5 + torch.rand(groups, N, generator=g, device="cuda")) * math.sqrt(12 / K) / 16).half().float()
    zero = -(5.5 + 4 * torch.rand(groups, N, generator=g, device="cuda")) * scale
    return QuantWeight(packed, scale, zero, K, G)


def whole_weight(K: int, N: int, G: int) -> QuantWeight:
    """W and bias are multiples of 1/16 below 1 in size, so that sums with `whole_activations` are exact in fp32 in any
    order, and in fp16 as long as they are below 128."""
    g = torch.Generator().manual_seed(K + N)
    q = torch.randint(0, 16, (K, N), generator=g, dtype=torch.uint8)
    zero = -torch.randint(6, 10, (-(-K // G), N), generator=g) / 16
    bias = torch.randint(-15, 16, (N,), generator=g) / 16
    return QuantWeight.from_codes(q, torch.full_like(zero, 1 / 16), zero, G, bias=bias).to("cuda")


def whole_activations(M: int, K: int) -> Tensor:
    g = torch.Generator("cuda").manual_seed(M)
    return torch.randint(-2, 3, (M, K), generator=g, device="cuda").to(torch.float16)


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


def needs_room(gigabytes: int) -> None:
    """Skips the test where the GPU has not so much memory."""
    if devices.memory(torch.device("cuda", torch.cuda.current_device())) < gigabytes * 10**9:
        pytest.skip(f"this GPU has less than {gigabytes} GB free")


def check(w: QuantWeight, x: Tensor, y: Tensor) -> None:
    """y = x @ W + bias, as near as torch's product with the dequantised weight in x's dtype."""
    want, bias = want64(x, w), 0 if w.bias is None else w.bias.to(x.dtype)
    assert error(y, want) <= 1.2 * error(x @ w.dequantize(x.dtype) + bias, want)


class Canaries:
    """Stands in for `torch` in a module: what that gets as `empty` lies between canaries in one allocation, and holds
    NaN. So does what is handed out as scratch, of exactly the size that is asked for."""

    PAD = 1 << 14  # elements on either side

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def take(self, count: int, dtype: torch.dtype, device: torch.device | str, value: float) -> Tensor:
        around = torch.full((count + 2 * self.PAD,), 7, dtype=dtype, device=device)
        self._taken.append((around, count))
        return around[self.PAD : self.PAD + count].fill_(value)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.take(math.prod(shape), dtype, device, math.nan).view(shape)

    def scratch_floats(self, device: int, count: int, purpose: str) -> Tensor:
        return self.take(count, torch.float32, torch.device("cuda", device), math.nan)

    def scratch_addresses(self, device: int, stream: int, floats: int, counters: int) -> tuple[int, int]:
        partial = self.scratch_floats(device, floats, "partial")
        return partial.data_ptr(), self.take(counters, torch.int32, torch.device("cuda", device), 0).data_ptr()

    def check(self) -> list[torch.dtype]:
        """All canaries are alive, and counters at zero again; of what dtypes were the buffers taken since the last
        check."""
        taken, self._taken = self._taken, []
        for around, count in taken:
            assert bool((around[: self.PAD] == 7).all()), f"written before {count} of {around.dtype}"
            assert bool((around[self.PAD + count :] == 7).all()), f"written beyond {count} of {around.dtype}"
            if around.dtype == torch.int32:
                assert not bool(around[self.PAD : self.PAD + count].any()), "counters are left for the next launch"
        return [around.dtype for around, _ in taken]
