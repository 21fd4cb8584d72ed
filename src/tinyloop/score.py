"""Perplexity and bits per byte of a text, under a protocol that is stated with the result.

    window     [head][ … up to window − 1 tokens … ]      one pass of the model, nothing carried over
    scored                [ … the last stride of them … ]  those before it are context only

The head of every window is the token that begins a text (`bos`), or, without one, the token before the window; so each
token of the text is scored exactly once, except that the first has nothing before it where there is no `bos`. With the
default stride, a window's width, windows do not overlap. Losses are natural logarithms, summed in fp64.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np
import torch

from .errors import InputError, NumericalError, whole
from .interrupt import uninterrupted
from .textstream import TokenPiece, encode_stream, read_text
from .tokenizer import token_ids

if TYPE_CHECKING:
    from .model import Model

Tensor = torch.Tensor
Source: TypeAlias = "str | os.PathLike[str] | BinaryIO | Sequence[int] | Tensor"

WINDOW = 1024
USUAL_BOS = "<|endoftext|>"  # separates the texts of a training set, so a text begins after it


@dataclass(frozen=True)
class Protocol:
    """How to score. None takes the default: window 1024 (or the context, if shorter), stride as wide as the window,
    bos `<|endoftext|>` where the vocabulary has it, else the tokenizer's own, else none. `bos=False` asks for none.
    """

    window: int | None = None
    stride: int | None = None
    bos: int | bool | None = None
    loops: int | None = None


@dataclass(frozen=True)
class Score:
    """`nll` is the sum of the losses in nats of `tokens` tokens that spell `bytes` bytes (None for token lists)."""

    nll: float
    tokens: int
    bytes: int | None
    seconds: float
    window: int
    stride: int
    bos: int | None
    loops: int | None = None
    partial: bool = False  # interrupted: the rest of the text was not scored
    losses: Tensor | None = field(default=None, repr=False, compare=False)  # fp32 [tokens]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens) if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll / math.log(2) / self.bytes if self.bytes else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class ScoreInterrupted(KeyboardInterrupt):
    """Ctrl-C during scoring; `partial` is the score of what was read until then."""

    def __init__(self, partial: Score):
        super().__init__("scoring was interrupted")
        self.partial = partial


Progress = Callable[[Score, "float | None"], None]  # the score so far, and the part of the source read, 0..1


def score(
    model: Model,
    source: Source,
    protocol: Protocol | None = None,
    *,
    keep_losses: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Score a text (str), a UTF-8 file (path or binary stream, read in flat memory), or token ids.

    Raises InputError for a source that is empty, binary, not UTF-8 or shorter than two tokens and for settings out of
    range, NumericalError where a loss is NaN or infinite, ScoreInterrupted on Ctrl-C.
    """
    with ExitStack() as stack:
        given = _open(model, source, stack)
        run = _Run(model, _resolved(model, protocol or Protocol()), given.text, keep_losses)
        try:
            for ids, ends in given.pieces:
                run.add(ids, ends)
                while run.ready():
                    run.step()
                    if progress:
                        progress(run.result(partial=True), run.end / given.size if given.size else None)
            run.finish()
        except KeyboardInterrupt:
            raise ScoreInterrupted(run.result(partial=True)) from None
    return run.result()


@dataclass(frozen=True)
class _Given:
    """A source opened: token ids piece by piece; `size` is the last byte (or token) they reach, where known."""

    pieces: Iterator[TokenPiece]
    size: int | None
    text: bool


@dataclass(frozen=True)
class _Settings:
    window: int
    stride: int
    bos: int | None
    loops: int | None


def _resolved(model: Model, p: Protocol) -> _Settings:
    """Defaults filled in, ranges checked."""
    context = model.config.max_position_embeddings
    window = min(WINDOW, context) if p.window is None else whole("window", p.window)
    if not 2 <= window <= context:
        raise InputError(f"window={window} must be 2 to {context}, the model's context")
    stride = window if p.stride is None else whole("stride", p.stride)
    if not 1 <= stride <= window:
        raise InputError(f"stride={stride} must be 1 to window={window}")
    model.config.with_loops(p.loops)
    bos = default_bos(model) if p.bos is None or p.bos is True else None if p.bos is False else p.bos
    if bos is not None and not 0 <= bos < model.config.vocab_size:
        raise InputError(f"bos={bos} is no token; ids are 0..{model.config.vocab_size - 1}")
    return _Settings(window, min(stride, window - 1), bos, p.loops)


def default_bos(model: Model) -> int | None:
    """The token that begins every window unless the caller chooses: see `Protocol`."""
    if model.tokenizer is None:
        return None
    usual = model.tokenizer.id_of(USUAL_BOS)
    return model.tokenizer.data.bos if usual is None else usual


