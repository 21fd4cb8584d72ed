"""Any `transformers` model → 4 bits, in place: by rounding, or by GPTQ block by block on calibration tokens.

    tokens → embedding → x ─┬─ run a block, adding up H = Σ xᵀx of an input that linears share   (q, k, v; o; gate, up)
                            ├─ quantise those linears with H, and go on to the block's next input
                            └─ run the finished block once and go on with its x

Nothing is known of the architecture but that its blocks stand in a list and hand x from one to the next, which is
checked. What a block is given beside x (masks, angles), which linears share an input, and in which order they run is
seen in a first pass.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .errors import InputError, UnsupportedError
from .hf import ends, quantised_module, replace, tied, untie
from .hf_choice import Rules, check_tokens, inputs, wanted_modules
from .hf_saving import attach, is_transposed
from .interrupt import uninterrupted
from .linear import Canonical
from .quantize.calibration import Calibration, spread
from .quantize.gptq import QuantSpec, gptq, nearest
from .quantize.pipeline import add_outer
from .quantize.store import LayerReport
from .score import WINDOW

Tensor = torch.Tensor
Progress = Callable[[int, int, str], None]  # modules done, modules in all, what was just done
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
)  # fmt: skip
STAGES = 8  # a block whose linears have more inputs than this (experts, say) is calibrated in one pass


def quantize_(
    hf_model: nn.Module,
    spec: QuantSpec | None = None,
    calibration: Tensor | None = None,  # int64 [texts, length]; None: rounding to nearest
    *,
    rules: Rules = (),
    progress: Progress | None = None,
) -> list[LayerReport]:
    """Quantise every `nn.Linear` and `Conv1D` but the head by `spec`, and say what came of each.

    `rules` are (glob over module names, spec) pairs, the first that fits decides; a spec of None keeps a module dense.
    The head and the embedding stay dense without a rule of their own; one that is tied to the other is untied first.
    A layer under several names is one layer still. A subclass with a forward of its own stays dense, with a line in the
    log. Hooks on a layer, and its mode, pass to the one in its place. `calibration_tokens` makes tokens of a text.

    Raises InputError, before anything is changed, for a rule that fits nothing, a group longer than its K, weights that
    are not finite or tokens of a wrong kind, UnsupportedError where the blocks do not follow one another. After any
    error, and after Ctrl-C, the model is as it was: dense layers are kept until all are done.
    """
    wanted = wanted_modules(hf_model, spec, rules)
    check_tokens(calibration, hf_model)
    run = _Run(hf_model, wanted, progress)
    with run.undone_by_errors():
        if calibration is not None:
            run.blocks(calibration)
        run.rest()
    with uninterrupted():
        if any(name in ends(hf_model) for name in wanted):
            untie(hf_model)
        attach(hf_model)
    return run.reports


def calibration_tokens(tokenizer: Any, calibration: Calibration | None = None) -> Tensor:  # int64 [texts, length]
    """Windows spread over a text, in the tokens of a `transformers` tokenizer, each after its bos if it has one.

    Raises InputError for a text that is not there or too short.
    """
    calibration = calibration or Calibration()
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = tokenizer(calibration.text(), add_special_tokens=False, verbose=False)["input_ids"]
    texts, new = calibration.texts, (calibration.length or WINDOW) - len(begin)
    if not 1 <= texts * new <= len(ids):
        raise InputError(
            f"{calibration.name} has {len(ids)} tokens; {texts} windows of {new} need {texts * new}: give a longer "
            "text, or fewer or shorter windows"
        )
    return spread(ids, begin, texts, new)


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass
class _Block:
    """A block as the first pass saw it: arguments beside x, and its linears in groups that share their input."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)

    def run(self, x: Tensor) -> Tensor:
        y = self.module(x, *self.args, **self.kwargs)
        hidden: Tensor = y[0] if isinstance(y, tuple) else y
        return hidden


