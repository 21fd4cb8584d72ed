"""`quant_gemm` against float64, kernel by kernel: exact decode, derived tolerances, ragged shapes, every case row.

A kernel is forced by taking the others out of the dispatcher's table, so that each test goes the way a caller goes and
`ops.calls` proves which kernel ran. Names of tests carry the rows of the case list that they cover.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from helpers import random_dense_weight, random_quant_weight, with_random_perm
from tinyloop import dispatch, ops
from tinyloop.dispatch import Machine, Problem, machine
from tinyloop.errors import InputError
from tinyloop.ops import quant_gemm
from tinyloop.pack import PackedWeight, pack
from tinyloop.reference import dequantize64, matmul64
from tinyloop.weight import QuantWeight

Tensor = torch.Tensor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"panel": (F32, BF16, F16), "int4pack": (BF16,), "dense_cache": (F32, BF16), "dense": (BF16,),
          "native": (F32, BF16, F16)}  # fmt: skip
EVERYTHING = Machine(numba=True, int4pack=True, bf16=True, memory=1 << 40)
MISSING = {"panel": not machine().numba, "int4pack": not machine().int4pack, "dense": not machine().bf16}
EACH = [pytest.param(k, d, id=f"{k}-{str(d).removeprefix('torch.')}") for k in DTYPES for d in DTYPES[k]]
each = pytest.mark.parametrize(("kernel", "dtype"), EACH)
needs_numba = pytest.mark.skipif(not machine().numba, reason="numba is not installed")

Product = Callable[..., Tensor]


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Product:
    """`quant_gemm` with one kernel, and the proof that it ran."""
    table = dispatch.CPU_KERNELS

    def run(kernel: str, x: Tensor, w: QuantWeight) -> Tensor:
        if MISSING.get(kernel):
            pytest.skip(f"this machine has no {kernel} kernel")
        monkeypatch.setattr(dispatch, "CPU_KERNELS", tuple(k for k in table if k.name in (kernel, "native")))
        ops.calls.clear()
        y = quant_gemm(x, pack(w, keep_dense=kernel == "dense_cache"))
        assert dict(ops.calls) == {kernel: 1}
        assert y.dtype == x.dtype
        assert y.shape == (*x.shape[:-1], w.N)
        assert y.is_contiguous()
        return y

    return run


def activations(M: int, K: int, dtype: torch.dtype = F32, mean: float = 0.0, seed: int = 0) -> Tensor:
    return (torch.randn(M, K, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


def rows_for(kernel: str, dtype: torch.dtype, *wanted: int) -> list[int]:
    """Those of `wanted` that the dispatcher would give this kernel."""
    refuses = next(k.refuses for k in dispatch.CPU_KERNELS if k.name == kernel)
    problems = [Problem(M, 96, 96, 32, 4, dtype, cached=kernel == "dense_cache") for M in wanted]
    return [p.M for p in problems if refuses(p, EVERYTHING) is None]


def at_once(kernel: str, dtype: torch.dtype) -> int:
    return max(rows_for(kernel, dtype, 1, 4, 64))


def error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def torch_error(x: Tensor, w: QuantWeight) -> float:
    """Of plain torch on the dequantised weight: the larger of one product and of one per row, which sum in different
    orders. Rows of ours do not depend on M, so either is a fair yardstick."""
    W, exact = w.dequantize(x.dtype), matmul64(x, w)
    bias = 0 if w.bias is None else w.bias.to(x.dtype)
    few = x[:4]
    return max(error(x @ W + bias, exact), error(torch.cat([row[None] @ W for row in few]) + bias, exact[:4]))


def rounding(x: Tensor, w: QuantWeight) -> float:
    """One rounding to x's dtype, and four to fp32 in sums over x·q·scale and x·zero apart: what a few terms may lose
    where torch is exact by luck."""
    group = torch.arange(w.K) // w.group_size
    apart = w.codes().double() * w.scale.double().abs()[group] + w.zero.double().abs()[group]
    loss = 4 * 2**-24 * float((x.double().abs() @ apart).norm() / matmul64(x, w).norm())
    return torch.finfo(x.dtype).eps / 2 + loss


def check(y: Tensor, x: Tensor, w: QuantWeight) -> None:
    x, y = x.reshape(-1, w.K), y.reshape(-1, w.N)
    assert torch.isfinite(y).all()
    assert error(y, matmul64(x, w)) <= 2 * torch_error(x, w) + rounding(x, w)


def gaussian_weight(K: int, N: int, G: int, seed: int = 0) -> QuantWeight:
    """As quantising a trained weight gives: codes crowd about the middle, zero + 8·scale is small."""
    W = (torch.randn(K, N, generator=torch.Generator().manual_seed(seed)) / math.sqrt(K)).view(K // G, G, N)
    zero, scale = W.amin(1), (W.amax(1) - W.amin(1)) / 15
    q = ((W - zero[:, None]) / scale[:, None]).round().clamp(0, 15)
    return QuantWeight.from_codes(q.reshape(K, N).to(torch.uint8), scale, zero, G)


def uniform_weight(K: int, N: int, G: int, q: int, scale: float, zero: float) -> QuantWeight:
    shape = (-(-K // G), N)
    return QuantWeight.from_codes(
        torch.full((K, N), q, dtype=torch.uint8), torch.full(shape, scale), torch.full(shape, zero), G
    )


def exact_in_bf16(K: int, N: int, G: int, seed: int = 0) -> QuantWeight:
    """W = (q − 8)/64: no kernel rounds it, so a result is as good as its arithmetic."""
    q = torch.randint(0, 16, (K, N), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    parameters = torch.full((-(-K // G), N), 1 / 64)
    return QuantWeight.from_codes(q, parameters, -8 * parameters, G)


# ── accuracy ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "off-centre"])
@pytest.mark.parametrize("G", [32, 128, 512], ids=lambda G: f"G{G}")
@pytest.mark.parametrize("weight", [random_quant_weight, gaussian_weight], ids=["uniform", "gaussian"])
@each
def test_num12_error_is_within_twice_torchs(
    product: Product, kernel: str, dtype: torch.dtype, weight: Callable[..., QuantWeight], G: int, mean: float
) -> None:
    """All back ends, one tolerance; the panel's fp32 adds what its two sums lose where they cancel."""
    w = weight(512, 48, G, seed=1)
    for M in rows_for(kernel, dtype, 4, 33):
        x = activations(M, 512, dtype, mean)
        apart = chains(x, w) if (kernel, dtype) == ("panel", F32) else 0.0
        assert error(product(kernel, x, w), matmul64(x, w)) <= 2 * torch_error(x, w) + apart


