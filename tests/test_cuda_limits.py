"""What a kernel on a GPU must not do: write beyond its memory, count in 31 bits, hang, hoard, or lean on what another
stream, thread or process has warmed up. Skipped where there is none."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import chain
from tests.parity.cuda_cases import (
    Canaries,
    activations,
    check,
    error,
    large_weight,
    needs_room,
    want64,
    weight,
    whole_activations,
    whole_weight,
)

import tinyloop as tl
from tinyloop.cuda import gemm, hopper, launch, paths, ready, run
from tinyloop.cuda.config import WHOLE, Config, HopperConfig, hopper_variants, variants
from tinyloop.dispatch_cuda import HOPPER
from tinyloop.marlin import MarlinWeight
from tinyloop.pack import PackedWeight, pack
from tinyloop.weight import QuantWeight

pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]
Tensor = torch.Tensor
ROOT = Path(__file__).parents[1]
RAGGED = (1, 17, 63, 65, 129, 257)  # rows: fewer than a tile's, and about the edges of every tile
on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
needs_hopper = chain.needs(None if on_hopper else "no GPU of capability 9.0")


def in_new_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns in a thread that has not touched CUDA; scratch that it made goes with the thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Canaries:
    """Every output and all scratch of the kernels lies between canaries."""
    made = Canaries()
    for module in (gemm, hopper, paths):
        monkeypatch.setattr(module, "torch", made)
    monkeypatch.setattr(run, "scratch_floats", made.scratch_floats)
    monkeypatch.setattr(ready, "scratch_addresses", made.scratch_addresses)
    return made


@functools.cache
def case(K: int, N: int, G: int) -> tuple[QuantWeight, MarlinWeight]:
    w = weight(K, N, G)
    return w, MarlinWeight.of(w)


def check_tile(product: Callable[..., Tensor], canaries: Canaries, cut: bool) -> None:
    """Ragged rows and columns, and KER-06: M = 16, K = N = 4096."""
    for M, K, N in (*((M, 2048, 328) for M in RAGGED), (130, 2048, 331), (16, 4096, 4096)):
        w, m = case(K, N, 128)
        x = activations(M, K, 0.0, torch.float16)
        y = product(x, m, out=canaries.empty(M, N, dtype=x.dtype, device="cuda"))
        taken = canaries.check()
        assert taken.count(torch.float16) == 1
        assert (torch.float32 in taken) is (torch.int32 in taken) is cut
        check(w, x, y)


@pytest.mark.parametrize("config", variants(), ids=str)
def test_ker02_every_tile_keeps_to_its_memory(config: Config, canaries: Canaries) -> None:
    """Whole, in slices of K through scratch, of which the first may be longer, and in slices of a cluster without."""
    if config.shared_memory(True, True) > launch.chip(0).shared_memory:
        pytest.skip("this GPU has less shared memory")
    for splits, cluster, lead in ((1, False, 0), (3, False, 0), (2, False, 20), (2, True, 0), (8, True, 0)):
        sliced = replace(config, splits=splits, cluster=cluster, lead=lead)
        if cluster and (
            launch.chip(0).capability != HOPPER or sliced.shared_memory() + 2048 > launch.chip(0).shared_memory
        ):
            continue
        check_tile(functools.partial(gemm.product, config=sliced), canaries, splits > 1 and not cluster)


@needs_hopper
@pytest.mark.parametrize("config", hopper_variants(), ids=str)
def test_ker02_every_hopper_tile_keeps_to_its_memory(config: HopperConfig, canaries: Canaries) -> None:
    """Tiles cut along K as finely as there are blocks for, unless clusters divide it; and whole."""
    for least, cut in ((1, config.SPLITS == 1), (WHOLE, False)):
        dealt = replace(config, least=least)
        check_tile(functools.partial(hopper.product, config=dealt), canaries, cut)


@pytest.mark.parametrize(
    ("K", "N", "G", "dtype"),
    [(300, 70, 64, torch.float16), (1000, 1000, 96, torch.float16), (520, 72, -1, torch.bfloat16)],
)
def test_every_other_kernel_keeps_to_its_memory(K: int, N: int, G: int, dtype: torch.dtype, canaries: Canaries) -> None:
    w, other = weight(K, N, G), weight(K, N, G, seed=1)
    m = MarlinWeight.of(w)
    for W in (paths.unpack(m, dtype), paths.dequantize(w, dtype).t()):
        canaries.check()
        assert error(W, w.dequantize(torch.float32).t().double()) < torch.finfo(dtype).eps
    for M in RAGGED:
        x = activations(M, K, 0.0, dtype)
        y = canaries.empty(M, N, dtype=dtype, device="cuda")
        assert run.mm_asymmetric(x, m, y) is run.Status.OK
        assert torch.float32 in canaries.check()  # the product and the sums between the kernels
        check(w, x, y)
        y = paths.native(x, w, None)
        canaries.check()
        check(w, x, y)
        if G == 64:
            check_pair(x, (w, m), (other, MarlinWeight.of(other)), canaries)
        sums = paths.group_sums(x, w.group_size)
        c = activations(M, N, 0.0, torch.float32).contiguous()
        y = paths.correction(c, sums, m, None, canaries.empty(M, N, dtype=dtype, device="cuda"))
        canaries.check()
        assert bool(torch.isfinite(y).all())


def check_pair(
    x: Tensor, gate: tuple[QuantWeight, MarlinWeight], up: tuple[QuantWeight, MarlinWeight], canaries: Canaries
) -> None:
    y, silu = gemm.product(x, gate[1], pair=(up[1], None)), torch.nn.functional.silu
    canaries.check()
    want = silu(want64(x, gate[0])) * want64(x, up[0])
    plain = silu(x @ gate[0].dequantize(x.dtype)) * (x @ up[0].dequantize(x.dtype))
    assert error(y, want) <= 1.2 * error(plain, want)


def test_idx05_scratch_beyond_31_bits() -> None:
    """The pair's, 9.8 GB. Slices of K have little, however many rows there are (tests/test_cuda_edges.py)."""
    needs_room(40)

    def paired() -> None:
        w = large_weight(128, 600_000, 128)
        x, y = activations(4096, 128, 0.0, torch.float16), torch.empty(4096, w.N, dtype=torch.float16, device="cuda")
        assert run.mm_asymmetric(x, MarlinWeight.of(w), y) is run.Status.OK
        check(w, x[:1], y[:1])
        check(w, x[-1:], y[-1:])

    in_new_thread(paired)
    torch.cuda.empty_cache()


