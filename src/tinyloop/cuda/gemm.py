"""The tensor-core product on the device format: one launch of `tensor_core.cu`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..errors import InputError
from ..marlin import MarlinWeight
from .config import CHUNK, Config, choose, in_halves
from .launch import Arguments, Launcher, chip
from .ready import Launch, Ready

Tensor = torch.Tensor
_p, _i64, _i32 = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class _Problem(Arguments):
    _fields_: ClassVar[Any] = [
        ("x", _p), ("y", _p), ("partial", _p), ("arrived", _p), ("ldx", _i64),
        ("M", _i32), ("N", _i32), ("K", _i32), ("blocks64", _i32), ("chunks", _i32), ("units_per_group", _i32),
        ("row_tiles", _i32), ("whole", _i32), ("splits", _i32), ("lead", _i32), ("clustered", _i32),
    ]  # fmt: skip


class _Weight(Arguments):
    _fields_: ClassVar[Any] = [("B", _p), ("S", _p), ("delta", _p), ("bias", _p)]


class _Arguments(Arguments):
    _fields_: ClassVar[Any] = [("p", _Problem), ("w", _Weight), ("w2", _Weight)]


@functools.cache
def _launcher(
    config: Config, device: int, bf16: bool, scale32: bool, column: bool, halves: bool, symmetric: bool, pair: bool,
    parts: bool, one_row: bool,
) -> Launcher:  # fmt: skip
    macros = defines(
        config, BF16=bf16, SCALE32=scale32, COLUMN=column, HALVES=halves, SYMMETRIC=symmetric, PAIR=pair,
        IN_PARTS=parts, ONE_ROW=one_row,
    )  # fmt: skip
    shared = config.shared_memory(scale32, halves, symmetric)
    blocks = config.splits if config.cluster else 1
    return Launcher("tensor_core", "tensor_core", macros, device, config.threads, shared, overlaps=True, cluster=blocks)


def defines(config: Config, **flags: bool) -> dict[str, int]:
    """The macros of one variant of tensor_core.cu."""
    tile = {n: int(getattr(config, n)) for n in ("MT", "WM", "WN", "WORDS", "WK", "STAGES", "DECODE")}
    return tile | {name: int(flag) for name, flag in flags.items()}


def ready(
    M: int, dtype: torch.dtype, w: MarlinWeight, bias: Tensor | None = None, config: Config | None = None,
    symmetric: bool = False, pair: tuple[MarlinWeight, Tensor | None] | None = None,
) -> Ready:  # fmt: skip
    """A product of M rows of x's dtype by tensor_core.cu, with everything but x and y in place."""
    device = w.B.device.index
    column = w.group_size == -1
    halves = in_halves(w.group_size)
    bf16, scale32 = dtype == torch.bfloat16, w.S.dtype == torch.float32
    c = config or choose(M, w.Np, w.Kp, chip(device), pair is not None, halves, scale32)
    one = replace(c, lead=0) if c.cluster else replace(c, splits=1, lead=0)
    parts, one_row = w.in_parts and not symmetric, M == c.MT == 1 and halves and not (c.DECODE or symmetric)
    run = _launcher(one, device, bf16, scale32, column, halves, symmetric, pair is not None, parts, one_row)
    p = _Problem(M=M, N=w.N, K=w.K, blocks64=w.Np // 64, chunks=w.Kp // CHUNK)
    p.units_per_group = (1 << 30) if column else w.group_size // (CHUNK // 2 if halves else CHUNK)
    p.row_tiles = -(-M // c.rows)
    tiles = p.row_tiles * -(-w.Np // (c.columns // (2 if pair else 1)))
    if c.cluster and chip(device).capability < (9, 0):
        raise InputError(f"config={c} asks for clusters, which {chip(device).name} does not have; give cluster=False")
    p.whole, p.splits, p.clustered = c.whole(tiles, chip(device).multiprocessors), c.splits, c.cluster
    p.lead = 0 if c.cluster else c.lead
    cut = tiles - p.whole
    arguments = _Arguments(p, _weight(w, bias), _weight(*pair) if pair else _Weight())
    floats = 0 if c.cluster else cut * c.splits * c.rows * c.columns
    launch = Launch(run, arguments, p.whole + cut * c.splits, floats, cut)
    return Ready(M, w.N, torch.float32 if symmetric else dtype, launch, _place, (w, bias, pair))


def _place(p: Any, x: int, ldx: int) -> None:
    p.x, p.ldx = x, ldx


def product(
    x: Tensor,  # fp16 | bf16 [M, K] on cuda, rows aligned to 16 bytes, elements adjacent
    w: MarlinWeight,
    bias: Tensor | None = None,  # x's dtype [N]
    config: Config | None = None,
    symmetric: bool = False,
    pair: tuple[MarlinWeight, Tensor | None] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # x's dtype [M, N]; fp32 where symmetric
    """`x @ W + bias`, or silu of it times `x @ W2 + bias2` for a pair. Symmetric leaves δ out and the sum in fp32."""
    return ready(x.shape[0], x.dtype, w, bias, config, symmetric, pair)(x, out)


def _weight(w: MarlinWeight, bias: Tensor | None) -> _Weight:
    return _Weight(w.B.data_ptr(), w.S.data_ptr(), w.delta.data_ptr(), None if bias is None else bias.data_ptr())
