"""The other kernels: the correction pair, the native product, dequantisation from either form of a weight."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, ClassVar

import torch

from ..channel import FRAC4
from ..marlin import MarlinWeight
from ..weight import QuantWeight
from .launch import Arguments, Launcher

Tensor = torch.Tensor
_p, _i64, _i32 = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class _Sums(Arguments):
    _fields_: ClassVar[Any] = [
        ("x", _p),
        ("a_sum", _p),
        ("ldx", _i64),
        ("M", _i32),
        ("K", _i32),
        ("group_size", _i32),
        ("groups", _i32),
    ]


class _Correction(Arguments):
    _fields_: ClassVar[Any] = [
        ("c", _p), ("a_sum", _p), ("S", _p), ("delta", _p), ("bias", _p), ("y", _p),
        ("M", _i32), ("N", _i32), ("groups", _i32), ("padded", _i32),
    ]  # fmt: skip


class _Rows(Arguments):
    _fields_: ClassVar[Any] = [("x", _p), ("y", _p), ("ldx", _i64), ("step", _i64), ("M", _i64)]


class _Canonical(Arguments):
    _fields_: ClassVar[Any] = [
        ("codes", _p), ("scale", _p), ("zero", _p), ("channel", _p), ("bias", _p),
        ("N", _i32), ("K", _i32), ("group_size", _i32), ("iteration", _i32),
    ]  # fmt: skip


class _Native(Arguments):
    _fields_: ClassVar[Any] = [("p", _Rows), ("w", _Canonical)]


class _Dequantize(Arguments):
    _fields_: ClassVar[Any] = [("W", _p), ("w", _Canonical)]


class _Unpack(Arguments):
    _fields_: ClassVar[Any] = [
        ("B", _p), ("S", _p), ("delta", _p), ("W", _p), ("ldw", _i64),
        ("N", _i32), ("K", _i32), ("blocks64", _i32), ("chunks", _i32), ("group_size", _i32),
    ]  # fmt: skip


@functools.cache
def _launcher(name: str, entry: str, device: int, threads: int, **defines: bool | int) -> Launcher:
    macros = {k: int(v) for k, v in defines.items()}
    return Launcher(name, entry, macros, device, threads, overlaps=name == "correction")


def group_sums(x: Tensor, group_size: int, out: Tensor | None = None) -> Tensor:  # fp16 | bf16 [M, K] → [M, ⌈K/G⌉]
    """Σ of x over each group, in fp32."""
    M, K = x.shape
    groups = -(-K // group_size)
    sums = torch.empty(M, groups, dtype=torch.float32, device=x.device) if out is None else out
    if M:
        a = _Sums(x.data_ptr(), sums.data_ptr(), x.stride(0), M, K, group_size, groups)
        run = _launcher("correction", "a_group_sum", x.device.index, 128, BF16=x.dtype == torch.bfloat16, COLUMN=False)
        run(a, -(-M * groups // 4))
    return sums


def correction(c: Tensor, sums: Tensor, w: MarlinWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    """y = `c + sums @ δ + bias`, c fp32 [M, N], sums fp32 [M, groups], y fp16 | bf16 [M, N]."""
    M = c.shape[0]
    if M:
        a = _Correction(
            c.data_ptr(), sums.data_ptr(), w.S.data_ptr(), w.delta.data_ptr(),
            None if bias is None else bias.data_ptr(), y.data_ptr(), M, w.N, sums.shape[1], w.Np,
        )  # fmt: skip
        run = _launcher(
            "correction", "correction_accum", c.device.index, 128,
            BF16=y.dtype == torch.bfloat16, SCALE32=w.S.dtype == torch.float32, COLUMN=w.group_size == -1,
            IN_PARTS=w.in_parts,
        )  # fmt: skip
        run(a, -(-w.N // 128) * -(-M // 8))
    return y


def native(x: Tensor, w: QuantWeight, bias: Tensor | None, iteration: int | None = None) -> Tensor:
    """`x @ W + bias`, one thread per output; x fp16, bf16 or fp32 [M, K] with any strides → its dtype [M, N]."""
    y = torch.empty(x.shape[0], w.N, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rows = _Rows(x.data_ptr(), y.data_ptr(), x.stride(0), x.stride(1), x.shape[0])
        run = _canonical_launcher("native", x.device.index, w, x.dtype, iteration)
        run(_Native(rows, _canonical(w, bias, iteration)), -(-w.N // 128) * x.shape[0])
    return y


def dequantize(w: QuantWeight, dtype: torch.dtype, iteration: int | None = None) -> Tensor:  # dtype [K, N]
    """W on its device, or iteration `iteration`'s rounding of it, exactly as `QuantWeight.dequantize` computes it."""
    W = torch.empty(w.K, w.N, dtype=dtype, device=w.packed.device)
    run = _canonical_launcher("dequantize", w.packed.device.index, w, dtype, iteration)
    run(_Dequantize(W.data_ptr(), _canonical(w, None, iteration)), -(-w.N // 128) * -(-w.K // 16))
    return W


def unpack(w: MarlinWeight, dtype: torch.dtype) -> Tensor:  # fp16 | bf16 [N, K]
    """The device format as a dense weight, in the order of `torch.nn.functional.linear`."""
    ldw = -(-w.K // 8) * 8
    W = torch.empty(w.N, ldw, dtype=dtype, device=w.B.device)
    column = w.group_size == -1
    a = _Unpack(
        w.B.data_ptr(), w.S.data_ptr(), w.delta.data_ptr(), W.data_ptr(), ldw,
        w.N, w.K, w.Np // 64, w.Kp // 64, (1 << 30) if column else w.group_size,
    )  # fmt: skip
    run = _launcher(
        "unpack", "unpack", w.B.device.index, 128,
        BF16=dtype == torch.bfloat16, SCALE32=w.S.dtype == torch.float32, COLUMN=column, IN_PARTS=w.in_parts,
    )  # fmt: skip
    run(a, -(-(w.Np // 64) * (w.Kp // 64) // 4))
    return W[:, : w.K]


def _canonical(w: QuantWeight, bias: Tensor | None, iteration: int | None) -> _Canonical:
    side = (w.frac4 if w.frac4 is not None else w.sign_bit) if iteration is not None else None
    return _Canonical(
        w.packed.data_ptr(), w.scale.data_ptr(), w.zero.data_ptr(), None if side is None else side.data_ptr(),
        None if bias is None else bias.data_ptr(), w.N, w.K, w.group_size, iteration or 0,
    )  # fmt: skip


def _canonical_launcher(entry: str, device: int, w: QuantWeight, dtype: torch.dtype, iteration: int | None) -> Launcher:
    channel = 0 if iteration is None or w.channel is None else 1 if w.channel == FRAC4 else 2
    return _launcher(
        "native", entry, device, 128, BITS=w.bits, CHANNEL=channel, PARAM32=w.scale.dtype == torch.float32,
        X32=dtype == torch.float32, BF16=dtype == torch.bfloat16,
    )  # fmt: skip
