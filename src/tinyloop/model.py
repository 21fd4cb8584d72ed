"""The decoder: tokens → embedding → segments of blocks → norm → head. One page of torch, one KV slot per application.

All of it lies on one device, from weights to logits; token ids and cache lengths are the host's.

A segment is (layers, repeats): pre once, loop `loops` times, coda once; an ordinary model is one segment. The residual
stream is fp32; products run in the model's dtype, through a linear operation that the caller may replace.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import channel, devices, dispatch, layers
from .checkpoint import Checkpoint
from .config import ModelConfig
from .dispatch_cuda import int4_refusal
from .errors import InputError
from .marlin import packed_bytes
from .ops import problem, quant_gemm, quant_swiglu
from .pack import PackedWeight
from .tokenizer import Tokenizer
from .weight import QuantWeight

if TYPE_CHECKING:
    from .generate import Prompt, Stream
    from .sampling import Sampling
    from .score import Score, Source

log = logging.getLogger("tinyloop")
Tensor = torch.Tensor
Linear = Callable[[Tensor, PackedWeight], Tensor]
LOSS_ROWS = 128  # logits of a vocabulary of 49152: 12.6 MB in bf16
CUDA_LOGITS = 1 << 26  # logits at a time on a GPU, where few rows leave it idle: 256 MB in fp32
CPU = torch.device("cpu")
CACHE_SHARE = 4  # dense copies may take a quarter of the machine's memory


@dataclass
class KVCache:
    """Keys and values of `batch` rows: [applications, batch, KV heads, capacity, head_dim]; `lengths[b]` are filled.

    `config` carries the loop count the cache was made for: a loop iteration is a slot of its own.
    """

    config: ModelConfig
    k: Tensor
    v: Tensor
    lengths: np.ndarray  # int64 [batch]

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        return self.k.shape[3]

    def row(self, b: int) -> KVCache:
        """Row b alone, sharing memory with this cache."""
        return KVCache(self.config, self.k[:, b : b + 1], self.v[:, b : b + 1], self.lengths[b : b + 1])


class Model:
    """Built by `tinyloop.load`. Holds packed weights, norms and the tokenizer; keeps no state between calls.

    `dtype` is that of products and of the KV cache: on a CPU float32, or bfloat16 (the default where the CPU has it);
    on a GPU float16 (the default), bfloat16 or float32.
    `cross_iter_round`: loop iterations round each on their own where the weights have channels; None asks the
    environment, TINYLOOP_CROSS_ITER_ROUND, once.
    `fp16_body`: on a GPU, loop blocks are kept dequantised; None asks TINYLOOP_EXPERIMENTAL_FP16_BODY, once.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None = None, linear: Linear = quant_gemm,
        budget: int | None = None, cross_iter_round: bool | None = None, device: torch.device | str = "cpu",
        fp16_body: bool | None = None,
    ):  # fmt: skip
        self.config = checkpoint.config
        self.device = devices.resolve(device)
        self.dtype = devices.dtype_on(self.device, dtype)
        self.source = dict(checkpoint.source)
        self.tokenizer = None if checkpoint.tokenizer is None else Tokenizer(checkpoint.tokenizer)
        self.weights = {name: PackedWeight(w, device=self.device) for name, w in checkpoint.weights.items()}
        self.norms = {  # copied: aligned, out of the map
            name: t.to(self.device, torch.float32, copy=True) for name, t in checkpoint.norms.items()
        }
        self.cross_iter_round = dispatch.cross_iter_round() if cross_iter_round is None else cross_iter_round
        self._linear = linear
        self._ops = between(self.dtype, self.device)
        self._attention = [self._attention_of(i) for i in range(self.config.num_layers)]
        self._inv_freq = torch.tensor(self.config.rope.inv_freq, dtype=torch.float32, device=self.device)
        self._decoder: tuple[KVCache, object] | None = None
        self.body_cache = 0  # bytes of loop blocks that a GPU keeps dequantised
        if self.device.type == "cpu":
            keep_dense(self, dispatch.machine().memory // CACHE_SHARE if budget is None else budget)
        elif dispatch.fp16_body() if fp16_body is None else fp16_body:
            self.body_cache = keep_body(self)

    def new_cache(self, batch: int, capacity: int, loops: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens a row. Raises InputError beyond the model's context or the memory."""
        config = self.config.with_loops(loops)
        if not 1 <= capacity <= config.max_position_embeddings:
            raise InputError(
                f"{capacity} tokens exceed the context of {config.max_position_embeddings}; shorten the text"
            )
        slots = sum(segment.layers * segment.repeats for segment in config.segments)
        shape = (slots, batch, config.num_key_value_heads, capacity, config.head_dim)
        size, what = 2 * math.prod(shape) * self.dtype.itemsize, f"{batch * capacity} tokens in {slots} KV slots"
        devices.check_room(self.device, size, what, "take fewer tokens, rows or, in a looped model, fewer loops")
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return KVCache(config, k, v, np.zeros(batch, np.int64))

    def prepare(self, rows: int) -> None:
        """Derive now what products of `rows` rows read, the largest weight first: while its temporary copy exists,
        little else does, which takes 90 MB off the peak of scoring a model with a vocabulary of 49152."""
        if self.device.type != "cpu":
            return  # nothing depends on the number of rows there: see `pack`
        for w in sorted(self.weights.values(), key=lambda w: w.weight.nbytes, reverse=True):
            if dispatch.plan(problem(w, rows, self.dtype)).kernel == "dense_cache":
                w.dense(self.dtype, keep=True)

    def pack(self, progress: Callable[[int, int], None] | None = None) -> None:
        """On a GPU: move weights there now in the form that products read, which else happens at the first product.

        `progress(done, total)` counts bytes on the GPU. Raises InputError, before anything moves, where they are more
        than it has free, or where a 4-bit weight cannot take the tensor-core path and `set_marlin_dispatch("require")`
        asks for it.
        """
        sizes = {name: self._bytes_there(name) for name in self.weights}
        done, total = 0, sum(sum(size) for size in sizes.values())
        devices.check_room(self.device, total, "the weights", "take another GPU, or run on the CPU")
        for name, (codes, canonical) in sizes.items():
            if codes:
                self.weights[name].marlin()
            if canonical:
                self.weights[name].canonical()
            done += codes + canonical
            if progress:
                progress(done, total)

    def _bytes_there(self, name: str) -> tuple[int, int]:
        """What a weight takes on a GPU in device format and in canonical form: 0 for a form that nothing reads."""
        w, codes = self.weights[name], 0
        if name != "embed" or self.config.tie_word_embeddings:  # an embedding alone is looked up, not multiplied
            posed = problem(self.weight(name, 0 if (self.config.loops or 1) > 1 else None), 1, self.dtype)
            self._check_required(name, posed)
            if int4_refusal(posed, dispatch.chip(self.device)) is None:
                assert isinstance(w.weight, QuantWeight)
                codes = packed_bytes(w.weight)
        return codes, w.weight.nbytes if name == "embed" or not codes else 0

    def _check_required(self, name: str, posed: dispatch.Problem) -> None:
        if posed.require:
            try:
                dispatch.plan(posed, dispatch.chip(self.device))
            except InputError as error:
                raise InputError(f"{name}: {error}") from error

    def embed(self, tokens: Tensor) -> Tensor:  # int64 [...] → fp32 [..., D]
        return self.weights["embed"].canonical().columns(tokens).contiguous()

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # int64 [...] → cos, sin fp32 [..., rotated/2]
        angle = positions.float()[..., None] * self._inv_freq
        return angle.cos() * self.config.rope.attention_scaling, angle.sin() * self.config.rope.attention_scaling

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: KVCache | None = None, loops: int | None = None) -> Tensor:
        """Final hidden states after the last norm: int64 [B, T], on the host or the model's device → dtype [B, T, D].

        With a cache, tokens continue each row at its own length, and the cache grows by T; its loop count holds.
        Raises InputError where a token is no token of the vocabulary or a row would outgrow the cache or context.
        """
        config = cache.config if cache else self.config.with_loops(loops)
        self._check(tokens, config, cache)
        B, T = tokens.shape
        if tokens.numel() == 0:
            return torch.empty(B, T, config.hidden_size, dtype=self.dtype, device=self.device)
        places = layers.Places([0] * B if cache is None else cache.lengths.tolist(), T, self.device)
        rope = self.rope(places.positions)
        x = self.embed(tokens.to(self.device, non_blocking=True))  # fp32 [B, T, D]
        y = None  # what is still to be added to x
        loops = config.loops or 1
        for slot, (layer, i) in enumerate(config.applications()):
            turn = i if loops > 1 else None  # of one iteration alone, the codes are the better rounding
            kv = None if cache is None else (cache.k[slot], cache.v[slot])
            h = self._norm(x, y, f"layers.{layer}.attn_norm")
            h = self._ops.attention(
                self._apply(h, f"layers.{layer}.attn_qkv", turn), self._attention[layer], rope, places, kv
            )
            h = self._norm(x, self._apply(h, f"layers.{layer}.attn_out", turn), f"layers.{layer}.mlp_norm")
            y = self._apply(self._swiglu(h, layer, turn), f"layers.{layer}.mlp_down", turn)
        if cache is not None:
            cache.lengths += T
        return self._norm(x, y, "final_norm")

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:  # [..., D] → fp32 [..., V]
        """Logits of hidden states."""
        return self._head(hidden).float()

    @torch.inference_mode()
    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:  # [M, D], int64 [M] → fp32 [M]
        """Cross-entropy in nats of the tokens that follow, some rows of logits at a time."""
        rows = LOSS_ROWS if self.device.type == "cpu" else max(LOSS_ROWS, CUDA_LOGITS // self.config.vocab_size)
        targets = targets.to(self.device, non_blocking=True)
        parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.cat([self._ops.losses(self._head(h), t) for h, t in parts])

    def logits(self, tokens: Tensor, loops: int | None = None) -> Tensor:  # int64 [B, T] → fp32 [B, T, V]
        """Logits at every position of whole texts."""
        return self.head(self.hidden(tokens, loops=loops))

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:  # int64 [B] → fp32 [B, V]
        """One decode step: append one token per row, return the next logits (valid until the next step)."""
        self._check(tokens[:, None], cache.config, cache)
        if self.fused_refusal() is not None:
            return self.head(self.hidden(tokens[:, None], cache))[:, 0]
        from .cpu.decode import FusedDecoder

        held = self._decoder  # read once: another thread may decode with another cache
        if held is None or held[0] is not cache:
            held = self._decoder = cache, FusedDecoder(self, cache)
        decoder = held[1]
        assert isinstance(decoder, FusedDecoder)
        return decoder.step(tokens)

    def score(
        self, source: Source, *, window: int | None = None, stride: int | None = None, bos: int | bool | None = None,
        loops: int | None = None, keep_losses: bool = False,
    ) -> Score:  # fmt: skip
        """Perplexity of a text (str), a UTF-8 file (path or binary stream) or token ids: see `tinyloop.score`."""
        from . import score

        return score.score(self, source, score.Protocol(window, stride, bos, loops), keep_losses=keep_losses)

    def generate(
        self, prompt: Prompt, max_tokens: int = 256, *, sampling: Sampling | None = None, stop: tuple[str, ...] = (),
        loops: int | None = None,
    ) -> Stream:  # fmt: skip
        """Continue a prompt (text, token ids or chat messages): an iterator over pieces of text. Greedy by default."""
        from . import generate

        return generate.generate(self, prompt, generate.Options(max_tokens, sampling, stop, loops))

    def weight(self, name: str, iteration: int | None) -> PackedWeight:
        """The weight as iteration `iteration` of the loop reads it; None where nothing loops."""
        w = self.weights[name]
        return w if iteration is None or not self.cross_iter_round else w.at(iteration)

    def fused_refusal(self) -> str | None:
        """Why decoding does not take the fused step, or None where it does."""
        if self.device.type != "cpu":
            return f"the model is on {self.device}, the fused step is the CPU's"
        if not dispatch.machine().numba:
            return "numba is not installed: pip install 'tinyloop[cpu]'"
        if self._linear is not quant_gemm:
            return "the linear operation was replaced"
        if self.cross_iter_round and any(w.channel for w in self.weights.values()):
            return "cross-iteration rounding is on"
        from .cpu.decode import refusal

        return refusal(self)

    def _check(self, tokens: Tensor, config: ModelConfig, cache: KVCache | None) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise InputError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give int64 [batch, length]")
        if tokens.device.type != "cpu" and tokens.device != self.device:
            raise InputError(f"tokens are on {tokens.device}, the model on {self.device}; give the host's")
        if cache is not None and cache.k.device != self.device:
            raise InputError(f"the cache is on {cache.k.device}, the model on {self.device}; use its own new_cache")
        ids = tokens.cpu()  # one wait, before the first layer, where they are not the host's
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            raise InputError(f"tokens span {int(ids.min())}..{int(ids.max())}; ids are 0..{config.vocab_size - 1}")
        room = cache.capacity if cache else config.max_position_embeddings
        longest = tokens.shape[1] + (int(cache.lengths.max()) if cache else 0)
        if cache is not None and cache.batch != tokens.shape[0]:
            raise InputError(f"tokens have {tokens.shape[0]} rows, the cache {cache.batch}; they must agree")
        if longest > room:
            what = "the cache's capacity" if cache else "the model's context"
            raise InputError(f"{longest} tokens exceed {what} of {room}; shorten the text")

    def _head(self, hidden: Tensor) -> Tensor:
        return self._apply(hidden, "embed" if self.config.tie_word_embeddings else "head")

    def _apply(self, x: Tensor, name: str, iteration: int | None = None) -> Tensor:
        return self._linear(x, self.weight(name, iteration))

    def _swiglu(self, h: Tensor, layer: int, iteration: int | None) -> Tensor:
        gate, up = (self.weight(f"layers.{layer}.{name}", iteration) for name in ("mlp_gate", "mlp_up"))
        if self.device.type == "cuda" and self._linear is quant_gemm:
            return quant_swiglu(h, gate, up)
        swiglu: Tensor = self._ops.swiglu(self._linear(h, gate), self._linear(h, up))
        return swiglu

    def _norm(self, x: Tensor, y: Tensor | None, name: str) -> Tensor:
        normed: Tensor = self._ops.add_norm(x, y, self.norms[name], self.config.rms_norm_eps, self.dtype)
        return normed

    def _attention_of(self, layer: int) -> layers.Attention:
        c = self.config
        window = c.sliding_window[layer] if c.sliding_window else None
        q, k = (self.norms[f"layers.{layer}.{n}"] if c.qk_norm else None for n in ("q_norm", "k_norm"))
        return layers.Attention(c.num_attention_heads, c.num_key_value_heads, c.head_dim, window, c.rms_norm_eps, q, k)


def between(dtype: torch.dtype, device: torch.device = CPU) -> ModuleType:
    """The module that computes what lies between the products: compiled for bf16 where the CPU has it, else torch."""
    if device.type == "cpu" and dtype == torch.bfloat16 and dispatch.machine().numba:
        from .cpu import rows

        if rows.available:
            return rows
    return layers


def keep_body(model: Model) -> int:
    """Keep the loop's weights dequantised on a GPU, where they are multiplied more than once a token; the bytes taken.
    Raises InputError where there is no room for them, before anything is kept."""
    reads = reads_per_token(model)
    body = [w for name, w in model.weights.items() if reads[name] > 1]
    size = sum(w.weight.K * w.weight.N for w in body) * model.dtype.itemsize
    devices.check_room(model.device, size, f"{len(body)} dequantised loop weights", f"unset {dispatch.FP16_BODY}")
    for w in body:
        w.keep_dense = True
    if body:
        codes = sum(w.weight.nbytes for w in body) / 1e6
        log.info("body cache: %d loop weights, %.1f MB beside %.1f MB in 4 bits", len(body), size / 1e6, codes)
    return size


def reads_per_token(model: Model) -> dict[str, int]:
    """How often each weight is multiplied for one token."""
    repeats: dict[int, int] = {}
    for layer, _ in model.config.applications():
        repeats[layer] = repeats.get(layer, 0) + 1
    return {n: repeats.get(int(n.split(".")[1]), 0) if n.startswith("layers.") else 1 for n in model.weights}


def keep_dense(model: Model, budget: int) -> None:
    """Allow dense copies within `budget` bytes: loop blocks first, since they are read once per iteration, then the
    head, then the others in order. Where iterations round on their own, each rounding is a copy."""
    counts = reads_per_token(model)
    reads = counts.__getitem__
    for name in sorted(model.weights, key=reads, reverse=True):
        w = model.weights[name]
        if name == "embed" and not model.config.tie_word_embeddings:
            continue
        size = w.weight.K * w.weight.N * model.dtype.itemsize
        if w.channel is not None and model.cross_iter_round and reads(name) > 1:
            w.keep_roundings = min(channel.roundings(w.channel, reads(name)), budget // size)
            budget -= w.keep_roundings * size
        elif size <= budget:
            w.keep_dense = True
            budget -= size
