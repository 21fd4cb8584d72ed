"""From the logits of one position to a token. numpy only: torch's operations would wake its own threads, which then
spin on the core that the decode step needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from .errors import InputError, NumericalError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the most probable one; otherwise logits are divided by it, and then
    only tokens stay that are at least `min_p` times as probable as the most probable one, among the `top_k` most
    probable (0: all), and in the smallest set of those that has `top_p` of their probability.

    Row b of a batch draws from random stream (seed, stream + b), whatever the other rows do.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), int | float):
                raise InputError(f"{field.name}={value!r} must be a number")
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "a number ≥ 0 (0: the most probable token)"),
            ("top_k", self.top_k >= 0, "≥ 0 (0: no limit)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("seed", self.seed >= 0, "≥ 0"),
            ("stream", self.stream >= 0, "≥ 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InputError(f"{name}={getattr(self, name)} must be {rule}")

    def rng(self, row: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.stream + row])


def pick(logits: np.ndarray, how: Sampling, rng: np.random.Generator) -> int:  # fp32 [V]
    """The next token. Raises NumericalError where a logit is NaN or +infinity."""
    highest = logits.max()  # NaN if any is
    if not np.isfinite(highest):
        raise NumericalError(
            "the logits are NaN or infinite, so there is no next token; the weights are damaged or overflow: import "
            "the model again, or run it in float32"
        )
    if how.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        z = (logits.astype(np.float64) - highest) / how.temperature
    kept = np.flatnonzero(z >= math.log(how.min_p)) if how.min_p else np.arange(len(z))
    if 0 < how.top_k < len(kept):
        kept = kept[np.argpartition(-z[kept], how.top_k - 1)[: how.top_k]]
    p = np.exp(z[kept])
    if how.top_p < 1:
        kept, p = _nucleus(kept, p, how.top_p)
    reached = np.cumsum(p)
    at = int(np.searchsorted(reached, rng.random() * reached[-1], side="right"))
    return int(kept[min(at, len(kept) - 1)])


def _nucleus(ids: np.ndarray, p: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The most probable tokens that together reach `top_p` of the mass, ties by id."""
    total = p.sum()
    # Tokens below this share cannot be needed, all of them together weigh less than 1 − top_p: far fewer to sort.
    large = p >= 0.5 * (1 - top_p) / len(p) * total
    ids, p = ids[large], p[large]
    order = np.lexsort((ids, -p))
    count = int(np.searchsorted(np.cumsum(p[order]), top_p * total)) + 1
    return ids[order[:count]], p[order[:count]]
