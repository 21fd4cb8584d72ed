"""The symmetric link: packed in device order and multiplied on tensor cores, y = x @ (q − 8)·scale in fp32."""

from __future__ import annotations

import pytest
import torch
from tests.parity import chain
from tests.parity.cuda_cases import DTYPES, activations, error, plain_error, weight

from tinyloop.cuda import gemm
from tinyloop.cuda.config import Config
from tinyloop.marlin import MarlinWeight, marlin_pack_symmetric, marlin_unpack_symmetric

pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]

SHAPES = [(64, 128, 128), (72, 300, 64), (192, 512, 32), (1000, 1000, 128), (320, 520, -1), (64, 4304, 32)]  # N, K, G


def test_packer_on_the_gpu_is_that_on_the_cpu() -> None:
    q = torch.randint(0, 16, (512, 192), dtype=torch.uint8)
    scale = torch.rand(4, 192).half()
    B, S = marlin_pack_symmetric(q, scale)
    for ours, theirs in zip(marlin_pack_symmetric(q.cuda(), scale.cuda()), (B, S), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    back = marlin_unpack_symmetric(B.cuda(), S.cuda(), 128)
    assert torch.equal(back[0].cpu(), q)
    assert torch.equal(back[1].cpu(), scale)


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "mean 1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
@pytest.mark.parametrize("M", [1, 8, 9, 16, 31, 64, 130])
def test_against_float64(M: int, N: int, K: int, G: int, dtype: torch.dtype, mean: float) -> None:
    w = weight(K, N, G)
    m, x = MarlinWeight.of(w), activations(M, K, mean, dtype)
    group = torch.arange(K, device="cuda") // w.group_size
    symmetric = (w.codes().double() - 8) * w.scale.double()[group]
    want = x.double() @ symmetric
    y = gemm.product(x, m, symmetric=True)
    assert y.dtype == torch.float32
    assert error(y, want) <= 1.2 * plain_error(x, symmetric, want)


def test_exact_integers() -> None:
    """Codes and activations that are whole, scale 1: what comes out is exact while sums stay below 2²⁴."""
    q = torch.randint(0, 16, (640, 128), dtype=torch.uint8, device="cuda")
    m = MarlinWeight(
        *marlin_pack_symmetric(q, torch.ones(5, 128, device="cuda")), torch.zeros(5, 128).cuda(), 640, 128, 128
    )
    x = torch.randint(-4, 5, (7, 640), device="cuda").half()
    assert torch.equal(gemm.product(x, m, symmetric=True).double(), x.double() @ (q.double() - 8))


def test_slices_of_k_change_nothing_but_the_order_of_sums() -> None:
    """NUM-05: K = 16384, whatever the number of blocks along K."""
    w = weight(16384, 256, 128)
    m, x = MarlinWeight.of(w), activations(16, 16384, 0.0, torch.float16)
    whole = gemm.product(x, m, symmetric=True, config=Config(2, 1, 1, 4, 4, False, 1))
    for splits in (2, 3, 7, 16):
        y = gemm.product(x, m, symmetric=True, config=Config(2, 1, 1, 4, 4, False, splits))
        assert error(y, whole.double()) < 1e-6


if __name__ == "__main__":
    chain.main(__file__)
