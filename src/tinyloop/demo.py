"""`tinyloop demo`: the looped model that ships in this repository, from fp16 to 4 bits, entirely offline.

Its fp16 checkpoint is quantised three ways, by rounding to nearest, by GPTQ, and by GPTQ with a channel for
cross-iteration rounding; each is scored on the same held-out text, and the GPTQ file writes some. Small calibration, so
that it takes a minute; `tinyloop quantize` with its defaults does better.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from . import container
from .checkpoint import Checkpoint
from .demo_smollm2 import peak_memory, text
from .errors import InputError
from .explain import explain
from .generate import Options, generate
from .importers import import_model
from .model import Model
from .quantize.calibration import Calibration
from .quantize.convert import quantize
from .quantize.gptq import QuantSpec
from .quantize.pipeline import Settings
from .sampling import Sampling
from .score import score
from .terminal import bar

if TYPE_CHECKING:
    from .generate import Generation

BUNDLED = Path("examples/looped-12m")
PROMPT = "The old house stood at the end of the lane, and"
CALIBRATION = Calibration(texts=16, length=512)
SPEC = QuantSpec(128)
SAMPLING = Sampling(temperature=0.8, min_p=0.05, seed=1)
EMBED = ("embed", QuantSpec(32))  # at 4 bits, since the table is a third of the model


def run(source: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Everything, in order. `save` keeps the GPTQ file. Raises InputError where the model is not to be found."""
    folder = find(source)
    dense = import_model(folder)
    rows, made_by = [_scored("fp16, as trained", dense, seconds=0.0)], {}
    for name, settings, crossing in ways():
        started = time.perf_counter()
        with bar(name) as update:
            made = quantize(
                dense, settings=settings, calibration=CALIBRATION, progress=lambda done, total, _: update(done, total)
            ).checkpoint
        rows.append(_scored(name, made, time.perf_counter() - started, crossing))
        made_by[name] = made
    model = Model(made_by["GPTQ"])
    if save is not None:
        container.write(made_by["GPTQ"], save)
    said = _speak(model)
    return {
        "model": str(folder), "loops": dense.config.loops, "text": "Persuasion", "ways": rows,
        "dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "prompt": PROMPT,
        "continuation": said.text, "decode_tokens_per_second": said.tokens_per_second,
        "plans": explain(model).to_dict(), "peak_bytes": peak_memory(), "saved": None if save is None else str(save),
    }  # fmt: skip


def ways() -> tuple[tuple[str, Settings, bool], ...]:
    """Name, settings, and whether iterations are rounded on their own."""
    nearest = Settings(SPEC, "nearest", (EMBED,))
    channel = Settings(QuantSpec(128, channel="sign_bit"), "gptq", (EMBED,))
    return (
        ("nearest", nearest, False),
        ("GPTQ", Settings(SPEC, "gptq", (EMBED,)), False),
        ("GPTQ, sign_bit", channel, True),
    )


def find(source: Path | None) -> Path:
    """The bundled model's folder: the one given, in the working directory, or in the checkout of this package."""
    places = [source] if source else [BUNDLED, Path(__file__).parents[2] / BUNDLED]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise InputError(
        f"the looped model is not at {places[-1]}; run this in a checkout of the repository, give its folder "
        "(--model), or see the other demo: tinyloop demo --smollm2"
    )


def render(found: dict[str, Any]) -> Iterator[RenderableType]:
    """The table, the continuation, and what computed it."""
    table = Table("weights", "MB", "quantised in", "perplexity", "bits per byte", "scoring")
    for row in found["ways"]:
        loss = row["perplexity"] / found["ways"][0]["perplexity"] - 1
        worse = f"  ({100 * loss:+.1f} %)" if row["seconds"] else ""
        table.add_row(
            row["way"], f"{row['bytes'] / 1e6:.1f}", f"{row['seconds']:.0f} s" if row["seconds"] else "",
            f"{row['perplexity']:.2f}{worse}", f"{row['bits_per_byte']:.4f}",
            f"{row['tokens_per_second']:,.0f} tokens/s",
        )  # fmt: skip
    kernels = sorted({kernel for weight in found["plans"]["weights"] for kernel in weight["kernels"].values()})
    yield f"{found['model']}: one block applied {found['loops']} times, {found['dtype']}, {found['threads']} threads"
    yield table
    yield f"[bold cyan]{escape(found['prompt'])}[/]{escape(found['continuation'])}"
    yield (
        f"[dim]decoding {found['decode_tokens_per_second']:,.0f} tokens/s · kernels {', '.join(kernels)} · peak memory "
        f"{(found['peak_bytes'] or 0) / 1e6:,.0f} MB[/]"
    )
    if found["saved"]:
        yield f"[dim]The GPTQ model is {escape(found['saved'])}; try: tinyloop explain {escape(found['saved'])}[/]"


def _scored(way: str, checkpoint: Checkpoint, seconds: float, crossing: bool = False) -> dict[str, Any]:
    """One row: size as a file, and the score of the bundled text."""
    with tempfile.TemporaryDirectory() as scratch:
        size = container.write(checkpoint, Path(scratch) / "model.tinyloop").stat().st_size
    model = Model(checkpoint, cross_iter_round=crossing)
    score(model, text()[:2000])  # compile and warm up
    found = score(model, text())
    return {
        "way": way, "bytes": size, "seconds": seconds, "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte, "tokens_per_second": found.tokens_per_second, "tokens": found.tokens,
    }  # fmt: skip


def _speak(model: Model) -> Generation:
    """A continuation, after one token that lets the kernels compile."""
    generate(model, PROMPT, Options(max_tokens=2)).finish()
    return generate(model, PROMPT, Options(max_tokens=80, sampling=SAMPLING)).finish()
