"""From tensors to the compiled kernels: dequantising, and the fused decode step of a whole model.

`FusedDecoder` gathers every address and buffer once, so that a step costs one call: embeddings in, logits out, keys and
values appended to the same cache that the torch path fills during prefill. Results do not depend on the batch or on
the number of threads in the products; attention sums in as many parts as there are threads.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import kernels, simd, step
from .panel import TILE, Panel
from .team import run, threads

if TYPE_CHECKING:
    from ..model import KVCache, Model
    from ..weight import QuantWeight

_LINEARS = ("attn_qkv", "attn_out", "mlp_gate", "mlp_up", "mlp_down")  # in the order of step.Linear

# What a step reads: tables of addresses and norms. And what it writes. numba takes named tuples of arrays as they are.
Weights = namedtuple(
    "Weights", "layers head order windows attn_norm mlp_norm final_norm q_norm k_norm cos sin heads eps"
)
Scratch = namedtuple(
    "Scratch", "hidden positions qkv gate up out logits normed pairs sums query key scores parts"
)  # fmt: skip


def dequantize(w: QuantWeight, dtype: torch.dtype) -> torch.Tensor:  # [K, N], fp32 or bf16
    """`w.dequantize(dtype)`, to the bit, in one pass on the team."""
    out = torch.empty(w.K, w.N, dtype=dtype)
    parameters = (t.float().contiguous().numpy() for t in (w.scale, w.zero))
    run(kernels.dequantize_rows, w.packed.contiguous().numpy(), *parameters, w.group_size, w.bits, _words(out))
    return out


def padded(M: int) -> int:
    """Rows that the product is given for M rows: three of them run as four."""
    return M if M < 3 else -(-M // 4) * 4


def _prepared(T: int, M: int, *panels: Panel) -> tuple[np.ndarray, np.ndarray]:
    """Per-thread scratch for prepared activations and group sums, large enough for each of `panels`."""
    pairs = max(p.groups * p.rows * (2 if p.bits == 4 else 1) for p in panels)
    groups = max(p.groups for p in panels)
    return np.zeros((T, padded(M), pairs), np.float32), np.zeros((T, padded(M), groups), np.float32)


def refusal(model: Model) -> str | None:
    """Why this model cannot take the fused step, or None."""
    from ..weight import QuantWeight

    if model.config.head_dim % simd.LANES:
        return f"head_dim={model.config.head_dim} is not a multiple of {simd.LANES}"
    for name, w in model.weights.items():
        if name != "embed" and not isinstance(w.weight, QuantWeight):
            return f"{name} is dense"
        if w.perm is not None:
            return f"{name} has its inputs in an order of its own (act-order)"
    head = model.weights["embed" if model.config.tie_word_embeddings else "head"]
    if not isinstance(head.weight, QuantWeight):
        return "the head is dense"
    return None


class FusedDecoder:
    """The decode step of one model for one KV cache."""

    def __init__(self, model: Model, cache: KVCache):
        self._threads = threads()
        self._model, self._cache = model, cache
        config = model.config
        layers = [[model.weights[f"layers.{i}.{n}"].panel() for n in _LINEARS] for i in range(config.num_layers)]
        head = model.weights["embed" if config.tie_word_embeddings else "head"].panel()
        self._keep = (layers, head)
        self._weights = self._tables(layers, head)
        self._scratch = self._buffers(layers, head)
        self._k, self._v = (_words(t) for t in (cache.k, cache.v))

    def _tables(self, layers: list[list[Panel]], head: Panel) -> Any:
        model, config = self._model, self._model.config
        L = config.num_layers

        def norms(name: str) -> np.ndarray:
            stack = [model.norms[f"layers.{i}.{name}"].numpy() for i in range(L)]
            return np.ascontiguousarray(np.stack(stack))

        none = np.empty((0, config.head_dim), np.float32)
        cos, sin = model.rope(torch.arange(self._cache.capacity))
        windows = config.sliding_window or (None,) * L
        return Weights(
            layers=np.array([[p.describe() for p in row] for row in layers], np.int64),
            head=np.array(head.describe(), np.int64),
            order=np.array([layer for layer, _ in self._cache.config.applications()], np.int64),
            windows=np.array([w or 0 for w in windows], np.int64),
            attn_norm=norms("attn_norm"), mlp_norm=norms("mlp_norm"),
            final_norm=model.norms["final_norm"].numpy(),
            q_norm=norms("q_norm") if config.qk_norm else none, k_norm=norms("k_norm") if config.qk_norm else none,
            cos=np.ascontiguousarray(cos.numpy()), sin=np.ascontiguousarray(sin.numpy()),
            heads=config.num_attention_heads, eps=np.float32(config.rms_norm_eps),
        )  # fmt: skip

    def _buffers(self, layers: list[list[Panel]], head: Panel) -> Any:
        config, B, T = self._model.config, self._cache.batch, self._threads
        M = padded(B)
        qkv, out, gate, _, down = (max(row[i].tiles for row in layers) * TILE for i in range(5))
        heads = config.num_attention_heads * config.head_dim
        pairs, sums = _prepared(T, B, head, *(p for row in layers for p in row))

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.float32)

        return Scratch(
            hidden=zeros(B, config.hidden_size), positions=np.zeros(B, np.int64), qkv=zeros(M, qkv),
            gate=zeros(M, gate), up=zeros(M, gate), out=zeros(M, max(out, down)), logits=zeros(M, head.tiles * TILE),
            normed=zeros(T, B, max(config.hidden_size, heads)), pairs=pairs, sums=sums, query=zeros(T, heads),
            key=zeros(config.head_dim), scores=zeros(T, self._cache.capacity + simd.LANES),
            parts=zeros(B, T, config.num_attention_heads, config.head_dim + 2),
        )  # fmt: skip

    def step(self, tokens: torch.Tensor) -> torch.Tensor:  # int64 [B] → fp32 [B, V]
        """Logits after one more token per row. The result is overwritten by the next step."""
        if threads() != self._threads:
            self._threads = threads()  # first: the buffers are sized by it
            self._scratch = self._buffers(*self._keep)
        self._scratch.hidden[:] = self._model.embed(tokens).numpy()
        self._scratch.positions[:] = self._cache.lengths
        run(step.decode_step, self._weights, self._scratch, self._k, self._v)
        self._cache.lengths += 1
        return torch.from_numpy(self._scratch.logits)[: self._cache.batch, : self._model.config.vocab_size]


def _words(t: torch.Tensor) -> np.ndarray:
    """A cache as numpy: fp32 as it is, bf16 as its 16-bit words."""
    return np.asarray((t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy())
