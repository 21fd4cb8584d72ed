"""The edges of the GPU path that have a CPU form: what may be kept, what is refused, and what a thread needs.

`meta` plays the GPU where tensors must lie elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinyloop as tl
from helpers import random_quant_weight
from tinyloop import devices, dispatch, ops, torch_op
from tinyloop.cuda import gemm, hopper, launch, ready, run
from tinyloop.cuda.config import KINDS, WHOLE, Chip, Config, HopperConfig, choose, choose_hopper
from tinyloop.marlin import MarlinWeight
from tinyloop.pack import PackedWeight
from tinyloop.weight import DenseWeight, QuantWeight

pack = importlib.import_module("tinyloop.pack")  # tinyloop.pack is the function
NEW = Chip("new", (8, 0), 100, 163 << 10, 1 << 34)


@pytest.mark.parametrize(
    ("device", "text"), [("gpu", "device='gpu' is no device"), ("meta", "device='meta': a model runs on cpu or cuda")]
)
def test_pack_refuses_what_is_no_device(device: str, text: str) -> None:
    with pytest.raises(tl.InputError, match=text):
        tl.pack(random_quant_weight(64, 32, 32, seed=0), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_pack_without_a_gpu_is_a_sentence() -> None:
    with pytest.raises(tl.InputError, match=r"^device='cuda': .*use cpu$"):
        tl.pack(random_quant_weight(64, 32, 32, seed=0), device="cuda")


def permuted(w: QuantWeight) -> QuantWeight:
    perm = torch.randperm(w.K, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return QuantWeight(w.packed, w.scale, w.zero, w.K, w.group_size, bias=w.bias, perm=perm)


def made(w: PackedWeight) -> dict[str, Any]:
    """Everything of a weight that is made once and kept."""
    return {
        "bias": lambda: w.bias(torch.float16), "canonical": w.canonical, "perm": lambda: w.perm,
        "marlin": w.marlin, "dense": lambda: w.dense(torch.float16, keep=True),
    }  # fmt: skip


def test_nothing_is_kept_that_a_graph_has_yet_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """DEV-05: under capture a result is not there before the first replay, so it cannot serve later calls."""
    weight = permuted(random_quant_weight(128, 64, 64, seed=0, bias=True))
    monkeypatch.setattr(pack, "_capturing", lambda device: device.type == "meta")
    for name in made(PackedWeight(weight, device="meta")):
        with pytest.raises(tl.InputError, match="warm up first"):
            made(PackedWeight(weight, device="meta"))[name]()
    monkeypatch.setattr(pack, "_capturing", lambda device: False)
    warm = PackedWeight(weight, device="meta").prepare()
    warm.canonical()
    monkeypatch.setattr(pack, "_capturing", lambda device: True)
    for name in ("bias", "perm", "marlin"):
        made(warm)[name]()
    warm.dense(torch.float16, keep=False)  # of this call alone, and so a part of the graph
    with pytest.raises(tl.InputError, match="warm up first"):
        warm.dense(torch.float16, keep=True)


def test_what_is_kept_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """DEV-04: another thread that finds a layout uses it on a stream of its own, which waits for nobody."""
    weight = permuted(random_quant_weight(128, 64, 64, seed=0, bias=True))
    w, waits = PackedWeight(weight, device="meta"), list[Any]()
    monkeypatch.setattr(devices, "settle", lambda device: waits.append(kept()))

    def kept() -> tuple[Any, ...]:
        return w._marlin, w._canonical, len(w._bias), len(w._dense), w.__dict__.get("perm")

    for name, make in made(w).items():
        before = kept()
        make()
        assert waits, name
        assert all(a is b or a == b for a, b in zip(waits[-1], before, strict=True)), name  # not kept yet
        waits.clear()


def test_native_kernels_read_contiguous_tensors() -> None:
    """They take addresses, so a weight that was cut from a larger one is copied; on a CPU it is read as it is."""
    w = random_quant_weight(64, 48, 32, seed=0, bias=True)
    cut = QuantWeight(w.packed[:, ::2], w.scale[:, :24], w.zero[:, :24], 64, 32, bias=w.bias[:24])
    assert PackedWeight(cut).canonical() is cut
    there = QuantWeight(*(t.to("meta").t().contiguous().t() for t in (w.packed, w.scale, w.zero)), 64, 32)
    found = PackedWeight(there, device="meta").canonical()
    assert isinstance(found, QuantWeight)
    assert all(t.is_contiguous() for t in (found.packed, found.scale, found.zero))
    narrow = PackedWeight(DenseWeight(torch.zeros(8, 4), torch.zeros(16)[::2])).bias(torch.float32)
    assert narrow is not None
    assert narrow.is_contiguous()


def test_a_pair_that_needs_a_gradient_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "chip", lambda device: NEW)
    gate, up = (PackedWeight(random_quant_weight(128, 64, 64, seed=s), device="meta") for s in (0, 1))
    x = torch.empty(3, 128, dtype=torch.float16, device="meta", requires_grad=True)
    assert not ops._one_launch(x, gate, up)
    with torch.no_grad():
        assert ops._one_launch(x, gate, up)
    assert ops._one_launch(x.detach(), gate, up)


def test_a_kept_call_is_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that skips the checks must not be found for rows that lie elsewhere: a kernel would read their address."""
    w = random_quant_weight(128, 64, 64, seed=0)
    x = torch.zeros(2, 128)
    rest = (w.packed, w.scale, w.zero, None, 128, 64, 4)
    torch_op._product(x, *rest)
    held = torch_op.held_for(w.packed, w.scale, w.zero, None, (128, 64, 4, 64))

    def call(x: torch.Tensor) -> torch.Tensor:
        assert not x.is_meta, "not checked"
        return x

    held.few[x.shape, torch.float32, x.get_device()] = torch_op.Kept(call)
    assert torch_op._product(x, *rest) is x
    with pytest.raises(tl.InputError, match="x is on meta, the weight on cpu"):
        torch_op._product(x.to("meta"), *rest)


