"""Every kernel on a GPU: values, bounds, strides, streams, graphs, threads, errors. Skipped where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tests.parity import chain
from tests.parity.cuda_cases import (
    DTYPES,
    activations,
    check,
    error,
    large_weight,
    needs_room,
    plain_error,
    want64,
    weight,
    whole_weight,
)

import tinyloop as tl
from tinyloop import ops
from tinyloop.cuda import gemm, hopper, launch, paths, run
from tinyloop.cuda.config import WHOLE, Config, HopperConfig, choose, hopper_variants, variants
from tinyloop.dispatch_cuda import HOPPER
from tinyloop.errors import InputError
from tinyloop.marlin import MarlinWeight
from tinyloop.pack import pack
from tinyloop.quantize import QuantSpec
from tinyloop.quantize.gptq import nearest
from tinyloop.weight import QuantWeight

pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]
Tensor = torch.Tensor
Product = Callable[[Tensor, MarlinWeight], Tensor]

# K, N, G: aligned, ragged, groups of 32 and 96, one group, short last group, odd N
SHAPES = [(2048, 2048, 128), (1000, 1000, 96), (4304, 64, 32), (520, 72, -1), (2880, 328, 160), (256, 257, 64)]
needs_hopper = chain.needs(
    None if torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER else "no GPU of capability 9.0"
)
needs_two_gpus = chain.needs(None if torch.cuda.device_count() > 1 else "one GPU: what needs a second was not tried")


def check_around(rows: int, dtype: torch.dtype, product: Product) -> None:
    """A tile of so many rows: one row, all, and one more, on every shape."""
    for K, N, G in SHAPES:
        w = weight(K, N, G)
        m = MarlinWeight.of(w)
        for M in (1, rows, rows + 1):
            x = activations(M, K, 1.0, dtype)
            check(w, x, product(x, m))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", variants(), ids=str)
def test_every_tile(config: Config, dtype: torch.dtype) -> None:
    if config.shared_memory(True, True) > launch.chip(0).shared_memory:
        pytest.skip("this GPU has less shared memory")
    check_around(config.rows, dtype, lambda x, m: gemm.product(x, m, config=config))


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", hopper_variants(), ids=str)
def test_every_hopper_tile(config: HopperConfig, dtype: torch.dtype) -> None:
    check_around(config.BM, dtype, lambda x, m: hopper.product(x, m, config=config))


def pair_of_kernels(x: Tensor, m: MarlinWeight) -> Tensor:
    """The reference composition, which a weight with one group has too."""
    y = torch.empty(x.shape[0], m.N, dtype=x.dtype, device=x.device)
    assert run.mm_asymmetric(x, m, y) is run.Status.OK
    return y


def unpacked(x: Tensor, m: MarlinWeight) -> Tensor:
    return torch.nn.functional.linear(x, paths.unpack(m, x.dtype))


def int4_products() -> list[Product]:
    """The kernels on the device format as this GPU has them, each asked for by itself."""
    on_hopper: list[Product] = [hopper.product] if torch.cuda.get_device_capability() == HOPPER else []
    return [gemm.product, *on_hopper, pair_of_kernels, unpacked]


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "mean 1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [*range(1, 10), 16, 17, 32, 33, 63, 64, 65, 128, 200, 512, 1024])
def test_dispatch_at_every_size(M: int, dtype: torch.dtype, mean: float) -> None:
    for K, N, G in SHAPES:
        w = weight(K, N, G, integer_zero=G == 64, bias=N == 72)
        x = activations(M, K, mean, dtype)
        y = tl.quant_gemm(x, pack(w))
        bias = 0 if w.bias is None else w.bias.to(dtype)
        want = want64(x, w)
        assert error(y, want) <= 1.2 * error(x @ w.dequantize(dtype) + bias, want), (K, N, G)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "N", "G"), [(300, 70, 64), (100, 33, 48), (4304, 64, 32), (128, 8, 100)])
def test_native(K: int, N: int, G: int, dtype: torch.dtype) -> None:
    w = weight(K, N, G)
    x = activations(5, K, 1.0, dtype)
    want = want64(x, w)
    y = tl.quant_gemm(x, pack(w), exact_int4=True)
    assert y.dtype == dtype
    one_after_another = K**0.5 * 2**-22  # the order of its sums in fp32
    plain = plain_error(x, w.dequantize(torch.float32), want)
    assert error(y, want) <= (one_after_another if dtype == torch.float32 else 1.2 * plain)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["frac4", "sign_bit"])
def test_rounding_of_every_iteration(name: str, dtype: torch.dtype) -> None:
    """The GPU's rule is docs/format.md's: the same weights as the CPU's, bit for bit; the product on them."""
    w = weight(300, 70, 64)
    inner = w.codes().clamp(1, 14).cpu()
    base = QuantWeight.from_codes(inner, w.scale.cpu(), w.zero.cpu(), 64)
    values = torch.randint(0, 16 if name == "frac4" else 2, (300, 70), dtype=torch.uint8)
    w = base.with_channel(name, values)
    on_gpu, packed = w.to("cuda"), pack(w, device="cuda")
    for i in (0, 1, 2, 7):
        assert torch.equal(paths.dequantize(on_gpu, dtype, i).cpu(), w.rounding(i).dequantize(dtype))
        for M in (3, 40):
            x = activations(M, 300, 1.0, dtype)
            want = want64(x, w.rounding(i).to("cuda"))
            y = tl.quant_gemm(x, packed.at(i))
            assert error(y, want) <= max(1e-6, 1.2 * plain_error(x, w.rounding(i).dequantize().cuda(), want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G", [64, 32])
@pytest.mark.parametrize("M", [1, 8, 17, 32, 64, 600])
def test_swiglu(M: int, dtype: torch.dtype, G: int) -> None:
    """Gate and up in one launch below a launch's rows; never on the native kernel."""
    gate, up = weight(512, 200, G, seed=1, bias=True), weight(512, 200, G, seed=2, bias=True)
    x = activations(M, 512, 0.0, dtype)
    ops.calls.clear()
    y = ops.quant_swiglu(x, pack(gate), pack(up))
    assert not ops.calls["native"]
    want = torch.nn.functional.silu(want64(x, gate)) * want64(x, up)
    plain = torch.nn.functional.silu(x @ gate.dequantize(dtype) + gate.bias.to(dtype)) * (
        x @ up.dequantize(dtype) + up.bias.to(dtype)
    )
    assert error(y, want) <= 1.2 * error(plain, want)


def test_outputs_stay_between_canaries_and_inputs_are_not_read_beyond() -> None:
    """Rows of x end where poison begins; y lies between canaries in one allocation."""
    for K, N, G, M in ((300, 70, 64, 5), (1000, 1000, 96, 33), (520, 72, -1, 130)):
        w = weight(K, N, G)
        m = MarlinWeight.of(w)
        store = torch.full((M, -(-K // 8) * 8 + 8), float("nan"), dtype=torch.float16, device="cuda")
        store[:, :K] = activations(M, K, 0.0, torch.float16)
        x = store[:, :K]
        for product in [gemm.product] + [hopper.product] * (torch.cuda.get_device_capability() == HOPPER):
            around = torch.full((M * N + 256,), 7.0, dtype=torch.float16, device="cuda")
            y = around[128 : 128 + M * N].view(M, N)
            assert product(x, m, out=y) is y
            check(w, x, y)
            assert bool((around[:128] == 7).all())
            assert bool((around[128 + M * N :] == 7).all())


def test_rows_of_any_stride() -> None:
    w = weight(520, 72, 64)
    p, base = pack(w), activations(12, 1040, 0.0, torch.float16)
    want = tl.quant_gemm(base[:, :520].contiguous(), p)
    for x in (base[:, :520], torch.cat((base[:, :1], base[:, :520]), 1)[:, 1:], base[:, :520].t().contiguous().t()):
        assert torch.equal(tl.quant_gemm(x, p), want)
    one = base[:1, :520].expand(12, 520)
    assert torch.equal(tl.quant_gemm(one, p), want[:1].expand(12, -1))
    assert tl.quant_gemm(base[:0, :520], p).shape == (0, 72)
    assert tl.quant_gemm(base[:, :520].reshape(2, 2, 3, 520), p).shape == (2, 2, 3, 72)
    assert torch.equal(tl.quant_gemm(base[0, :520], p), tl.quant_gemm(base[:1, :520], p)[0])


@pytest.mark.parametrize(
    "shape", [(4096,), (1, 7, 4096), (7, 1, 4096), (2, 3, 5, 4096), (32, 16, 4096), (2, 0, 4096), (0, 4096)], ids=str
)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    """SHP-01, SHP-02, SHP-11: those of x but the last are those of y."""
    p, K = pack(weight(4096, 72, 128)), shape[-1]
    x = activations(torch.Size(shape).numel() // K, K, 0.0, torch.float16)
    y = tl.quant_gemm(x.reshape(shape), p)
    assert y.shape == (*shape[:-1], 72)
    if y.numel():
        assert torch.equal(y.reshape(-1, 72), tl.quant_gemm(x, p))


@pytest.mark.parametrize("M", [65535, 65536, 65537, 131072])
def test_many_rows(M: int) -> None:
    """IDX-04, as rows of a matrix and as a batch, and the group sums' kernel with as many."""
    w = weight(128, 64, 128)
    x, p = activations(M, 128, 0.0, torch.float16), pack(w)
    products = [tl.quant_gemm(x, p), tl.quant_gemm(x[:, None], p)[:, 0], paths.native(x, w, None)]
    for y in products + [product(x, MarlinWeight.of(w)) for product in int4_products()]:
        check(w, x[-100:], y[-100:])
        check(w, x[:100], y[:100])
    assert error(paths.group_sums(x, 128)[:, 0], x.double().sum(1)) < 1e-6


def test_more_outputs_than_31_bits_count() -> None:
    """IDX-02: 4.3 GB of them, from every kernel."""
    needs_room(40)
    w = weight(128, 128256, 128)
    p, m, x = pack(w), MarlinWeight.of(w), activations(16745, 128, 0.0, torch.float16)
    others: list[Product] = [lambda x, m: tl.quant_gemm(x, p), lambda x, m: paths.native(x, w, None)]
    rows = torch.tensor([0, 1, 8191, 16742, 16743, 16744], device="cuda")
    for product in int4_products() + others:
        check(w, x[rows], product(x, m)[rows])
    y, want = gemm.product(x, m, pair=(m, None))[rows], want64(x[rows], w)
    plain = x[rows] @ w.dequantize(torch.float16)
    silu = torch.nn.functional.silu
    assert error(y, silu(want) * want) <= 1.2 * error(silu(plain) * plain, silu(want) * want)


def test_ker05_more_rows_than_a_grid_has_in_y() -> None:
    needs_room(20)
    w = large_weight(256, 7168, 128)
    p, m, x = pack(w), MarlinWeight.of(w), activations(131072, 256, 0.0, torch.float16)
    for product in [*int4_products(), lambda x, m: tl.quant_gemm(x, p)]:
        y = product(x, m)
        check(w, x[:100], y[:100])
        check(w, x[-100:], y[-100:])


def test_repeats_are_bitwise_equal() -> None:
    """KER-01 and NUM-06, with K cut into slices."""
    w = weight(16384, 128, 128)
    p = pack(w)
    for M in (1, 8, 16, 40, 64, 200):
        x = activations(M, 16384, 0.0, torch.bfloat16)
        first = tl.quant_gemm(x, p)
        assert all(torch.equal(tl.quant_gemm(x, p), first) for _ in range(50))


@pytest.mark.parametrize(("M", "N"), [(16, 256), (33, 512), (48, 512), (64, 512)])
def test_ker01_a_thousand_repeats(M: int, N: int) -> None:
    """Compared on the GPU, so that launches follow each other closely."""
    m, x = MarlinWeight.of(weight(512, N, 128)), activations(M, 512, 0.0, torch.float16)
    for product in int4_products():
        first, wrong = product(x, m), torch.zeros(1, dtype=torch.bool, device="cuda")
        for _ in range(1000):
            wrong |= (product(x, m) != first).any()
        assert not bool(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "G"), [(328, 32), (136, 96), (72, 160)])
def test_one_row_of_small_groups(N: int, G: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight units of 32 k at a time: any number of them to a team, whole and in slices, and rows of x that are not
    there."""
    one_row, define = [], gemm.defines
    monkeypatch.setattr(gemm, "defines", lambda c, **flags: one_row.append(flags["ONE_ROW"]) or define(c, **flags))
    gemm._launcher.cache_clear()
    folding = [c for c in variants((launch.chip(0),), (False,), (True,)) if c.MT == 1 and not c.DECODE]
    on_hopper = torch.cuda.get_device_capability() == HOPPER
    for K in (192, 264, 1056, 4304):
        w = weight(K, N, G)
        m = MarlinWeight.of(w)
        assert m.in_parts == (G != 96)
        x = activations(1, K, 1.0, dtype)
        for c, splits, cluster in ((c, s, k) for c in folding for s in (1, 2, 8) for k in {False, on_hopper and s > 1}):
            check(w, x, gemm.product(x, m, config=replace(c, splits=splits, cluster=cluster)))
    assert one_row
    assert all(one_row)


def test_ker08_a_row_alone_and_among_others() -> None:
    """With one tile and one way to cut K, a row's value is the same bits in any batch and at any place in it; but one
    row alone adds small groups in an order of its own. Dispatch takes another tile for another number of rows, and then
    only the errors are alike."""
    w = weight(4096, 328, 128)
    p, m, x = pack(w), MarlinWeight.of(w), activations(257, 4096, 0.0, torch.float16)
    chosen = [replace(choose(M, m.Np, m.Kp, launch.chip(0)), splits=4, cluster=False) for M in (16, 64)]
    assert [c.DECODE for c in chosen] == [False, True]
    products: list[Product] = [lambda x, m: paths.native(x, w, None)]
    if torch.cuda.get_device_capability() == HOPPER:
        chosen += [replace(c, cluster=True) for c in chosen]
    for c in chosen:
        products.append(lambda x, m, c=c: gemm.product(x, m, config=c))  # type: ignore[misc]
    if torch.cuda.get_device_capability() == HOPPER:
        for tile in hopper_variants():
            whole = replace(tile, least=WHOLE)
            products.append(lambda x, m, whole=whole: hopper.product(x, m, config=whole))  # type: ignore[misc]
    for product in products:
        alone = torch.cat([product(x[r : r + 1], m) for r in range(257)])
        for first, M in ((0, 2), (0, 16), (3, 17), (0, 64), (9, 64), (0, 257)):
            assert torch.equal(product(x[first : first + M], m), alone[first : first + M])
    for M in (1, 2, 16, 17, 64, 257):
        check(w, x[:M], tl.quant_gemm(x[:M], p))


def test_exact_cases() -> None:
    """NUM-01, NUM-03, GRP-01: values that come out exactly, at every size."""
    for M in (1, 16, 64, 256, 1024):
        zero = torch.tensor([[-(2.0**-7) + 2.0**-11, -(2.0**-7)]])
        w = QuantWeight.from_codes(torch.full((128, 2), 8, dtype=torch.uint8), torch.full((1, 2), 2.0**-10), zero, 128)
        for sign in (1, -1):
            x = torch.full((M, 128), sign * 512.0, dtype=torch.float16, device="cuda")
            y = tl.quant_gemm(x, pack(w, device="cuda"))
            assert bool((y[:, 0] == sign * 32).all())
            assert bool((y[:, 1] == 0).all())
        codes = torch.full((4096, 8), 15, dtype=torch.uint8)
        w = QuantWeight.from_codes(codes, torch.full((1, 8), 2.0**-10), torch.full((1, 8), -(2.0**-7)), 4096)
        x = torch.full((M, 4096), 100.0, dtype=torch.float16, device="cuda")
        assert bool((tl.quant_gemm(x, pack(w, device="cuda")) == 2800).all())
        zero = torch.arange(8.0)[:, None].expand(8, 64)
        w = QuantWeight.from_codes(torch.zeros(256, 64, dtype=torch.uint8), torch.ones(8, 64), zero, 32)
        x = torch.ones(M, 256, dtype=torch.float16, device="cuda")
        assert bool((tl.quant_gemm(x, pack(w, device="cuda")) == 896).all())


def test_num04_halves_that_are_huge_and_opposite() -> None:
    """W = 0 from codes 0: the symmetric half and the correction are beyond fp16 each, in every kernel."""
    zero = torch.zeros(32, 72)
    w = QuantWeight.from_codes(torch.zeros(4096, 72, dtype=torch.uint8), zero + 2**-6, zero, 128).to("cuda")
    m, p = MarlinWeight.of(w), pack(w)
    for M in (1, 16, 64, 256, 1024):
        x = torch.full((M, 4096), 256.0, dtype=torch.float16, device="cuda")
        for y in [tl.quant_gemm(x, p), *(product(x, m) for product in int4_products())]:
            assert bool((y == 0).all())


@pytest.mark.parametrize("scale", [0.25, 0.296875], ids=["60,000", "71,250"])
def test_num07_one_large_input(scale: float) -> None:
    """A down projection with one input of 3e4, whose weight is ±8·scale: finite as far as fp16 goes, then infinite of
    the right sign, never NaN."""
    K, N, large, groups = 27648, 64, 1000, 27648 // 128
    g = torch.Generator().manual_seed(0)
    q, z = torch.randint(0, 16, (K, N), generator=g, dtype=torch.uint8), torch.full((groups, N), 7.5)
    scales, odd = torch.full((groups, N), 2.0**-11), torch.arange(N) % 2 == 1
    z[large // 128], scales[large // 128] = torch.where(odd, 7.0, 8.0), scale
    q[large // 128 * 128 : large // 128 * 128 + 128] = torch.where(odd, 7, 8).to(torch.uint8)  # W = 0
    q[large] = torch.where(odd, 15, 0).to(torch.uint8)
    w = QuantWeight.from_codes(q, scales, -z * scales, 128).to("cuda")
    p, kept, sign = pack(w), pack(w, keep_dense=True), torch.where(odd, 1.0, -1.0).cuda()
    for M in (1, 8, 50, 51, 64, 600):
        x = activations(M, K, 0.0, torch.float16)
        x[:, large] = 3e4
        want = want64(x, w)
        assert bool((want.abs() < 61000).all() if scale == 0.25 else (want.abs() > 70000).all())
        for y in (tl.quant_gemm(x, p), tl.quant_gemm(x, kept), tl.quant_gemm(x, p, exact_int4=True)):
            if scale == 0.25:
                assert float((y.double() - want).abs().max()) <= 32  # a unit of fp16's last place
            else:
                assert bool((y == sign * float("inf")).all())


def units_off(y: Tensor, want: Tensor, x: Tensor, bits: int) -> float:
    """Units of the last of `bits` places by which y is off, beyond what sums in fp32 may lose where |W| < 1."""
    unit = torch.exp2(want.abs().log2().floor() - bits).clamp_min(2**-14)
    lost = 2**-22 * x.double().abs().sum(1, keepdim=True)
    off = float((((y.double() - want).abs() - lost) / unit).max())
    return off if off == off else float("inf")


@pytest.mark.parametrize(("dtype", "large", "bits"), [(torch.bfloat16, 131072.0, 7), (torch.float16, 60000.0, 10)])
def test_num08_one_large_activation(dtype: torch.dtype, large: float, bits: int) -> None:
    """One value beyond fp16, or near its end, at every branch of the dispatcher and on a kept dense copy: within a unit
    of the last place, or as torch's own product. W is exact."""
    w = whole_weight(512, 64, 128)
    W, bias = w.dequantize(dtype).t().contiguous(), w.bias.to(dtype)
    for M in (1, 16, 17, 63, 64, 65, 1024):
        x = activations(M, 512, 0.0, dtype)
        x[0, 0] = large
        want = want64(x, w)
        plain = units_off(torch.nn.functional.linear(x, W, bias), want, x, bits)
        for p in (pack(w), pack(w, keep_dense=True)):
            assert units_off(tl.quant_gemm(x, p), want, x, bits) <= max(1, plain)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_num10_groups_of_tiny_weights(dtype: torch.dtype) -> None:
    """Beside a normal group: what every kernel makes of them is off by less than the group's own range."""
    g = torch.Generator().manual_seed(0)
    W = torch.randn(512, 72, generator=g)
    sizes = (1e-7, 1e-6, 3e-5)
    for i, size in enumerate(sizes, 1):
        W[128 * i : 128 * (i + 1)] = size * torch.randint(0, 2, (128, 72), generator=g).mul(2).sub(1)
    p = pack(nearest(W, QuantSpec(group_size=128)), device="cuda")
    x = torch.eye(512, device="cuda", dtype=dtype)
    for M in (1, 8, 32, 64, 512):
        y = torch.cat([tl.quant_gemm(rows, p) for rows in torch.split(x, M)]).float().cpu()
        off = (y - W).abs()
        assert bool((off[:128] <= W[:128].max(0).values - W[:128].min(0).values).all())
        for i, size in enumerate(sizes, 1):
            assert float(off[128 * i : 128 * (i + 1)].max()) <= 2 * size


def test_lay03_dtypes_of_activations() -> None:
    """fp32 is served, in fp32; what else is no 16-bit float is refused by name."""
    w = weight(128, 64, 128)
    x = activations(3, 128, 0.0, torch.float16)
    y = tl.quant_gemm(x.float(), pack(w))
    assert y.dtype == torch.float32
    assert error(y, want64(x, w)) < 1e-6
    for dtype in (torch.float64, torch.int8, torch.int64):
        with pytest.raises(InputError, match=rf"x is {dtype}; activations are float32, bfloat16 or float16"):
            tl.quant_gemm(x.to(dtype), pack(w))


def test_lay04_lay05_a_layer_moves_there_and_back() -> None:
    """From a bf16 layer on the GPU: its state is canonical, so moving changes no bit of it."""
    linear = torch.nn.Linear(256, 72, dtype=torch.bfloat16, device="cuda")
    layer = tl.QuantLinear.from_linear(linear, QuantSpec(group_size=64))
    assert layer.weight.dtype == torch.bfloat16
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    x = activations(5, 256, 0.0, torch.bfloat16)
    with torch.no_grad():
        y = layer(x)
        check(layer.quant_weight, x, y)
        there = layer.cpu()
        assert error(there(x.cpu()).cuda(), y.double()) < 1e-2
        back = there.cuda()
        assert torch.equal(back(x), y)
    assert all(torch.equal(t, state[name]) for name, t in back.state_dict().items())


@pytest.mark.parametrize("M", [16, 100, 600])
def test_current_stream(M: int) -> None:
    """DEV-02: what is written on a side stream after a long kernel is what the product reads."""
    w = weight(1024, 256, 128)
    p, side = pack(w), torch.cuda.Stream()
    for i in range(100):
        x = torch.zeros(M, 1024, dtype=torch.float16, device="cuda")
        new = activations(M, 1024, 0.0, torch.float16, seed=i)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            x.copy_(new)
            y = tl.quant_gemm(x, p)
        side.synchronize()
        assert torch.equal(y, tl.quant_gemm(new, p))


def test_two_threads_on_two_streams() -> None:
    """DEV-04: split-K scratch and counters are never shared."""
    w = [weight(8192, 256, 128, seed=s) for s in (1, 2)]
    p = [pack(v) for v in w]
    x = [activations(M, 8192, 0.0, torch.float16) for M in (16, 64)]
    want = [tl.quant_gemm(a, b) for a, b in zip(x, p, strict=True)]
    torch.cuda.synchronize()
    wrong = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(tl.quant_gemm(x[i], p[i]), want[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("M", [0, 1, 16, 64, 600])
def test_graph_capture_on_the_first_call(M: int) -> None:
    """DEV-05: nothing warmed up but the compilation; replays follow their input, and scratch outlives it all."""
    w = weight(8192, 264, 128, seed=M)
    p = pack(w)
    if M:  # compile, on another stream than the capture's
        tl.quant_gemm(activations(M, 8192, 0.0, torch.float16), p)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    x, graph = activations(M, 8192, 0.0, torch.float16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tl.quant_gemm(x, p)
        torch.zeros(1, device="cuda")  # M = 0 launches nothing, and an empty graph cannot be replayed
    for seed in (1, 2, 3):
        new = activations(M, 8192, 0.0, torch.float16, seed=seed)
        x.copy_(new)
        tl.quant_gemm(new, p)
        graph.replay()
        assert torch.equal(y, tl.quant_gemm(new, p))


def test_capture_before_the_weight_is_there_says_warm_up_first() -> None:
    x = activations(4, 512, 0.0, torch.float16)
    for prepared in (False, True):
        p, graph = pack(weight(512, 64, 128)), torch.cuda.CUDAGraph()
        gemm.product(x, pack(weight(512, 64, 128, seed=1)).marlin())  # the kernel is compiled
        if prepared:
            p.prepare()
            with torch.cuda.graph(graph):
                tl.quant_gemm(x, p)
            continue
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
            with pytest.raises(InputError, match="warm up first"):
                tl.quant_gemm(x, p)


def test_launch_errors_are_raised_and_leave_nothing_behind() -> None:
    """KER-10: too many threads for a block; the next call works."""
    w = weight(512, 64, 128)
    x, m = activations(4, 512, 0.0, torch.float16), MarlinWeight.of(w)
    good = launch.Launcher("correction", "a_group_sum", {"BF16": 0, "COLUMN": 0}, 0, 2048)
    with pytest.raises(launch.LaunchError, match="a_group_sum with 1 blocks of 2048 threads"):
        good(launch.Arguments(), 1)
    check(w, x, gemm.product(x, m))


def test_wrong_devices_and_types() -> None:
    w = weight(128, 64, 128)
    with pytest.raises(InputError, match=r"x is on cpu, the weight on cuda:0"):
        tl.quant_gemm(torch.zeros(1, 128), pack(w))
    with pytest.raises(InputError, match=r"x is on cuda:0, the weight on cpu"):
        tl.quant_gemm(torch.zeros(1, 128, device="cuda"), pack(w.to("cpu")))
    with pytest.raises(InputError, match="int8"):
        tl.quant_gemm(torch.zeros(1, 128, dtype=torch.int8, device="cuda"), pack(w))


@needs_two_gpus
def test_the_second_gpu() -> None:
    """DEV-01: device 0 is current and has just been used, all tensors are on the other."""
    here = weight(8192, 256, 128)
    w = here.to("cuda:1")
    m, p = MarlinWeight.of(w), pack(w)
    for M in (1, 16, 64, 600):
        x = activations(M, 8192, 0.0, torch.float16)
        check(here, x, tl.quant_gemm(x, pack(here)))
        x = x.to("cuda:1")
        for y in [tl.quant_gemm(x, p), *(product(x, m) for product in int4_products()), paths.native(x, w, None)]:
            assert y.device == x.device
            check(w, x, y)
        with ThreadPoolExecutor(1) as new_thread:
            assert torch.equal(new_thread.submit(tl.quant_gemm, x, p).result(), tl.quant_gemm(x, p))
    assert torch.cuda.current_device() == 0


@needs_two_gpus
def test_two_gpus_do_not_mix() -> None:
    """DEV-01 and KER-10: refused by name, or a status; a launch that fails on one leaves the other as it was."""
    w, other = weight(512, 64, 128), weight(512, 64, 128).to("cuda:1")
    x, y = activations(4, 512, 0.0, torch.float16), torch.empty(4, 64, dtype=torch.float16, device="cuda:1")
    for product in (tl.quant_gemm, lambda x, p: ops.quant_swiglu(x, pack(w), p)):
        with pytest.raises(InputError, match="x is on cuda:0, the weight on cuda:1; move one of them"):
            product(x, pack(other))
    assert run.mm_asymmetric(x, MarlinWeight.of(other), y) is run.Status.NOT_CUDA
    assert run.mm_asymmetric(x, MarlinWeight.of(w), y) is run.Status.NOT_CUDA
    with pytest.raises(launch.LaunchError):
        launch.Launcher("correction", "a_group_sum", {"BF16": 0, "COLUMN": 0}, 1, 2048)(launch.Arguments(), 1)
    assert torch.cuda.current_device() == 0
    check(w, x, tl.quant_gemm(x, pack(w)))
    check(other, x.to("cuda:1"), tl.quant_gemm(x.to("cuda:1"), pack(other)))


def test_bare_weight_and_dense_cache() -> None:
    w, x = weight(512, 64, 128), activations(9, 512, 0.0, torch.float16)
    check(w, x, tl.quant_gemm(x, w))
    ops.calls.clear()
    check(w, x, tl.quant_gemm(x, pack(w, keep_dense=True)))
    assert ops.calls == {"fp16_cache": 1}
