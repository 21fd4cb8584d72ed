"""The linear operation against torch's dense product, by shape and number of rows, on a GPU or a CPU.

    python bench/gemm.py                              every shape, INT4 against fp16 (bf16 on a CPU that has it)
    python bench/gemm.py --rows 1,16 --shapes 4096x4096 --group 64 --dtype bfloat16
    python bench/gemm.py --kernels                    every INT4 kernel by itself, and the dispatcher's regret
    python bench/gemm.py --tiles                      every tile of the chosen kernel, beside what the cost model says
    python bench/gemm.py --pair                       what the correction costs, replayed and called one by one
    python bench/gemm.py --chart result.json gemm.png draws the last line of an earlier run

Protocol: weights rotate over at least 256 MB, so that none is found in a cache; calls are captured in a CUDA graph and
replayed; a figure is the median of seven replays, in which dense and INT4 take turns. "dense" is the faster of
torch's two weight layouts. "floor" is the larger of bytes over bandwidth and operations over rate, both as measured on
this chip where it is known. Errors are against float64. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import tinyloop as tl
from tinyloop import dispatch
from tinyloop.cuda import config, gemm, hopper, paths, run
from tinyloop.dispatch_cuda import HOPPER, INT4_KERNELS, int4_refusal
from tinyloop.ops import problem
from tinyloop.pack import PackedWeight, pack
from tinyloop.weight import QuantWeight

Tensor = torch.Tensor
SHAPES = ((2048, 2048), (2048, 6144), (8192, 2048), (4096, 4096), (8192, 8192), (8192, 28672))
CPU_SHAPES = ((576, 1536), (2048, 2048), (2048, 6144))
ROWS, CPU_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096), (1, 4, 16, 128)
COLD, REPLAYS = 256 << 20, 7
NATIVE_WORK = 2 << 33  # multiplications up to which the native kernel is worth waiting for
LIMITS = {"NVIDIA H200": (4.47e12, 690e12)}  # bytes/s read and dense fp16 FLOP/s, measured
Call = Callable[[], Any]


def weight(K: int, N: int, G: int, device: str, scale_dtype: torch.dtype = torch.float16) -> QuantWeight:
    """Codes, scales and zeros at random, zeros on either side of the middle; scales that `scale_dtype` holds."""
    g = torch.Generator().manual_seed(K + N)
    G = K if G < 1 else G
    groups = -(-K // G)
    scale = ((0.5 + torch.rand(groups, N, generator=g)) * (12 / K) ** 0.5 / 16).to(scale_dtype).float()
    zero = (-(7.5 + 4 * torch.rand(groups, N, generator=g) - 2) * scale).half().float()
    q = torch.randint(0, 16, (K, N), generator=g, dtype=torch.uint8)
    return QuantWeight.from_codes(q, scale, zero, G).to(device)


def copies(w: PackedWeight) -> list[PackedWeight]:
    """As many device packs as exceed the caches together."""
    m = w.marlin()
    found = []
    for _ in range(max(2, -(-COLD // m.nbytes))):
        other = PackedWeight(w.weight, device=w.device)
        other._marlin = dataclasses.replace(m, B=m.B.clone(), S=m.S.clone(), delta=m.delta.clone())
        found.append(other.prepare())
    return found


def replayed(*sets: Sequence[Call]) -> list[float]:
    """µs per call of each set: median of seven replays of a graph that holds all its calls. Sets take turns, replay by
    replay, so that none has the chip cooler or its clocks higher than another."""
    pool = torch.cuda.graph_pool_handle()  # for all, since they run one after another
    graphs = [captured(calls, pool) for calls in sets]
    for graph, _ in graphs:
        graph.replay()
    times: list[list[float]] = [[] for _ in graphs]
    for _, (own, (graph, count)) in itertools.product(range(REPLAYS), enumerate(graphs)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times[own].append(start.elapsed_time(end) * 1e3 / count)
    return [statistics.median(t) for t in times]


def captured(calls: Sequence[Call], pool: Any) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that holds all calls, several times where they are short, and how many it holds."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    turns, graph = max(1, min(40, int(20e3 / eager(calls[:2]))) // len(calls)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(turns):
            for call in calls:
                call()
    return graph, turns * len(calls)


def eager(calls: Sequence[Call]) -> float:
    """µs per call, called one after another: the host's time where that is longer."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / len(calls)


