"""What the host spends on one call: the linear operation in its forms beside an empty custom op and nn.Linear.

    python bench/host.py                              M = 1; K = N = 1024 in fp16 on a GPU, 64×32 in fp32 on a CPU
    python bench/host.py --shape 4096x4096 --rows 8

Protocol: calls take turns in one process, in batches of 200, so that none has a quiet moment to itself; a figure is the
median of its five best batches of forty. On a GPU a batch is too short to fill the launch queue, and the wait for the
GPU is outside of the clock: what is measured is the time until the call returns. On a CPU the product itself is in it,
hence the small shape, and torch keeps to one thread. "First" is a fresh layer's first call, layouts and all, in a
process that has compiled the kernels. "Over" is what a call costs more than the empty op, which takes the same
arguments and returns `x.new_empty`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import tinyloop as tl
from gemm import count, size, weight
from tinyloop import dispatch, torch_op
from tinyloop.cuda import run
from tinyloop.ops import problem
from tinyloop.pack import pack

Tensor = torch.Tensor
BATCH, BATCHES, BEST = 200, 40, 5
EMPTY = "empty op"


def empty_op(device: str) -> Callable[..., Tensor]:
    """A custom op of the linear operation's arguments that computes nothing."""
    library = torch.library.Library("tinyloop_bench", "DEF")  # type: ignore[no-untyped-call]
    schema = str(torch_op.product_without_gradient._schema)
    library.define(schema.replace("tinyloop::quant_gemm.inference", "empty"))
    library.impl("empty", lambda x, q, *rest: x.new_empty(*x.shape[:-1], q.shape[1]), device.upper())
    op: Callable[..., Tensor] = torch.ops.tinyloop_bench.empty.default
    op.keep = library  # type: ignore[attr-defined]  # the op lives as long as its library
    return op


def calls(layer: tl.QuantLinear, x: Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    packed, wide = pack(layer.quant_weight), x[None]
    dense = nn.Linear(layer.K, layer.N, bias=False, dtype=x.dtype, device=x.device)
    empty, op, b = empty_op(x.device.type), torch_op.product_without_gradient, layer._buffers
    given = b["q"], b["scale"], b["zero"], b["bias"], layer.K, layer.group_size, layer.bits
    found: dict[str, Callable[[], object]] = {
        EMPTY: lambda: empty(x, *given),
        "nn.Linear": lambda: dense(x),
        "op": lambda: op(x, *given),
        "QuantLinear": lambda: layer(x),
        "QuantLinear, x 3-D": lambda: layer(wide),
        "quant_gemm": lambda: tl.quant_gemm(x, packed),
    }
    kernel = dispatch.plan(problem(packed, x.shape[0], x.dtype)).kernel
    if kernel in ("tensor_core", "hopper"):
        ready_call = run.ready(packed, x.shape[0], x.dtype, kernel)
        found["Ready"] = lambda: ready_call(x)
    return found


def settle(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def batch(call: Callable[[], object], x: Tensor, count: int = BATCH) -> float:
    """µs per call."""
    settle(x)
    start = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - start
    settle(x)
    return spent * 1e6 / count


def measure(layer: tl.QuantLinear, x: Tensor) -> dict[str, float]:
    """µs per call, by name."""
    every = calls(layer, x)
    for call in every.values():
        batch(call, x)
    seen: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(BATCHES):
        for name, call in every.items():
            seen[name].append(batch(call, x))
    us = {name: statistics.median(sorted(values)[:BEST]) for name, values in seen.items()}
    layers = [copy.deepcopy(layer) for _ in range(BEST)]
    first = [batch(lambda fresh=fresh: fresh(x[None]), x, 1) for fresh in layers]  # type: ignore[misc]
    return us | {"QuantLinear, x 3-D, first": statistics.median(first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=size, help="K×N as 4096x4096")
    parser.add_argument("--rows", type=count, default=1)
    parser.add_argument("--group", type=int, default=32)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    torch.set_num_threads(1)
    K, N = options.shape or ((1024, 1024) if cuda else (64, 32))
    layer = tl.QuantLinear(weight(K, N, options.group, device), dtype)
    with torch.no_grad():
        us = measure(layer, torch.randn(options.rows, K, device=device).to(dtype))
    print("| call | µs | over |")
    print("|---|---|---|")
    for name, value in us.items():
        print(f"| {name} | {value:.2f} | {value - us[EMPTY]:+.2f} |")
    where = torch.cuda.get_device_name() if cuda else "CPU, 1 thread"
    shape = {"M": options.rows, "K": K, "N": N, "group": options.group}
    print(json.dumps({"bench": "host", "device": where, "torch": torch.__version__} | shape | {"us": us}))


if __name__ == "__main__":
    sys.exit(main())