def test_rows_that_overlap_are_copied() -> None:
    """cuTensorMapEncodeTiled wants rows apart from each other."""
    x = torch.arange(64.0).half()
    for rows in (x[None].expand(5, 64), x.as_strided((3, 48), (8, 1))):
        assert run.aligned(rows) is not rows
        assert torch.equal(run.aligned(rows), rows)
    for rows in (x[None], x.view(4, 16), torch.zeros(5, 24).half()[:, :20]):
        assert run.aligned(rows) is rows


def tensor(*shape: int, device: str = "cuda:0", dtype: torch.dtype = torch.float16, contiguous: bool = True) -> Any:
    return SimpleNamespace(
        device=torch.device(device), dtype=dtype, shape=torch.Size(shape), dim=lambda: len(shape),
        stride=lambda i: shape[1] if i == 0 else 1, data_ptr=lambda: 256, is_contiguous=lambda: contiguous,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "status"),
    [
        (tensor(64), "OK"), (None, "OK"), (tensor(64, dtype=torch.float32), "DTYPE"), (tensor(63), "SHAPE"),
        (tensor(1, 64), "SHAPE"), (tensor(64, contiguous=False), "SHAPE"), (tensor(64, device="cpu"), "NOT_CUDA"),
        (tensor(64, device="cuda:1"), "NOT_CUDA"),
    ],
)  # fmt: skip
def test_mm_asymmetric_looks_at_the_bias(monkeypatch: pytest.MonkeyPatch, bias: Any, status: str) -> None:
    """The kernel takes its address: another dtype would be read as what it is not, another size beyond its end."""
    monkeypatch.setattr(run, "chip", lambda index: NEW)
    w: Any = SimpleNamespace(B=tensor(8, 128), K=128, N=64)
    assert run._admissible(tensor(4, 128), w, tensor(4, 64), bias).name == status