def timed(*sets: Sequence[Call]) -> list[float]:
    """µs per call of each set on a CPU: median of rounds over all its calls. Set after set, since torch's threads still
    turn for a while after its product, and other threads would wait for a core."""
    medians = []
    for calls in sets:
        rounds = []
        for _ in range(REPLAYS + 1):
            start = time.perf_counter()
            for call in calls:
                call()
            rounds.append((time.perf_counter() - start) * 1e6 / len(calls))
        medians.append(statistics.median(rounds[1:]))
    return medians


def want64(x: Tensor, w: QuantWeight) -> Tensor:
    """x @ W in float64, a slab of columns at a time."""
    group = torch.arange(w.K, device=x.device) // w.group_size
    parts = []
    for n in range(0, w.N, 4096):
        cut = slice(n, n + 4096)
        W = w.codes()[:, cut].double() * w.scale[:, cut].double()[group] + w.zero[:, cut].double()[group]
        parts.append(x.double() @ W)
    return torch.cat(parts, 1)


def error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def dense_calls(x: Tensor, K: int, N: int) -> tuple[list[Call], list[Call]]:
    """torch's product with weights [N, K] and with weights [K, N]."""
    count = max(2, -(-COLD // (K * N * x.element_size())))
    stored = [torch.randn(N, K, device=x.device, dtype=x.dtype) for _ in range(count)]
    return (
        [lambda W=W: torch.nn.functional.linear(x, W) for W in stored],
        [lambda W=W: torch.mm(x, W.view(K, N)) for W in stored],
    )


def kernels(x: Tensor) -> dict[str, Callable[[Tensor, PackedWeight], Tensor]]:
    """Every INT4 kernel of this chip by name, and the reference composition."""
    found = {"tensor_core": lambda x, w: gemm.product(x, w.marlin())}
    if dispatch.chip(x.device).capability == HOPPER:
        found["hopper"] = lambda x, w: hopper.product(x, w.marlin())
    found["symmetric"] = lambda x, w: gemm.product(x, w.marlin(), symmetric=True)
    found["unpack_dense"] = lambda x, w: torch.nn.functional.linear(x, paths.unpack(w.marlin(), x.dtype))
    found["pair"] = composed
    return found


def composed(x: Tensor, w: PackedWeight) -> Tensor:
    y = torch.empty(x.shape[0], w.weight.N, dtype=x.dtype, device=x.device)
    status = run.mm_asymmetric(x, w.marlin(), y)
    assert status is run.Status.OK, status
    return y


def tiles(x: Tensor, w: PackedWeight, kernel: str) -> list[tuple[Any, float | None, Callable[[PackedWeight], Tensor]]]:
    """(tile, µs by the cost model, product) for each tile of a kernel, tensor_core's cut along K in every way."""
    m, on = w.marlin(), dispatch.chip(x.device)
    if kernel == "hopper":
        sizes = x.shape[0], m.Np, m.Kp, on.multiprocessors
        every = config.hopper_configs(m.Kp, m.group_size, x.dtype == torch.bfloat16 and not m.coarse)
        once = {(dataclasses.replace(c, least=0), c.work(*sizes)): (c, step) for c, step in reversed(every)}
        return [
            (c, config.hopper_cost(c, step, *sizes), lambda p, c=c: hopper.product(x, p.marlin(), config=c))
            for c, step in once.values()
        ]
    halves, scale32 = config.in_halves(m.group_size), m.S.dtype == torch.float32
    chosen = config.choose(x.shape[0], m.Np, m.Kp, on, halves=halves, scale32=scale32)
    cut = {
        dataclasses.replace(tile, splits=splits, cluster=cluster and splits > 1)
        for tile in config.variants((on,), (False,), (halves,)) if tile.MT == chosen.MT
        for splits in (1, 2, 4, 8) if splits * tile.WK * config.CHUNK <= m.Kp
        for cluster in (False, on.capability == (9, 0))
    }  # fmt: skip
    return [(c, None, lambda p, c=c: gemm.product(x, p.marlin(), config=c)) for c in sorted(cut | {chosen}, key=str)]


def row(x: Tensor, w: PackedWeight, packs: list[PackedWeight], options: argparse.Namespace) -> dict[str, Any]:
    """One shape at one number of rows."""
    K, N, M = w.weight.K, w.weight.N, x.shape[0]
    clock = replayed if x.is_cuda else timed
    plan, own = dispatch.plan(problem(w, M, x.dtype)), [lambda p=p: tl.quant_gemm(x, p) for p in packs]
    *both, us = clock(*dense_calls(x, K, N), own)
    dense = min(both)
    result: dict[str, Any] = {
        "K": K,
        "N": N,
        "M": M,
        "dense": dense,
        "kernel": plan.kernel,
        "us": us,
        "ratio": dense / us,
    }
    assert isinstance(w.weight, QuantWeight)
    want = want64(x, w.weight)
    result["error"] = error(tl.quant_gemm(x, w), want)
    result["dense_error"] = error(x @ w.weight.dequantize(x.dtype), want)
    bytes_read = w.weight.nbytes + x.nbytes + M * N * x.element_size()
    result["gbps"] = bytes_read / us / 1e3
    if x.is_cuda and (known := LIMITS.get(dispatch.chip(x.device).name)):
        result["floor"] = 1e6 * max(bytes_read / known[0], 2 * M * N * K / known[1])
    if options.tiles and plan.kernel in ("tensor_core", "hopper"):
        found = tiles(x, w, plan.kernel)
        again, *each = clock(own, *([partial(f, p) for p in packs] for _, _, f in found))
        result["tiles"] = sorted((t, str(c), cost) for t, (c, cost, _) in zip(each, found, strict=True))
        result["regret"] = again / min(each)
    if options.kernels and x.is_cuda and int4_refusal(problem(w, M, x.dtype), dispatch.chip(x.device)) is None:
        every = kernels(x)
        again, *times = clock(own, *([partial(f, x, p) for p in packs] for f in every.values()))
        by_name = dict(zip(every, times, strict=True))
        result["regret"] = again / min(by_name[name] for name in INT4_KERNELS if name in by_name)
        if M * N * K <= NATIVE_WORK:
            (by_name["native"],) = clock([lambda: tl.quant_gemm(x, w, exact_int4=True)] * 2)
        result["kernels"] = by_name
    return result


def line(r: dict[str, Any]) -> str:
    floor = f"{100 * r['floor'] / r['us']:4.0f} %" if "floor" in r else "     –"
    text = (
        f"| {r['K']}×{r['N']} | {r['M']} | {r['dense']:.1f} | {r['us']:.1f} | {r['kernel']} | {r['ratio']:.2f} "
        f"| {r['gbps']:.0f} | {floor} | {r['error']:.1e} | {r['dense_error']:.1e} |"
    )
    for us, tile, cost in r.get("tiles", [])[:3]:
        text += f" {us:.1f}" + ("" if cost is None else f" (model {cost:.1f})") + f" {tile};"
    if "tiles" in r:
        text += f" regret {r['regret']:.2f}"
    if "kernels" in r:
        text += " " + ", ".join(f"{k} {v:.1f}" for k, v in r["kernels"].items()) + f"; regret {r['regret']:.2f}"
    return text


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device == "cuda"
    dtype = getattr(torch, options.dtype) if options.dtype else torch.float16 if cuda else dispatch.default_dtype()
    rows = options.rows or (ROWS if cuda else CPU_ROWS)
    scales = getattr(torch, options.scales or ("bfloat16" if dtype == torch.bfloat16 else "float16"))
    print("| K×N | M | dense µs | INT4 µs | kernel | ratio | GB/s | of floor | error | dense error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    results = []
    for K, N in options.shapes or (SHAPES if cuda else CPU_SHAPES):
        w = pack(weight(K, N, options.group, device, scales))
        packs = copies(w) if cuda else [w]
        for M in rows:
            x = torch.randn(M, K, device=device).to(dtype)
            results.append(row(x, w, packs, options))
            print(line(results[-1]), flush=True)
        del packs
    return results


def pair(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The correction pair over the symmetric product, at sixteen groups: in a graph, and as separate calls."""
    results = []
    print("| K×N | M | symmetric µs | pair adds µs | fused µs | eager: symmetric | pair adds | fused |")
    print("|---|---|---|---|---|---|---|---|")
    for K, N in ((2048, 2048), (2048, 6144), (2048, 8192)):
        w = pack(weight(K, N, options.group, "cuda"))
        packs = copies(w)
        for M in (1, 16, 64, 256):
            x, every = torch.randn(M, K, device="cuda").half(), kernels(torch.empty(0, device="cuda"))
            names = ("symmetric", "pair", "tensor_core")
            sets = [[partial(every[name], x, p) for p in packs] for name in names]
            graphs, separate = replayed(*sets), [[eager(calls) for calls in sets] for _ in range(REPLAYS)]
            eagers = [statistics.median(column) for column in zip(*separate, strict=True)]
            (s, p, f), (es, ep, ef) = graphs, eagers
            each = dict(zip(names, zip(graphs, eagers, strict=True), strict=True))
            print(
                f"| {K}×{N} | {M} | {s:.1f} | {p - s:.1f} | {f:.1f} | {es:.1f} | {ep - es:.1f} | {ef:.1f} |", flush=True
            )
            results.append({"K": K, "N": N, "M": M} | {name: {"graph": g, "eager": e} for name, (g, e) in each.items()})
    return results


def result(path: str) -> dict[str, Any]:
    """The last line of an earlier run. Raises OSError and ValueError."""
    with open(path, encoding="utf-8") as f:
        found = json.loads((f.read().strip().splitlines() or [""])[-1])
    if not isinstance(found, dict) or not all("ratio" in r for r in found.get("rows", [{}])):
        raise ValueError("no ratios in it")
    return found


def chart(found: dict[str, Any], target: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    for K, N in dict.fromkeys((r["K"], r["N"]) for r in found["rows"]):
        of_shape = [r for r in found["rows"] if (r["K"], r["N"]) == (K, N)]
        axes.plot([r["M"] for r in of_shape], [r["ratio"] for r in of_shape], marker="o", label=f"{K}×{N}")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xscale="log", xlabel="rows of x", ylabel=f"times torch.mm, {found['dtype']}", title=found["device"])
    axes.set_xscale("log", base=2)
    axes.legend(title="K×N")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def group_size(text: str) -> int:
    """A group size, as an argument."""
    return -1 if text == "-1" else count(text)


def count(text: str) -> int:
    """A number of rows or columns, as an argument."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """K and N of a weight, as an argument."""
    K, times, N = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; give K and N as 4096x4096")
    return count(K), count(N)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda text: [size(s) for s in text.split(",")], help="K×N as 4096x4096,…")
    parser.add_argument("--rows", type=lambda text: [count(m) for m in text.split(",")], help="1,16,…")
    parser.add_argument("--group", type=group_size, default=128, help="group size; -1: one group over K")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"))
    parser.add_argument(
        "--scales", choices=("float16", "bfloat16"),
        help="what holds the scales; else as quantising makes them: bfloat16 for weights in it",
    )  # fmt: skip
    parser.add_argument("--kernels", action="store_true", help="time every INT4 kernel of the chip too")
    parser.add_argument("--tiles", action="store_true", help="time every tile of the chosen kernel too")
    parser.add_argument("--pair", action="store_true", help="time the correction pair against the symmetric product")
    parser.add_argument("--chart", nargs=2, metavar=("RESULT", "PNG"), help="draw an earlier run's last line")
    options = parser.parse_args()
    if options.chart:
        source, target = options.chart
        try:
            found = result(source)
        except (OSError, ValueError) as e:
            parser.error(f"argument --chart: {source} is no result of this bench ({e}); give a file with its output")
        try:
            chart(found, target)
        except (OSError, ValueError) as e:
            parser.error(f"argument --chart: {target} cannot be drawn ({e}); give the path of a .png")
        return
    cuda = torch.cuda.is_available()
    if options.pair and not cuda:
        parser.error("argument --pair: the correction pair is two kernels of a GPU, and torch sees none here")
    for K, N in options.shapes or ():
        if options.group > K:
            parser.error(f"argument --group: {options.group} is more than K of {K}x{N}; give -1 for one group over K")
    rows = pair(options) if options.pair else measure(options)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    dtype = options.dtype or ("float16" if cuda else str(dispatch.default_dtype()).removeprefix("torch."))
    print(
        json.dumps({"device": name, "torch": torch.__version__, "dtype": dtype, "group": options.group, "rows": rows})
    )


if __name__ == "__main__":
    sys.exit(main())
