"""CPU kernels for few rows, exact to fp32 rounding: products with panel weights, and one whole decode step.

Every function runs on all threads of a team at once (team.py): thread `t` of `T` takes its share of columns or of key
positions, and `sync` separates phases. Nothing is allocated and the interpreter is not entered between the first
embedding row and the logits, because thirty layers of small tensors cost more in calls than in arithmetic.

One decode step, for each block application (■ = a barrier):

    norm → qkv ■ RoPE, append K and V, attend to this thread's keys ■ merge, out, add ■ norm → gate·up ■ down, add ■

Each thread prepares the activation for itself: a norm over D elements is cheaper than handing it round.
"""
# mypy: ignore-errors

from __future__ import annotations

import os
from collections import namedtuple
from enum import IntEnum

import numpy as np
from numba import types
from numba.extending import overload

from . import simd
from .jit import jit
from .panel import TILE


class Field(IntEnum):
    """Columns of a panel's description, as `Panel.describe` gives them."""

    DATA, TILES, GROUPS, ROWS, GROUP_SIZE, K, N, BITS, HALF, BIAS = range(10)


class Linear(IntEnum):
    """The five weights of a block, in the order of a layer table."""

    QKV, OUT, GATE, UP, DOWN = range(5)


_DATA, _TILES, _GROUPS, _ROWS, _GROUP_SIZE, _K, _N, _BITS, _HALF, _BIAS = (int(f) for f in Field)
_QKV, _OUT, _GATE, _UP, _DOWN = (int(f) for f in Linear)
_FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered, NaN and infinity keep their meaning
_SPINS = 4096  # before a waiting thread offers its core to another

if os.name == "posix":
    _yield = types.ExternalFunction("sched_yield", types.int32())
else:

    @jit
    def _yield():
        return 0


def _to_f32(value):  # replaced below; exists for the interpreter's sake
    raise NotImplementedError


@overload(_to_f32, inline="always")
def _to_f32_overload(value):
    if value == types.uint16:
        return lambda value: simd.bf16_to_f32(value)
    return lambda value: value


def _store(array, i, value):
    raise NotImplementedError


@overload(_store, inline="always")
def _store_overload(array, i, value):
    if array.dtype == types.uint16:

        def store(array, i, value):
            array[i] = simd.f32_to_bf16(value)

    else:

        def store(array, i, value):
            array[i] = value

    return store


@jit
def sync(counter, target):
    """Wait until all threads have arrived: `counter` is an address, `target` its value by then."""
    simd.atomic_add(counter, 1)
    spins = 0
    while simd.atomic_load(counter) < target:
        spins += 1
        if spins >= _SPINS:
            spins = 0
            _yield()


@jit
def share(count, t, T):
    """Begin and end of thread t's part of `count` things."""
    return count * t // T, count * (t + 1) // T


@jit
def prepare(w, x, pairs, sums):
    """Activation [K] → what `group_dot` reads: `pairs`, each group padded to whole byte rows, and the group sums.

    Sums are fp64: zero·Σx cancels most of scale·Σx·q where x is off-centre, so its error would be the result's.
    """
    K, G, rows = w[_K], w[_GROUP_SIZE], w[_ROWS]
    for g in range(w[_GROUPS]):
        first, end = g * G, min(g * G + G, K)
        total = 0.0
        for k in range(first, end):
            total += x[k]
        sums[g] = np.float32(total)
        if w[_BITS] == 8:
            for k in range(first, first + G):
                pairs[k] = x[k] if k < end else np.float32(0.0)
            continue
        at = g * rows * 2
        for i in range(rows):
            k = first + 2 * i
            x0 = x[k] if k < end else np.float32(0.0)
            x1 = x[k + 1] * np.float32(0.0625) if k + 1 < end else np.float32(0.0)
            pairs[at + 2 * i] = x0 - x1
            pairs[at + 2 * i + 1] = x1


