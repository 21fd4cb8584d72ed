"""Each RoPE recipe against transformers' own frequencies, to the last bit; each refusal by its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tinyloop.errors import FormatError, UnsupportedError
from tinyloop.rope import resolve

RECIPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 3.7, "rope_theta": 500000},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 1.7, "rope_theta": 12345.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 1024, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.9, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1, "beta_slow": 1, "truncate": True},
    {"rope_type": "yarn", "factor": 0.5},
]  # fmt: skip


def reference(recipe: dict[str, Any], head_dim: int, limit: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=limit,
        rope_parameters=dict(recipe),
    )  # fmt: skip
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


@pytest.mark.parametrize("head_dim", [4, 64, 96, 128])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(f"{k}={v}" for k, v in r.items()) or "empty")
def test_frequencies_are_those_of_transformers(recipe: dict[str, Any], head_dim: int) -> None:
    for limit in (2048, 40960):
        want, scaling = reference(recipe, head_dim, limit)
        rope = resolve(recipe, head_dim, limit)
        assert rope.inv_freq == tuple(want.tolist())
        assert rope.attention_scaling == scaling


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_partial_rotation_shortens_the_frequencies(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    recipe = {"rope_type": kind, "factor": 4.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    if kind == "llama3":
        recipe |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=dict(recipe))
    want, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    rope = resolve(recipe, 64, config.max_position_embeddings)
    assert len(rope.inv_freq) == 16
    assert (rope.inv_freq, rope.attention_scaling) == (tuple(want.tolist()), scaling)


def test_old_spelling_and_nulls_mean_the_same() -> None:
    new = resolve({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}, 64, 2048)
    old = resolve({"type": "linear", "factor": 2.0, "rope_theta": 5e4, "partial_rotary_factor": None}, 64, 2048)
    assert new.inv_freq == old.inv_freq
    assert new.source["rope_type"] == old.source["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("recipe", "error", "text"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, UnsupportedError, "rope_type='longrope' is not supported; known"),
        ({"type": "su"}, UnsupportedError, "rope_type='su'"),
        ({"mrope_section": [1, 2]}, UnsupportedError, r"rope_type=default: parameter mrope_section=\[1, 2\]"),
        ({"rope_type": "linear"}, FormatError, "rope_type=linear needs factor as a positive number; .* None"),
        ({"rope_type": "yarn", "factor": 0}, FormatError, "rope_type=yarn needs factor .* 0"),
        ({"rope_theta": "1e4"}, FormatError, "needs rope_theta"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, FormatError,
         "high_freq_factor=4.0 must exceed low_freq_factor=4.0"),
        ({"rope_theta": 0.5}, FormatError, "rope_theta=0.5 must exceed 1"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"}, FormatError, "beta_fast='32' must be a number"),
        ({"partial_rotary_factor": 1.5}, FormatError, "partial_rotary_factor=1.5 must be in"),
        ({"partial_rotary_factor": 0.05}, FormatError, "rotates 3 elements; pairs rotate"),
    ],
)  # fmt: skip
def test_refusals(recipe: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        resolve(recipe, 64, 2048)


def test_a_head_beyond_measure() -> None:
    with pytest.raises(FormatError, match="head_dim=100000000000 is more than 65536; the configuration is damaged"):
        resolve({"rope_type": "default", "rope_theta": 10000.0}, 10**11, 2048)