def chains(x: Tensor, w: QuantWeight) -> float:
    """Rounding of Σ x·q over a group, 64 steps at most, whose size wanders up to its end, and of its two products.

    Errors of steps and groups are independent: they add in quadrature.
    """
    steps = min(w.group_size, 128) / 2
    sums = x.double()[:, :, None] * w.codes().double() * w.scale.double().repeat_interleave(w.group_size, 0)
    ends = sums.view(x.shape[0], -1, int(2 * steps), w.N).sum(2)  # [M, groups, N]
    return 2**-24 * math.sqrt(steps / 3 + 2) * float(ends.norm() / matmul64(x, w).norm())


@needs_numba
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_one_group_per_column_is_as_accurate(product: Product, mean: float) -> None:
    """A sum over all of K in one chain loses 20 times what torch does."""
    w = random_quant_weight(2048, 64, 2048, seed=1)
    x = activations(4, 2048, F32, mean)
    assert error(product("panel", x, w), matmul64(x, w)) <= 2 * torch_error(x, w)


@pytest.mark.parametrize("half", [True, False], ids=["fp16 parameters", "fp32 parameters"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("K", "N", "G"), [(1, 1, 1), (7, 31, 7), (100, 33, 64), (129, 48, 32), (300, 8, 300)])
@pytest.mark.parametrize("kernel", ["panel", "native"])
def test_one_hot_rows_return_the_dequantised_weight(
    product: Product, kernel: str, K: int, N: int, G: int, bits: int, half: bool
) -> None:
    w = random_quant_weight(K, N, G, seed=2, bits=bits)
    if half:
        w = QuantWeight.from_codes(w.codes(), w.scale.half(), w.zero.half(), G, bits)
    eye, step = torch.eye(K), at_once(kernel, F32)
    y = torch.cat([product(kernel, eye[k : k + step], w) for k in range(0, K, step)])
    assert torch.equal(y, w.dequantize())


@each
def test_imp02_rows_in_another_order(product: Product, kernel: str, dtype: torch.dtype) -> None:
    """Groups of inputs that do not lie beside each other."""
    w = with_random_perm(random_quant_weight(256, 96, 64, seed=0, bias=True))
    x = activations(at_once(kernel, dtype), 256, dtype)
    check(product(kernel, x, w), x, w)


def test_imp02_dense_copies_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    w = with_random_perm(random_quant_weight(256, 96, 64, seed=0))
    monkeypatch.setattr(sys.modules["tinyloop.pack"], "machine", lambda: Machine(False, False, False, 1 << 40))
    x = activations(64, 256)
    check(quant_gemm(x, pack(w, keep_dense=True)), x, w)


@pytest.mark.parametrize("kernel", ["int4pack", "dense_cache", "dense"])
def test_one_hot_rows_are_exact_where_bf16_is(product: Product, kernel: str) -> None:
    w = exact_in_bf16(96, 48, 32)
    eye, step = torch.eye(96, dtype=BF16), at_once(kernel, BF16)
    y = torch.cat([product(kernel, eye[k : k + step], w) for k in range(0, 96, step)])
    assert torch.equal(y.double(), dequantize64(w))


# ── shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [
    (1, 1, 1), (1, 33, 1), (7, 8, 7), (9, 1, 1), (33, 31, 32), (64, 48, 7), (100, 48, 64), (255, 33, 128),
    (300, 31, 300), (600, 33, 200), (512, 48, 256), (1000, 8, 512),
]  # fmt: skip