def test_perf03_memory_of_a_long_prompt() -> None:
    """Beside y, a product takes one fp16 weight and 64 MB at most."""
    needs_room(20)
    w = large_weight(4096, 28672, 128)
    p, x = pack(w).prepare(), activations(32768, 4096, 0.0, torch.float16)
    before = start_of_peak()
    y = tl.quant_gemm(x, p)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + 2 * w.K * w.N + (64 << 20)
    check(w, x[-3:], y[-3:])


def start_of_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(("where", "seconds"), [("cpu", 5), ("cuda", 1)])
def test_load05_packing_a_large_weight(where: str, seconds: float) -> None:
    """8192 × 28672 in a second on the GPU, in five from the host; beside the result, no more than 1.2 of the codes, one
    a byte."""
    w = large_weight(8192, 28672, 128).to(where)
    MarlinWeight.of(large_weight(256, 128, 128).to(where), "cuda")  # whatever loads at the first call
    before, begin = start_of_peak(), time.perf_counter()
    m = MarlinWeight.of(w, "cuda")
    torch.cuda.synchronize()
    assert time.perf_counter() - begin <= seconds
    given = w.packed.nbytes + w.scale.nbytes + w.zero.nbytes if where == "cuda" else 0
    assert torch.cuda.max_memory_allocated() - before + given <= m.nbytes + 1.2 * w.K * w.N
    x = activations(3, 8192, 0.0, torch.float16)
    check(w.to("cuda"), x, gemm.product(x, m))


