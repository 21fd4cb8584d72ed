"""The decoder: tokens → embedding → segments of blocks → norm → head. One page of torch, one KV slot per application.

A segment is (layers, repeats): pre once, loop `loops` times, coda once; an ordinary model is one segment. The residual
stream is fp32; products run in the model's dtype, through a linear operation that the caller may replace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from . import dispatch
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import InputError
from .ops import quant_gemm
from .pack import PackedWeight
from .tokenizer import Tokenizer

Tensor = torch.Tensor
Linear = Callable[[Tensor, PackedWeight], Tensor]
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

    `dtype` is that of products and of the KV cache: float32, or bfloat16 (the default where the CPU has it).
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None = None, linear: Linear = quant_gemm,
        budget: int | None = None,
    ):  # fmt: skip
        self.config = checkpoint.config
        self.dtype = dtype or dispatch.default_dtype()
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype={self.dtype}: on a CPU a model runs in float32 or bfloat16")
        self.source = dict(checkpoint.source)
        self.tokenizer = None if checkpoint.tokenizer is None else Tokenizer(checkpoint.tokenizer)
        self.weights = {name: PackedWeight(w) for name, w in checkpoint.weights.items()}
        self.norms = dict(checkpoint.norms)
        self._linear = linear
        self._inv_freq = torch.tensor(self.config.rope.inv_freq)
        self._decoder: tuple[KVCache, object] | None = None
        keep_dense(self, dispatch.machine().memory // CACHE_SHARE if budget is None else budget)

    def new_cache(self, batch: int, capacity: int, loops: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens a row. Raises InputError beyond the model's context."""
        config = self.config.with_loops(loops)
        if not 1 <= capacity <= config.max_position_embeddings:
            raise InputError(
                f"{capacity} tokens exceed the context of {config.max_position_embeddings}; shorten the text"
            )
        slots = sum(1 for _ in config.applications())
        shape = (slots, batch, config.num_key_value_heads, capacity, config.head_dim)
        return KVCache(
            config,
            torch.zeros(shape, dtype=self.dtype),
            torch.zeros(shape, dtype=self.dtype),
            np.zeros(batch, np.int64),
        )

    def embed(self, tokens: Tensor) -> Tensor:  # int64 [...] → fp32 [..., D]
        return self.weights["embed"].weight.columns(tokens)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # int64 [...] → cos, sin fp32 [..., rotated/2]
        angle = positions.float()[..., None] * self._inv_freq
        return angle.cos() * self.config.rope.attention_scaling, angle.sin() * self.config.rope.attention_scaling

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, cache: KVCache | None = None, loops: int | None = None) -> Tensor:
        """Final hidden states after the last norm: int64 [B, T] → model dtype [B, T, D].

        With a cache, tokens continue each row at its own length, and the cache grows by T; its loop count holds.
        Raises InputError where a token is no token of the vocabulary or a row would outgrow the cache or context.
        """
        config = cache.config if cache else self.config.with_loops(loops)
        B, T = tokens.shape
        self._check(tokens, config, cache)
        start = torch.zeros(B, dtype=torch.int64) if cache is None else torch.from_numpy(cache.lengths.copy())
        positions = start[:, None] + torch.arange(T)  # [B, T]
        rope = tuple(t[:, None].to(torch.float32) for t in self.rope(positions))  # [B, 1, T, r]
        x = self.embed(tokens)  # fp32 [B, T, D]
        for slot, (layer, _) in enumerate(config.applications()):
            window = config.sliding_window[layer] if config.sliding_window else None
            h = self._norm(x, f"layers.{layer}.attn_norm")
            x = x + self._attention(h, layer, slot, positions, rope, window, cache).float()
            h = self._norm(x, f"layers.{layer}.mlp_norm")
            gate, up = self._apply(h, f"layers.{layer}.mlp_gate"), self._apply(h, f"layers.{layer}.mlp_up")
            x = x + self._apply(F.silu(gate, inplace=True).mul_(up), f"layers.{layer}.mlp_down").float()
        if cache is not None:
            cache.lengths += T
        return self._norm(x, "final_norm")

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:  # [..., D] → fp32 [..., V]
        """Logits of hidden states."""
        return self._apply(hidden, "embed" if self.config.tie_word_embeddings else "head").float()

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

        if self._decoder is None or self._decoder[0] is not cache:
            self._decoder = cache, FusedDecoder(self, cache)
        decoder = self._decoder[1]
        assert isinstance(decoder, FusedDecoder)
        return decoder.step(tokens)

    def fused_refusal(self) -> str | None:
        """Why decoding does not take the fused step, or None where it does."""
        if not dispatch.machine().numba:
            return "numba is not installed: pip install 'tinyloop[cpu]'"
        if self._linear is not quant_gemm:
            return "the linear operation was replaced"
        from .cpu.decode import refusal

        return refusal(self)

    def _check(self, tokens: Tensor, config: ModelConfig, cache: KVCache | None) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise InputError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give int64 [batch, length]")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
            raise InputError(
                f"tokens span {int(tokens.min())}..{int(tokens.max())}; ids are 0..{config.vocab_size - 1}"
            )
        room = cache.capacity if cache else config.max_position_embeddings
        longest = tokens.shape[1] + (int(cache.lengths.max()) if cache else 0)
        if cache is not None and cache.batch != tokens.shape[0]:
            raise InputError(f"tokens have {tokens.shape[0]} rows, the cache {cache.batch}; they must agree")
        if longest > room:
            what = "the cache's capacity" if cache else "the model's context"
            raise InputError(f"{longest} tokens exceed {what} of {room}; shorten the text")

    def _apply(self, x: Tensor, name: str) -> Tensor:
        return self._linear(x, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.norms[name].float()
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(self.dtype)

    def _attention(
        self, h: Tensor, layer: int, slot: int, positions: Tensor, rope: tuple[Tensor, ...], window: int | None,
        cache: KVCache | None,
    ) -> Tensor:  # fmt: skip
        c, (B, T, _) = self.config, h.shape
        H, HKV, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qkv = self._apply(h, f"layers.{layer}.attn_qkv").view(B, T, H + 2 * HKV, D).transpose(1, 2)  # [B, ·, T, D]
        q, k, v = torch.split(qkv, [H, HKV, HKV], dim=1)
        if c.qk_norm:
            q, k = self._norm(q, f"layers.{layer}.q_norm"), self._norm(k, f"layers.{layer}.k_norm")
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = append(cache, slot, positions, k, v)
        mask = attention_mask(positions, k.shape[2], window)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=H != HKV
        )
        return self._apply(y.transpose(1, 2).reshape(B, T, H * D), f"layers.{layer}.attn_out")


