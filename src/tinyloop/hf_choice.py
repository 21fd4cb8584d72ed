"""What `quantize_` does with each module of a model: arguments in, module name → `QuantSpec` out.

Everything that can be refused is refused here, weights that are not finite included, before anything is changed. A
layer that computes more than its class says, or whose weight something else computes, stays dense with a line in the
log: what it does beyond x @ W would be lost.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import InputError
from .hf import ends
from .hf_saving import is_transposed
from .linear import Canonical
from .quantize.gptq import QuantSpec

Tensor = torch.Tensor
Rules = Sequence[tuple[str, "QuantSpec | None"]]
log = logging.getLogger("tinyloop")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of x, so of a model that gives x


def wanted_modules(model: nn.Module, spec: QuantSpec | None, rules: Rules) -> dict[str, QuantSpec]:
    """Module name → what is done with it. Raises InputError naming the argument, the rule or the module."""
    _check_types(model, spec, rules)
    found = ends(model)
    dense = {
        name: m
        for name, m in model.named_modules()
        if _is_dense(m) and (name in found or not isinstance(m, nn.Embedding))
    }
    odd = {name: why for name, m in dense.items() if (why := _oddity(m))}
    modules = {name: m for name, m in dense.items() if name not in odd}
    _check_rules(rules, modules, odd)
    chosen = {name: _spec_of(name, None if name in found else spec or QuantSpec(), rules) for name in dense}
    for name in odd:
        if chosen[name] is not None:
            log.warning("%s is kept dense: %s, which would be lost.", name, odd[name])
    wanted = {name: s for name, s in chosen.items() if s is not None and name not in odd}
    if not wanted:
        raise InputError(
            "no dense linear layer is left to quantise; every one is skipped by a rule, has a forward of its own, or "
            "the model has none"
        )
    if channels := {s.channel for s in wanted.values()} - {None}:
        raise InputError(f"channel={channels.pop()!r}: transformers applies every layer once; leave the channel out")
    if problems := [p for name, s in wanted.items() if (p := _problem(name, modules[name], s))]:
        raise InputError(
            f"{len(problems)} modules cannot be quantised: {'; '.join(problems[:8])}"
            f"{' …' if len(problems) > 8 else ''}; mend that, or keep them dense with a rule (name, None)"
        )
    return wanted


def check_tokens(tokens: Any, model: nn.Module) -> None:
    """Raises InputError for calibration that is no int64 [texts, length] of the model's vocabulary."""
    if tokens is None:
        return
    way_out = "give int64 [texts, length] (calibration_tokens makes them of a text)"
    if not isinstance(tokens, Tensor):
        raise InputError(f"calibration is {type(tokens).__name__}; {way_out}")
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise InputError(
            f"calibration is {tokens.dtype} {list(tokens.shape)}; it needs texts of 2 tokens or more: {way_out}"
        )
    embedding = ends(model)[0]
    size = getattr(model.get_submodule(embedding), "num_embeddings", None) if embedding else None
    if size is not None and (outside := tokens[(tokens < 0) | (tokens >= size)]).numel():
        raise InputError(
            f"calibration holds token {int(outside[0])}; the model has tokens 0..{size - 1}: use its own tokenizer"
        )


def inputs(m: nn.Module) -> int:
    """K of a dense layer."""
    return int(m.weight.shape[0 if is_transposed(m) else 1])  # type: ignore[index]


def _check_types(model: Any, spec: Any, rules: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"hf_model is {type(model).__name__}; give a model, an nn.Module")
    if _is_dense(model):
        raise InputError(
            f"hf_model is a {type(model).__name__} itself, so there is nothing to replace it in; use "
            "QuantLinear.from_linear or QuantEmbedding.from_embedding"
        )
    if spec is not None and not isinstance(spec, QuantSpec):
        raise InputError(f"spec={spec!r} must be a QuantSpec, such as QuantSpec(group_size=32), or None")
    pairs = isinstance(rules, Sequence) and not isinstance(rules, str)
    for rule in rules if pairs else [rules]:
        whole = pairs and isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
        if not whole or not isinstance(rule[0], str) or not (rule[1] is None or isinstance(rule[1], QuantSpec)):
            raise InputError(
                f"rules has {rule!r}; it must be a list of pairs (pattern of names, QuantSpec or None), such as "
                "[('*.mlp.*', None)]"
            )


def _check_rules(rules: Rules, modules: Mapping[str, nn.Module], odd: Mapping[str, str]) -> None:
    for pattern, spec in rules:
        if fnmatch.filter(modules, pattern):
            continue
        if not (named := fnmatch.filter(odd, pattern)):
            raise InputError(
                f"rule {pattern!r} fits no dense linear layer; names are like {', '.join(list(modules)[:3])}"
            )
        if spec is not None:
            raise InputError(
                f"rule {pattern!r} asks to quantise {named[0]}, but {odd[named[0]]}, which would be lost; leave the "
                "rule out, or put an nn.Linear in its place first"
            )


def _spec_of(name: str, default: QuantSpec | None, rules: Rules) -> QuantSpec | None:
    return next((spec for pattern, spec in rules if fnmatch.fnmatchcase(name, pattern)), default)


def _is_dense(m: nn.Module) -> bool:
    return (isinstance(m, (nn.Linear, nn.Embedding)) or is_transposed(m)) and not isinstance(m, Canonical)


def _oddity(m: nn.Module) -> str | None:
    """What a layer does that a quantised one in its place would not."""
    plain = nn.Linear if isinstance(m, nn.Linear) else nn.Embedding if isinstance(m, nn.Embedding) else None
    if "forward" in vars(m):
        return "it has a forward of its own"
    if plain and type(m).forward is not plain.forward:
        return f"its class {type(m).__name__} has a forward of its own"
    if "weight" not in m._parameters:
        return "its weight is computed anew by a hook or a parametrisation"
    return None


def _problem(name: str, m: nn.Module, spec: QuantSpec) -> str | None:
    weight: Tensor = m.weight  # type: ignore[assignment]
    if weight.is_meta:
        return f"{name} is on the meta device and has no values, load them first"
    if weight.dtype not in _DTYPES:
        return f"{name} is {weight.dtype}, but a product takes float32, bfloat16 or float16, such as model.float() has"
    if spec.group_size is not None and inputs(m) < spec.group_size:
        return f"{name} has K={inputs(m)} < group {spec.group_size}, choose a smaller group"
    if not bool(torch.isfinite(weight).all()):
        return f"{name} holds NaN or infinite values, its file is damaged"
    return None