# ---- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [64, 192, 256, 7392, 8256, 10944])
def test_shp04_shp06_sizes_of_models(K: int) -> None:
    """K that no tile divides, N down to 8 and odd: exactly N columns, from every branch of the dispatcher."""
    for N in (8, 48, 1000, 32001, 32016) if K == 256 else (64, 576, 1088, 2880):
        w = large_weight(K, N, 64)
        p = pack(w)
        for M in (1, 17, 70, 600):
            x = activations(M, K, 0.0, torch.float16)
            y = tl.quant_gemm(x, p)
            assert list(y.shape) == [M, N]
            if M * N < 500:  # two errors of so few values are alike in size only roughly
                assert error(y, want64(x, w)) < 2e-3
            else:
                check(w, x, y)


@needs_hopper
@pytest.mark.parametrize("G", [32, 64])
def test_shp14_no_hopper_tile_hangs(G: int) -> None:
    """Groups smaller than a stage's k, or as large; a watchdog ends the run, since nothing else ends such a kernel."""
    w = large_weight(8192, 5120, G)
    m, x = MarlinWeight.of(w), activations(2048, 8192, 0.0, torch.float16)
    for config in [None, *hopper_variants()]:
        y = hopper.product(x, m, config=config)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + 30
        while not done.query():
            if time.monotonic() > deadline:
                pytest.exit(f"hopper.cu hangs: M=2048 K=8192 N=5120 G={G}, {config}", returncode=1)
            time.sleep(0.001)
        rows = [0, 1023, 2047]
        check(w, x[rows], y[rows])


# ---- threads, streams, processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 16, 64])
def test_a_thread_whose_first_cuda_call_is_a_product(M: int) -> None:
    """Made, warmed up and kept in one thread; the other has no context yet, and memory for y is there already."""
    w = weight(8192, 256, 128, bias=True)
    p, layer, x = pack(w), tl.QuantLinear(w), activations(M, 8192, 0.0, torch.float16)
    m, bias, fresh = p.marlin(), p.bias(torch.float16), x.clone()  # fresh: no tensor map of it is kept
    kept, out = run.ready(p, M, torch.float16, "tensor_core"), torch.empty(M, 256, dtype=torch.float16, device="cuda")

    def composed() -> Tensor:
        assert run.mm_asymmetric(x, m, out, bias) is run.Status.OK
        return out

    acts: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {  # here first, then in the new thread
        "kept product": (lambda: kept(x), lambda: kept(x, out)),
        "layer": (lambda: layer(x), lambda: layer(x)),
        "quant_gemm": (lambda: tl.quant_gemm(x, p), lambda: tl.quant_gemm(x, p)),
        "pair of kernels": (lambda: composed().clone(), composed),
    }
    if on_hopper:
        acts["hopper"] = lambda: hopper.product(x, m, bias), lambda: hopper.product(fresh, m, bias, out=out)
    for name, (here, there) in acts.items():
        want = [here() for _ in range(2)][1]  # the second call of a layer is the kept one
        torch.cuda.synchronize()
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        y = in_new_thread(there)
        torch.cuda.synchronize()
        assert torch.equal(y, want), name


