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
from enum import IntEnum

import numpy as np
from numba import njit, types
from numba.extending import overload

from . import simd
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

    @njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def sync(counter, target):
    """Wait until all threads have arrived: `counter` is an address, `target` its value once they have."""
    simd.atomic_add(counter, 1)
    spins = 0
    while simd.atomic_load(counter) < target:
        spins += 1
        if spins >= _SPINS:
            spins = 0
            _yield()


@njit(cache=True, nogil=True)
def share(count, t, T):
    """Begin and end of thread t's part of `count` things."""
    return count * t // T, count * (t + 1) // T


@njit(cache=True, nogil=True)
def prepare(w, x, pairs, sums):
    """Activation [K] → what `group_dot` reads: `pairs`, each group padded to whole byte rows, and the group sums."""
    K, G, rows = w[_K], w[_GROUP_SIZE], w[_ROWS]
    for g in range(w[_GROUPS]):
        first, end = g * G, min(g * G + G, K)
        total = np.float32(0.0)
        for k in range(first, end):
            total += x[k]
        sums[g] = total
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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def matvec(w, pairs, sums, y, first, end):
    """`y[m, tile columns] = x @ W + bias` for tiles first..end−1. The order of sums does not depend on M or on threads.

    pairs fp32 [M, ·] and sums fp32 [M, groups] from `prepare`; y fp32 [M, ≥ tiles·32].
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


@njit(cache=True, nogil=True)
def _product(t, T, w, x, y, pairs, sums):
    for m in range(x.shape[0]):
        prepare(w, x[m], pairs[t, m], sums[t, m])
    first, end = share(w[_TILES], t, T)
    matvec(w, pairs[t], sums[t], y, first, end)


@njit(cache=True, nogil=True)
def product(t, T, w, x, y, pairs, sums, counter, arrivals):
    """`y = x @ W + bias` on a team. x fp32 [M, K]; pairs, sums: scratch [T, M, ·]; y fp32 [M, ≥ tiles·32]."""
    _product(t, T, w, x, y, pairs, sums)
    sync(counter, arrivals + T)


@njit(cache=True, nogil=True)
def product_alone(w, x, y, pairs, sums):
    """`product` on the calling thread."""
    _product(0, 1, w, x, y, pairs, sums)


@njit(cache=True, nogil=True, fastmath=_FAST)
def rms_norm(x, weight, eps, out):
    """`x / sqrt(mean(x²) + eps) · weight` over one row."""
    total = np.float32(0.0)
    for i in range(weight.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(weight.shape[0]) + eps)
    for i in range(weight.shape[0]):
        out[i] = x[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath=_FAST)
def rotate(head, cos, sin):
    """RoPE on one head, rotate-half layout, in place; cos and sin cover the rotated part."""
    half = cos.shape[0]
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = a * cos[i] - b * sin[i]
        head[half + i] = b * cos[i] + a * sin[i]


@njit(cache=True, nogil=True, fastmath=_FAST, inline="always")
def _exp(x):
    """e^x in fp32, relative error 2e-7, for loops that LLVM shall vectorise (libm's exp is a call per element).

    2^t = 2^n · 2^f with f in [−½, ½]: 2^f by its series, 2^n by the exponent bits. Clamped to the normal range.
    """
    t = min(max(x * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(127.0))
    n = np.floor(t + np.float32(0.5))
    f = (t - n) * np.float32(0.6931471805599453)
    p = np.float32(1 / 5040)
    p = p * f + np.float32(1 / 720)
    p = p * f + np.float32(1 / 120)
    p = p * f + np.float32(1 / 24)
    p = p * f + np.float32(1 / 6)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    return p * simd.power_of_two(np.int32(n))


@njit(cache=True, nogil=True, fastmath=_FAST)
def swiglu(gate, up, first, end):
    """gate ← silu(gate) · up on columns first..end−1."""
    for i in range(first, end):
        gate[i] = gate[i] / (np.float32(1.0) + _exp(-gate[i])) * up[i]


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend(q, k, v, scores, part):
    """One query head over keys k [n, head_dim]: part = [Σ e·v (head_dim values), Σ e, largest score]."""
    n, head_dim = k.shape
    factor = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    top = np.float32(-3.0e38)
    for p in range(n):
        total = np.float32(0.0)
        for d in range(head_dim):
            total += q[d] * _to_f32(k[p, d])
        scores[p] = total * factor
        top = max(top, scores[p])
    total = np.float32(0.0)
    for p in range(n):
        scores[p] = _exp(scores[p] - top)
        total += scores[p]
    for d in range(head_dim):
        part[d] = 0.0
    for p in range(n):
        weight = scores[p]
        for d in range(head_dim):
            part[d] += weight * _to_f32(v[p, d])
    part[head_dim], part[head_dim + 1] = total, top


@njit(cache=True, nogil=True, fastmath=_FAST)
def merge(parts, head, out):
    """The threads' parts [T, H, head_dim + 2] of one head → its output. A sum of 0 marks a thread without keys."""
    head_dim = out.shape[0]
    top = np.float32(-3.0e38)
    for t in range(parts.shape[0]):
        if parts[t, head, head_dim] > 0.0:
            top = max(top, parts[t, head, head_dim + 1])
    total = np.float32(0.0)
    out[:] = 0.0
    for t in range(parts.shape[0]):
        if parts[t, head, head_dim] > 0.0:
            factor = np.exp(parts[t, head, head_dim + 1] - top)
            total += factor * parts[t, head, head_dim]
            for d in range(head_dim):
                out[d] += factor * parts[t, head, d]
    for d in range(head_dim):
        out[d] /= total


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _normed_product(t, T, w, norm, W, S, y):
    """This thread's columns of `rms_norm(hidden) @ w`."""
    for b in range(S.hidden.shape[0]):
        rms_norm(S.hidden[b], norm, W.eps, S.normed[t, b])
        prepare(w, S.normed[t, b], S.pairs[t, b], S.sums[t, b])
    first, end = share(w[_TILES], t, T)
    matvec(w, S.pairs[t], S.sums[t], y, first, end)


@njit(cache=True, nogil=True)
def _add_product(t, T, w, x, S):
    """hidden += x @ w, on this thread's columns."""
    for b in range(x.shape[0]):
        prepare(w, x[b], S.pairs[t, b], S.sums[t, b])
    first, end = share(w[_TILES], t, T)
    matvec(w, S.pairs[t], S.sums[t], S.out, first, end)
    for b in range(x.shape[0]):
        for n in range(first * TILE, min(end * TILE, w[_N])):
            S.hidden[b, n] += S.out[b, n]


@njit(cache=True, nogil=True)
def decode_step(t, T, W, S, k, v, counter, arrivals):
    """S.hidden (embeddings [B, D]) → S.logits [B, ≥ V]; appends one key and value per block application.

    k, v [applications, B, KV heads, P, head_dim], bf16 as uint16 or fp32. `counter` is the address of the team's
    barrier and `arrivals` its value before this step.
    """
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
            swiglu(S.gate[b], S.up[b], first * TILE, end * TILE)
        arrivals += T
        sync(counter, arrivals)
        _add_product(t, T, w[_DOWN], S.gate, S)
        arrivals += T
        sync(counter, arrivals)
    _normed_product(t, T, W.head, W.final_norm, W, S, S.logits)
    sync(counter, arrivals + T)


SYNCS_PER_BLOCK, SYNCS_PER_STEP = 5, 1
