"""The correction algebra on a CPU, from the device format back to x @ W.

    y = x @ W_sym + group_sum(x) @ delta        W_sym = (q − 8)·scale, delta = zero + 8·scale, both as they are packed

Three ways to spend delta, as the kernels do, each in fp32 and rounded once at the end:

    pair    the symmetric product, then the group sums of x times delta
    decode  delta added while a code becomes a weight
    fold    products of x with 16 + q, as kernels decode them, turned into W per group by two multiplications
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import random_quant_weight
from tests.parity import chain

from tinyloop.marlin import MarlinWeight
from tinyloop.reference import dequantize64, matmul64
from tinyloop.weight import QuantWeight

Tensor = torch.Tensor

SHAPES = [(1, 64, 64), (7, 128, 256), (3, 301, 70), (17, 1000, 130), (2, 4304, 64), (64, 2048, 192)]  # M, K, N
WAYS = ("pair", "decode", "fold")
OFFSET = 16  # what a decoded code carries beside its value


def activations(M: int, K: int, mean: float, dtype: torch.dtype) -> Tensor:
    return (mean + torch.randn(M, K, generator=torch.Generator().manual_seed(K))).to(dtype)


def unpacked(m: MarlinWeight) -> tuple[Tensor, Tensor, Tensor]:  # codes fp32 [K, N], scale and delta fp32 [groups, N]
    q, scale, zero = m.unpack()
    return q.float(), scale.float(), zero + 8 * scale.float()


def group_sum(x: Tensor, G: int) -> Tensor:  # fp32 [M, K] → fp32 [M, ⌈K/G⌉]
    return torch.stack([part.sum(1) for part in torch.split(x, G, 1)], 1)


def product(way: str, x: Tensor, m: MarlinWeight) -> Tensor:  # fp16 | bf16 [M, K] → fp32 [M, N]
    q, scale, delta = unpacked(m)
    G = m.K if m.group_size == -1 else m.group_size
    x, group = x.float(), torch.arange(m.K) // G
    sums = group_sum(x, G)
    if way == "pair":
        return x @ ((q - 8) * scale[group]) + sums @ delta
    if way == "decode":
        return x @ ((q - 8) * scale[group] + delta[group])
    y = torch.zeros(x.shape[0], m.N)
    for g, rows in enumerate(torch.split(torch.arange(m.K), G)):
        acc = x[:, rows] @ (q[rows] + OFFSET)
        y += scale[g] * (acc - (OFFSET + 8) * sums[:, g, None]) + sums[:, g, None] * delta[g]
    return y


def bound(x: Tensor, w: QuantWeight) -> Tensor:  # float64 [M, N]
    """What fp32 may lose whatever the order of the sums: n roundings of everything that is added, each 2⁻²⁴."""
    q, group = w.codes().double(), torch.arange(w.K) // w.group_size
    scale, zero = w.scale.double()[group], w.zero.double()[group]
    terms = (q + 2 * OFFSET + 8) * scale.abs() + 2 * (zero.abs() + 8 * scale.abs())
    return (w.K + 8) * 2**-24 * (x.double().abs() @ terms)


def error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "mean 1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("G", [32, 64, 128, 256, -1])
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_against_the_definition(M: int, K: int, N: int, G: int, dtype: torch.dtype, mean: float) -> None:
    """Rounded to the dtype: at most 1.2 times the error of torch's product with the dequantised weight in it. Before:
    within what fp32 may lose."""
    w = random_quant_weight(K, N, K if G == -1 or G > K else G, seed=N)
    x, m = activations(M, K, mean, dtype), MarlinWeight.of(w)
    want = matmul64(x, w)
    plain = error(x @ w.dequantize(dtype), want)
    for way in WAYS:
        y = product(way, x, m)
        assert bool(((y.double() - want).abs() <= bound(x, w)).all()), way
        assert error(y.to(dtype), want) <= 1.2 * plain, way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("integer_zero", [True, False])
def test_one_hot_rows_return_the_weight(way: str, integer_zero: bool) -> None:
    """Every element, through every way: within the few roundings between a code and its weight."""
    w = random_quant_weight(300, 70, 64, seed=1, integer_zero=integer_zero)
    y = product(way, torch.eye(300, dtype=torch.float16), MarlinWeight.of(w))
    size = (w.codes().double() + 2 * OFFSET + 8) * w.scale.double()[torch.arange(300) // 64]
    assert bool(((y.double() - dequantize64(w)).abs() <= 6 * 2**-24 * size).all())


@pytest.mark.parametrize("way", WAYS)
def test_group_sums_beyond_fp16(way: str) -> None:
    """128 activations of 600 sum to 76,800, which fp16 does not hold."""
    w = random_quant_weight(256, 64, 128, seed=2)
    x = torch.full((3, 256), 600.0, dtype=torch.float16)
    assert bool(torch.isinf(group_sum(x.float(), 128).half()).all())
    want = matmul64(x, w)
    assert bool(((product(way, x, MarlinWeight.of(w)).double() - want).abs() <= bound(x, w)).all())


@pytest.mark.parametrize("way", WAYS)
def test_halves_that_are_huge_and_opposite(way: str) -> None:
    """Codes 0 and a zero near 0: the symmetric half and the correction are each beyond fp16, and W is small."""
    K, N, G = 512, 64, 128
    q, scale = torch.zeros(K, N, dtype=torch.uint8), torch.full((K // G, N), 40.0)
    w = QuantWeight.from_codes(q, scale, torch.full((K // G, N), 0.25), G)
    x = activations(5, K, 1.0, torch.float16)
    symmetric = x.float() @ (-8 * scale[torch.arange(K) // G])
    assert bool(torch.isinf(symmetric.half()).all())
    want = matmul64(x, w)
    assert bool(((product(way, x, MarlinWeight.of(w)).double() - want).abs() <= bound(x, w)).all())


if __name__ == "__main__":
    chain.main(__file__)
