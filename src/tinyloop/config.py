"""What a model is, as plain values: dimensions, segments and rotary frequencies; in and out of the file as JSON.

Two choices keep the runtime small. The depth is a list of segments (layers × repeats), so a looped model and an
ordinary one are the same thing. And every RoPE scaling recipe is resolved by the importer to the inverse frequencies
it means, so that the runtime rotates by numbers and knows no recipe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import FormatError, InputError, whole

SEGMENT_NAMES = ("pre", "loop", "coda")


# Names are made for every layer before tensors are looked for, so a damaged number must not ask for a billion.
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Segment:
    """`layers` blocks in a row, the whole row applied `repeats` times. Only the segment named loop may repeat."""

    name: str
    layers: int
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.name not in SEGMENT_NAMES:
            raise FormatError(f"segment name {self.name!r} is none of {', '.join(SEGMENT_NAMES)}")
        if not all(isinstance(n, int) and n >= 1 for n in (self.layers, self.repeats)):
            raise FormatError(
                f"segment {self.name}: layers={self.layers!r}, repeats={self.repeats!r}; both are whole numbers ≥ 1"
            )
        if self.layers > MOST_LAYERS:
            raise FormatError(
                f"segment {self.name} has layers={self.layers}; more than {MOST_LAYERS} layers are taken for a damaged "
                "file"
            )
        if self.repeats > 1 and self.name != "loop":
            raise FormatError(f"segment {self.name} has repeats={self.repeats}; only the loop segment repeats")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, rotate-half layout: angle of pair i at position p is `p · inv_freq[i]`, fp32.

    `inv_freq` covers the rotated part of the head, `2·len(inv_freq) ≤ head_dim`; cos and sin are multiplied by
    `attention_scaling` (YaRN). `source` keeps the recipe of the checkpoint, for the record and for export.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    source: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of RMSNorm, RoPE attention and SwiGLU blocks. Sizes are counts of elements.

    `sliding_window[i]` is the attention window of physical layer i in tokens, None for full attention; the empty
    tuple means full attention everywhere. `qk_norm`: RMSNorm over head_dim on queries and keys before RoPE.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    segments: tuple[Segment, ...]
    rope: Rope
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "max_position_embeddings")  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise FormatError(f"config {name}={value!r} must be a whole number ≥ 1")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise FormatError(f"config rms_norm_eps={self.rms_norm_eps!r} must be a number ≥ 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise FormatError(
                f"config num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        names = [s.name for s in self.segments]
        if not names or names != sorted(set(names), key=SEGMENT_NAMES.index):
            raise FormatError(f"config segments {names} must be some of {list(SEGMENT_NAMES)} in this order, each once")
        if not 0 < 2 * len(self.rope.inv_freq) <= self.head_dim:
            raise FormatError(
                f"rope has {len(self.rope.inv_freq)} frequencies; "
                f"head_dim={self.head_dim} takes 1 to {self.head_dim // 2}"
            )
        if self.sliding_window and len(self.sliding_window) != self.num_layers:
            raise FormatError(f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers")

    @property
    def num_layers(self) -> int:
        """Physical layers, which is how many sets of weights there are."""
        return sum(s.layers for s in self.segments)

    @property
    def loops(self) -> int | None:
        """Repeats of the loop segment; None for a model that has none."""
        return next((s.repeats for s in self.segments if s.name == "loop"), None)

    def with_loops(self, loops: int | None) -> ModelConfig:
        """The same model with another loop count; None keeps the file's.

        Raises InputError where the model has no loop segment or loops < 1.
        """
        if loops is None:
            return self
        if self.loops is None:
            raise InputError(f"loops={loops}: this model has no loop segment, leave the loop count out")
        whole("loops", loops, 1)
        segments = tuple(dataclasses.replace(s, repeats=loops) if s.name == "loop" else s for s in self.segments)
        return dataclasses.replace(self, segments=segments)

    def applications(self) -> Iterator[tuple[int, int]]:
        """(physical layer, iteration) of every block application in order; its index is the KV slot."""
        first = 0
        for segment in self.segments:
            for iteration in range(segment.repeats):
                for layer in range(first, first + segment.layers):
                    yield layer, iteration
            first += segment.layers

    def in_loop(self, name: str) -> bool:
        """Whether the linear weight `name` belongs to the loop segment, whatever its loop count."""
        first = 0
        for segment in self.segments:
            layers = range(first, first + segment.layers)
            if segment.name == "loop" and name.startswith(tuple(f"layers.{i}." for i in layers)):
                return True
            first += segment.layers
        return False

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name → (K, N) of every linear weight and of the embedding, which is stored as the head would be."""
        D, F = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes = {"embed": (D, self.vocab_size)}
        for i in range(self.num_layers):
            shapes[f"layers.{i}.attn_qkv"] = (D, q + 2 * kv)
            shapes[f"layers.{i}.attn_out"] = (q, D)
            shapes[f"layers.{i}.mlp_gate"] = (D, F)
            shapes[f"layers.{i}.mlp_up"] = (D, F)
            shapes[f"layers.{i}.mlp_down"] = (F, D)
        if not self.tie_word_embeddings:
            shapes["head"] = (D, self.vocab_size)
        return shapes

    def norm_shapes(self) -> dict[str, int]:
        """Name → length of every norm weight."""
        shapes = {"final_norm": self.hidden_size}
        for i in range(self.num_layers):
            shapes[f"layers.{i}.attn_norm"] = self.hidden_size
            shapes[f"layers.{i}.mlp_norm"] = self.hidden_size
            if self.qk_norm:
                shapes[f"layers.{i}.q_norm"] = self.head_dim
                shapes[f"layers.{i}.k_norm"] = self.head_dim
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelConfig:
        """Raises FormatError on missing or unknown keys: nothing a file says is ignored, nothing it omits is guessed.

        A guessed loop count, window or QK norm would still write fluent, wrong text.
        """
        try:
            _check_keys("model", ModelConfig, values)
            _check_keys("rope", Rope, values["rope"])
            for segment in values["segments"]:
                _check_keys("segment", Segment, segment)
            rope = Rope(**{**values["rope"], "inv_freq": tuple(values["rope"]["inv_freq"])})
            segments = tuple(Segment(**s) for s in values["segments"])
            window = tuple(values["sliding_window"])
            return ModelConfig(**{**values, "rope": rope, "segments": segments, "sliding_window": window})
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"model description is not of this format version: {error}") from error


def _check_keys(what: str, kind: type[Any], values: dict[str, Any]) -> None:
    if odd := sorted({f.name for f in dataclasses.fields(kind)} ^ values.keys()):
        state = "has no place in this format version" if odd[0] in values else "is missing"
        raise FormatError(f"{what} key {odd[0]} {state}; import the model again")
