"""Every kernel once or twice on small ragged shapes, against float64: what compute-sanitizer is run over.

    compute-sanitizer --tool memcheck python -m tests.parity.every_kernel
    compute-sanitizer --tool racecheck --print-limit 0 python -m tests.parity.every_kernel --rows 1,3

    --rows 1,3,70  numbers of rows of x; racecheck is slow, and each number of rows is a run of all tiles
    --apart        without launches that overlap

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck sees each tensor by itself, where else it sees torch's large blocks. By
default a tool stops printing after some reports; 0 lifts that limit, so that what it prints is all it found. The last
lines name each kernel with the number of its launches: what a clean report is a report of.

exit status   0  all right    1  a wrong value    77  no GPU to try it on
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from tests.parity import chain
from tests.parity.cuda_cases import activations, error, want64, weight

from tinyloop.cuda import gemm, hopper, launch, paths, run
from tinyloop.cuda.config import CHUNK, hopper_variants, variants
from tinyloop.dispatch_cuda import HOPPER
from tinyloop.marlin import MarlinWeight

SHAPES = [(264, 72, 64), (520, 136, -1), (352, 328, 96), (416, 200, 32)]  # K, N, G
LIMIT = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # a few roundings of the dtype


def products(dtype: torch.dtype, rows: Sequence[int]) -> Iterator[tuple[str, float]]:
    """(what ran, its error), kernel after kernel."""
    for K, N, G in SHAPES:
        w = weight(K, N, G)
        m = MarlinWeight.of(w)
        for M in rows:
            x = activations(M, K, 1.0, dtype)
            want, where = want64(x, w), f"M={M} K={K} N={N} G={G} {dtype}"
            y = torch.empty(M, N, dtype=dtype, device="cuda")
            yield f"pair {run.mm_asymmetric(x, m, y).name} {where}", error(y, want)
            yield f"native {where}", error(paths.native(x, w, None), want)
            yield f"unpack {where}", error(torch.nn.functional.linear(x, paths.unpack(m, dtype)), want)
            yield f"dequantize {where}", error(x @ paths.dequantize(w, dtype), want)
            silu = torch.nn.functional.silu(want) * want
            yield f"swiglu {where}", error(gemm.product(x, m, pair=(m, None)), silu)
            for config in variants():
                yield f"{config} {where}", error(gemm.product(x, m, config=config), want)
                if config.MT == 8:
                    uneven = dataclasses.replace(config, splits=2, lead=m.Kp // CHUNK - 1)
                    yield f"{uneven} {where}", error(gemm.product(x, m, config=uneven), want)
            if torch.cuda.get_device_capability() == HOPPER:
                for config in variants():
                    parts = dataclasses.replace(config, splits=2, cluster=True)
                    if parts.shared_memory(True, True) + 2048 > launch.chip(0).shared_memory:
                        continue
                    yield f"{parts} {where}", error(gemm.product(x, m, config=parts), want)
                for tile in hopper_variants():
                    tile = dataclasses.replace(tile, least=1)  # cut along K, small as K is
                    yield f"hopper {tile} {where}", error(hopper.product(x, m, config=tile), want)


def count_launches() -> Counter[str]:
    """Launches from now on, by kernel."""
    launched, launch_one = Counter[str](), launch.Launcher.__call__

    def counted(self: launch.Launcher, arguments: launch.Arguments, blocks: int, stream: int | None = None) -> None:
        launched[self.entry] += 1
        launch_one(self, arguments, blocks, stream)

    launch.Launcher.__call__ = counted  # type: ignore[method-assign]
    return launched


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.every_kernel")
    parser.add_argument(
        "--rows", type=lambda text: [int(M) for M in text.split(",")], default=[1, 3, 70], metavar="M,…"
    )
    parser.add_argument("--apart", action="store_true", help="without launches that overlap")
    return parser.parse_args(arguments)


def main() -> int:
    asked = options(sys.argv[1:])
    if reason := chain.gpu():
        print(reason)
        return chain.SKIPPED
    launch.Launcher.overlapping = not asked.apart
    launched = count_launches()
    wrong = tried = 0
    for dtype, limit in LIMIT.items():
        for what, e in products(dtype, asked.rows):
            tried += 1
            if not e <= limit * (2 if what.startswith("swiglu") else 1):
                wrong += 1
                print(f"{what}: error {e:.1e}")
    torch.cuda.synchronize()
    for name, times in sorted(launched.items()):
        print(f"{name} {times}")
    print(f"{tried} products, {wrong} wrong")
    return chain.FAILED if wrong else chain.PASSED


if __name__ == "__main__":
    sys.exit(main())
