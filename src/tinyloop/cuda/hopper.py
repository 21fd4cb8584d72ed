"""The Hopper product: one launch of `hopper.cu`, whose x comes through a tensor map of the copy engine."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, ClassVar

import torch

from ..marlin import MarlinWeight
from .config import CHUNK, HopperConfig, choose_hopper
from .launch import Arguments, Launcher, bind_thread, chip, driver, raise_for, scratch_counters, scratch_floats

Tensor = torch.Tensor
_p, _i32 = ctypes.c_void_p, ctypes.c_int
_MAP_BYTES = 128


class _Problem(Arguments):
    _fields_: ClassVar[Any] = [
        ("x", ctypes.c_uint64 * 16), ("y", _p), ("partial", _p), ("arrived", _p),
        ("M", _i32), ("N", _i32), ("blocks64", _i32), ("chunks", _i32), ("runs_per_group", _i32),
        ("row_tiles", _i32), ("column_tiles", _i32), ("whole", _i32), ("piece", _i32), ("total", _i32),
    ]  # fmt: skip


class _Arguments(Arguments):
    _fields_: ClassVar[Any] = [
        ("p", _Problem), ("B", _p), ("S", _p), ("delta", _p), ("bias", _p), ("padding", ctypes.c_char * 32),
    ]  # fmt: skip


def product(
    x: Tensor,  # fp16 | bf16 [M, K] on cuda, rows aligned to 16 bytes, elements adjacent
    w: MarlinWeight,
    bias: Tensor | None = None,  # x's dtype [N]
    config: HopperConfig | None = None,
    out: Tensor | None = None,  # x's dtype [M, N], contiguous, aligned to 16 bytes
) -> Tensor:  # x's dtype [M, N]
    """`x @ W + bias`."""
    M, device = x.shape[0], x.device.index
    y = torch.empty(M, w.N, dtype=x.dtype, device=x.device) if out is None else out
    if M == 0:
        return y
    sms = chip(device).multiprocessors
    c = config or choose_hopper(M, w.Np, w.Kp, w.group_size, sms)
    column, runs = w.group_size == -1, c.runs(w.group_size)
    run = _launcher(c, device, x.dtype == torch.bfloat16, w.S.dtype == torch.float32, column, runs)
    a = _Arguments()
    p = a.p
    ctypes.memmove(ctypes.addressof(p), _tensor_map(x, c.BM), _MAP_BYTES)
    p.y, p.M, p.N = y.data_ptr(), M, w.N
    p.blocks64, p.chunks = w.Np // 64, w.Kp // c.DEPTH
    p.runs_per_group = (1 << 30) if column else w.group_size * runs // c.DEPTH
    p.row_tiles, p.column_tiles = -(-M // c.BM), -(-w.Np // c.columns)
    tiles = p.row_tiles * p.column_tiles
    work = c.schedule(tiles, p.chunks, sms)
    p.whole, p.piece, p.total = work.whole, work.piece, work.total
    if work.pieces:
        p.partial = scratch_floats(device, work.pieces * c.BM * c.columns, "partial").data_ptr()
        p.arrived = scratch_counters(device, sms * c.CW).data_ptr()
    a.B, a.S, a.delta = w.B.data_ptr(), w.S.data_ptr(), w.delta.data_ptr()
    a.bias = None if bias is None else bias.data_ptr()
    run(a, (tiles if c.SPLITS > 1 else max(work.pieces, min(work.whole, sms))) * c.SPLITS)
    return y


@functools.cache
def _launcher(c: HopperConfig, device: int, bf16: bool, scale32: bool, column: bool, runs: int) -> Launcher:
    macros = defines(c, runs, BF16=bf16, SCALE32=scale32, COLUMN=column)
    return Launcher("hopper", "hopper", macros, device, c.threads, c.shared_memory(scale32, runs), overlaps=True)


def defines(c: HopperConfig, runs: int = 1, **flags: bool) -> dict[str, int]:
    """The macros of one variant of hopper.cu."""
    names = ("BM", "NJ", "CW", "SPLITS", "DEPTH")
    x_stages, w_stages = c.stages(flags.get("SCALE32", False), runs)
    tile = {name: getattr(c, name) for name in names} | {"RUNS": runs, "X_STAGES": x_stages, "W_STAGES": w_stages}
    return tile | {name: int(flag) for name, flag in flags.items()}


def _tensor_map(x: Tensor, rows: int) -> bytes:
    """The copy engine's description of x; zeros are read outside of it."""
    d = driver()
    kind = d.CUtensorMapDataType
    dtype = kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if x.dtype == torch.bfloat16 else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    M, K = x.shape
    stride = x.stride(0) if M > 1 else -(-K // 8) * 8
    return _encoded(dtype, x.data_ptr(), M, K, stride, rows, x.device.index)


@functools.lru_cache(maxsize=256)
def _encoded(dtype: Any, pointer: int, M: int, K: int, stride: int, rows: int, device: int) -> bytes:
    d = driver()
    with torch.cuda.device(device):
        bind_thread(device)  # encoding wants a context, and comes before the first launch of a new thread
    u32, u64 = d.cuuint32_t, d.cuuint64_t
    result, encoded = d.cuTensorMapEncodeTiled(
        dtype, 2, pointer, [u64(K), u64(M)], [u64(2 * stride)], [u32(CHUNK), u32(rows)], [u32(1), u32(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    raise_for(result, f"tensor map of x [{M}, {K}] with rows {stride} elements apart")
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)
