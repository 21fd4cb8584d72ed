"""A checkpoint at a path → a quantised file, with the checks before and after: what `tinyloop quantize` calls.

    everything that can be refused is refused → perplexity of the source on held-back text → quantise
        → perplexity of the result → the gate → the file

The gate refuses a result that is NaN or twice as perplexed as its source. Then, as after any error or kill, finished
layers stay in the work folder, and nothing is under the destination.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import container
from ..checkpoint import Checkpoint
from ..errors import InputError, NumericalError
from ..importers import import_model
from ..model import Model
from ..score import Protocol, score
from .calibration import Calibration, Samples, sample
from .gptq import QuantSpec
from .pipeline import Progress, Settings, preflight, quantize_weights
from .store import LayerReport

WORST = 2.0  # times the source's perplexity


@dataclass(frozen=True)
class Output:
    """Where a run keeps what it makes. `work` holds finished layers, None for the destination's name + ".work", or
    memory where there is no destination; it is removed after success unless `keep_work`."""

    overwrite: bool = False
    work: str | os.PathLike[str] | None = None
    keep_work: bool = False


@dataclass(frozen=True)
class Report:
    """What quantising did. Perplexities are those of `held_tokens` tokens of `held_text`, held back from calibration.

    `bytes` are those of weights and norms; `bits_per_weight` counts the quantised weights alone.
    """

    perplexity_before: float
    perplexity_after: float
    held_text: str
    held_tokens: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float
    layers: tuple[LayerReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Result:
    """The quantised model, mapped from the destination where there is one, and the report."""

    checkpoint: Checkpoint
    report: Report


def quantize(
    source: Checkpoint | str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    settings: Settings | None = None,
    calibration: Calibration | None = None,
    output: Output | None = None,
    progress: Progress | None = None,
) -> Result:
    """Quantise a dense checkpoint: a `Checkpoint`, a Hugging Face folder, a .gguf file or a dense .tinyloop file.

    A second call after a kill, an error or Ctrl-C goes on after the last finished layer. Raises InputError before any
    work for whatever can be known before it, NumericalError where the result is NaN or more than twice as bad as the
    source.
    """
    started = time.perf_counter()
    settings, calibration, output = settings or Settings(), calibration or Calibration(), output or Output()
    target = None if destination is None else Path(destination)
    _check_target(target, output)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    names = preflight(checkpoint, settings)
    work = _work(target, output)
    samples = sample(Model(checkpoint), calibration)
    before = _perplexity(checkpoint, samples, "the source")
    tokens = samples.windows if settings.method == "gptq" else None
    made, layers = quantize_weights(checkpoint, tokens, settings, work, progress)
    after = _gated(made, samples, before, work)
    origin = {**checkpoint.source, "quantised": describe(settings, calibration, samples)}
    made = dataclasses.replace(made, source=origin)
    if target is not None:
        made = container.read(container.write(made, target, output.overwrite), verify=False)
    if work is not None and not output.keep_work:
        shutil.rmtree(work, ignore_errors=True)
    report = Report(
        before, after, calibration.name, len(samples.held), checkpoint.nbytes, made.nbytes,
        _bits(made, names), time.perf_counter() - started, tuple(layers),
    )  # fmt: skip
    return Result(made, report)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The model at `path`, of whatever format is read."""
    path = Path(path)
    if path.is_file():
        with path.open("rb") as f:
            if f.read(4) != b"GGUF":
                return container.read(path)
    return import_model(path)


def describe(settings: Settings, calibration: Calibration, samples: Samples) -> str:
    """The run in a line, for the file's record of its source."""
    rules = [f"{pattern}={'skip' if spec is None else _group(spec)}" for pattern, spec in settings.rules]
    spec = settings.spec
    parts = [settings.method, f"group {_group(spec)}", f"{'integer' if spec.integer_zero else 'float'} zero", *rules]
    parts += [] if spec.channel is None else [spec.channel]
    parts += [name for name, on in (("no clip", not spec.clip), ("no order", not spec.order)) if on]
    parts += [] if spec.channel is None else [f"channel {spec.channel}"]
    if settings.method == "gptq":
        parts.append(f"{calibration.texts} windows of {samples.length} tokens of {calibration.name}")
    return ", ".join(parts)


def _group(spec: QuantSpec) -> str:
    return "K" if spec.group_size is None else str(spec.group_size)


def _check_target(target: Path | None, output: Output) -> None:
    if target is None:
        return
    if target.exists() and not output.overwrite:
        raise InputError(f"{target} exists; give another name, or allow overwriting (--force)")
    if target.is_dir() or not target.parent.is_dir():
        wrong = target if target.is_dir() else target.parent
        raise InputError(
            f"{wrong} is {'a folder' if target.is_dir() else 'no folder'}; give the path of a file to write"
        )


def _work(target: Path | None, output: Output) -> Path | None:
    if output.work is not None:
        return Path(output.work)
    return None if target is None else target.with_name(target.name + ".work")


def _perplexity(checkpoint: Checkpoint, samples: Samples, what: str) -> float:
    """Perplexity of the held-back text; a channel, where there is one, counts as it is meant to be run."""
    try:
        return score(Model(checkpoint, cross_iter_round=True), samples.held, Protocol(window=samples.length)).perplexity
    except NumericalError as error:
        raise NumericalError(f"{what} has no perplexity on the held-back text: {error}") from error


def _gated(made: Checkpoint, samples: Samples, before: float, work: Path | None) -> float:
    """The result's perplexity. Raises NumericalError where it is NaN or beyond the limit."""
    kept = "" if work is None else f"; nothing was written, the layers and their losses are kept in {work}"
    try:
        after = _perplexity(made, samples, "the result")
    except NumericalError as error:
        raise NumericalError(f"{error}{kept}") from error
    if not after <= WORST * before:
        raise NumericalError(
            f"the result has perplexity {after:.4g}, the source {before:.4g}, on {len(samples.held)} held-back tokens: "
            f"more than {WORST:g} times worse is refused{kept}; try a smaller group (--group), or calibrate on text "
            "like that which the model will read (--calibration)"
        )
    return after


def _bits(made: Checkpoint, names: list[str]) -> float:
    weights = [made.weights[name] for name in names]
    return 8 * sum(w.nbytes for w in weights) / sum(w.K * w.N for w in weights)
