"""Text from a model: prompts in, pieces of text out as they are decided.

    prompt → ids → prefill, each row alone → [ pick a token per row → show its text → one step for all rows ] …

A call owns its cache, so calls are independent. Rows of a batch share only the step; a row that has finished is parked
at position 0 until the others are done. A row ends at an end-of-text token ("eos"), before a stop string ("stop"), or
when `max_tokens` or the context is reached ("length").
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from .errors import InputError, NumericalError, whole
from .interrupt import uninterrupted
from .sampling import Sampling, pick
from .tokenizer import token_ids

if TYPE_CHECKING:
    from .model import KVCache, Model
    from .tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, str]]"  # text, token ids, or chat messages


@dataclass(frozen=True)
class Options:
    """What to generate; `sampling` None is greedy. A stop string ends the text before itself, wherever token boundaries
    fall.
    """

    max_tokens: int = 256
    sampling: Sampling | None = None
    stop: tuple[str, ...] = ()
    loops: int | None = None

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 1)
        if not isinstance(self.sampling, Sampling | None):
            raise InputError(
                f"sampling={self.sampling!r} must be a tinyloop.Sampling, or None for the most probable token"
            )
        if isinstance(self.stop, str) or not all(self.stop):
            raise InputError(f"stop={self.stop!r} must be a tuple of strings, none of them empty")


@dataclass(frozen=True)
class Generation:
    """One row's result. `finish` is eos, stop, length, or interrupted; tokens exclude the prompt and the eos token."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    note: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Decode steps per second; the first token comes with the prompt."""
        return max(0, len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Stream:
    """Iterator over the text's pieces; `result` is what was generated so far, `finish()` runs to the end."""

    def __init__(self, decoding: Decoding):
        self._decoding = decoding
        self._pieces = (piece for _, piece in decoding.run())

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Generation:
        return self._decoding.results()[0]

    def finish(self) -> Generation:
        for _ in self._pieces:
            pass
        return self.result


def generate(model: Model, prompt: Prompt, options: Options | None = None) -> Stream:
    """Continue one prompt. Checks everything first; work begins with the first piece that is asked for.

    Raises InputError where the prompt is empty or longer than the context, NumericalError on NaN logits.
    """
    return Stream(Decoding(model, [encode_prompt(model, prompt)], options or Options()))


def generate_batch(model: Model, prompts: Sequence[Prompt], options: Options | None = None) -> list[Generation]:
    """Continue several prompts, of any lengths, together. Each comes out as it would alone."""
    if not prompts:
        return []
    decoding = Decoding(model, [encode_prompt(model, p) for p in prompts], options or Options())
    for _ in decoding.run():
        pass
    return decoding.results()


def encode_prompt(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt of any kind."""
    if isinstance(prompt, str):
        return _tokenizer(model).encode(prompt)
    messages = [dict(m) for m in prompt if isinstance(m, Mapping)]
    if messages:
        if len(messages) != len(prompt):
            raise InputError("the prompt mixes chat messages and token ids; give one kind")
        return _tokenizer(model).encode(_tokenizer(model).chat(messages), bos=False)
    return token_ids(prompt)


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer; give token ids and take them from the result")
    return model.tokenizer


class _Row:
    """One prompt and what has become of it: its random stream, tokens, and text held back."""

    def __init__(self, model: Model, prompt: list[int], options: Options, number: int):
        context, vocab = model.config.max_position_embeddings, model.config.vocab_size
        if not prompt:
            raise InputError("the prompt is empty; give some text or at least one token")
        if len(prompt) > context:
            raise InputError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten it")
        if odd := [i for i in prompt if not 0 <= i < vocab]:
            raise InputError(f"prompt token {odd[0]} is not in the vocabulary; ids are 0..{vocab - 1}")
        self.prompt, self.options = prompt, options
        self.limit = min(options.max_tokens, context - len(prompt) + 1)
        self.note = f"the context of {context} tokens is full" if self.limit < options.max_tokens else ""
        self.sampling = options.sampling or Sampling()
        self.rng = self.sampling.rng(number)
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.seconds = [0.0, 0.0]  # prefill, decode
        self._eos = frozenset(model.tokenizer.data.eos) if model.tokenizer else frozenset()
        self._stream = model.tokenizer.stream() if model.tokenizer else None
        self._shown: list[str] = []
        self._held = ""

    def push(self, token: int) -> str:
        """Take the next token; returns the text that it makes certain."""
        if token in self._eos:
            return self._end("eos")
        self.tokens.append(token)
        piece = self._release(self._stream.push(token) if self._stream else "")
        if self.finish is None and len(self.tokens) == self.limit:
            piece += self._end("length")
        return piece

    def _release(self, piece: str) -> str:
        """Text up to a stop string, or all but an end that may be the beginning of one."""
        text = self._held + piece
        found = [at for s in self.options.stop if (at := text.find(s)) >= 0]
        if found:
            self.finish, self._held = "stop", ""
            return self._show(text[: min(found)])
        may_stop = (n for s in self.options.stop for n in range(1, len(s)) if text.endswith(s[:n]))
        keep = len(text) - max(may_stop, default=0)
        self._held = text[keep:]
        return self._show(text[:keep])

    def _end(self, reason: str) -> str:
        piece = self._release(self._stream.flush() if self._stream else "")
        if self.finish is None:
            self.finish = reason
            piece += self._show(self._held)
        return piece

    def _show(self, piece: str) -> str:
        if piece:
            self._shown.append(piece)
        return piece

    def result(self) -> Generation:
        return Generation(
            text="".join(self._shown),
            tokens=tuple(self.tokens),
            finish=self.finish or "interrupted",
            prompt_tokens=len(self.prompt),
            prefill_seconds=self.seconds[0],
            decode_seconds=self.seconds[1],
            note=self.note if self.finish == "length" else "",
        )


class Decoding:
    """The rows of one call and their cache. `reused` tokens of a single row are in the cache already."""

    def __init__(self, model: Model, prompts: list[list[int]], options: Options, cache: KVCache | None = None):
        self.model = model
        self.rows = [_Row(model, prompt, options, b) for b, prompt in enumerate(prompts)]
        context = model.config.max_position_embeddings
        capacity = min(context, max(len(row.prompt) + row.limit for row in self.rows))
        self.cache = model.new_cache(len(prompts), capacity, options.loops) if cache is None else cache

    def run(self) -> Iterator[tuple[int, str]]:
        """(row, piece of its text) as they come."""
        next_tokens = torch.zeros(len(self.rows), dtype=torch.int64)
        tokens = next_tokens.numpy()
        for b in range(len(self.rows)):
            tokens[b], piece = self._prefill(b)
            if piece:
                yield b, piece
        while live := [b for b, row in enumerate(self.rows) if row.finish is None]:
            started = time.perf_counter()
            for b, row in enumerate(self.rows):
                if row.finish is not None:  # parked: the step must neither outgrow the cache nor cost attention
                    tokens[b] = self.cache.lengths[b] = 0
            with uninterrupted():
                logits = self.model.step(next_tokens, self.cache).cpu().numpy()
            pieces = []
            for b in live:
                tokens[b] = self._pick(b, logits[b])
                pieces.append((b, self.rows[b].push(int(tokens[b]))))
                self.rows[b].seconds[1] += time.perf_counter() - started
            yield from ((b, piece) for b, piece in pieces if piece)

    def results(self) -> list[Generation]:
        return [row.result() for row in self.rows]

    def _prefill(self, b: int) -> tuple[int, str]:
        """Read row b's prompt, without what its cache holds already, and take the first token."""
        row, cache, started = self.rows[b], self.cache.row(b), time.perf_counter()
        prompt = torch.tensor([row.prompt[int(cache.lengths[0]) :]])
        with uninterrupted():
            logits = self.model.head(self.model.hidden(prompt, cache)[:, -1:])[0, 0].cpu().numpy()
        token = self._pick(b, logits)
        piece = row.push(token)
        row.seconds[0] = time.perf_counter() - started
        return token, piece

    def _pick(self, b: int, logits: np.ndarray) -> int:
        row = self.rows[b]
        try:
            return pick(logits, row.sampling, row.rng)
        except NumericalError as error:
            raise NumericalError(f"row {b}, after {len(row.tokens)} new tokens: {error}") from None


class Chat:
    """A conversation. Keys and values of what was said are kept, so that a turn reads only what is new."""

    def __init__(self, model: Model, options: Options | None = None, system: str | None = None):
        self.model, self.options = model, options or Options()
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.messages: list[dict[str, str]] = list(self._system)
        self._cache: KVCache | None = None
        self._read: list[int] = []  # what the cache holds
        self.last: Generation | None = None

    def say(self, text: str) -> Iterator[str]:
        """The reply to `text`, piece by piece. A reply that is broken off stays in the conversation as far as it came.

        Raises InputError where the conversation no longer fits into the context; it is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_prompt(self.model, messages)
        decoding = Decoding(self.model, [ids], self.options, self._prepare(ids))
        self.messages = messages
        return self._reply(decoding)

    def _reply(self, decoding: Decoding) -> Iterator[str]:
        try:
            for _, piece in decoding.run():
                yield piece
        finally:
            row = decoding.rows[0]
            self.last = row.result()
            self._read = (row.prompt + row.tokens)[: int(decoding.cache.lengths[0])]
            self.messages.append({"role": "assistant", "content": self.last.text})

    def _prepare(self, ids: list[int]) -> KVCache:
        """A cache with room for this turn, holding the part of `ids` that was read before."""
        context = self.model.config.max_position_embeddings
        need = min(context, len(ids) + self.options.max_tokens)
        same = next((n for n, (a, b) in enumerate(zip(ids, self._read, strict=False)) if a != b), len(self._read))
        same = min(same, len(ids) - 1)  # the last token is read again: its logits begin the reply
        old = self._cache
        if old is None or old.capacity < need:
            self._cache = self.model.new_cache(1, max(1, min(context, 2 * need)), self.options.loops)
            if old is not None:
                self._cache.k[:, :, :, :same] = old.k[:, :, :, :same]
                self._cache.v[:, :, :, :same] = old.v[:, :, :, :same]
        assert self._cache is not None
        self._cache.lengths[0] = same
        return self._cache
