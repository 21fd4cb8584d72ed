"""A whole model in memory, between a source and a file: configuration, weights, norms, tokenizer.

Importers return one, `container.write` stores one, `container.read` returns one again. Whatever builds it, its
completeness is checked here once: a missing or misshapen tensor never gets as far as a product.

Weights may be `Deferred`: their shapes are known, their numbers are read when they are asked for. So a model is
stored in the memory of two weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch

from .config import ModelConfig
from .errors import FormatError
from .tokenizer import TokenizerData
from .weight import LinearWeight, QuantWeight


class Deferred(Mapping[str, LinearWeight]):
    """Weights that are made anew each time they are asked for, and not kept.

    `outlines` are the same weights without numbers, their tensors on the meta device: dtypes and shapes are theirs.
    """

    def __init__(self, outlines: Mapping[str, LinearWeight], make: Callable[[str], LinearWeight]):
        self.outlines = outlines
        self._make = make

    def __getitem__(self, name: str) -> LinearWeight:
        if name not in self.outlines:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.outlines

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)


@dataclass(frozen=True)
class Checkpoint:
    """Names are those of `ModelConfig.linear_shapes` and `norm_shapes`; tensors may be mapped from a file.

    `source` says where the weights come from (format, file name, licence …), for people; `notes` is what the importer
    had to decide, one sentence each, and is shown to the user.
    """

    config: ModelConfig
    weights: Mapping[str, LinearWeight]
    norms: Mapping[str, torch.Tensor]  # [D] or [head_dim], any float dtype
    tokenizer: TokenizerData | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_names("linear weight", self.config.linear_shapes().keys(), self.weights.keys())
        _check_names("norm", self.config.norm_shapes().keys(), self.norms.keys())
        for name, (K, N) in self.config.linear_shapes().items():
            w = self.outlines[name]
            if (w.K, w.N) != (K, N):
                raise FormatError(f"{name} is K={w.K}, N={w.N}; the configuration needs K={K}, N={N}")
            if isinstance(w, QuantWeight) and w.channel and not self.config.in_loop(name):
                raise FormatError(
                    f"{name} has the channel {w.channel}, but is not in a loop; drop it: nothing reads it"
                )
        for name, length in self.config.norm_shapes().items():
            t = self.norms[name]
            if list(t.shape) != [length] or not t.is_floating_point():
                raise FormatError(f"{name} is {t.dtype} {list(t.shape)}; the configuration needs floats [{length}]")

    @property
    def outlines(self) -> Mapping[str, LinearWeight]:
        """The weights to ask for shapes and dtypes only: reads nothing."""
        return self.weights.outlines if isinstance(self.weights, Deferred) else self.weights

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.outlines.values()) + sum(t.nbytes for t in self.norms.values())


def _check_names(kind: str, wanted: Set[str], present: Set[str]) -> None:
    if missing := sorted(wanted - present):
        raise FormatError(f"{len(missing)} {kind}s are missing, the first is {missing[0]}; the source is incomplete")
    if extra := sorted(present - wanted):
        raise FormatError(f"{len(extra)} {kind}s have no place in the configuration, the first is {extra[0]}")
