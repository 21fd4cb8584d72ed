"""The same GGUF weights, the same threads, one process, turn by turn: TinyLoop against llama.cpp.

    python bench/against_llama.py model.gguf model.tinyloop [--threads 2] [--rounds 5]

Four measures, each the median over rounds in which the two take turns, so that a drifting clock moves both: prefill of
1024 tokens (logits of the last), scoring of 1024 tokens (logits of all), and decoding one token at context 16 and
1024. Needs the extra `bench`, which builds llama.cpp. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import tinyloop as tl

TOKENS, STEPS, CONTEXTS = 1024, 48, (16, 1024)
PAUSE = 0.1  # seconds between turns: both engines' threads spin for a while after their last work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("tinyloop", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measures = take_turns(ours(args.tinyloop), llama(args.gguf, args.threads), args.rounds)
    show(measures)
    figures = {name: {"tinyloop": a, "llama.cpp": b, "ratio": a / b} for name, (a, b) in measures.items()}
    about = {"cpu": cpu(), "threads": args.threads, "torch": torch.__version__,
             "llama-cpp-python": llama_cpp.__version__, "rounds": args.rounds}  # fmt: skip
    print(json.dumps({"bench": "against_llama", **about, "tokens_per_s": figures}))


Measure = Callable[[], float]  # → tokens per second


def ours(path: Path) -> dict[str, Measure]:
    model = tl.load(path)
    tokens = ids(model.config.vocab_size)

    def prefill() -> float:
        return rate(TOKENS, lambda: model.head(model.hidden(tokens)[:, -1]))

    def scoring() -> float:
        return rate(TOKENS, lambda: model.score(tokens[0].tolist(), window=TOKENS + 1))

    def decode(context: int) -> float:
        cache = model.new_cache(1, context + STEPS + 1)
        model.hidden(tokens[:, :context], cache)
        model.step(tokens[0, :1], cache)
        return rate(STEPS, lambda: [model.step(tokens[0, i : i + 1], cache) for i in range(STEPS)])

    return {"prefill": prefill, "scoring": scoring, **{f"decode at {c}": lambda c=c: decode(c) for c in CONTEXTS}}


def llama(path: Path, threads: int) -> dict[str, Measure]:
    def engine(every_logit: bool) -> Any:
        return llama_cpp.Llama(
            str(path), n_ctx=2 * TOKENS, n_batch=512, n_threads=threads, n_threads_batch=threads,
            logits_all=every_logit, verbose=False,
        )  # fmt: skip

    last, every = engine(False), engine(True)
    tokens = ids(last.n_vocab())[0].tolist()

    def evaluate(model: Any) -> float:
        model.reset()
        return rate(TOKENS, lambda: model.eval(tokens))

    def decode(context: int) -> float:
        last.reset()
        last.eval(tokens[:context])
        last.eval(tokens[:1])
        return rate(STEPS, lambda: [last.eval([t]) for t in tokens[:STEPS]])

    return {"prefill": lambda: evaluate(last), "scoring": lambda: evaluate(every),
            **{f"decode at {c}": lambda c=c: decode(c) for c in CONTEXTS}}  # fmt: skip


def take_turns(a: dict[str, Measure], b: dict[str, Measure], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of both; the first round warms up and does not count."""
    results: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in a}
    for i in range(rounds + 1):
        for name, (mine, theirs) in results.items():
            for measure, out in ((a[name], mine), (b[name], theirs)):
                time.sleep(PAUSE)
                value = measure()
                if i:
                    out.append(value)
    return {name: (statistics.median(x), statistics.median(y)) for name, (x, y) in results.items()}


def ids(vocabulary: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, TOKENS)))


def rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(measures: dict[str, tuple[float, float]]) -> None:
    table = Table("tokens/s", "TinyLoop", "llama.cpp", "ratio")
    for name, (a, b) in measures.items():
        table.add_row(name, f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