def _open(model: Model, source: Source, stack: ExitStack) -> _Given:
    if isinstance(source, Sequence | Tensor) and not isinstance(source, str):
        ids = token_ids(source)
        _check_ids(ids, model.config.vocab_size)
        return _Given(iter([(ids, np.arange(1, len(ids) + 1))]), len(ids), text=False)
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer, so it cannot score text; give token ids")
    if isinstance(source, str):
        if "\0" in source:
            raise InputError(f"the text is binary: character {source.index(chr(0))} is 0; give plain text")
        return _Given(encode_stream(model.tokenizer, [source]), len(source.encode()), text=True)
    size = None
    if isinstance(source, os.PathLike):
        path = Path(source)
        if path.is_dir():
            raise InputError(f"{path} is a folder; give a text file")
        if not path.exists():
            raise InputError(f"{path} is not there; give a text file")
        size = path.stat().st_size or None
        source = stack.enter_context(path.open("rb"))
    chunks = read_text(source, str(getattr(source, "name", "the stream")))
    return _Given(encode_stream(model.tokenizer, chunks), size, text=True)


def _check_ids(ids: list[int], vocab: int) -> None:
    if odd := next((i for i in ids if not 0 <= i < vocab), None):
        raise InputError(f"token {odd} is not in the vocabulary; ids are 0..{vocab - 1}")


class _Run:
    """Tokens in, windows through the model, losses out. Keeps no more tokens than a window needs."""

    def __init__(self, model: Model, settings: _Settings, text: bool, keep_losses: bool):
        self.model, self.settings, self.text = model, settings, text
        self.kept: list[Tensor] | None = [] if keep_losses else None
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.first = 0  # place in the text of ids[0]
        self.next = 0 if settings.bos is not None else 1  # place of the first token not yet scored
        self.begin = self.end = 0  # bytes (or tokens) of the source that are scored
        self.nll, self.tokens, self.windows = 0.0, 0, 0
        self.started = time.perf_counter()

    def add(self, ids: list[int], ends: np.ndarray) -> None:
        if self.first == 0 and not self.ids and ids and self.settings.bos is None:
            self.begin = self.end = int(ends[0])
        self.ids += ids
        self.ends += ends.tolist()

    def _new(self) -> int:
        """Tokens that the next window scores: all it can hold at first, then a stride."""
        return self.settings.window - 1 if self.windows == 0 else self.settings.stride

    def ready(self) -> bool:
        return self.first + len(self.ids) >= self.next + self._new()

    def finish(self) -> None:
        if self.first + len(self.ids) < 2:
            raise InputError(
                f"the text has {len(self.ids)} tokens; a score needs at least 2" if self.ids else "the text is empty"
            )
        if self.first + len(self.ids) > self.next:
            self.step()

    def step(self) -> None:
        """Score the next window, then forget the tokens that no later window reads."""
        s, total = self.settings, self.first + len(self.ids)
        begin = max(0 if s.bos is not None else 1, self.next + self._new() - (s.window - 1))
        end = min(self.next + self._new(), total)
        text = self.ids[begin - self.first : end - self.first]
        head = self.ids[begin - 1 - self.first] if s.bos is None else s.bos
        tokens = torch.tensor([[head, *text]])
        if self.windows == 0:
            self.model.prepare(tokens.shape[1])
        with uninterrupted():
            if self.windows == 0:
                self.model.prepare(tokens.shape[1])
            count = end - self.next
            hidden = self.model.hidden(tokens, loops=s.loops)[0, -1 - count : -1]
            losses = self.model.losses(hidden, tokens[0, -count:]).cpu().numpy()
        if not np.isfinite(losses).all():
            raise NumericalError(
                f"window {self.windows}, tokens {begin} to {end - 1}: a loss is NaN or infinite, so there is no score; "
                "the weights are damaged or overflow: import the model again, or score with dtype float32"
            )
        self.nll += float(losses.sum(dtype=np.float64))
        self.tokens += len(losses)
        if self.kept is not None:
            self.kept.append(torch.from_numpy(losses))
        self.end, self.next, self.windows = self.ends[end - 1 - self.first], end, self.windows + 1
        keep_from = max(self.first, end + s.stride - s.window)  # the next window's head, at the earliest
        del self.ids[: keep_from - self.first], self.ends[: keep_from - self.first]
        self.first = keep_from

    def result(self, partial: bool = False) -> Score:
        s = self.settings
        return Score(
            nll=self.nll,
            tokens=self.tokens,
            bytes=self.end - self.begin if self.text else None,
            seconds=time.perf_counter() - self.started,
            window=s.window,
            stride=s.stride,
            bos=s.bos,
            loops=self.model.config.with_loops(s.loops).loops,
            partial=partial,
            losses=torch.cat(self.kept) if self.kept and not partial else None,
        )