@pytest.mark.parametrize(("K", "N", "G"), SHAPES)
@pytest.mark.parametrize(("kernel", "dtype"), [p for p in EACH if p.values[0] != "int4pack"])
def test_ragged_shapes(product: Product, kernel: str, dtype: torch.dtype, K: int, N: int, G: int) -> None:
    w = random_quant_weight(K, N, G, seed=K, bias=True)
    for M in rows_for(kernel, dtype, 1, 3, 17):
        x = activations(M, K, dtype)
        check(product(kernel, x, w), x, w)


@pytest.mark.parametrize(("K", "N", "G"), [(32, 16, 32), (96, 48, 96), (512, 16, 256), (160, 1008, 32)])
def test_ragged_shapes_of_int4pack(product: Product, K: int, N: int, G: int) -> None:
    w = random_quant_weight(K, N, G, seed=K, bias=True)
    for M in (1, 3, 17, 24):
        x = activations(M, K, BF16)
        check(product("int4pack", x, w), x, w)


@pytest.mark.parametrize("M", [0, *range(1, 10), 17, 64, 257])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("keep", [False, True], ids=["transient", "kept"])
def test_shp02_any_number_of_rows(M: int, dtype: torch.dtype, keep: bool) -> None:
    """As the dispatcher chooses, on a shape that no kernel finds even."""
    w = random_quant_weight(100, 33, 64, seed=0, bias=True)
    x = activations(M, 100, dtype)
    y = quant_gemm(x, pack(w, keep))
    assert (y.dtype, y.shape) == (dtype, (M, 33))
    if M:
        check(y, x, w)


