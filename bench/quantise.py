"""Quality of quantisation on SmolLM2-135M: perplexity after rounding and after GPTQ, with time and peak memory.

    python bench/quantise.py SmolLM2-135M-Instruct.Q4_1.gguf wiki.utf8

The model is made fp32 first; the text is the calibration text `wiki.utf8` of the package exllamav2 0.3.2 without its
tags. Its last 12,288 tokens are scored, in windows of 1024 tokens without a token that begins a text (1023 predictions
each, nothing carried over); 40 windows of 1023 tokens after `<|endoftext|>`, spread over the rest, calibrate.

Known from an independent implementation: 7.827 in fp32; rounding to nearest with integer zero points and without
clipping 9.605 at G = 64, 9.123 at G = 32. They show that the ruler is the same one.

With float zeros at G = 32 this material cannot tell methods apart: its weights lie on a Q4_1 grid already, which is a
float zero per 32 weights, so rounding to nearest is lossless. Integer zeros, and other groups, are real losses.
Every row runs in a process of its own, so that its peak memory is its own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tinyloop as tl
from tinyloop import container
from tinyloop.quantize.gptq import QuantSpec
from tinyloop.quantize.pipeline import Settings, quantize_weights
from tinyloop.score import Protocol, score

HELD, WINDOW, TEXTS = 12_288, 1024, 40
KNOWN = {"fp32": 7.827, "nearest g64 integer": 9.605, "nearest g32 integer": 9.123}
ROWS = [
    "fp32",
    *(f"nearest g{G} integer" for G in (64, 32)),
    *(f"gptq g{G} {zero}" for zero in ("integer", "float") for G in (32, 64, 128)),
]


def dense(path: Path) -> tl.Checkpoint:
    """The blocks in fp32; the embedding, which no row quantises, as it is."""
    checkpoint = tl.import_model(path)
    weights = {
        name: w if name == "embed" else tl.DenseWeight(w.dequantize().t().contiguous(), w.bias)
        for name, w in checkpoint.weights.items()
    }
    return dataclasses.replace(checkpoint, weights=weights)


def tokens(model: tl.Model, path: Path) -> tuple[torch.Tensor, list[int]]:
    """Calibration windows int64 [TEXTS, WINDOW], and the held-out tokens."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(re.sub(r"<[^>]*>", "", path.read_text("utf-8")))
    bos, new = model.tokenizer.id_of("<|endoftext|>"), WINDOW - 1
    assert bos is not None
    rest = ids[:-HELD]
    starts = [i * (len(rest) - new) // (TEXTS - 1) for i in range(TEXTS)]
    return torch.tensor([[bos, *rest[s : s + new]] for s in starts]), ids[-HELD:]


def perplexity(checkpoint: tl.Checkpoint, held: list[int]) -> float:
    """In fp32 arithmetic, each window alone, so that none sees a token of the one before it."""
    model = tl.Model(checkpoint, dtype=torch.float32)
    windows = [held[i : i + WINDOW] for i in range(0, len(held), WINDOW)]
    scores = [score(model, ids, Protocol(window=WINDOW, bos=False)) for ids in windows]
    return float(torch.tensor(sum(s.nll for s in scores) / sum(s.tokens for s in scores)).exp())


def measure(row: str, source: Path, text: Path) -> dict[str, Any]:
    checkpoint = container.read(source, verify=False)
    windows, held = tokens(tl.Model(checkpoint), text)
    started = time.perf_counter()
    if row != "fp32":
        method, group, zero = row.split()
        spec = QuantSpec(int(group[1:]), zero == "integer", clip=method == "gptq")
        with tempfile.TemporaryDirectory() as work:
            settings = Settings(spec, method)
            checkpoint, _ = quantize_weights(checkpoint, windows, settings, Path(work) / "work")
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before scoring, whose memory is another matter
    found = perplexity(checkpoint, held)
    return {"row": row, "perplexity": found, "known": KNOWN.get(row), "seconds": seconds, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the .gguf file")
    parser.add_argument("text", type=Path)
    parser.add_argument("--row", choices=ROWS, action="append", help="only this; repeatable")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.row[0], args.model, args.text)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = tl.save(dense(args.model), Path(folder) / "fp32.tinyloop")
        for row in args.row or ROWS:
            command = [sys.executable, __file__, str(source), str(args.text), "--row", row, "--child"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr, flush=True)
    table = Table("weights", "perplexity", "known", "off %", "s", "peak GB")
    for r in rows:
        off = f"{100 * (r['perplexity'] / r['known'] - 1):+.2f}" if r["known"] else ""
        shown = f"{r['known']}" if r["known"] else ""
        table.add_row(
            r["row"], f"{r['perplexity']:.3f}", shown, off, f"{r['seconds']:.0f}", f"{r['peak_bytes'] / 1e9:.2f}"
        )
    Console().print(table)
    print(json.dumps({"bench": "quantise", "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
