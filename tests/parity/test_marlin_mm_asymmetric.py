"""The composition: symmetric product, group sums, accumulation, against float64 and against the fused kernels."""

from __future__ import annotations

import pytest
import torch
from tests.parity import chain
from tests.parity.cuda_cases import DTYPES, activations, error, plain_error, want64, weight

from tinyloop.cuda.run import Status, mm_asymmetric
from tinyloop.marlin import MarlinWeight

pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]

# M, K, N, G: the last ones are the composition's own sizes, K = 8192 in 64 groups, and beyond
SHAPES = [
    (1, 128, 64, 128), (7, 300, 72, 64), (17, 512, 192, 32), (33, 1000, 1000, 256), (5, 520, 320, -1),
    (64, 8192, 2048, 128), (256, 8192, 2048, 128), (5000, 1024, 264, 128),
]  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "mean 1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K", "N", "G"), SHAPES)
def test_against_float64(M: int, K: int, N: int, G: int, dtype: torch.dtype, mean: float) -> None:
    w = weight(K, N, G, bias=True)
    x, y = activations(M, K, mean, dtype), torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
    bias = w.bias.to(dtype)
    assert mm_asymmetric(x, MarlinWeight.of(w), y, bias) is Status.OK
    want = want64(x, w) + (bias.double() - w.bias.double())
    plain = error(torch.addmm(bias, x, w.dequantize(dtype)), want)
    assert error(y, want) <= 1.2 * plain


def test_what_it_cannot_serve_is_a_status() -> None:
    w = weight(256, 64, 64)
    m, x = MarlinWeight.of(w), activations(4, 256, 0.0, torch.float16)
    y = torch.empty(4, 64, dtype=torch.float16, device="cuda")
    assert mm_asymmetric(x, m, y) is Status.OK
    assert mm_asymmetric(x[:0], m, y[:0]) is Status.OK
    assert mm_asymmetric(x.cpu(), m, y) is Status.NOT_CUDA
    assert mm_asymmetric(x.float(), m, y) is Status.DTYPE
    assert mm_asymmetric(x, m, y.float()) is Status.DTYPE
    assert mm_asymmetric(x[:, :128], m, y) is Status.SHAPE
    assert mm_asymmetric(x, m, y[:, :32]) is Status.SHAPE
    assert mm_asymmetric(x.t().contiguous().t(), m, y) is Status.SHAPE


def test_the_steady_state_allocates_nothing() -> None:
    w = weight(2048, 512, 128)
    m, x = MarlinWeight.of(w), activations(64, 2048, 0.0, torch.float16)
    y = torch.empty(64, 512, dtype=torch.float16, device="cuda")
    mm_asymmetric(x, m, y)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        mm_asymmetric(x, m, y)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_plain_error_is_of_the_order_expected() -> None:
    """The yardstick itself: 16-bit products of centred values err by about the dtype's rounding."""
    w, x = weight(1024, 256, 128), activations(32, 1024, 0.0, torch.float16)
    assert 1e-4 < plain_error(x, w.dequantize(torch.float32), want64(x, w)) < 1e-3


if __name__ == "__main__":
    chain.main(__file__)