class _Run:
    """One call of `quantize_`: modules still to do, and reports of those that are done."""

    def __init__(self, model: nn.Module, wanted: dict[str, QuantSpec], progress: Progress | None):
        self.model, self.wanted, self.progress = model, wanted, progress
        self.names = {id(m): name for name, m in model.named_modules()}
        self.tied = tied(model)
        self.reports: list[LayerReport] = []
        self.replaced: dict[str, nn.Module] = {}

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Modules are in the mode in which they were, and where the block raises, the old ones in their places."""
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            yield
        except BaseException:
            for name, old in self.replaced.items():
                replace(self.model, name, old)
            raise
        finally:
            for m, training in modes:
                m.training = training
            for name, old in self.replaced.items():
                self.model.get_submodule(name).training = old.training

    @torch.no_grad()
    def blocks(self, tokens: Tensor) -> None:
        """GPTQ for all that stands in blocks, then for the head."""
        self.model.eval()
        seen, x = self._first_pass(tokens)
        for block in seen:
            for groups in self._stages(block):
                moments = self._moments(groups, [functools.partial(block.run, h) for h in x])
                for group in groups:
                    for name in group:
                        self._gptq(name, moments[group[0]])
            x = [block.run(h) for h in x]
        head = ends(self.model)[1]
        if head in self.wanted:
            texts = [functools.partial(self._forward, row) for row in tokens]
            self._gptq(head, self._moments([[head]], texts)[head])

    def rest(self) -> None:
        """Rounding for what is left. A head that was the embedding, and is treated alike, stays the same weight."""
        embedding, head = ends(self.model)
        for name, spec in self.wanted.items():
            old = self.model.get_submodule(name)
            if isinstance(old, Canonical):
                continue
            table = self.model.get_submodule(embedding) if name == head and self.tied and embedding else None
            if isinstance(table, Canonical) and spec == self.wanted.get(str(embedding)):
                self._place(name, table.quant_weight, None, None)
            else:
                self._place(name, nearest(_matrix(old), spec, _bias(old)), None, None)

    def _first_pass(self, tokens: Tensor) -> tuple[list[_Block], list[Tensor]]:
        """Blocks, and the first one's x for each text."""
        listed = _block_list(self.model, self.wanted)
        seen = [_Block(m) for m in listed]
        firsts: list[Tensor] = []
        with _hooks() as hook:
            last: list[Tensor] = []
            for i, block in enumerate(seen):
                hook(block.module, self._note_arguments(block, firsts, last, first=i == 0), True)
                hook(block.module, lambda m, args, y: last.append(y[0] if isinstance(y, tuple) else y), False)
                self._note_groups(block, hook)
            self._forward(tokens[0])
        with _hooks() as hook:

            def stop(m: nn.Module, args: Any, kwargs: Any) -> None:
                firsts.append(args[0] if args else kwargs["hidden_states"])
                raise _Stop

            hook(seen[0].module, stop, True)
            for row in tokens[1:]:
                _until_stopped(functools.partial(self._forward, row))
        return seen, firsts

    def _forward(self, row: Tensor) -> None:
        self.model(row[None].to(next(self.model.parameters()).device), use_cache=False)

    def _note_arguments(
        self, block: _Block, firsts: list[Tensor], last: list[Tensor], first: bool
    ) -> Callable[..., None]:
        def note(m: nn.Module, args: Any, kwargs: Any) -> None:
            block.kwargs = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            x, block.args = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
            if first:
                firsts.append(x)
            elif x is not last[-1] and not torch.equal(x, last[-1]):
                raise UnsupportedError(
                    f"{self.names[id(m)]} does not take what the block before it gives, so blocks cannot be calibrated "
                    "one after another; quantise without calibration tokens"
                )

        return note

    def _note_groups(self, block: _Block, hook: Callable[..., None]) -> None:
        last: list[weakref.ref[Tensor]] = []

        def note(m: nn.Module, args: Any, kwargs: Any) -> None:
            x, name = args[0], self.names[id(m)]
            if last and last[-1]() is x:
                block.groups[-1].append(name)
            elif not any(name in group for group in block.groups):
                block.groups.append([name])
            last.append(weakref.ref(x))

        for m in block.module.modules():
            if self.names[id(m)] in self.wanted:
                hook(m, note, True)

    def _stages(self, block: _Block) -> Iterator[list[list[str]]]:
        """Groups to calibrate together: one after another, or all at once where there are many."""
        if len(block.groups) > STAGES:
            yield block.groups
        else:
            yield from ([group] for group in block.groups)

    def _moments(self, groups: list[list[str]], passes: Sequence[Callable[[], Any]]) -> dict[str, Tensor]:
        """H of each group's input, summed over `passes`, which are cut short where one group is asked for."""
        moments: dict[str, Tensor] = {}
        with _hooks() as hook:
            for leader, *_ in groups:
                m: Any = self.model.get_submodule(leader)
                H = moments[leader] = torch.zeros(inputs(m), inputs(m), dtype=torch.float32, device=m.weight.device)
                hook(m, functools.partial(_add, H, len(groups) == 1), True)
            for run in passes:
                _until_stopped(run)
        return moments

    def _gptq(self, name: str, H: Tensor) -> None:
        old, spec = self.model.get_submodule(name), self.wanted[name]
        W, H = _matrix(old), H.cpu()
        done = gptq(W, H, spec, _bias(old))
        W = W.float()
        energy = float((W * (H @ W)).sum(dtype=torch.float64))
        relative = done.loss / energy if energy else 0.0
        self._place(name, done.weight, relative if math.isfinite(relative) else None, done.note)

    def _place(self, name: str, w: Any, relative: float | None, note: str | None) -> None:
        old = self.model.get_submodule(name)
        new = quantised_module(old, w)
        for hooks in _HOOKS:
            setattr(new, hooks, getattr(old, hooks))  # the same dictionary, so that a hook's handle removes it still
        self.replaced[name] = old
        replace(self.model, name, new)
        self.reports.append(LayerReport(name, relative, note))
        if self.progress:
            self.progress(len(self.reports), len(self.wanted), name)


