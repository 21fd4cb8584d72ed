"""Where one CPU kernel overtakes another: time against rows M, for the limits in `tinyloop.dispatch`.

    python bench/crossover.py [--shapes 2048x6144 4096x4096] [--group 128]

Cold weights: each call takes the next of several copies, together larger than the last-level cache. Every kernel's turn
comes within the same second; a figure is the median of seven. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from tinyloop import ops
from tinyloop.cpu.product import product
from tinyloop.pack import PackedWeight, dense_product, pack
from tinyloop.weight import QuantWeight

Tensor = torch.Tensor
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
COLD = 96 << 20  # bytes of 4-bit codes in rotation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "2048x6144", "4096x4096"], help="KxN")
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    results = {}
    for shape in args.shapes:
        K, N = map(int, shape.split("x"))
        results[shape] = measure(K, N, args.group if K % args.group == 0 else 32)
        show(shape, results[shape])
    print(json.dumps({"bench": "crossover", "threads": torch.get_num_threads(), "ms": results}))


def measure(K: int, N: int, G: int) -> dict[str, dict[int, float]]:
    """kernel → M → milliseconds."""
    weights = [random_weight(K, N, G, seed) for seed in range(min(8, max(2, COLD // (K * N // 2))))]
    turn = itertools.cycle(weights)
    kernels: dict[str, Callable[[Tensor], object]] = {
        "panel": lambda x: product(x, next(turn).panel()),
        "int4pack": lambda x: int4pack(x.bfloat16(), next(turn)),
        "dense_cache bf16": lambda x: dense_product(x.bfloat16(), next(turn).dense(torch.bfloat16, True), None),
        "dense_cache fp32": lambda x: dense_product(x, next(turn).dense(torch.float32, True), None),
        "dense bf16": lambda x: dense_product(x.bfloat16(), pack(next(turn).weight).dense(torch.bfloat16, False), None),
        "native": lambda x: ops._native(x, next(turn).weight),
    }
    for kernel in kernels.values():
        for _ in weights:
            kernel(torch.randn(1, K))
    return {name: {M: timed(kernel, torch.randn(M, K)) for M in ROWS} for name, kernel in kernels.items()}


def random_weight(K: int, N: int, G: int, seed: int) -> PackedWeight:
    torch.manual_seed(seed)
    scale, zero = (torch.randn(-(-K // G), N).half() * 0.01 for _ in range(2))
    return pack(QuantWeight.from_codes(torch.randint(0, 16, (K, N)), scale, zero, G), keep_dense=True)


def int4pack(x: Tensor, w: PackedWeight) -> Tensor:
    codes, parameters = w.int4()
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, w.int4_group, parameters)
    return y


def timed(kernel: Callable[[Tensor], object], x: Tensor) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        kernel(x)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def show(shape: str, results: dict[str, dict[int, float]]) -> None:
    table = Table(f"{shape}, ms", *(f"M={M}" for M in ROWS))
    for name, row in results.items():
        table.add_row(name, *(f"{row[M]:.2f}" for M in ROWS))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
