"""The correction pair by itself: y = c + group_sum(x) @ δ against the same in float64, to one or two ulp."""

from __future__ import annotations

import pytest
import torch
from tests.parity import chain
from tests.parity.cuda_cases import DTYPES, activations, weight

from tinyloop.cuda import paths
from tinyloop.marlin import MarlinWeight

pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]

SHAPES = [(64, 128, 128), (72, 300, 64), (192, 512, 32), (1000, 1000, 128), (320, 520, -1), (8, 4304, 32)]  # N, K, G


def delta64(w: object, m: MarlinWeight) -> torch.Tensor:
    return (m.unpack()[2].double() + 8 * m.unpack()[1].double())[: m.groups]


def sums64(x: torch.Tensor, G: int) -> torch.Tensor:
    return torch.stack([part.double().sum(1) for part in torch.split(x, G, 1)], 1)


@pytest.mark.parametrize("mean", [0.0, 1.0, 600.0], ids=["centred", "mean 1", "mean 600"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
@pytest.mark.parametrize("M", [1, 3, 64, 130])
def test_group_sums(M: int, N: int, K: int, G: int, dtype: torch.dtype, mean: float) -> None:
    """In fp32: what adding |x| once each may lose."""
    x, G = activations(M, K, mean, dtype), K if G == -1 else G
    want = sums64(x, G)
    assert bool(((paths.group_sums(x, G).double() - want).abs() <= 2**-23 * sums64(x.abs(), G)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
@pytest.mark.parametrize("M", [1, 3, 64, 130])
def test_accumulation(M: int, N: int, K: int, G: int, dtype: torch.dtype) -> None:
    w = weight(K, N, G, bias=True)
    m, x = MarlinWeight.of(w), activations(M, K, 1.0, dtype)
    sums, bias = paths.group_sums(x, w.group_size), w.bias.to(dtype)
    c = torch.randn(M, N, device="cuda")
    y = paths.correction(c, sums, m, bias, torch.empty(M, N, dtype=dtype, device="cuda"))
    want = c.double() + sums.double() @ delta64(w, m) + bias.double()
    ulp = torch.finfo(dtype).eps * want.abs().clamp_min(torch.finfo(dtype).tiny)
    lost = 2**-23 * (sums.double().abs() @ delta64(w, m).abs() + c.double().abs())  # by the sum in fp32
    assert bool(((y.double() - want).abs() <= ulp / 2 + lost).all())


def test_halves_that_are_huge_and_opposite() -> None:
    """NUM-04: W = 0, whose symmetric half is −8·scale, with sums beyond fp16."""
    from tinyloop.cuda.run import Status, mm_asymmetric
    from tinyloop.weight import QuantWeight

    K, N, G = 4096, 128, 128
    zero = torch.zeros(K // G, N)
    w = QuantWeight.from_codes(torch.zeros(K, N, dtype=torch.uint8), zero + 2**-6, zero, G).to("cuda")
    x = torch.full((16, K), 256.0, dtype=torch.float16, device="cuda")
    y = torch.empty(16, N, dtype=torch.float16, device="cuda")
    assert mm_asymmetric(x, MarlinWeight.of(w), y) is Status.OK
    assert bool((y == 0).all())


if __name__ == "__main__":
    chain.main(__file__)