@jit
def _dot(w, record, x, x_stride, sums, sum_stride, y, y_stride, four):
    """One group of one tile for one row of x, or for four."""
    if w[_BITS] == 4:
        if w[_HALF]:
            if four:
                simd.dot4_half_4(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
            else:
                simd.dot4_half_1(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
        elif four:
            simd.dot4_full_4(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
        else:
            simd.dot4_full_1(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
    elif w[_HALF]:
        if four:
            simd.dot8_half_4(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
        else:
            simd.dot8_half_1(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
    elif four:
        simd.dot8_full_4(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)
    else:
        simd.dot8_full_1(record, w[_ROWS], x, x_stride, sums, sum_stride, y, y_stride)


@jit
def matvec(w, pairs, sums, y, first, end):
    """`y[m, tile columns] = x @ W + bias` for tiles first..end−1. The order of sums does not depend on M or on threads.

    pairs fp32 [M, ·] and sums fp32 [M, groups] from `prepare`; y fp32 [M, ≥ tiles·32]. Four rows cost little more than
    two, so callers pad three to four (`decode.padded`).
    """
    M = y.shape[0]
    code_row = 8 if w[_BITS] == 4 else 4  # bytes of prepared activation per byte row of codes
    record_bytes = w[_ROWS] * TILE + TILE * (4 if w[_HALF] else 8)
    x_stride, sum_stride, y_stride = pairs.strides[0], sums.strides[0], y.strides[0]
    for tile in range(first, end):
        column = tile * TILE
        for m in range(M):
            for n in range(column, column + TILE):
                y[m, n] = 0.0
        record = w[_DATA] + tile * w[_GROUPS] * record_bytes
        for g in range(w[_GROUPS]):
            x, s = pairs.ctypes.data + g * w[_ROWS] * code_row, sums.ctypes.data + g * 4
            out = y.ctypes.data + column * 4
            m = 0
            while m + 4 <= M:
                _dot(w, record, x, x_stride, s, sum_stride, out, y_stride, True)
                x, s, out, m = x + 4 * x_stride, s + 4 * sum_stride, out + 4 * y_stride, m + 4
            while m < M:
                _dot(w, record, x, x_stride, s, sum_stride, out, y_stride, False)
                x, s, out, m = x + x_stride, s + sum_stride, out + y_stride, m + 1
            record += record_bytes
        if w[_BIAS]:
            for n in range(column, min(column + TILE, w[_N])):
                bias = simd.load_f32(w[_BIAS] + n * 4)
                for m in range(M):
                    y[m, n] += bias


@jit
def product(t, T, w, x, y, pairs, sums, counter):
    """`y = x @ W + bias` on a team. x fp32 [M, K]; pairs, sums: scratch [T, M, ·]; y fp32 [M, ≥ tiles·32]."""
    for m in range(x.shape[0]):
        prepare(w, x[m], pairs[t, m], sums[t, m])
    first, end = share(w[_TILES], t, T)
    matvec(w, pairs[t], sums[t], y, first, end)


@jit
def dequantize_rows(t, T, packed, scale, zero, group_size, bits, out, counter):
    """out [K, N] (fp32, or bf16 as uint16) = q·scale + zero, each rounded once to fp32; parameters fp32 [groups, N]."""
    K = out.shape[0]
    per_byte, mask = (2, 15) if bits == 4 else (1, 255)
    first, end = share(packed.shape[0], t, T)
    for i in range(first, end):
        for half in range(per_byte):
            k = i * per_byte + half
            if k < K:
                _dequantize_row(packed[i], scale[k // group_size], zero[k // group_size], 4 * half, mask, out[k])


@jit
def _dequantize_row(packed, scale, zero, shift, mask, out):
    for n in range(out.shape[0]):
        code = (np.uint32(packed[n]) >> np.uint32(shift)) & np.uint32(mask)
        _store(out, n, np.float32(np.int32(code)) * scale[n] + zero[n])


@jit(fastmath=_FAST)
def rms_norm(x, weight, eps, out):
    """`x / sqrt(mean(x²) + eps) · weight` over one row."""
    total = np.float32(0.0)
    for i in range(weight.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(weight.shape[0]) + eps)
    for i in range(weight.shape[0]):
        out[i] = x[i] * factor * weight[i]


@jit(fastmath=_FAST)
def rotate(head, cos, sin):
    """RoPE on one head, rotate-half layout, in place; cos and sin cover the rotated part."""
    half = cos.shape[0]
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = a * cos[i] - b * sin[i]
        head[half + i] = b * cos[i] + a * sin[i]


@jit(fastmath=_FAST)
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


@jit(fastmath=_FAST)
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
                _store(k[g, position], d, key[d])
                _store(v[g, position], d, qkv[(H + HKV + g) * D + d])
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


@jit
def losses_rows(t, T, logits, targets, out, counter):
    """out[m] = log Σ e^logits[m] − logits[m, target]; logits bf16 (as uint16) or fp32, contiguous rows [M, V]."""
    V = logits.shape[1]
    vectors = V // simd.LANES
    first, end = share(logits.shape[0], t, T)
    for m in range(first, end):
        row = logits[m]
        top = simd.largest(row.ctypes.data, vectors, logits) if vectors else np.float32(-3.0e38)
        for n in range(vectors * simd.LANES, V):
            top = max(top, _to_f32(row[n]))
        total = np.float64(simd.exp_sum(row.ctypes.data, vectors, top, logits)) if vectors else 0.0
        for n in range(vectors * simd.LANES, V):
            total += np.exp(np.float64(_to_f32(row[n]) - top))
        out[m] = np.float32(np.log(total) + top - _to_f32(row[targets[m]]))


# ── many rows ──────────────────────────────────────────────────────────────────────────────────────────────────────

KEY_TILE = simd.TILE_VECTORS * simd.LANES
QUERY_ROWS = 8 * simd.TILE_ROWS

Given = namedtuple("Given", "qkv cos sin q_norm k_norm eps start window heads")
Space = namedtuple("Space", "keys values queries scores weights sums totals head")


@jit(fastmath=_FAST)
def add_norm_rows(t, T, x, y, out, add, weight, eps, counter):
    """Rows of x (fp32) += y (bf16) if `add`; out (bf16) = RMSNorm(x)·weight."""
    first, end = share(x.shape[0], t, T)
    D = weight.shape[0]
    for m in range(first, end):
        total = np.float32(0.0)
        if add:
            for i in range(D):
                x[m, i] += simd.bf16_to_f32(y[m, i])
        for i in range(D):
            total += x[m, i] * x[m, i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(D) + eps)
        for i in range(D):
            out[m, i] = simd.f32_to_bf16(x[m, i] * factor * weight[i])


@jit
def swiglu_flat(t, T, gate, up, counter):
    """gate ← silu(gate)·up over flat arrays of a multiple of 16 elements."""
    first, end = share(gate.shape[0] // simd.LANES, t, T)
    if end > first:
        offset = first * simd.LANES * gate.itemsize
        simd.swiglu_row(gate.ctypes.data + offset, up.ctypes.data + offset, end - first, gate)


@jit
def attention_rows(t, T, A, k, v, out, S, counter):
    """Causal attention of the rows in A.qkv, whose positions begin at A.start. k, v [KV heads, P, D] take their keys.

    out [rows, heads·D]; all bf16 as uint16. S.scores and S.weights are as wide as the keys, in whole tiles.
    """
    rows, H, D = A.qkv.shape[0], A.heads, k.shape[2]
    first, end = share(rows, t, T)
    for m in range(first, end):
        _rotate_row(A, m, k, v, S.head[t])
    sync(counter, T)
    tiles = S.keys.shape[1]
    first, end = share(k.shape[0] * tiles, t, T)
    for i in range(first, end):
        _pack_tile(k[i // tiles], v[i // tiles], A.start + rows, i % tiles, S.keys[i // tiles], S.values[i // tiles])
    sync(counter, 2 * T)
    blocks = (rows + QUERY_ROWS - 1) // QUERY_ROWS
    while True:  # the longest blocks first, whoever is free takes the next
        item = simd.atomic_add(counter + 8, 1)
        if item >= blocks * H:
            break
        _attend_block(A, item % H, blocks - 1 - item // H, t, D, k.shape[0], S, out)


@jit
def _rotate_row(A, m, k, v, head):
    """Norm and RoPE on one row: queries stay in qkv, scaled by 1/√D; the key and the value go to their slot."""
    H, (HKV, _, D) = A.heads, k.shape
    factor = np.float32(1.0) / np.sqrt(np.float32(D))
    row = A.qkv[m]
    for h in range(H + HKV):
        for d in range(D):
            head[d] = simd.bf16_to_f32(row[h * D + d])
        norm = A.q_norm if h < H else A.k_norm
        if norm.shape[0]:
            rms_norm(head, norm, A.eps, head)
        rotate(head, A.cos[m], A.sin[m])
        if h < H:
            for d in range(D):
                row[h * D + d] = simd.f32_to_bf16(head[d] * factor)
        else:
            for d in range(D):
                k[h - H, A.start + m, d] = simd.f32_to_bf16(head[d])
    for g in range(HKV):
        v[g, A.start + m, :] = row[(H + HKV + g) * D : (H + HKV + g + 1) * D]


@jit
def _pack_tile(k, v, count, tile, keys, values):
    """Keys and values tile·64 … +63 of [P, D] → pairs; beyond `count` zeros."""
    D = k.shape[1]
    for j in range(KEY_TILE):
        p = tile * KEY_TILE + j
        for d in range(D // 2):
            word = np.uint32(0)
            if p < count:
                word = np.uint32(k[p, 2 * d]) | np.uint32(k[p, 2 * d + 1]) << np.uint32(16)
            keys[tile, d, j] = word
    for j in range(KEY_TILE // 2):
        p = tile * KEY_TILE + 2 * j
        for d in range(D):
            low = np.uint32(v[p, d]) if p < count else np.uint32(0)
            high = np.uint32(v[p + 1, d]) if p + 1 < count else np.uint32(0)
            values[tile * (KEY_TILE // 2) + j, d] = low | high << np.uint32(16)


@jit
def _attend_block(A, h, block, t, D, HKV, S, out):
    """48 queries of head h, all their keys."""
    first = block * QUERY_ROWS
    rows = min(QUERY_ROWS, A.qkv.shape[0] - first)
    for r in range(QUERY_ROWS):
        for d in range(D):
            S.queries[t, r, d] = A.qkv[first + r, h * D + d] if r < rows else np.uint16(0)
    g = h // (A.heads // HKV)
    low = max(0, A.start + first + 1 - A.window) // KEY_TILE if A.window else 0
    tiles = (A.start + first + rows + KEY_TILE - 1) // KEY_TILE - low
    q, scores, weights, sums = S.queries[t], S.scores[t], S.weights[t], S.sums[t]
    for tile in range(tiles):
        for r in range(0, rows, simd.TILE_ROWS):
            simd.dot_tile(q[r].ctypes.data, q.strides[0], S.keys[g, low + tile].ctypes.data, KEY_TILE * 4, D // 2,
                          scores[r].ctypes.data + tile * KEY_TILE * 4, scores.strides[0])  # fmt: skip
    for r in range(rows):
        end = A.start + first + r + 1 - low * KEY_TILE
        begin = max(0, end - A.window) if A.window else 0
        S.totals[t, r] = _softmax(scores[r], begin, end, tiles * KEY_TILE, weights[r])
    for c in range(0, D, KEY_TILE):
        right = S.values[g, low * (KEY_TILE // 2)].ctypes.data + c * 4
        for r in range(0, rows, simd.TILE_ROWS):
            simd.dot_tile(weights[r].ctypes.data, weights.strides[0], right, D * 4, tiles * (KEY_TILE // 2),
                          sums[r].ctypes.data, sums.strides[0])  # fmt: skip
        for r in range(rows):
            factor = np.float32(1.0) / S.totals[t, r]
            for d in range(KEY_TILE):
                out[first + r, h * D + c + d] = simd.f32_to_bf16(sums[r, d] * factor)


@jit
def _softmax(scores, begin, end, width, weights):
    """weights (bf16) = e^(score − top) on begin..end−1, 0 elsewhere below `width`; returns their unrounded sum."""
    for i in range(begin):
        scores[i] = np.float32(-3.0e38)
    for i in range(end, width):
        scores[i] = np.float32(-3.0e38)
    top = simd.largest(scores.ctypes.data, width // simd.LANES, scores)
    return simd.exp_row(scores.ctypes.data, width // simd.LANES, top, weights.ctypes.data, weights)
