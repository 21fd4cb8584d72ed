"""`transformers` models on our weights: `load_into` puts a `.tinyloop` file into a model that is there.

    file      embed          layers.i.attn_qkv                      layers.i.mlp_down           head
    model     embed_tokens   layers.i.self_attn.{q,k,v}_proj        layers.i.mlp.down_proj      lm_head

Linear layers become `QuantLinear`, a quantised embedding becomes `QuantEmbedding`, norms and dense weights are written
into the parameters that are there. Everything is compared first: a model that does not fit is left as it was.
`hf_quantize.py` makes the same kind of model from a dense one, `hf_saving.py` stores it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

import torch
from torch import nn

from . import container
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import InputError, UnsupportedError
from .hf_saving import attach, declare_shared
from .importers.hf_config import biased, model_config
from .importers.huggingface import LINEARS, NORMS
from .linear import QuantEmbedding, QuantLinear
from .weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor
_PARTS = {  # what must agree; the context may differ, and depth and rotation are compared by what they mean
    f.name for f in dataclasses.fields(ModelConfig)
} - {"architecture", "max_position_embeddings", "segments", "rope", "tie_word_embeddings"}


def load_into(hf_model: nn.Module, source: str | os.PathLike[str] | Checkpoint) -> None:
    """Give `hf_model`, a causal `transformers` model of the file's architecture, the weights of `source`, a `.tinyloop`
    file or a checkpoint.

    A head that is quantised together with the embedding is untied: both modules then read the same 4- or 8-bit weight.
    Raises InputError naming the first difference between model and file, UnsupportedError for looped files, which
    `transformers` has no model for. In each case the model is unchanged.
    """
    if not isinstance(source, (Checkpoint, str, os.PathLike)):
        raise InputError(
            f"source={source!r} is {type(source).__name__}; give the path of a .tinyloop file, or a Checkpoint"
        )
    checkpoint = source if isinstance(source, Checkpoint) else container.read(source)
    _check(hf_model, checkpoint.config)
    parts = _linear_parts(hf_model, checkpoint)
    norms = _norm_parts(hf_model, checkpoint)
    for name, w in parts.items():
        if isinstance(w, QuantWeight):
            replace(hf_model, name, quantised_module(hf_model.get_submodule(name), w))
        else:
            _write(hf_model.get_submodule(name), w.weight, w.bias)
    for name, norm in norms.items():
        _write(hf_model.get_submodule(name), norm, None)
    if checkpoint.config.tie_word_embeddings != tied(hf_model) or isinstance(checkpoint.weights["embed"], QuantWeight):
        untie(hf_model)
    attach(hf_model)


def quantised_module(old: nn.Module, w: QuantWeight) -> nn.Module:
    """What takes the place of `old`: on its device, of its dtype."""
    dense: Tensor = old.weight  # type: ignore[assignment]
    device = torch.device("cpu") if dense.is_meta else dense.device
    if isinstance(old, nn.Embedding):
        return QuantEmbedding(w, dense.dtype, getattr(old, "padding_idx", None)).to(device)
    return QuantLinear(w, dense.dtype).to(device)


def replace(hf_model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` at `name`, and wherever else the model holds what is there."""
    old = hf_model.get_submodule(name)
    new.train(old.training)
    for holder in list(hf_model.modules()):
        for key in [key for key, child in holder._modules.items() if child is old]:
            setattr(holder, key, new)


def name_of(hf_model: nn.Module, module: nn.Module | None) -> str | None:
    """Where `module` is in the model, None for none."""
    return next((name for name, m in hf_model.named_modules() if m is module), None)