def at_once(p: PackedWeight, xs: list[Tensor]) -> list[Tensor]:
    """Each product in a new thread on a stream of its own, none before all are ready."""
    start = threading.Barrier(len(xs))

    def work(x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        start.wait(60)
        with torch.cuda.stream(stream):
            y = tl.quant_gemm(x, p)
        stream.synchronize()
        return y

    with ThreadPoolExecutor(len(xs)) as pool:
        return list(pool.map(work, xs))


@pytest.mark.parametrize("keep", [False, True], ids=["codes", "dense copy"])
def test_dev04_two_streams_at_once_from_the_start(keep: bool) -> None:
    """Each time a weight that nothing was made of yet, with a bias: what one thread makes, the other reads on a stream
    that waits for no other. Values are exact in fp16, so they are the serial ones in whatever order sums are taken."""
    w = whole_weight(512, 264, 64)
    rows = [(4, 40), (16, 300), (1, 2), (64, 600)]
    xs = {M: whole_activations(M, 512) for pair in rows for M in pair}
    want = {M: want64(x, w) for M, x in xs.items()}
    assert all(float(y.abs().max()) < 128 for y in want.values())
    torch.cuda.synchronize()
    for i in range(200):
        both = rows[i % len(rows)]
        got = at_once(pack(w, keep_dense=keep), [xs[M] for M in both])
        assert all(torch.equal(y.double(), want[M]) for y, M in zip(got, both, strict=True)), (i, both)


FRESH = """
import json, sys, torch
import tinyloop as tl
from tests.parity.cuda_cases import activations, weight
from tinyloop.cuda import launch

K, N = 1024, 264
p = tl.pack(weight(K, N, 64, bias=True)).prepare()
torch.nn.functional.linear(*(torch.ones(*s, device="cuda").half() for s in ((600, K), (N, K), (N,))))  # torch's own
launched = launch.Launcher.__call__
for how in sys.argv[1:]:
    what, M = how.split("=")
    x, graph, said = activations(int(M), K, 0.0, torch.float16), torch.cuda.CUDAGraph(), None
    if what == "compiled":
        launch.Launcher.__call__ = lambda self, arguments, blocks, stream=None: None
        tl.quant_gemm(x, p)
        launch.Launcher.__call__ = launched
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
            try:
                y = tl.quant_gemm(x, p)
            except tl.InputError as e:
                said = str(e)
        if said is None:
            replayed = []
            for seed in (1, 2, 3):
                x.copy_(activations(int(M), K, 0.0, torch.float16, seed))
                graph.replay()
                replayed.append((x.clone(), y.clone()))
            right = [torch.equal(tl.quant_gemm(new, p), y) for new, y in replayed]
            said = "right" if all(right) else f"replays are {right}"
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    print("#" + json.dumps([how, said]))
"""


def test_dev05_first_capture_in_a_new_process(tmp_path: Path) -> None:
    """Nothing compiled; compiled on disk and never loaded; loaded and never launched: a graph that replays right, or
    the sentence that says to warm up first."""
    path = os.pathsep.join((str(ROOT), *filter(None, sys.path)))
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}
    wrong = []
    for hows in (["cold=4", "cold=64", "cold=600"], ["disk=4", "disk=64", "disk=600", "compiled=12", "compiled=100"]):
        command = [sys.executable, "-c", FRESH, *hows]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
        said = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("#")]
        assert [how for how, _ in said] == hows, done.stderr
        wrong += [(how, text) for how, text in said if text != "right" and "warm up first" not in text]
    assert not wrong


# ---- beside other processes, which run until the end ---------------------------------------------------------------


BUSY = """
import torch
a = torch.randn(2048, 2048, device="cuda").half()
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """The GPU belongs to other processes as well, by turns."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == "busy\n"
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


@needs_hopper
@pytest.mark.parametrize("config", hopper_variants(), ids=str)
def test_hopper_tiles_repeat_beside_other_processes(config: HopperConfig, busy: None) -> None:
    """Whole, so that rings of stages go round several times, and cut. Before `reads_done` (hopper.cu) was there, tiles
    with three consumers gave other results in one of some hundred launches (docs/log.md)."""
    w, m = case(4096 * config.SPLITS, 1000, 128)
    x = activations(130, m.K, 0.0, torch.float16)
    for least in (WHOLE, 1):
        dealt = replace(config, least=least)
        first = hopper.product(x, m, config=dealt)
        check(w, x, first)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            wrong += (hopper.product(x, m, config=dealt) != first).any()
        assert wrong.item() == 0