def keep_dense(model: Model, budget: int) -> None:
    """Allow dense copies within `budget` bytes: loop blocks first, since they are read once per iteration, then the
    head, then the others in order."""
    repeats = {layer: 0 for layer, _ in model.config.applications()}
    for layer, _ in model.config.applications():
        repeats[layer] += 1

    def reads(name: str) -> int:
        return repeats[int(name.split(".")[1])] if name.startswith("layers.") else 1

    for name in sorted(model.weights, key=reads, reverse=True):
        w = model.weights[name]
        if name == "embed" and not model.config.tie_word_embeddings:
            continue
        size = w.weight.K * w.weight.N * model.dtype.itemsize
        if size <= budget:
            w.keep_dense = True
            budget -= size


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [B, H, T, D]; cos, sin [B, 1, T, r], 2r ≤ D
    """RoPE, rotate-half layout, on the first 2r channels of each head; angles and products in fp32."""
    r = cos.shape[-1]
    a, b, rest = x[..., :r].float(), x[..., r : 2 * r].float(), x[..., 2 * r :]
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)


def append(cache: KVCache, slot: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Store keys and values [B, HKV, T, D] at their rows' positions; returns all that any row may see."""
    for b in range(cache.batch):
        first, end = int(positions[b, 0]), int(positions[b, -1]) + 1
        cache.k[slot, b, :, first:end] = k[b]
        cache.v[slot, b, :, first:end] = v[b]
    longest = int(positions[:, -1].max()) + 1
    return cache.k[slot, :, :, :longest], cache.v[slot, :, :, :longest]


def attention_mask(positions: Tensor, keys: int, window: int | None) -> Tensor | None:  # bool [B, 1, T, keys]
    """Key j is seen from position i when i − window < j ≤ i. None where plain causal attention says the same."""
    T = positions.shape[1]
    if keys == T and (window is None or window >= T):
        return None
    if T == 1 and (window is None or window >= keys) and bool((positions == keys - 1).all()):
        return None
    j, i = torch.arange(keys), positions[:, :, None]
    seen = j <= i
    if window is not None:
        seen &= j > i - window
    return seen[:, None]
