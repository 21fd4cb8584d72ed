"""Causal attention of many bf16 rows, blocked as in FlashAttention (Dao et al. 2022), but in two passes.

    queries [48, D] · keys → scores fp32 [48, keys] → e^(score − top) bf16 → · values → out [48, D] / Σ e

Scores of 48 queries against all their keys stay in the second-level cache, so no running maximum is needed. Both
products run on the CPU's bf16 dot product (simd.dot_tile). Keys are packed in tiles of 64 as [D/2, 64] pairs, values as
[keys/2, D] pairs: the order in which the dot product reads its right side.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections import namedtuple

import numpy as np

from . import simd
from .jit import jit
from .kernels import rms_norm, rotate, share, sync

KEY_TILE = simd.TILE_VECTORS * simd.LANES
QUERY_ROWS = 8 * simd.TILE_ROWS

Given = namedtuple("Given", "qkv cos sin q_norm k_norm eps start window heads")
Space = namedtuple("Space", "keys values queries scores weights sums totals head")


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
