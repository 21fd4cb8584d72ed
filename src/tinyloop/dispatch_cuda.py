"""Which kernel computes a product on a GPU, and why not the others: the rows that `dispatch.plan` walks for a `Chip`.

    fp16_cache ─▶ tensor_core ─▶ hopper ─▶ unpack_dense ─▶ cross_iter ─▶ dense ─▶ native    the first not to refuse

`tensor_core`, `hopper` and `unpack_dense` are one path, the INT4 one, on the device format: codes are decoded into
`mma.sync`, into Hopper's `wgmma`, or, where arithmetic decides, once into a dense copy that lives for this call.
`native` is right for every problem and fast for none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from .cuda.config import Chip, wgmma_is_faster

if TYPE_CHECKING:
    from .dispatch import Problem

NATIVE_ROWS = 8  # up to which one thread per output beats dequantising the whole weight first
_DENSE_ROWS_HOPPER, _DENSE_ROWS = 8192, 1024
HOPPER = (9, 0)
INT4_KERNELS = ("tensor_core", "hopper", "unpack_dense")


On = TypeVar("On")  # what a table's kernels run on: a Chip, or dispatch's Machine


@dataclass(frozen=True)
class Kernel(Generic[On]):
    """A row of a table: `refuses` is the reason for refusing a problem, or None."""

    name: str
    about: str
    refuses: Callable[[Problem, On], str | None]


def dense_rows(on: Chip) -> int:
    """Rows from which a dense copy of the weight, made for the call, costs less than decoding into tensor cores does.
    Measured on Hopper (log, 2026-11-30); elsewhere estimated from arithmetic rates and bandwidth."""
    return _DENSE_ROWS_HOPPER if on.capability == HOPPER else _DENSE_ROWS


def padded(p: Problem) -> tuple[int, int]:
    """N and K as the device format has them."""
    return -(-p.N // 64) * 64, -(-p.K // 128) * 128


def int4_refusal(p: Problem, on: Chip) -> str | None:
    """Why the INT4 tensor-core path cannot serve a problem, whatever M is; None where it can."""
    if p.bits != 4:
        return f"the weight has {p.bits} bits"
    if p.exact:
        return "exact_int4 asks for fp32 arithmetic, tensor cores take 16-bit factors"
    if not p.marlin:
        return "dispatch to it is switched off (TINYLOOP_USE_MARLIN=0 or set_marlin_dispatch(False))"
    if on.refusal:
        return on.refusal
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"activations are {str(p.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    if p.iteration is not None and p.channel is not None:
        return "this loop iteration rounds on its own, and the device format holds the stored codes"
    return p.unpackable


def _fp16_cache(p: Problem, on: Chip) -> str | None:
    if not p.cached:
        return "no dense copy is kept"
    if p.exact and p.dtype != torch.float32:
        return "exact_int4 asks for fp32 arithmetic"
    if p.iteration is not None and p.channel is not None:
        return "this loop iteration rounds on its own, and the copy is of the stored codes"
    return None


def _tensor_core(p: Problem, on: Chip) -> str | None:
    if reason := int4_refusal(p, on):
        return reason
    if on.capability == HOPPER and wgmma_is_faster(p.M, *padded(p)):
        return f"M={p.M}: Hopper's own instructions are faster for so many rows of this weight"
    return _many_rows(p, on)


def _hopper(p: Problem, on: Chip) -> str | None:
    if on.capability != HOPPER:
        return f"{on.name} has compute capability {_dotted(on.capability)}; wgmma runs on {_dotted(HOPPER)} alone"
    return int4_refusal(p, on) or _many_rows(p, on)


def _many_rows(p: Problem, on: Chip) -> str | None:
    if p.M > (limit := dense_rows(on)):
        return f"M={p.M} > {limit}: arithmetic decides, and a dense copy for this call has more of it"
    return None


def _cross_iter(p: Problem, on: Chip) -> str | None:
    if p.channel is None:
        return "the weight has no channel (frac4 or sign_bit)"
    if p.iteration is None:
        return "no iteration's rounding is asked for: TINYLOOP_CROSS_ITER_ROUND is not 1, or nothing loops"
    return on.refusal


def _dense(p: Problem, on: Chip) -> str | None:
    if p.exact and p.dtype != torch.float32:
        return "exact_int4 asks for fp32 arithmetic"
    if p.M <= NATIVE_ROWS and not on.refusal and p.bits in (4, 8):
        return f"M={p.M} ≤ {NATIVE_ROWS}: one thread per output is faster than dequantising the whole weight"
    return None


def _native(p: Problem, on: Chip) -> str | None:
    return on.refusal or (None if p.bits in (4, 8) else f"the weight is dense ({p.bits} bits)")


CUDA_KERNELS: tuple[Kernel[Chip], ...] = (
    Kernel("fp16_cache", "dense product on a dequantised copy that is kept", _fp16_cache),
    Kernel("tensor_core", "INT4 codes decoded into tensor cores, δ on the way", _tensor_core),
    Kernel("hopper", "INT4 codes decoded into warpgroup tensor cores, x by the copy engine", _hopper),
    Kernel("unpack_dense", "device format decoded once for this call, then the dense product", int4_refusal),
    Kernel("cross_iter", "product on the loop iteration's own rounding", _cross_iter),
    Kernel("dense", "dense product on a dequantised copy made for this call", _dense),
    Kernel("native", "one thread per output, fp32 throughout: any shape, any dtype", _native),
    Kernel("slabs", "torch, dequantised slab by slab: needs no kernel of ours", lambda p, on: None),
)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