@pytest.mark.parametrize("bound", [0, 7])
def test_a_new_thread_gets_the_context(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    """The driver launches nothing in a thread without a context; one that is there stays."""
    asked = list[tuple[str, int]]()
    api = SimpleNamespace(
        CUdevice=int, cuCtxGetCurrent=lambda: (0, bound),
        cuDevicePrimaryCtxRetain=lambda device: (asked.append(("retain", device)), (0, 40 + device))[1],
        cuCtxSetCurrent=lambda context: (asked.append(("set", context)), (0,))[1],
    )  # fmt: skip
    monkeypatch.setattr(launch, "driver", lambda: api)
    launch.bind_thread(1)
    assert asked == ([] if bound else [("retain", 1), ("set", 41)])


def test_a_tensor_map_is_encoded_in_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first call of the driver in a product, so a new thread has no context from a launch yet."""
    did = list[str]()
    kinds = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_UINT16=1, CU_TENSOR_MAP_DATA_TYPE_UINT64=4)
    code = ctypes.create_string_buffer(b"map", 128)
    api = SimpleNamespace(
        CUtensorMapDataType=kinds, cuuint32_t=int, cuuint64_t=int,
        CUtensorMapInterleave=SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0),
        CUtensorMapSwizzle=SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3, CU_TENSOR_MAP_SWIZZLE_NONE=0),
        CUtensorMapL2promotion=SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3),
        CUtensorMapFloatOOBfill=SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0),
        cuTensorMapEncodeTiled=lambda *of: (did.append(f"encode {of[0]} {of[3:6]} swizzle {of[8]}"),
                                            (0, SimpleNamespace(getPtr=lambda: ctypes.addressof(code))))[1],
    )  # fmt: skip
    monkeypatch.setattr(hopper, "driver", lambda: api)
    monkeypatch.setattr(hopper, "bind_thread", lambda device: did.append(f"bind {device}"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    hopper._encoded.cache_clear()
    assert hopper._encoded(2, 4096, 5, 60, 64, 8, 64, 1, True)[:3] == b"map"  # of x
    assert hopper._encoded(8, 4096, 4, 128, 128, 4, 128, 1, False)[:3] == b"map"  # of words
    hopper._encoded.cache_clear()
    of_x, of_words = "encode 1 ([60, 5], [128], [64, 8]) swizzle 3", "encode 4 ([128, 4], [1024], [128, 4]) swizzle 0"
    assert did == ["bind 1", of_x, "bind 1", of_words]


def test_idx05_scratch_is_counted_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows: slices are of the last tiles alone, so that scratch and what the kernel is told stay small."""
    asked, launched = list[tuple[int, int]](), list[tuple[Any, int]]()

    class Fake:
        device = 0

        def __call__(self, arguments: Any, blocks: int, stream: int) -> None:
            launched.append((arguments.p, blocks))

    def scratch(device: int, stream: int, floats: int, counters: int) -> tuple[int, int]:
        asked.append((floats, counters))
        return 0, 0

    monkeypatch.setattr(gemm, "_launcher", lambda *of: Fake())
    monkeypatch.setattr(gemm, "chip", lambda device: KINDS[3])
    monkeypatch.setattr(ready, "scratch_addresses", scratch)
    monkeypatch.setattr(ready, "current_stream", lambda device: 0)
    N, K = 8256, 1024
    parts = ((K // 16, 2 * N), torch.int32), ((8, N), torch.float16), ((8, N), torch.float32)
    w = MarlinWeight(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in parts), K, N, 128)
    config = Config(8, 1, 4, 1, 4, True, splits=16)
    for M in (1, 16400, 32800, 1 << 22):
        gemm.product(torch.empty(M, K, dtype=torch.float16, device="meta"), w, config=config)
        tiles = -(-M // 64) * 33
        cut = tiles % KINDS[3].multiprocessors
        assert asked[-1] == (cut * 16 * 64 * 256, cut)
        p, blocks = launched[-1]
        assert (p.M, p.row_tiles, p.whole, p.splits) == (M, -(-M // 64), tiles - cut, 16)
        assert blocks == tiles - cut + 16 * cut < 1 << 31
    x = torch.empty(64, K, dtype=torch.float16, device="meta")
    gemm.product(x, w, config=Config(8, 1, 4, 2, 3, True, splits=2, lead=11))
    p, blocks = launched[-1]
    assert (p.whole, p.splits, p.lead, blocks, asked[-1]) == (0, 2, 11, 66, (33 * 2 * 64 * 256, 33))


@pytest.mark.parametrize(
    ("tile", "blocks", "floats"),
    [
        (HopperConfig(64, 2, 256, least=1), 104, 104 * 64 * 128),  # 13 tiles of eight chunks, a piece for each
        (HopperConfig(64, 2, 256, least=1024), 26, 26 * 64 * 128),
        (HopperConfig(64, 2, 256, least=WHOLE), 13, 0),
        (HopperConfig(64, 2, 256, SPLITS=4), 52, 0),
    ],
    ids=str,
)
def test_what_a_hopper_tile_launches(
    tile: HopperConfig, blocks: int, floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid and the scratch of its pieces, and what the kernel is told of them."""
    monkeypatch.setattr(hopper, "_launcher", lambda *of: None)
    monkeypatch.setattr(hopper, "chip", lambda device: Chip("h", (9, 0), 132, 227 << 10, 1 << 34))
    monkeypatch.setattr(hopper, "_put", lambda *of, **how: None)
    N, K = 1664, 2048
    parts = ((K // 16, 2 * N), torch.int32), ((16, N), torch.float16), ((16, N), torch.float32)
    w = MarlinWeight(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in parts), K, N, 128)
    made = hopper.ready(64, torch.float16, w, config=tile)._launch
    assert (made.blocks, made.floats, made.counters) == (blocks, floats, 132 * tile.consumers)
    p = made.arguments.p
    assert (p.chunks, p.whole, p.total) == ((8, 0, 13 * 8) if floats else (8, 13, 0))
    assert not floats or p.piece * blocks == p.total


def test_perf03_scratch_is_small_whatever_the_problem() -> None:
    """Sums of slices or pieces exist for about as many tiles as a chip has multiprocessors, and no more."""
    rows = (1, 8, 16, 33, 64, 65, 128, 129, 257, 4096, 1 << 20)
    for M, N, K in itertools.product(rows, (64, 4096, 28672, 128256), (128, 4096, 1 << 17)):
        for on in KINDS:
            for pair in (False, True):
                c = choose(M, N, K, on, pair)
                tiles = -(-M // c.rows) * -(-N * (2 if pair else 1) // c.columns)
                cut = tiles - c.whole(tiles, on.multiprocessors)
                assert cut * c.splits * c.rows * c.columns * 4 < 32 << 20
        tile = choose_hopper(M, N, K, 128, 132)
        work = tile.work(M, N, K, 132)
        assert work.pieces * tile.BM * tile.columns * 4 < 32 << 20
