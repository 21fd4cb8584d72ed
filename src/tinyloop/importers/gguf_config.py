"""Metadata of a .gguf file → `ModelConfig`.

In: the fields as plain values. Out: the description. Keys under `llama.` are hyperparameters and nothing else, so one
that is not known here is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..config import ModelConfig, Rope, Segment
from ..errors import FormatError, UnsupportedError
from ..rope import resolve

Fields = Mapping[str, Any]
ARCHITECTURE = "llama"

_SIZES = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "ffn": "feed_forward_length",
    "context": "context_length",
    "heads": "attention.head_count",
}
_HONOURED = {
    *_SIZES.values(), "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# key → the value that means what the runtime does.
_FIXED = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False}


def model_config(fields: Fields, vocab_size: int | None, tied: bool, divisors: torch.Tensor | None) -> ModelConfig:
    """The description; `vocab_size` is the rows of the embedding, `divisors` the tensor rope_freqs.

    Raises UnsupportedError or FormatError naming the key.
    """
    _check_keys(fields)
    size = {ours: _number(fields, key) for ours, key in _SIZES.items()}
    head_dim = _number(fields, "attention.key_length", size["hidden"] // size["heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := _number(fields, key, head_dim)) != head_dim:
            raise UnsupportedError(f"{ARCHITECTURE}.{key}={value} differs from the head size {head_dim}; not supported")
    if vocab_size is None:
        raise FormatError("tensor token_embd.weight is missing; the file is incomplete")
    window = fields.get(f"{ARCHITECTURE}.attention.sliding_window")
    eps = fields.get(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon")
    if not isinstance(eps, float):
        raise FormatError(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon={eps!r} must be a number")
    return ModelConfig(
        architecture=ARCHITECTURE, vocab_size=vocab_size, hidden_size=size["hidden"], intermediate_size=size["ffn"],
        num_attention_heads=size["heads"],
        num_key_value_heads=_number(fields, "attention.head_count_kv", size["heads"]), head_dim=head_dim,
        rms_norm_eps=_decimal(eps), max_position_embeddings=size["context"],
        segments=(Segment("pre", size["layers"]),), rope=_rope(fields, head_dim, size["context"], divisors),
        tie_word_embeddings=tied, sliding_window=(window,) * size["layers"] if window else (),
    )  # fmt: skip


def _check_keys(fields: Fields) -> None:
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedError(
            f"general.architecture={architecture!r} is not supported; .gguf files are read for llama"
        )
    for key, value in fields.items():
        name = key.removeprefix(f"{ARCHITECTURE}.")
        if name == key or name in _HONOURED or (name in _FIXED and value == _FIXED[name]):
            continue
        known = f"; the runtime does {_FIXED[name]} only" if name in _FIXED else " is not known, so it is not ignored"
        raise UnsupportedError(f"metadata key {key}={value!r}{known}")


def _number(fields: Fields, key: str, missing: int | None = None) -> int:
    """A size; files may give it once for each layer, which must then agree."""
    value = fields.get(f"{ARCHITECTURE}.{key}", missing)
    if isinstance(value, list) and value:
        if len(set(value)) > 1:
            raise UnsupportedError(f"{ARCHITECTURE}.{key} differs between layers ({value}); not supported")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise FormatError(f"{ARCHITECTURE}.{key}={value!r} must be a whole number ≥ 1")
    return value


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to this fp32: files hold 1e-5 as fp32, which is 9.999999747378752e-06."""
    return next(d for digits in range(1, 18) if torch.tensor(d := float(f"{value:.{digits}g}")).item() == value)


def _rope(fields: Fields, head_dim: int, context: int, divisors: torch.Tensor | None) -> Rope:
    def get(key: str, missing: Any = None) -> Any:
        return fields.get(f"{ARCHITECTURE}.rope.{key}", missing)

    factor = get("scaling.factor", get("scale_linear"))
    kind = get("scaling.type", "linear" if factor else "none")
    recipe: dict[str, Any] = {"rope_theta": get("freq_base", 10000.0)}
    if kind == "yarn":
        # The format's attn_factor multiplies the temperature that follows from the factor.
        recipe |= {"factor": factor, "beta_fast": get("scaling.yarn_beta_fast"),
                   "beta_slow": get("scaling.yarn_beta_slow"),
                   "original_max_position_embeddings": get("scaling.original_context_length")}  # fmt: skip
        if (extra := get("scaling.attn_factor", 1.0)) != 1.0 and factor:
            recipe["attention_factor"] = extra * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    elif kind == "linear":
        recipe |= {"factor": factor or 1.0}
    elif kind != "none":
        raise UnsupportedError(f"{ARCHITECTURE}.rope.scaling.type={kind!r} is not supported; known are linear, yarn")
    rope = resolve(recipe | {"rope_type": "default" if kind == "none" else kind}, head_dim, context)
    if divisors is None:
        return rope
    if len(divisors) != len(rope.inv_freq):
        raise FormatError(
            f"tensor rope_freqs.weight has {len(divisors)} values; {len(rope.inv_freq)} frequencies need as many"
        )
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32) / divisors.float()
    return dataclasses.replace(
        rope, inv_freq=tuple(frequencies.tolist()), source=rope.source | {"rope_freqs": divisors.tolist()}
    )