@each
def test_shp01_no_rows_no_launch(kernel: str, dtype: torch.dtype) -> None:
    w = pack(random_quant_weight(64, 48, 32, seed=0), kernel == "dense_cache")
    ops.calls.clear()
    for shape in ((0, 64), (2, 0, 64), (0, 3, 64)):
        y = quant_gemm(torch.empty(shape, dtype=dtype), w)
        assert (y.shape, y.dtype) == ((*shape[:-1], 48), dtype)
    assert not ops.calls


@pytest.mark.parametrize("shape", [(64,), (1, 7, 64), (7, 1, 64), (2, 3, 5, 64), (2, 1, 1, 2, 64)], ids=str)
@each
def test_shp11_any_number_of_dimensions(
    product: Product, kernel: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    w = random_quant_weight(64, 48, 32, seed=0, bias=True)
    x = activations(math.prod(shape[:-1]), 64, dtype).reshape(shape)
    if rows_for(kernel, dtype, math.prod(shape[:-1])):
        check(product(kernel, x, w), x, w)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "expanded": lambda x: x[:1].expand(3, -1),
    "one number": lambda x: x[:1, :1].expand(3, 100),
    "offset": lambda x: torch.cat((x[:, :3], x), dim=1)[:, 3:],
}


@pytest.mark.parametrize("how", STRIDED)
@each
def test_strides_do_not_matter(product: Product, kernel: str, dtype: torch.dtype, how: str) -> None:
    w = random_quant_weight(100, 48, 100 if kernel != "int4pack" else 64, seed=0)
    if kernel == "int4pack":
        w = random_quant_weight(96, 48, 32, seed=0)
    x = STRIDED[how](activations(3, 100, dtype))[:, : w.K]
    before = x.clone()
    assert torch.equal(product(kernel, x, w), product(kernel, x.contiguous(), w))
    check(product(kernel, x, w), x, w)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("K", "N"), [(64, 64), (192, 576), (7392, 64), (8256, 64), (10944, 64), (64, 1088), (64, 2880)]
)
def test_shp04_any_multiple_of_64(K: int, N: int) -> None:
    w = random_quant_weight(K, N, 32, seed=0)
    for M, dtype in ((1, F32), (2, BF16), (17, BF16), (33, F16)):
        x = activations(M, K, dtype)
        check(quant_gemm(x, pack(w)), x, w)


@pytest.mark.parametrize("N", [8, 48, 1000, 32001, 32016])
def test_shp06_exactly_n_columns(N: int) -> None:
    w = random_quant_weight(256, N, 128, seed=0)
    packed = pack(w)
    for M, dtype in ((1, F32), (2, BF16), (25, BF16)):
        x = activations(M, 256, dtype)
        y = quant_gemm(x, packed)
        assert y.shape == (M, N)
        check(y, x, w)


def test_shp07_eight_columns() -> None:
    w = random_quant_weight(256, 8, 128, seed=0)
    for dtype in (F32, BF16, F16):
        x = activations(256, 256, dtype)
        check(quant_gemm(x, pack(w)), x, w)


@pytest.mark.parametrize("M", [65535, 65536, 65537, 131072])
def test_idx04_many_rows(M: int) -> None:
    """Beyond 16 bits of rows, on the kernels that see them; the rows about each limit, and the last."""
    w = exact_in_bf16(128, 64, 32)
    x = activations(M, 128, BF16)
    seen = torch.tensor([0, 2047, 2048, 32767, 32768, 65534, M - 2, M - 1])
    ops.calls.clear()
    for y in (quant_gemm(x, w), quant_gemm(x.half(), w), quant_gemm(x[:, None], w)[:, 0]):
        assert y.shape == (M, 64)
        exact = matmul64(x[seen], w)
        assert error(y[seen], exact) <= torch.finfo(y.dtype).eps / 2
    assert sum(ops.calls.values()) == 3
    assert ops.calls["native"] >= 1


