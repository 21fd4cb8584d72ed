"""A dense checkpoint → a quantised one, block by block, each calibrated on what the quantised blocks before it produce.

    tokens → embedding → x ─┬─ run a segment up to a stage, adding up H = Σ xᵀx of that stage's input
                            ├─ quantise the stage's weights with H            (attn_qkv; attn_out; gate and up; down)
                            └─ next stage, next layer; then run the finished segment once and go on with its x

the loop segment H is summed over every iteration, since one set of weights serves them all. Finished layers lie on
disk as they are made: a run that was killed goes on after the last, if settings, weights and text are the same.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fnmatch
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..checkpoint import Checkpoint
from ..config import ModelConfig, Segment
from ..errors import InputError
from ..interrupt import uninterrupted
from ..layers import Places
from ..model import Model
from ..ops import quant_gemm
from ..pack import PackedWeight, pack
from ..weight import DenseWeight, LinearWeight, QuantWeight
from .gptq import Quantized, QuantSpec, gptq, nearest
from .store import LayerReport, Store, digest

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


Progress = Callable[[int, int, str], None]  # weights done, weights in all, what was just done


def preflight(checkpoint: Checkpoint, settings: Settings) -> list[str]:
    """Names that will be quantised, in order. Raises InputError, before any work, for a weight that cannot be: already
    quantised, or with a group longer than its K; every offender is listed with the way out."""
    everything = list(order(checkpoint.config))
    for pattern, _ in settings.rules:
        if not fnmatch.filter(everything, pattern):
            raise InputError(f"rule {pattern!r} fits no weight; names are like {everything[0]}, {everything[-1]}")
    names = [name for name in everything if settings.of(name) is not None]
    channels = {spec.channel for name in names if (spec := settings.of(name)) and spec.channel}
    if channels and (checkpoint.config.loops or 1) == 1:
        raise InputError(f"channel={channels.pop()!r}, but this model applies every weight once; leave the channel out")
    if problems := [p for n in names if (p := _problem(n, checkpoint.outlines[n], _spec(checkpoint, settings, n)))]:
        raise InputError(
            f"{len(problems)} weights cannot be quantised: {'; '.join(problems[:8])}"
            f"{' …' if len(problems) > 8 else ''}; start from a dense checkpoint, choose another group (--group), or "
            "skip them (--rule 'NAME=skip')"
        )
    if not names:
        raise InputError("no weight is left to quantise; every name is skipped by a rule")
    return names


def _problem(name: str, w: LinearWeight, spec: QuantSpec) -> str | None:
    if isinstance(w, QuantWeight):
        return f"{name} is quantised already ({w.bits} bits)"
    if spec.group_size is not None and w.K < spec.group_size:
        return f"{name} has K={w.K} < group {spec.group_size}"
    return None


def order(config: ModelConfig) -> Iterator[str]:
    """Weights in the order in which they are quantised."""
    for i in range(config.num_layers):
        for stage in STAGES:
            yield from (f"layers.{i}.{name}" for name in stage)
    yield from (name for name in ("head", "embed") if name in config.linear_shapes())


def quantize_weights(
    checkpoint: Checkpoint, tokens: Tensor | None, settings: Settings, work: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Checkpoint, list[LayerReport]]:  # fmt: skip
    """Quantise by `settings`; tokens int64 [texts, length] are the calibration, None for method "nearest".

    `work` is a folder for finished layers, made if missing; a second call with the same arguments goes on from it, one
    with other arguments raises InputError. With it memory stays flat over layers: results are mapped from there.
    Raises InputError as `preflight` does.
    """
    names = preflight(checkpoint, settings)
    if settings.method == "nearest":
        return _with(checkpoint, _nearest(checkpoint, names, settings, progress)), []
    if tokens is None or tokens.dim() != 2 or not tokens.numel():
        raise InputError("method 'gptq' needs calibration tokens [texts, length]")
    store = Store(work, digest(checkpoint, tokens, settings) if work else "")
    run = _Run(checkpoint, tokens, settings, store, progress)
    for segment, first in _segments(checkpoint.config):
        run.segment(segment, first)
    run.heads()
    return _with(checkpoint, run.made), run.reports


def _nearest(
    checkpoint: Checkpoint, names: list[str], settings: Settings, progress: Progress | None
) -> dict[str, LinearWeight]:
    made: dict[str, LinearWeight] = {}
    for name in names:
        made[name] = nearest(_dense(checkpoint, name), _spec(checkpoint, settings, name), checkpoint.weights[name].bias)
        if progress:
            progress(len(made), len(names), name)
    return made


class _Run:
    """The state between stages: the model as quantised so far, and x of every calibration text."""

    def __init__(
        self, checkpoint: Checkpoint, tokens: Tensor, settings: Settings, store: Store, progress: Progress | None
    ):
        self.checkpoint, self.settings, self.store = checkpoint, settings, store
        self.total, self.progress = len(preflight(checkpoint, settings)), progress
        self.watched: dict[int, Tensor] = {}  # id of a packed weight → H of its inputs
        self.model = Model(checkpoint, linear=self._watch, budget=1 << 62, cross_iter_round=True)
        self.x = [self.model.embed(row[None]) for row in tokens]  # fp32 [1, T, D] each
        self.places = Places([0], tokens.shape[1])
        self.rope = self.model.rope(self.places.positions)
        self.made: dict[str, LinearWeight] = {}
        self.reports: list[LayerReport] = []

    @torch.inference_mode()
    def segment(self, segment: Segment, first: int) -> None:
        layers = range(first, first + segment.layers)
        for layer in layers:
            unit = f"layer-{layer:04d}"
            if not self._restore(unit):
                before = len(self.reports)
                for stage in range(len(STAGES)):
                    self._stage(layers, segment.repeats, layer, stage)
                self._save(unit, before)
        for i, x in enumerate(self.x):
            self.x[i] = self._through(x, layers, segment.repeats)
        for name in [n for n in self.model.weights if n.startswith(tuple(f"layers.{i}." for i in layers))]:
            del self.model.weights[name]  # with its dense copies: nothing reads this segment again
        _trim()

    @torch.inference_mode()
    def heads(self) -> None:
        """The head, or the embedding that serves as one, calibrated on final hidden states."""
        names = [n for n in ("head", "embed") if n in self.model.weights and self.settings.of(n)]
        if not names or self._restore("heads"):
            return
        before = len(self.reports)
        reads = "embed" if self.checkpoint.config.tie_word_embeddings else "head"
        for name in names:
            K = self.checkpoint.outlines[name].K
            H = torch.zeros(K, K, dtype=torch.float32) if name == reads else torch.eye(K, dtype=torch.float32)
            for x in self.x if name == reads else ():
                add_outer(H, self.model._norm(x.clone(), None, "final_norm")[0])
            self._quantise([name], H)
        self._save("heads", before)

    def _stage(self, layers: range, repeats: int, layer: int, stage: int) -> None:
        """Record what stage `stage` of `layer` is given in every iteration, then quantise its weights."""
        names = [f"layers.{layer}.{n}" for n in STAGES[stage] if self.settings.of(f"layers.{layer}.{n}")]
        if not names:
            return
        K = self.checkpoint.outlines[names[0]].K
        H = self.watched[id(self.model.weights[names[0]])] = torch.zeros(K, K, dtype=torch.float32)
        for x in self.x:
            self._through(x, layers, repeats, until=(layer, stage))
        self.watched.clear()
        self._quantise(names, H)

    def _through(
        self, x: Tensor, layers: range, repeats: int, until: tuple[int, int] | None = None
    ) -> Tensor:  # fp32 [1, T, D]
        """x after `repeats` passes over `layers`; with `until`, stops in the last pass once that stage was run."""
        x = x.clone()
        with uninterrupted():  # compiled steps run on a team of threads
            for iteration in range(repeats):
                for layer in layers:
                    last = until is not None and iteration == repeats - 1 and layer == until[0]
                    stage = until[1] if last and until else len(STAGES)
                    self._block(x, layer, stage, iteration)
                    if last:
                        return x
        return x

    def _block(self, x: Tensor, layer: int, stage: int, iteration: int) -> None:
        """One block on x, in place, up to the products of `stage`; beyond the last stage, all of it."""
        m, at = self.model, f"layers.{layer}"
        h = m._norm(x, None, f"{at}.attn_norm")
        qkv = m._apply(h, f"{at}.attn_qkv", iteration)
        if stage == 0:
            return
        h = m._ops.attention(qkv, m._attention[layer], self.rope, self.places, None)
        y = m._apply(h, f"{at}.attn_out", iteration)
        if stage == 1:
            return
        h = m._norm(x, y, f"{at}.mlp_norm")
        gate = m._apply(h, f"{at}.mlp_gate", iteration)
        if stage == 2 and self.settings.of(f"{at}.mlp_gate"):
            return
        up = m._apply(h, f"{at}.mlp_up", iteration)
        if stage > 2:
            x += m._apply(m._ops.swiglu(gate, up), f"{at}.mlp_down", iteration)

    def _watch(self, x: Tensor, w: PackedWeight) -> Tensor:
        H = self.watched.get(id(w))
        if H is not None:
            add_outer(H, x.reshape(-1, x.shape[-1]))
        return quant_gemm(x, w)

    def _quantise(self, names: list[str], H: Tensor) -> None:
        for name in names:
            W, spec = _dense(self.checkpoint, name), _spec(self.checkpoint, self.settings, name)
            done: Quantized = gptq(W, H, spec, self.checkpoint.weights[name].bias)
            W = W.float()
            energy = float((W * (H @ W)).sum(dtype=torch.float64))
            relative = done.loss / energy if energy else 0.0
            finite = relative if math.isfinite(relative) else None
            self._place(LayerReport(name, finite, done.note), done.weight)

    def _place(self, report: LayerReport, w: LinearWeight) -> None:
        self.made[report.name] = w
        self.model.weights[report.name] = packed = pack(w, keep_dense=True)
        packed.keep_roundings = self.checkpoint.config.loops or 0
        self.reports.append(report)
        if self.progress:
            loss = "loss unknown" if report.relative_loss is None else f"loss {report.relative_loss:.2e}"
            self.progress(len(self.made), self.total, f"{report.name} {loss}")

    def _save(self, unit: str, first: int) -> None:
        """Keep what was made since report `first`, and hold the mapped copy from now on."""
        new = self.reports[first:]
        for name, w in self.store.save(unit, new, {r.name: self.made[r.name] for r in new}).items():
            self.made[name] = w

    def _restore(self, unit: str) -> bool:
        found = self.store.load(unit)
        for report, w in found or ():
            self._place(report, w)
        return found is not None


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps it, 100 MB after scoring a model of 24 M weights, and what it
    keeps grows by fits and starts from layer to layer."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def add_outer(H: Tensor, x: Tensor) -> None:
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


def _dense(checkpoint: Checkpoint, name: str) -> Tensor:  # [K, N], a dense weight's dtype, which its scales may follow
    w = checkpoint.weights[name]
    return w.dequantize(w.weight.dtype) if isinstance(w, DenseWeight) else w.dequantize()


def _spec(checkpoint: Checkpoint, settings: Settings, name: str) -> QuantSpec:
    """What is done with `name`: a channel only where there are iterations that could use it."""
    spec = settings.of(name)
    assert spec is not None
    return spec if checkpoint.config.in_loop(name) else dataclasses.replace(spec, channel=None)


def _with(checkpoint: Checkpoint, new: Mapping[str, LinearWeight]) -> Checkpoint:
    return dataclasses.replace(checkpoint, weights={**checkpoint.weights, **new})