def _add(H: Tensor, alone: bool, m: nn.Module, args: Any, kwargs: Any) -> None:
    add_outer(H, args[0].reshape(-1, args[0].shape[-1]))
    if alone:
        raise _Stop


def _block_list(model: nn.Module, wanted: dict[str, QuantSpec]) -> nn.ModuleList:
    """The list of modules that holds most of what is to be quantised."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    count = {name: sum(w.startswith(f"{name}.") for w in wanted) for name in lists}
    best = max(count, key=lambda name: count[name], default=None)
    if best is None or not count[best]:
        raise UnsupportedError("the model has no list of blocks to calibrate; quantise without calibration tokens")
    return lists[best]


@contextmanager
def _hooks() -> Iterator[Callable[..., None]]:
    """`hook(module, function, before)` for as long as the context lasts."""
    handles = []

    def hook(m: nn.Module, function: Callable[..., Any], before: bool = True) -> None:
        if before:
            handles.append(m.register_forward_pre_hook(function, with_kwargs=True))
        else:
            handles.append(m.register_forward_hook(lambda m, args, y: function(m, args, y) and None))

    try:
        yield hook
    finally:
        for handle in handles:
            handle.remove()


def _until_stopped(run: Callable[[], Any]) -> None:
    with suppress(_Stop):
        run()


def _matrix(m: nn.Module) -> Tensor:  # the weight's dtype [K, N]
    weight: Tensor = m.weight  # type: ignore[assignment]
    return (weight if is_transposed(m) else weight.t()).detach().cpu()


def _bias(m: nn.Module) -> Tensor | None:
    bias = getattr(m, "bias", None)
    return None if bias is None else bias.detach().to("cpu", copy=True)
