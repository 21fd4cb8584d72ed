"""CPU kernels that others are built of: exact products with panel weights, and passes over rows.

Every function with `t, T` runs on all threads of a team at once (team.py): thread `t` of `T` takes its share, and
`sync` separates phases. Nothing is allocated and the interpreter is not entered inside.
"""
# mypy: ignore-errors

from __future__ import annotations

import os
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


_DATA, _TILES, _GROUPS, _ROWS, _GROUP_SIZE, _K, _N, _BITS, _HALF, _BIAS = (int(f) for f in Field)
FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered, NaN and infinity keep their meaning
_SPINS = 4096  # before a waiting thread offers its core to another

if os.name == "posix":
    _yield = types.ExternalFunction("sched_yield", types.int32())
else:

    @jit
    def _yield():
        return 0


def to_f32(value):  # replaced below; exists for the interpreter's sake
    raise NotImplementedError


@overload(to_f32, inline="always")
def _to_f32_overload(value):
    if value == types.uint16:
        return lambda value: simd.bf16_to_f32(value)
    return lambda value: value


def store(array, i, value):
    raise NotImplementedError


@overload(store, inline="always")
def _store_overload(array, i, value):
    if array.dtype == types.uint16:

        def put(array, i, value):
            array[i] = simd.f32_to_bf16(value)

    else:

        def put(array, i, value):
            array[i] = value

    return put


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
def _dot(w, R, record, x, x_stride, sums, sum_stride, y, y_stride):
    """One group of one tile for R = 1, 2 or 4 rows of x."""
    rows, half = w[_ROWS], w[_HALF]
    if w[_BITS] == 4:
        if R == 1 and half:
            simd.dot4_half_1(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
        elif R == 1:
            simd.dot4_full_1(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
        elif R == 2 and half:
            simd.dot4_half_2(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
        elif R == 2:
            simd.dot4_full_2(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
        elif half:
            simd.dot4_half_4(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
        else:
            simd.dot4_full_4(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    elif R == 1 and half:
        simd.dot8_half_1(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    elif R == 1:
        simd.dot8_full_1(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    elif R == 2 and half:
        simd.dot8_half_2(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    elif R == 2:
        simd.dot8_full_2(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    elif half:
        simd.dot8_half_4(record, rows, x, x_stride, sums, sum_stride, y, y_stride)
    else:
        simd.dot8_full_4(record, rows, x, x_stride, sums, sum_stride, y, y_stride)


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
            while m < M:
                R = 4 if M - m >= 4 else 2 if M - m >= 2 else 1
                _dot(w, R, record, x, x_stride, s, sum_stride, out, y_stride)
                x, s, out, m = x + R * x_stride, s + R * sum_stride, out + R * y_stride, m + R
            record += record_bytes
        if w[_BIAS]:
            for n in range(column, min(column + TILE, w[_N])):
                bias = simd.load_f32(w[_BIAS] + n * 4)
                for m in range(M):
                    y[m, n] += bias


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
        store(out, n, np.float32(np.int32(code)) * scale[n] + zero[n])


@jit(fastmath=FAST)
def rms_norm(x, weight, eps, out):
    """`x / sqrt(mean(x²) + eps) · weight` over one row."""
    total = np.float32(0.0)
    for i in range(weight.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(weight.shape[0]) + eps)
    for i in range(weight.shape[0]):
        out[i] = x[i] * factor * weight[i]


@jit(fastmath=FAST)
def rotate(head, cos, sin):
    """RoPE on one head, rotate-half layout, in place; cos and sin cover the rotated part."""
    half = cos.shape[0]
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = a * cos[i] - b * sin[i]
        head[half + i] = b * cos[i] + a * sin[i]


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
            top = max(top, to_f32(row[n]))
        total = np.float64(simd.exp_sum(row.ctypes.data, vectors, top, logits)) if vectors else 0.0
        for n in range(vectors * simd.LANES, V):
            total += np.exp(np.float64(to_f32(row[n]) - top))
        out[m] = np.float32(np.log(total) + top - to_f32(row[targets[m]]))


@jit(fastmath=FAST)
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
