"""Which kernel runs for each weight at each number of rows, which were refused, and why: the dispatcher's plans, shown.

In: a model, a `.tinyloop` file, or one `Problem`. Out: an `Explanation`, values that print as a table. Nothing is
computed; a file is mapped, not read. What `set_marlin_dispatch("require")` would refuse is shown like the rest.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .dispatch import Plan, Problem, plan
from .ops import problem

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from .model import Model

ROWS = (1, 4, 16, 128, 1024)


@dataclass(frozen=True)
class WeightPlans:
    """Weights that agree in shape and plans: `name` stands for `count` of them."""

    name: str
    count: int
    K: int
    N: int
    G: int
    bits: int
    plans: tuple[Plan, ...]  # one per entry of Explanation.rows
    channel: str | None = None  # for cross-iteration rounding


@dataclass(frozen=True)
class Explanation:
    """`decode` says how a token is decoded: fused, or why not; None where only a problem was asked about."""

    dtype: str
    rows: tuple[int, ...]
    weights: tuple[WeightPlans, ...]
    decode: str | None = None

    def refusals(self) -> list[dict[str, Any]]:
        """Every refusal once: kernel, reason, the rows and the weights that it holds for."""
        found: dict[tuple[str, str], tuple[dict[int, None], dict[str, None]]] = {}
        for w in self.weights:
            for M, p in zip(self.rows, w.plans, strict=True):
                for kernel, reason in p.refused:
                    general = re.sub(rf"^M={M}\b", "M", reason)  # the rows are listed beside it
                    rows, names = found.setdefault((kernel, general), ({}, {}))
                    rows[M], names[w.name] = None, None
        return [
            {"kernel": kernel, "reason": reason, "rows": list(rows), "weights": list(names)}
            for (kernel, reason), (rows, names) in found.items()
        ]

    def configs(self) -> dict[tuple[str, str], list[int]]:
        """Tile and pipeline of each kernel that has a choice of them, and for which rows."""
        found: dict[tuple[str, str], dict[int, None]] = {}
        for w in self.weights:
            for M, p in zip(self.rows, w.plans, strict=True):
                if p.config:
                    found.setdefault((p.kernel, p.config), {})[M] = None
        return {key: list(rows) for key, rows in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        weights = [
            {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if f.name != "plans"}
            | {"kernels": {str(M): p.kernel for M, p in zip(self.rows, w.plans, strict=True)}}
            | {"configs": {str(M): p.config for M, p in zip(self.rows, w.plans, strict=True) if p.config}}
            for w in self.weights
        ]
        return {"dtype": self.dtype, "decode": self.decode, "weights": weights, "refused": self.refusals()}

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape
        from rich.table import Table

        table = Table("weight", "K", "N", "G", "bits", *(f"M={M}" for M in self.rows))
        for w in self.weights:
            name = f"{w.name} ×{w.count}" if w.count > 1 else w.name
            bits = f"{w.bits} + {w.channel}" if w.channel else str(w.bits)
            numbers = (*map(str, (w.K, w.N, w.G)), bits)
            table.add_row(escape(name), *numbers, *(p.kernel for p in w.plans))
        yield table
        yield f"Activations: {self.dtype}."
        if self.decode is not None:
            yield f"Decode step: {escape(self.decode)}."
        kernels = {p.kernel: p.why for w in self.weights for p in w.plans}
        yield from (f"[bold]{name}[/]: {escape(why)}" for name, why in kernels.items())
        for (kernel, config), configured in self.configs().items():
            yield f"[dim]{kernel} takes {escape(config)} (M = {', '.join(map(str, configured))})[/]"
        for r in self.refusals():
            rows = ", ".join(map(str, r["rows"]))
            names = "all weights" if len(r["weights"]) == len(self.weights) else ", ".join(r["weights"])
            yield f"[dim]not {r['kernel']}[/]: {escape(r['reason'])} [dim](M = {rows}; {escape(names)})[/]"


def explain(subject: Model | Problem | str | os.PathLike[str], rows: tuple[int, ...] = ROWS) -> Explanation:
    """The plans of every product in a model or a `.tinyloop` file for each number of rows, or of one problem."""
    if isinstance(subject, Problem):
        p = dataclasses.replace(subject, require=False)
        one = WeightPlans("problem", 1, p.K, p.N, p.G, p.bits, (plan(p),), p.channel)
        return Explanation(_name(subject.dtype), (subject.M,), (one,))
    if isinstance(subject, str | os.PathLike):
        from .loading import load

        subject = load(subject, verify=False)
    refusal = subject.fused_refusal()
    decode = "fused, all blocks in one compiled call" if refusal is None else f"one product after another: {refusal}"
    return Explanation(_name(subject.dtype), rows, _grouped(subject, rows), decode)


def _grouped(model: Model, rows: tuple[int, ...]) -> tuple[WeightPlans, ...]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in model.weights:
        if name == "embed" and not model.config.tie_word_embeddings:
            continue  # its rows are looked up, never multiplied
        w = model.weight(name, 0 if (model.config.loops or 1) > 1 else None)
        problems = [dataclasses.replace(problem(w, M, model.dtype), require=False) for M in rows]
        p, plans = problems[0] if problems else problem(w, 1, model.dtype), tuple(map(plan, problems))
        groups.setdefault((_pattern(name), p.K, p.N, p.G, p.bits, plans, p.channel), []).append(name)
    patterns = [key[0] for key in groups]
    return tuple(
        WeightPlans(key[0] if patterns.count(key[0]) == 1 else f"{names[0]} …", len(names), *key[1:])
        for key, names in groups.items()
    )


def _pattern(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
