"""One decode step of a whole model as a single compiled call.

Thirty layers of small tensors cost more in calls than in arithmetic, so from the embedding rows to the logits nothing
is allocated and the interpreter is not entered. For each block application (■ = a barrier):

    norm → qkv ■ RoPE, append K and V, attend to this thread's keys ■ merge, out, add ■ norm → gate·up ■ down, add ■

Each thread prepares the activation for itself: a norm over D elements is cheaper than handing it round. Products are
split by columns, attention by keys, so that any number of heads and threads is balanced.
"""
# mypy: ignore-errors

from __future__ import annotations

from enum import IntEnum

import numpy as np

from . import simd
from .jit import jit
from .kernels import FAST, Field, matvec, prepare, rms_norm, rotate, share, store, sync
from .panel import TILE


class Linear(IntEnum):
    """The five weights of a block, in the order of a layer table."""

    QKV, OUT, GATE, UP, DOWN = range(5)


_QKV, _OUT, _GATE, _UP, _DOWN = (int(f) for f in Linear)
_TILES, _N = int(Field.TILES), int(Field.N)


@jit(fastmath=FAST)
def attend(q, k, v, scores, part):
    """One query head over keys k [n, head_dim]: part = [Σ e·v (head_dim values), Σ e, largest score].

    head_dim is a multiple of 16; scores has room for n + 15.
    """
    n, head_dim = k.shape
    part[head_dim] = 0.0
    if n == 0:
        return
    factor = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    top = np.float32(-3.0e38)
    for p in range(n):
        score = simd.dot_row(q.ctypes.data, k.ctypes.data + p * k.strides[0], head_dim // simd.LANES, k) * factor
        scores[p] = score
        top = max(top, score)
    vectors = (n + simd.LANES - 1) // simd.LANES
    for p in range(n, vectors * simd.LANES):
        scores[p] = np.float32(-3.0e38)
    total = simd.exp_row(scores.ctypes.data, vectors, top, scores.ctypes.data, scores)
    d = 0
    while d < head_dim:
        values, out = v.ctypes.data + d * v.itemsize, part.ctypes.data + d * 4
        if d + 4 * simd.LANES <= head_dim:
            simd.weighted_rows_4(scores.ctypes.data, values, n, v.strides[0], out, v)
            d += 4 * simd.LANES
        else:
            simd.weighted_rows_1(scores.ctypes.data, values, n, v.strides[0], out, v)
            d += simd.LANES
    part[head_dim], part[head_dim + 1] = total, top


@jit(fastmath=FAST)
def merge(parts, head, out):
    """The threads' parts [T, H, head_dim + 2] of one head → its output.

    A sum of 0 marks a thread without keys. A sum that is NaN is no such mark: it must reach the logits.
    """
    head_dim = out.shape[0]
    top = np.float32(-3.0e38)
    for t in range(parts.shape[0]):
        if parts[t, head, head_dim] != 0.0:
            top = max(top, parts[t, head, head_dim + 1])
    total = np.float32(0.0)
    out[:] = 0.0
    for t in range(parts.shape[0]):
        if parts[t, head, head_dim] != 0.0:
            factor = np.exp(parts[t, head, head_dim + 1] - top)
            total += factor * parts[t, head, head_dim]
            for d in range(head_dim):
                out[d] += factor * parts[t, head, d]
    for d in range(head_dim):
        out[d] /= total


@jit
def attention(t, T, b, layer, k, v, W, S):
    """Row b over this thread's share of keys; the last thread first appends. k, v [KV heads, P, head_dim]."""
    H, HKV, D = W.heads, k.shape[0], k.shape[2]
    position = S.positions[b]
    cos, sin = W.cos[position], W.sin[position]
    oldest = max(0, position + 1 - W.windows[layer]) if W.windows[layer] else 0
    first, end = share(position + 1 - oldest, t, T)
    first, end = first + oldest, end + oldest
    qkv, query = S.qkv[b], S.query[t]
    for h in range(H):
        q = query[h * D : (h + 1) * D]
        if W.q_norm.shape[0]:
            rms_norm(qkv[h * D : (h + 1) * D], W.q_norm[layer], W.eps, q)
        else:
            q[:] = qkv[h * D : (h + 1) * D]
        rotate(q, cos, sin)
    for g in range(HKV):
        if t == T - 1:
            key = S.key
            if W.k_norm.shape[0]:
                rms_norm(qkv[(H + g) * D : (H + g + 1) * D], W.k_norm[layer], W.eps, key)
            else:
                key[:] = qkv[(H + g) * D : (H + g + 1) * D]
            rotate(key, cos, sin)
            for d in range(D):
                store(k[g, position], d, key[d])
                store(v[g, position], d, qkv[(H + HKV + g) * D + d])
        for h in range(g * (H // HKV), (g + 1) * (H // HKV)):
            attend(query[h * D : (h + 1) * D], k[g, first:end], v[g, first:end], S.scores[t], S.parts[b, t, h])


@jit
def _normed_product(t, T, w, norm, W, S, y):
    """This thread's columns of `rms_norm(hidden) @ w`."""
    for b in range(S.hidden.shape[0]):
        rms_norm(S.hidden[b], norm, W.eps, S.normed[t, b])
        prepare(w, S.normed[t, b], S.pairs[t, b], S.sums[t, b])
    first, end = share(w[_TILES], t, T)
    matvec(w, S.pairs[t], S.sums[t], y, first, end)


@jit
def _add_product(t, T, w, x, S):
    """hidden += x @ w, on this thread's columns."""
    for b in range(S.hidden.shape[0]):
        prepare(w, x[b], S.pairs[t, b], S.sums[t, b])
    first, end = share(w[_TILES], t, T)
    matvec(w, S.pairs[t], S.sums[t], S.out, first, end)
    for b in range(S.hidden.shape[0]):
        for n in range(first * TILE, min(end * TILE, w[_N])):
            S.hidden[b, n] += S.out[b, n]


@jit
def decode_step(t, T, W, S, k, v, counter):
    """S.hidden (embeddings [B, D]) → S.logits [B, ≥ V]; appends one key and value per block application.

    k, v [applications, B, KV heads, P, head_dim], bf16 as uint16 or fp32.
    """
    arrivals = 0
    B, head_dim = S.hidden.shape[0], k.shape[4]
    for a in range(W.order.shape[0]):
        layer = W.order[a]
        w = W.layers[layer]
        _normed_product(t, T, w[_QKV], W.attn_norm[layer], W, S, S.qkv)
        arrivals += T
        sync(counter, arrivals)
        for b in range(B):
            attention(t, T, b, layer, k[a, b], v[a, b], W, S)
        arrivals += T
        sync(counter, arrivals)
        for b in range(B):
            for h in range(W.heads):
                merge(S.parts[b], h, S.normed[t, b, h * head_dim : (h + 1) * head_dim])
        _add_product(t, T, w[_OUT], S.normed[t], S)
        arrivals += T
        sync(counter, arrivals)
        _normed_product(t, T, w[_GATE], W.mlp_norm[layer], W, S, S.gate)
        _normed_product(t, T, w[_UP], W.mlp_norm[layer], W, S, S.up)
        first, end = share(w[_GATE, _TILES], t, T)
        for b in range(B):
            offset = first * TILE * 4
            vectors = (end - first) * (TILE // simd.LANES)
            if vectors:
                simd.swiglu_row(S.gate[b].ctypes.data + offset, S.up[b].ctypes.data + offset, vectors, S.gate)
        arrivals += T
        sync(counter, arrivals)
        _add_product(t, T, w[_DOWN], S.gate, S)
        arrivals += T
        sync(counter, arrivals)
    _normed_product(t, T, W.head, W.final_norm, W, S, S.logits)
