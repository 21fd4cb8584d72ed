"""A dense checkpoint → a quantised one, block by block, each calibrated on what the quantised blocks before it produce.

    tokens → embedding → x ─┬─ run a segment up to a stage, adding up H = Σ xᵀx of that stage's input
                            ├─ quantise the stage's weights with H            (attn_qkv; attn_out; gate and up; down)
                            └─ next stage, next layer; then run the finished segment once and go on with its x

the loop segment H is summed over every iteration, since one set of weights serves them all. Finished layers lie on
disk as they are made: a run that was killed goes on after the last, if settings, weights and text are the same.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..config import ModelConfig, Segment
from ..errors import InputError
from ..model import Model
from ..ops import quant_gemm
from ..pack import PackedWeight, pack
from ..weight import DenseWeight, LinearWeight, QuantWeight
from .gptq import Quantized, QuantSpec, gptq, nearest

Tensor = torch.Tensor
STAGES = (("attn_qkv",), ("attn_out",), ("mlp_gate", "mlp_up"), ("mlp_down",))


@dataclass(frozen=True)
class Settings:
    """What to do with each weight. `rules` are (glob, spec) pairs, the first that fits a name decides; a spec of None
    keeps the weight dense. Names without a rule get `spec`, except the embedding and the head, which stay as they are.
    """

    spec: QuantSpec = field(default_factory=QuantSpec)
    method: str = "gptq"  # or "nearest"
    rules: tuple[tuple[str, QuantSpec | None], ...] = ()

    def __post_init__(self) -> None:
        if self.method not in ("gptq", "nearest"):
            raise InputError(f"method={self.method!r} is none of 'gptq', 'nearest'")

    def of(self, name: str) -> QuantSpec | None:
        for pattern, spec in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                return spec
        return None if name in ("embed", "head") else self.spec


@dataclass(frozen=True)
class LayerReport:
    """One quantised weight: its name, GPTQ's loss relative to the output's energy tr(WᵀHW), and a note or None."""

    name: str
    relative_loss: float
    note: str | None


Progress = Callable[[int, int, str], None]  # weights done, weights in all, what was just done


def preflight(checkpoint: Checkpoint, settings: Settings) -> list[str]:
    """Names that will be quantised, in order. Raises InputError, before any work, for a weight that cannot be: already
    quantised, or with a group longer than its K; every offender is listed with the way out."""
    names, problems = [], []
    for name in order(checkpoint.config):
        spec, w = settings.of(name), checkpoint.weights[name]
        if spec is None:
            continue
        if isinstance(w, QuantWeight):
            problems.append(f"{name} has {w.bits}-bit codes already")
        elif spec.group_size is not None and w.K < spec.group_size:
            problems.append(f"{name} has K={w.K} < group {spec.group_size}")
        names.append(name)
    if problems:
        raise InputError(
            f"{len(problems)} weights cannot be quantised: {'; '.join(problems[:5])}"
            f"{' …' if len(problems) > 5 else ''}; start from a dense checkpoint, choose another group, or skip them"
        )
    if not names:
        raise InputError("no weight is left to quantise; every name is skipped by a rule")
    return names


def order(config: ModelConfig) -> Iterator[str]:
    """Weights in the order in which they are quantised."""
    for i in range(config.num_layers):
        for stage in STAGES:
            yield from (f"layers.{i}.{name}" for name in stage)
    yield from (name for name in ("head", "embed") if name in config.linear_shapes())


def quantize(
    checkpoint: Checkpoint, tokens: Tensor | None, settings: Settings, work: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Checkpoint, list[LayerReport]]:  # fmt: skip
    """Quantise by `settings`; tokens int64 [texts, length] are the calibration, None for method "nearest".

    `work` is a folder for finished layers, made if missing; a second call with the same arguments goes on from it, one
    with other arguments raises InputError. Raises InputError as `preflight` does.
    """
    names = preflight(checkpoint, settings)
    if settings.method == "nearest":
        new = {n: nearest(_dense(checkpoint, n), _spec(settings, n), checkpoint.weights[n].bias) for n in names}
        return _with(checkpoint, new), []
    if tokens is None or tokens.dim() != 2 or not tokens.numel():
        raise InputError("method 'gptq' needs calibration tokens [texts, length]")
    run = _Run(checkpoint, tokens, settings, _Store(work, checkpoint, tokens, settings), len(names), progress)
    for segment, first in _segments(checkpoint.config):
        run.segment(segment, first)
    run.heads()
    return _with(checkpoint, run.made), run.reports


class _Run:
    """The state between stages: the model as quantised so far, and x of every calibration text."""

    def __init__(
        self, checkpoint: Checkpoint, tokens: Tensor, settings: Settings, store: _Store, total: int,
        progress: Progress | None,
    ):  # fmt: skip
        self.checkpoint, self.settings, self.store = checkpoint, settings, store
        self.total, self.progress = total, progress
        self.watched: dict[int, Tensor] = {}  # id of a packed weight → H of its inputs
        self.model = Model(checkpoint, linear=self._watch, budget=1 << 62)
        self.x = [self.model.embed(row[None]) for row in tokens]  # fp32 [1, T, D] each
        positions = torch.arange(tokens.shape[1])[None]
        self.rope, self.positions = self.model.rope(positions), positions
        self.made: dict[str, LinearWeight] = {}
        self.reports: list[LayerReport] = []

    @torch.inference_mode()
    def segment(self, segment: Segment, first: int) -> None:
        layers = range(first, first + segment.layers)
        for layer in layers:
            if not self._restore(layer):
                for stage in range(len(STAGES)):
                    self._stage(layers, segment.repeats, layer, stage)
                self.store.save(layer, self.made, self.reports)
        for i, x in enumerate(self.x):
            self.x[i] = self._through(x, layers, segment.repeats)

    def heads(self) -> None:
        """The head, or the embedding that serves as one, calibrated on final hidden states."""
        names = [n for n in ("head", "embed") if n in self.model.weights and self.settings.of(n)]
        reads = "embed" if self.checkpoint.config.tie_word_embeddings else "head"
        for name in names:
            K = self.checkpoint.weights[name].K
            if name == reads:
                H = torch.zeros(K, K)
                for x in self.x:
                    _add_outer(H, self.model._norm(x.clone(), None, "final_norm")[0])
            else:
                H = torch.eye(K)
            self._quantise([name], H)

    def _stage(self, layers: range, repeats: int, layer: int, stage: int) -> None:
        """Record what stage `stage` of `layer` is given in every iteration, then quantise its weights."""
        names = [f"layers.{layer}.{n}" for n in STAGES[stage] if self.settings.of(f"layers.{layer}.{n}")]
        if not names:
            return
        K = self.checkpoint.weights[names[0]].K
        H = self.watched[id(self.model.weights[names[0]])] = torch.zeros(K, K)
        for x in self.x:
            self._through(x, layers, repeats, until=(layer, stage))
        self.watched.clear()
        self._quantise(names, H)

    def _through(
        self, x: Tensor, layers: range, repeats: int, until: tuple[int, int] | None = None
    ) -> Tensor:  # fp32 [1, T, D]
        """x after `repeats` passes over `layers`; with `until`, stops in the last pass once that stage was run."""
        m, x = self.model, x.clone()
        for iteration in range(repeats):
            for layer in layers:
                last = until is not None and iteration == repeats - 1 and layer == until[0]
                stage = until[1] if last and until else len(STAGES)
                h = m._norm(x, None, f"layers.{layer}.attn_norm")
                qkv = m._apply(h, f"layers.{layer}.attn_qkv")
                if stage == 0:
                    return x
                h = m._ops.attention(qkv, m._attention[layer], self.rope, self.positions, None)
                y = m._apply(h, f"layers.{layer}.attn_out")
                if stage == 1:
                    return x
                h = m._norm(x, y, f"layers.{layer}.mlp_norm")
                gate = m._apply(h, f"layers.{layer}.mlp_gate")
                if stage == 2:
                    return x
                h = m._ops.swiglu(gate, m._apply(h, f"layers.{layer}.mlp_up"))
                x += m._apply(h, f"layers.{layer}.mlp_down")
        return x

    def _watch(self, x: Tensor, w: PackedWeight) -> Tensor:
        H = self.watched.get(id(w))
        if H is not None:
            _add_outer(H, x.reshape(-1, x.shape[-1]))
        return quant_gemm(x, w)

    def _quantise(self, names: list[str], H: Tensor) -> None:
        for name in names:
            W = _dense(self.checkpoint, name)
            done: Quantized = gptq(W, H, _spec(self.settings, name), self.checkpoint.weights[name].bias)
            energy = float((W * (H @ W)).sum(dtype=torch.float64))
            self._place(name, done.weight, LayerReport(name, done.loss / energy if energy else 0.0, done.note))

    def _place(self, name: str, w: LinearWeight, report: LayerReport) -> None:
        self.made[name] = w
        self.model.weights[name] = pack(w, keep_dense=True)
        self.reports.append(report)
        if self.progress:
            self.progress(len(self.made), self.total, f"{name}  loss {report.relative_loss:.2e}")

    def _restore(self, layer: int) -> bool:
        found = self.store.load(layer)
        for report, w in found or ():
            self._place(report.name, w, report)
        return found is not None


def _add_outer(H: Tensor, x: Tensor) -> None:
    """H += xᵀx, by block columns of the lower triangle's mirror: a third less work than the whole."""
    x = x.float()
    K = H.shape[0]
    step = max(256, -(-K // 4))
    for k in range(0, K, step):
        end = min(K, k + step)
        part = x[:, k:end].t() @ x[:, k:]
        H[k:end, k:] += part
        if end < K:
            H[end:, k:end] += part[:, end - k :].t()


def _segments(config: ModelConfig) -> Iterator[tuple[Segment, int]]:
    """Units to calibrate, with their first layer: a repeated segment as a whole, others layer by layer."""
    first = 0
    for segment in config.segments:
        if segment.repeats > 1:
            yield segment, first
        else:
            for i in range(segment.layers):
                yield dataclasses.replace(segment, layers=1), first + i
        first += segment.layers


def _dense(checkpoint: Checkpoint, name: str) -> Tensor:  # fp32 [K, N]
    return checkpoint.weights[name].dequantize()


def _spec(settings: Settings, name: str) -> QuantSpec:
    spec = settings.of(name)
    assert spec is not None
    return spec


def _with(checkpoint: Checkpoint, new: Mapping[str, LinearWeight]) -> Checkpoint:
    return dataclasses.replace(checkpoint, weights={**checkpoint.weights, **new})


class _Store:
    """Finished layers in a folder, one file each, valid only for the arguments whose digest lies beside them."""

    def __init__(self, folder: Path | None, checkpoint: Checkpoint, tokens: Tensor, settings: Settings):
        self.folder = folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        digest = _digest(checkpoint, tokens, settings)
        mark = folder / "run.json"
        if mark.exists() and json.loads(mark.read_text())["digest"] != digest:
            raise InputError(
                f"{folder} holds layers of a run with other settings, weights or calibration text; "
                "give another folder, or delete this one"
            )
        mark.write_text(json.dumps({"digest": digest, "begun": time.strftime("%Y-%m-%d %H:%M:%S")}))

    def save(self, layer: int, made: dict[str, LinearWeight], reports: list[LayerReport]) -> None:
        if self.folder is None:
            return
        mine = [r for r in reports if r.name.startswith(f"layers.{layer}.")]
        target = self.folder / f"layer-{layer:04d}.pt"
        partial = target.with_suffix(".partial")
        torch.save([(dataclasses.asdict(r), vars(made[r.name])) for r in mine], partial)
        os.replace(partial, target)
        with (self.folder / "log.jsonl").open("a") as log:
            log.writelines(json.dumps(dataclasses.asdict(r)) + "\n" for r in mine)

    def load(self, layer: int) -> list[tuple[LayerReport, LinearWeight]] | None:
        if self.folder is None or not (path := self.folder / f"layer-{layer:04d}.pt").exists():
            return None
        rows: list[tuple[dict[str, Any], dict[str, Any]]] = torch.load(path, weights_only=True)
        return [(LayerReport(**report), QuantWeight(**w)) for report, w in rows]


def _digest(checkpoint: Checkpoint, tokens: Tensor, settings: Settings) -> str:
    h = hashlib.sha256(json.dumps([checkpoint.config.to_dict(), dataclasses.asdict(settings)]).encode())
    h.update(tokens.contiguous().numpy().tobytes())
    for name in sorted(checkpoint.weights):
        w = checkpoint.weights[name]
        data = w.weight if isinstance(w, DenseWeight) else w.packed
        h.update(f"{name} {list(data.shape)} {data.dtype}".encode())
        h.update(data[:: max(1, data.shape[0] // 16)].contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