def ends(hf_model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the input embedding and of the head."""
    get = (getattr(hf_model, f"get_{which}_embeddings", lambda: None) for which in ("input", "output"))
    embedding, head = (name_of(hf_model, getter()) for getter in get)
    return embedding, head


def tied(hf_model: nn.Module) -> bool:
    """Whether head and embedding are one parameter."""
    embedding, head = ends(hf_model)
    if embedding is None or head is None:
        return False
    return hf_model.get_submodule(embedding).weight is hf_model.get_submodule(head).weight


def untie(hf_model: nn.Module) -> None:
    """Keep `transformers` from tying head and embedding as parameters again, whenever it saves or loads."""
    for module in hf_model.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False
        if hasattr(module, "all_tied_weights_keys"):
            declare_shared(module, {})


def _check(hf_model: Any, ours: ModelConfig) -> None:
    if not hasattr(hf_model, "config") or not hasattr(hf_model, "get_output_embeddings"):
        raise InputError(f"hf_model is {type(hf_model).__name__}; give a causal model of transformers")
    if any(segment.repeats > 1 for segment in ours.segments):
        raise UnsupportedError(
            f"the file's model loops (loops={ours.loops}), and transformers applies every layer once; use tinyloop.load"
        )
    theirs, _ = model_config(_values(hf_model))
    for name in sorted(_PARTS):
        if (a := getattr(theirs, name)) != (b := getattr(ours, name)):
            raise InputError(f"{name} is {a!r} in the model, {b!r} in the file; make the model from the file's numbers")
    if theirs.num_layers != ours.num_layers:
        raise InputError(f"the model has {theirs.num_layers} layers, the file {ours.num_layers}; they must agree")
    if not _same_rotation(theirs, ours):
        raise InputError(
            f"the model rotates by {theirs.rope.source}, the file by {ours.rope.source}; give the model the file's "
            "rope_parameters"
        )


def _values(hf_model: Any) -> dict[str, Any]:
    """What config.json would hold."""
    values: dict[str, Any] = json.loads(hf_model.config.to_json_string(use_diff=False))
    return values


def _same_rotation(a: ModelConfig, b: ModelConfig) -> bool:
    frequencies = zip(a.rope.inv_freq, b.rope.inv_freq, strict=False)
    return (
        len(a.rope.inv_freq) == len(b.rope.inv_freq)
        and math.isclose(a.rope.attention_scaling, b.rope.attention_scaling, rel_tol=1e-6)
        and all(math.isclose(x, y, rel_tol=1e-6) for x, y in frequencies)
    )


def _linear_parts(hf_model: Any, checkpoint: Checkpoint) -> dict[str, LinearWeight]:
    """Module name → its weight, of the module's shape."""
    decoder, (embedding, head) = _decoder(hf_model), ends(hf_model)
    assert embedding is not None
    parts: dict[str, LinearWeight] = {embedding: checkpoint.weights["embed"]}
    for i in range(checkpoint.config.num_layers):
        for ours, theirs in LINEARS.items():
            w = checkpoint.weights[f"layers.{i}.{ours}"]
            names = [f"{decoder}layers.{i}.{name}" for name in theirs]
            widths = [hf_model.get_submodule(name).out_features for name in names]
            parts |= zip(names, split(w, widths), strict=True)
    if head is not None:
        parts[head] = checkpoint.weights["embed" if checkpoint.config.tie_word_embeddings else "head"]
    has_bias = biased(_values(hf_model))
    for name, w in parts.items():
        if name not in (embedding, head) and (name.rpartition(".")[2] in has_bias) != (w.bias is not None):
            where = "model" if w.bias is None else "file"
            raise InputError(f"{name} has a bias in the {where} only; they must agree")
    return parts


def _norm_parts(hf_model: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    decoder = _decoder(hf_model)
    norms = {f"{decoder}norm": checkpoint.norms["final_norm"]}
    for ours, t in checkpoint.norms.items():
        layer, _, name = ours.rpartition(".")
        if layer:
            norms[f"{decoder}{layer}.{NORMS[name]}"] = t
    return norms


def _decoder(hf_model: Any) -> str:
    prefix = name_of(hf_model, hf_model.get_decoder())
    assert prefix is not None
    return f"{prefix}." if prefix else ""


def split(w: LinearWeight, widths: list[int]) -> list[LinearWeight]:
    """A weight cut along N; whole, it stays where it is."""
    if len(widths) == 1:
        return [w]
    bias = [None] * len(widths) if w.bias is None else list(torch.split(w.bias, widths))
    if isinstance(w, DenseWeight):
        return [DenseWeight(t, b) for t, b in zip(torch.split(w.weight, widths), bias, strict=True)]
    tensors = ([t.contiguous() for t in torch.split(whole, widths, dim=1)] for whole in (w.packed, w.scale, w.zero))
    return [
        QuantWeight(q, scale, zero, w.K, w.group_size, w.bits, w.integer_zero, b, perm=w.perm)
        for q, scale, zero, b in zip(*tensors, bias, strict=True)
    ]


def _write(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Into the parameters that are there, in their dtype; a parameter on meta gets its memory here."""
    for name, t in (("weight", weight), ("bias", bias)):
        held = module._parameters.get(name)
        if t is None or held is None:
            continue
        if held.is_meta:
            module._parameters[name] = nn.Parameter(t.to(held.dtype, copy=True), held.requires_grad)
        else:
            with torch.no_grad():
                held.copy_(t)
