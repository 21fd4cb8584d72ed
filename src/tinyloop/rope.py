"""RoPE recipes → the inverse frequencies they mean.

In: the recipe of a checkpoint (`rope_type` and its parameters), the head size and the context limit. Out: a `Rope`.
Every recipe is resolved here, once, at import: the runtime rotates by numbers. All arithmetic on frequencies is fp32
in the order in which transformers does it, so that the numbers are its own to the last bit; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .config import Rope
from .errors import FormatError, UnsupportedError

Tensor = torch.Tensor
Recipe = Mapping[str, Any]

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Written beside any recipe by some tools; only the recipes that list it use it.
_BOOKKEEPING = {"finetuned", "original_max_position_embeddings"}

LARGEST_HEAD = 1 << 16  # elements of an attention head: real ones have 64 to 512


def resolve(recipe: Recipe, head_dim: int, max_position_embeddings: int) -> Rope:
    """The frequencies of `recipe`; a missing `rope_type` is default, a missing `rope_theta` 10000.

    Raises UnsupportedError on a recipe or a parameter that is not known, FormatError on a missing or impossible value.
    """
    recipe = {key: value for key, value in recipe.items() if value is not None}
    kind = recipe.get("rope_type", recipe.get("type", "default"))
    if not isinstance(kind, str) or kind not in _RECIPES:
        raise UnsupportedError(f"rope_type={kind!r} is not supported; known are {', '.join(_RECIPES)}")
    function, required, optional = _RECIPES[kind]
    if unknown := sorted(recipe.keys() - _COMMON - _BOOKKEEPING - required - optional):
        raise UnsupportedError(f"rope_type={kind}: parameter {unknown[0]}={recipe[unknown[0]]!r} is not supported")
    for name in sorted(required):
        _positive(recipe, kind, name)
    full = {"rope_theta": 10000.0, "original_max_position_embeddings": max_position_embeddings} | dict(recipe)
    _positive(full, kind, "rope_theta")
    _positive(full, kind, "original_max_position_embeddings")
    for name in sorted(optional & recipe.keys()):
        if not isinstance(recipe[name], (int, float)):
            raise FormatError(f"rope_type={kind}: {name}={recipe[name]!r} must be a number")
    if full["rope_theta"] <= 1:
        raise FormatError(f"rope_theta={full['rope_theta']} must exceed 1, or the frequencies do not fall")
    frequencies, attention_scaling = function(full, _rotated(recipe, head_dim), max_position_embeddings)
    return Rope(tuple(frequencies.tolist()), float(attention_scaling), dict(recipe) | {"rope_type": kind})


def default_frequencies(theta: float, dim: int) -> Tensor:  # fp32 [dim/2]
    """`theta^(−2i/dim)` (Su et al. 2021, RoFormer, arXiv 2104.09864, section 3.2.2)."""
    return 1.0 / _powers(theta, dim)


def _default(recipe: Recipe, dim: int, limit: int) -> tuple[Tensor, float]:
    return default_frequencies(recipe["rope_theta"], dim), 1.0


def _linear(recipe: Recipe, dim: int, limit: int) -> tuple[Tensor, float]:
    """Positions, hence frequencies, ÷ factor (Chen et al. 2023, Position Interpolation, arXiv 2306.15595)."""
    return default_frequencies(recipe["rope_theta"], dim) / recipe["factor"], 1.0


def _dynamic(recipe: Recipe, dim: int, limit: int) -> tuple[Tensor, float]:
    """Dynamic NTK (described in Peng et al. 2023, YaRN, arXiv 2309.00071, section 3.3), at a length up to `limit`.

    The base grows only beyond `limit`, where this runtime stops; within it the growth is 1 up to rounding.
    """
    factor = recipe["factor"]
    growth = factor * limit / limit - (factor - 1)
    theta = recipe["rope_theta"] * growth ** (dim / (dim - 2)) if dim > 2 else recipe["rope_theta"]
    return default_frequencies(theta, dim), 1.0


def _llama3(recipe: Recipe, dim: int, limit: int) -> tuple[Tensor, float]:
    """Long waves ÷ factor, short ones kept, a linear blend between (Llama 3.1, Meta 2024, model code)."""
    low, high = recipe["low_freq_factor"], recipe["high_freq_factor"]
    if high <= low:
        raise FormatError(f"rope_type=llama3: high_freq_factor={high} must exceed low_freq_factor={low}")
    context = recipe["original_max_position_embeddings"]
    frequencies = default_frequencies(recipe["rope_theta"], dim)
    waves = 2 * math.pi / frequencies  # tokens per turn
    slow, fast = waves > context / low, waves < context / high
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / recipe["factor"] + blend * frequencies
    return torch.where(slow, frequencies / recipe["factor"], torch.where(fast, frequencies, blended)), 1.0


def _yarn(recipe: Recipe, dim: int, limit: int) -> tuple[Tensor, float]:
    """NTK by parts and an attention temperature (Peng et al. 2023, YaRN, arXiv 2309.00071, sections 3.2 and 3.4)."""
    theta, factor = recipe["rope_theta"], recipe["factor"]
    context = recipe["original_max_position_embeddings"]
    powers = _powers(theta, dim)
    low = _turning_dimension(recipe.get("beta_fast") or 32, dim, theta, context)
    high = _turning_dimension(recipe.get("beta_slow") or 1, dim, theta, context)
    if recipe.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step where both bounds meet
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, recipe.get("attention_factor", _yarn_temperature(recipe))


def _yarn_temperature(recipe: Recipe) -> float:
    """0.1·ln(factor) + 1, or the ratio of two such terms weighted by mscale and mscale_all_dim (DeepSeek-V2)."""

    def term(weight: float) -> float:
        return 1.0 if recipe["factor"] <= 1 else 0.1 * weight * math.log(recipe["factor"]) + 1.0

    over, under = recipe.get("mscale"), recipe.get("mscale_all_dim")
    return term(over) / term(under) if over and under else term(1.0)


def _turning_dimension(turns: float, dim: int, theta: float, context: int) -> float:
    """The (fractional) pair whose wave turns `turns` times within `context` tokens."""
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _powers(theta: float, dim: int) -> Tensor:  # fp32 [dim/2]: theta^(2i/dim)
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return powers


def _rotated(recipe: Recipe, head_dim: int) -> int:
    """Elements of a head that rotate."""
    part = recipe.get("partial_rotary_factor", 1.0)
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise FormatError(f"partial_rotary_factor={part!r} must be in (0, 1]")
    if head_dim > LARGEST_HEAD:
        raise FormatError(f"head_dim={head_dim} is more than {LARGEST_HEAD}; the configuration is damaged")
    dim = int(head_dim * part)
    if dim < 2 or dim % 2:
        raise FormatError(f"head_dim={head_dim} with partial_rotary_factor={part} rotates {dim} elements; pairs rotate")
    return dim


def _positive(recipe: Recipe, kind: str, name: str) -> None:
    value = recipe.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise FormatError(f"rope_type={kind} needs {name} as a positive number; the configuration has {value!r}")


# rope_type → function, parameters it must have, parameters it may have.
_RECIPES: dict[str, tuple[Callable[[Recipe, int, int], tuple[Tensor, float]], set[str], set[str]]] = {
    "default": (_default, set(), set()),
    "linear": (_linear, {"factor"}, set()),
    "dynamic": (_dynamic, {"factor"}, set()),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (_yarn, {"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}  # fmt: skip