# ── cases: numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


@each
@pytest.mark.parametrize("sign", [1, -1])
def test_num01_group_sums_do_not_overflow(product: Product, kernel: str, dtype: torch.dtype, sign: int) -> None:
    w = uniform_weight(128, 16, 128, 8, 2**-10, -(2**-7))
    zero = w.zero.clone()
    zero[:, 0] += 2**-11
    w = QuantWeight.from_codes(w.codes(), w.scale, zero, 128)
    for M in rows_for(kernel, dtype, 1, 16, 256):
        y = product(kernel, torch.full((M, 128), sign * 512.0, dtype=dtype), w)
        assert (y[:, 0] == sign * 32).all()
        assert (y[:, 1:] == 0).all()


@each
def test_num03_scale_comes_before_the_cast(product: Product, kernel: str, dtype: torch.dtype) -> None:
    w = uniform_weight(4096, 16, 4096, 15, 2**-10, -(2**-7))
    for M in rows_for(kernel, dtype, 1, 4, 17):
        assert (product(kernel, torch.full((M, 4096), 100.0, dtype=dtype), w) == 2800).all()


@each
def test_num04_halves_meet_before_the_cast(product: Product, kernel: str, dtype: torch.dtype) -> None:
    w = uniform_weight(4096, 16, 128, 0, 2**-6, 0.0)
    for M in rows_for(kernel, dtype, 1, 4, 17):
        assert (product(kernel, torch.full((M, 4096), 256.0, dtype=dtype), w) == 0).all()


def ulps(y: Tensor, exact: Tensor) -> Tensor:
    """Distance in units of the last place of y's dtype at `exact`."""
    info = torch.finfo(y.dtype)
    ulp = torch.exp2(exact.abs().clamp_min(info.smallest_normal).log2().floor()) * info.eps
    return (y.double() - exact).abs() / ulp


