"""One product on panels with as little ceremony as there can be: eager decoding makes hundreds of such calls a token.

Everything the kernel needs stands in a block of 64-bit words, so that the same function is called from Python, at about
2 µs, or entered by every thread of torch's OpenMP pool, at about 2 µs more: no thread takes the interpreter's lock,
which cost 20 µs a call (team.py). x is read and y written in their own dtype. Threads take tiles as they are free, so
a thread that comes late or not at all delays nothing; what a tile holds does not depend on who computes it.
"""
# mypy: ignore-errors

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from enum import IntEnum

import numpy as np
import torch
from numba import carray, types

from . import simd, team
from .decode import padded
from .jit import jit
from .kernels import Field, matvec, prepare
from .panel import TILE, Panel
from .team import threads

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16)
_GOMP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Word(IntEnum):
    """The words of a block: what is called for."""

    WEIGHT = 0  # address of the panel's description, words as in kernels.Field
    X = 1  # address of x [M, K]
    Y = 2  # address of y [M, N]
    M = 3
    HALF = 4  # x and y are bf16, else fp32
    SCRATCH = 5  # address of fp32 scratch: y [M', tiles·32], then for each thread x [K], pairs and sums [M', ·]
    SHARE = 6  # words of scratch for each thread
    TAKE = 7  # tiles that a thread takes at a time
    THREAD = 8  # counts threads as they come
    NEXT = 9  # the next tile that nobody has taken


_TILES, _GROUPS, _ROWS, _K, _N, _BITS = (int(getattr(Field, n)) for n in ("TILES", "GROUPS", "ROWS", "K", "N", "BITS"))
_WEIGHT, _X, _Y, _M, _HALF, _SCRATCH, _SHARE, _TAKE, _THREAD, _NEXT = (int(word) for word in Word)
_FIELDS = len(Field)
_CALL = struct.Struct(f"={len(Word)}q")


@jit
def _widen(source, half, k, x):
    """x[...] = row k of the activations as fp32."""
    K = x.shape[0]
    if half:
        row = carray(simd.pointer_u16(source + k * K * 2), (K,))
        for i in range(K):
            x[i] = simd.bf16_to_f32(row[i])
    else:
        whole = carray(simd.pointer_f32(source + k * K * 4), (K,))
        for i in range(K):
            x[i] = whole[i]


@jit
def _narrow(y, half, target, N, first, end):
    """Columns first … end − 1 of y → the result."""
    M = y.shape[0]
    for m in range(M):
        if half:
            row = carray(simd.pointer_u16(target + m * N * 2), (N,))
            for n in range(first, end):
                row[n] = simd.f32_to_bf16(y[m, n])
        else:
            whole = carray(simd.pointer_f32(target + m * N * 4), (N,))
            for n in range(first, end):
                whole[n] = y[m, n]


@jit
def _product(address):
    call = carray(simd.pointer_i64(address), (_NEXT + 1,))
    w = carray(simd.pointer_i64(call[_WEIGHT]), (_FIELDS,))
    M, half, scratch, take = call[_M], call[_HALF], call[_SCRATCH], call[_TAKE]
    K, N, tiles, groups = w[_K], w[_N], w[_TILES], w[_GROUPS]
    rows = M if M < 3 else (M + 3) // 4 * 4
    width = groups * w[_ROWS] * (2 if w[_BITS] == 4 else 1)
    y = carray(simd.pointer_f32(scratch), (rows, tiles * TILE))
    t = simd.atomic_add(address + 8 * _THREAD, 1)
    own = scratch + 4 * (rows * tiles * TILE + t * call[_SHARE])
    x = carray(simd.pointer_f32(own), (K,))
    pairs = carray(simd.pointer_f32(own + 4 * K), (rows, width))
    sums = carray(simd.pointer_f32(own + 4 * (K + rows * width)), (rows, groups))
    for m in range(M):
        _widen(call[_X], half, m, x)
        prepare(w, x, pairs[m], sums[m])
    while True:
        first = simd.atomic_add(address + 8 * _NEXT, take)
        if first >= tiles:
            break
        end = min(first + take, tiles)
        matvec(w, pairs, sums, y, first, end)
        _narrow(y[:M], half, call[_Y], N, first * TILE, min(end * TILE, N))


@functools.cache
def _entry():
    """The compiled function as C calls it: its address, and a callable."""
    _product.compile((types.int64,))
    compiled = _product.overloads[(types.int64,)]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address, ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


class _Space(threading.local):
    """A thread's block and scratch, kept between calls."""

    def __init__(self):
        self.function, self.call = _entry()
        self.block = np.empty(len(Word), np.int64)
        self.address = self.block.ctypes.data
        self.room(1 << 16)

    def room(self, floats):
        self.scratch, self.size = np.empty(floats, np.float32), floats
        self.at = self.scratch.ctypes.data


_space = _Space()


def product(x: Tensor, panel: Panel) -> Tensor:  # contiguous fp32 | bf16 [..., K] → x's dtype [..., N]
    """`x @ W + bias` in fp32, rounded once."""
    y = x.new_empty((*x.shape[:-1], panel.N))
    M, tiles, T = x.numel() // panel.K, panel.tiles, threads() if panel.large else 1
    rows = M if M < 3 else padded(M)
    share = panel.K + rows * panel.prepared
    space, need = _space, rows * tiles * TILE + T * share
    if space.size < need:
        space.room(need)
    half, take = x.dtype is torch.bfloat16, 1 + tiles // (4 * T) if T > 1 else tiles
    _CALL.pack_into(space.block, 0, panel.address, x.data_ptr(), y.data_ptr(), M, half, space.at, share, take, 0, 0)
    if T == 1:
        space.call(space.address)
    elif (openmp := team._openmp()) is None:
        _plain(space, T)
    else:
        _parallel(openmp)(space.function, space.address, T, 0)
    return y


@functools.cache
def _parallel(openmp):
    return _GOMP(("GOMP_parallel", openmp))


def _plain(space, T):
    """Threads of our own, where torch's pool cannot be entered."""
    others = [threading.Thread(target=space.call, args=(space.address,)) for _ in range(1, T)]
    for other in others:
        other.start()
    space.call(space.address)
    for other in others:
        other.join()
