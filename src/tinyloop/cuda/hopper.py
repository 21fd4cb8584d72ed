"""The Hopper product: one launch of `hopper.cu`, whose x and words come through tensor maps of the copy engine."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, ClassVar

import torch

from ..marlin import MarlinWeight
from .config import CHUNK, HopperConfig, choose_hopper
from .launch import Arguments, Launcher, bind_thread, chip, driver, raise_for
from .ready import Launch, Ready

Tensor = torch.Tensor
_p, _i32 = ctypes.c_void_p, ctypes.c_int
_MAP = ctypes.c_uint64 * 16  # the copy engine's description of a matrix
_MAP_BYTES = ctypes.sizeof(_MAP)


class _Problem(Arguments):
    _fields_: ClassVar[Any] = [
        ("x", _MAP), ("words", _MAP), ("scale", _MAP), ("delta", _MAP), ("y", _p), ("partial", _p), ("arrived", _p),
        ("M", _i32), ("N", _i32), ("blocks64", _i32), ("chunks", _i32),
        ("runs_per_group", _i32), ("runs_per_box", _i32), ("row_tiles", _i32), ("box_rows", _i32),
        ("whole", _i32), ("piece", _i32), ("total", _i32), ("padding", ctypes.c_char * 60),
    ]  # fmt: skip


class _Arguments(Arguments):
    _fields_: ClassVar[Any] = [("p", _Problem), ("bias", _p), ("padding", ctypes.c_char * 56)]


def ready(
    M: int, dtype: torch.dtype, w: MarlinWeight, bias: Tensor | None = None, config: HopperConfig | None = None
) -> Ready:
    """A product of M rows of x's dtype by hopper.cu, with everything but x and y in place."""
    device = w.B.device.index
    sms, bf16 = chip(device).multiprocessors, dtype == torch.bfloat16
    c = config or choose_hopper(M, w.Np, w.Kp, w.group_size, sms, bf16 and not w.coarse)
    column, runs = w.group_size == -1, c.runs(w.group_size)
    scale32 = w.S.dtype == torch.float32
    run = _launcher(c, device, bf16, scale32, column, runs, bf16 and not scale32 and w.coarse, w.in_parts)
    a = _Arguments(bias=None if bias is None else bias.data_ptr())
    p = a.p
    p.M, p.N, p.blocks64, p.chunks = M, w.N, w.Np // 64, -(-w.Kp // c.DEPTH)
    p.runs_per_group = (1 << 30) if column else w.group_size * runs // c.DEPTH
    p.runs_per_box = runs if p.runs_per_group == 1 else 1
    p.row_tiles, p.box_rows = -(-M // c.BM), min(c.BM, -(-M // 8) * 8)
    work = c.work(M, w.Np, w.Kp, sms)
    p.whole, p.piece, p.total = work.whole, work.piece, work.total
    blocks = work.whole * c.SPLITS if c.SPLITS > 1 else work.blocks(sms)
    if M:
        for name, size, values, box_rows in (
            ("words", 8, w.B, c.DEPTH // 16),  # two words an element
            ("scale", w.S.element_size(), w.S, p.runs_per_box),
            ("delta", 4, w.delta, p.runs_per_box),
        ):
            to = ctypes.addressof(p) + getattr(_Problem, name).offset
            _put(to, size, values.data_ptr(), values.shape[0], w.Np, w.Np, box_rows, c.columns, device)
    K, x_rows = w.K, int(p.box_rows)

    def place(p: Any, x: int, ldx: int) -> None:
        stride = ldx if M > 1 else -(-K // 8) * 8
        _put(ctypes.addressof(p) + _Problem.x.offset, 2, x, M, K, stride, x_rows, CHUNK, device, swizzled=True)

    launch = Launch(run, a, blocks, work.pieces * c.BM * c.columns, sms * c.consumers)
    return Ready(M, w.N, dtype, launch, place, (w, bias))


def product(
    x: Tensor,  # fp16 | bf16 [M, K] on cuda, rows aligned to 16 bytes, elements adjacent
    w: MarlinWeight,
    bias: Tensor | None = None,  # x's dtype [N]
    config: HopperConfig | None = None,
    out: Tensor | None = None,  # x's dtype [M, N], contiguous, aligned to 16 bytes
) -> Tensor:  # x's dtype [M, N]
    """`x @ W + bias`."""
    return ready(x.shape[0], x.dtype, w, bias, config)(x, out)


@functools.cache
def _launcher(
    c: HopperConfig, device: int, bf16: bool, scale32: bool, column: bool, runs: int, coarse: bool, parts: bool
) -> Launcher:
    macros = defines(c, runs, BF16=bf16, SCALE32=scale32, COLUMN=column, COARSE=coarse, IN_PARTS=parts)
    return Launcher("hopper", "hopper", macros, device, c.threads, c.shared_memory(scale32, runs), overlaps=True)


def defines(c: HopperConfig, runs: int = 1, **flags: bool) -> dict[str, int]:
    """The macros of one variant of hopper.cu."""
    names = ("BM", "CW", "TEAMS", "SPLITS", "DEPTH")
    x_stages, w_stages = c.stages(flags.get("SCALE32", False), runs)
    tile = {name: getattr(c, name) for name in names} | {"RUNS": runs, "X_STAGES": x_stages, "W_STAGES": w_stages}
    return tile | {name: int(flag) for name, flag in flags.items()}


def _put(to: int, *matrix: int, swizzled: bool = False) -> None:
    """A map of `matrix`, the arguments of `_encoded`, to an address."""
    ctypes.memmove(to, _encoded(*matrix, swizzled), _MAP_BYTES)


@functools.lru_cache(maxsize=1 << 14)
def _encoded(
    size: int, pointer: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int, device: int,
    swizzled: bool,
) -> bytes:  # fmt: skip
    """The copy engine's description of a matrix of elements of `size` bytes, zeros outside of it. Boxes of 128 bytes in
    a row, as x has them, may be swizzled."""
    d = driver()
    with torch.cuda.device(device):
        bind_thread(device)  # encoding wants a context, and comes before the first launch of a new thread
    u32, u64 = d.cuuint32_t, d.cuuint64_t
    swizzle = "128B" if swizzled else "NONE"
    result, encoded = d.cuTensorMapEncodeTiled(
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_UINT{8 * size}"), 2, pointer,
        [u64(columns), u64(rows)], [u64(size * stride)], [u32(box_columns), u32(box_rows)], [u32(1), u32(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    raise_for(result, f"tensor map of [{rows}, {columns}] elements of {size} bytes, rows {stride} apart")
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)