@pytest.mark.parametrize("kernel", ["panel", "native"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_num05_num06_one_ulp_over_long_sums(product: Product, kernel: str, dtype: torch.dtype) -> None:
    """Where sums are fp32 only the last rounding shows, half a unit; the other half covers fp32 sums near zero."""
    w = random_quant_weight(16384, 128, 128, seed=0)
    for M in rows_for(kernel, dtype, 4, 16):
        x = activations(M, 16384, dtype)
        exact = matmul64(x, w)
        large = exact.abs() > 1e-3
        assert ulps(product(kernel, x, w), exact)[large].max() <= 1


@each
def test_num06_ker01_runs_repeat_bitwise(product: Product, kernel: str, dtype: torch.dtype) -> None:
    w = random_quant_weight(4096, 128, 128, seed=0)
    for M in rows_for(kernel, dtype, 4, 8, 64):
        x = activations(M, 4096, dtype)
        first = product(kernel, x, w)
        assert all(torch.equal(product(kernel, x, w), first) for _ in range(5))


@pytest.mark.parametrize("M", [1, 8, 50, 51, 64])
@pytest.mark.parametrize(("reach", "finite"), [(1.5, True), (2.5, False)], ids=["within fp16", "beyond fp16"])
def test_num07_infinite_only_where_the_result_is(M: int, reach: float, finite: bool) -> None:
    """One channel of 3e4 before a down projection, fp16: column 0 has the weight ±reach there, column 1 the other."""
    w = random_quant_weight(27648, 8, 128, seed=0)
    q, scale, zero = w.codes().clone(), w.scale.clone(), w.zero.clone()
    scale[0], zero[0] = 2 * reach / 15, -reach
    q[:128] = 7
    q[0, 0], q[0, 1] = 0, 15
    w = QuantWeight.from_codes(q, scale, zero, 128)
    x = activations(M, 27648, F16)
    x[:, 0] = 3e4
    y, exact = quant_gemm(x, pack(w)), matmul64(x, w)
    assert bool((exact[:, :2].abs() < 6e4).all()) == finite
    assert torch.equal(torch.isinf(y), exact.abs() > 65520)
    assert not torch.isnan(y).any()
    assert torch.equal(y.sign(), exact.half().sign())


@pytest.mark.parametrize("M", [1, 5, 24, 63, 64, 65, 1024])
@pytest.mark.parametrize("kernel", [k for k in DTYPES if BF16 in DTYPES[k]])
def test_num08_num11_large_bf16_stays_bf16(product: Product, kernel: str, M: int) -> None:
    if not rows_for(kernel, BF16, M):
        pytest.skip(f"{kernel} leaves {M} rows to the dense product")
    w = exact_in_bf16(256, 16, 32)
    x = activations(M, 256, BF16)
    x[0, 5] = 131072.0
    y, exact = product(kernel, x, w), matmul64(x, w)
    assert ulps(y, exact)[exact.abs() > 1e-2].max() <= 1


@each
def test_num10_tiny_groups(product: Product, kernel: str, dtype: torch.dtype) -> None:
    """Groups of ±1e-7, ±1e-6 and ±3e-5 beside a normal one, read back one by one."""
    size = torch.tensor([1e-7, 1e-6, 3e-5, 0.1])[:, None].expand(4, 16)
    q = torch.arange(16, dtype=torch.uint8).repeat(8)[:, None].expand(128, 16)
    w = QuantWeight.from_codes(q, 2 * size / 15, -size, 32)
    eye, step = torch.eye(128, dtype=dtype), at_once(kernel, dtype)
    y = torch.cat([product(kernel, eye[k : k + step], w) for k in range(0, 128, step)])
    assert torch.isfinite(y).all()
    loss = (y.double() - dequantize64(w)).abs() / size.double().repeat_interleave(32, 0)
    # fp16 results are subnormal at 1e-7: steps of 6e-8.
    assert loss.max() <= (0.3 if dtype == F16 else 2**-7)


# ── cases: groups ──────────────────────────────────────────────────────────────────────────────────────────────────


@each
def test_grp01_every_group_has_its_zero(product: Product, kernel: str, dtype: torch.dtype) -> None:
    zero = torch.arange(8.0)[:, None].expand(8, 16)
    w = QuantWeight.from_codes(torch.zeros(256, 16, dtype=torch.uint8), torch.ones(8, 16), zero, 32)
    for M in rows_for(kernel, dtype, 1, 16):
        assert (product(kernel, torch.ones(M, 256, dtype=dtype), w) == 896).all()


@pytest.mark.parametrize(("kernel", "dtype"), [p for p in EACH if p.values[0] != "int4pack"])
@pytest.mark.parametrize(("K", "N", "G"), [(4304, 64, 32), (100, 64, 64)])
def test_grp03_short_last_group(product: Product, kernel: str, dtype: torch.dtype, K: int, N: int, G: int) -> None:
    w = random_quant_weight(K, N, G, seed=0)
    for M in rows_for(kernel, dtype, 1, 2, 17):
        x = activations(M, K, dtype)
        check(product(kernel, x, w), x, w)
    last = torch.zeros(1, K, dtype=dtype)
    last[0, -1] = 1
    assert error(product(kernel, last, w), dequantize64(w)[-1:]) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("G", [256, 512, 1024])
@pytest.mark.parametrize("M", [1, 8, 33])
def test_grp05_large_groups(M: int, G: int) -> None:
    w = random_quant_weight(2048, 4, G, seed=0)
    for dtype in (F32, BF16, F16):
        x = activations(M, 2048, dtype)
        check(quant_gemm(x, pack(w)), x, w)


@pytest.mark.parametrize("G", [32, 64, 256])
@each
def test_grp07_groups_unlike_128(product: Product, kernel: str, dtype: torch.dtype, G: int) -> None:
    w = random_quant_weight(512, 256, G, seed=0)
    for M in rows_for(kernel, dtype, 1, 16, 64):
        x = activations(M, 512, dtype)
        check(product(kernel, x, w), x, w)


@each
def test_grp08_one_group_equals_two_alike(product: Product, kernel: str, dtype: torch.dtype) -> None:
    one = random_quant_weight(256, 48, 256, seed=3)
    two = QuantWeight.from_codes(one.codes(), one.scale.repeat(2, 1), one.zero.repeat(2, 1), 128)
    x = activations(3, 256, dtype)
    check(product(kernel, x, one), x, one)
    assert error(product(kernel, x, one), product(kernel, x, two).double()) <= 2 * torch.finfo(dtype).eps


# ── rows, threads, memory ──────────────────────────────────────────────────────────────────────────────────────────


@needs_numba
@pytest.mark.parametrize("bits", [4, 8])
def test_ker08_a_row_does_not_know_its_neighbours(bits: int) -> None:
    from tinyloop.cpu.product import product as panel_product

    w = pack(random_quant_weight(300, 65, 64, seed=0, bits=bits, bias=True))
    x = activations(17, 300)
    alone = torch.cat([panel_product(row[None], w.panel()) for row in x])
    for M in (*range(2, 10), 16, 17):
        for first in (0, 17 - M):
            assert torch.equal(panel_product(x[first : first + M], w.panel()), alone[first : first + M])


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_numba
@pytest.mark.usefixtures("two_threads")
def test_threads_do_not_change_the_result(product: Product) -> None:
    """The weight is large enough to wake the team, and its tiles do not divide by two."""
    w = random_quant_weight(1024, 1025, 128, seed=0)
    x = activations(3, 1024)
    together = product("panel", x, w)
    torch.set_num_threads(1)
    assert torch.equal(product("panel", x, w), together)


def test_two_callers_at_once() -> None:
    """Each with its own x, both on one weight whose layouts nobody has derived yet."""
    w = pack(random_quant_weight(96, 80, 32, seed=0))
    inputs = [activations(M, 96, dtype, seed=M) for M in (1, 3, 8) for dtype in (F32, BF16)]
    wanted = [quant_gemm(x, pack(w.weight)) for x in inputs]
    wrong: list[str] = []

    def call() -> None:
        for i in range(200):
            x, y = inputs[i % 6], wanted[i % 6]
            if not torch.equal(quant_gemm(x, w), y):
                wrong.append(f"call {i}")

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_numba
@pytest.mark.usefixtures("two_threads")
def test_two_callers_wake_two_teams() -> None:
    w = pack(random_quant_weight(1024, 1024, 128, seed=0))
    x = activations(2, 1024)
    wanted, results = quant_gemm(x, w), []
    callers = [threading.Thread(target=lambda: results.extend(quant_gemm(x, w) for _ in range(10))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 20
    assert all(torch.equal(y, wanted) for y in results)


PEAK = """
import resource, torch
from tinyloop.ops import quant_gemm
from tinyloop.weight import QuantWeight
K, N, M = {K}, {N}, {M}
w = QuantWeight(torch.zeros(K // 2, N, dtype=torch.uint8), torch.ones(1, N), torch.ones(1, N), K, K)
x = torch.ones(M, K, dtype=torch.float16)
quant_gemm(x[:1, :], QuantWeight(w.packed[:, :8].clone(), w.scale[:, :8], w.zero[:, :8], K, K))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
y = quant_gemm(x, w)
assert bool((y == K).all()), y
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read in Linux's unit")
@pytest.mark.parametrize(("K", "N", "M"), [(4096, 16384, 8), (64, 8192, 8192)], ids=["one large group", "many rows"])
def test_perf03_native_needs_little_memory(K: int, N: int, M: int) -> None:
    """Beside the result and fp32 sums of 2048 rows: no more than one fp16 weight and 64 MB, in which slabs of 16 MB
    (fp32 weights, and their scales and zeros spread out) come and go."""
    done = subprocess.run([sys.executable, "-c", PEAK.format(K=K, N=N, M=M)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weight, result, sums = 2 * K * N / 2**20, 2 * M * N / 2**20, 4 * min(M, 2048) * N / 2**20
    assert float(done.stdout) <= weight + 64 + result + sums


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.complex64], ids=str)
def test_lay03_other_dtypes_are_named(dtype: torch.dtype) -> None:
    w = random_quant_weight(64, 8, 32, seed=0)
    with pytest.raises(InputError, match=rf"x is {dtype}; activations are float32, bfloat16 or float16: cast it"):
        quant_gemm(torch.zeros(2, 64, dtype=dtype), w)


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (33, 24), (24,), (0, 24), (), (64, 1)], ids=str)
def test_shp12_wrong_last_dimension(shape: tuple[int, ...]) -> None:
    """On the vector path as on the matrix path; K=64, N=24, so that 24 is what a transposed weight would ask for."""
    w = random_quant_weight(64, 24, 32, seed=0)
    for weight in (w, pack(w), pack(w, keep_dense=True)):
        with pytest.raises(InputError, match=r"x has shape .*; its last dimension must be K=64"):
            quant_gemm(torch.zeros(shape), weight)


def test_other_devices_are_named() -> None:
    with pytest.raises(InputError, match=r"x is on meta, the weight on cpu; move one of them"):
        quant_gemm(torch.zeros(2, 64, device="meta"), random_quant_weight(64, 8, 32, seed=0))


def test_gradients_are_refused() -> None:
    w = pack(random_quant_weight(64, 8, 32, seed=0))
    x = torch.zeros(2, 64, requires_grad=True)
    with pytest.raises(InputError, match=r"x requires grad, and this product has no gradient; detach it"):
        quant_gemm(x, w)
    with torch.no_grad():
        assert quant_gemm(x, w).shape == (2, 8)


def test_dsp04_without_numba_another_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine", lambda: Machine(numba=False, int4pack=False, bf16=False, memory=1 << 30))
    w = pack(random_quant_weight(64, 48, 32, seed=0))
    x = activations(1, 64)
    ops.calls.clear()
    check(quant_gemm(x, w), x, w.weight)
    assert dict(ops.calls) == {"native": 1}
    refused = dict(dispatch.plan(ops.problem(w, 1, F32)).refused)
    assert refused["panel"] == "numba is not installed: pip install 'tinyloop[cpu]'"


# ── dense weights ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_dense_weights_are_products_like_others(stored: torch.dtype, dtype: torch.dtype, packed: bool) -> None:
    w = random_dense_weight(100, 33, seed=0, dtype=stored, bias=True)
    ours, plain = [0.0], [0.0]
    for M in (0, 1, 9, 64):
        x = activations(M, 100, dtype)
        y = quant_gemm(x, PackedWeight(w) if packed else w)
        assert (y.dtype, y.shape) == (dtype, (M, 33))
        if M:
            exact = x.double() @ w.dequantize(torch.float64) + w.bias.double()
            ours.append(error(y, exact))
            plain.append(error(torch.nn.functional.linear(x, w.weight.to(dtype), w.bias.to(dtype)), exact))
    assert max(ours) <= 2 * max(plain) + torch.finfo(dtype).eps / 2


def test_what_is_no_tensor_and_no_weight() -> None:
    w = random_quant_weight(64, 32, 32, seed=1)
    with pytest.raises(InputError, match="x is list; activations are a torch tensor"):
        quant_gemm([1.0], w)
    with pytest.raises(InputError, match="NoneType is no weight; give a QuantWeight or a DenseWeight"):
        quant_gemm(torch.zeros(1, 64), None)
