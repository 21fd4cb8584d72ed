"""Plans carried out on a GPU, and the composition of the reference path from its three kernels."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

import torch

from ..dispatch import Plan, Problem
from ..dispatch_cuda import INT4_KERNELS
from ..marlin import MarlinWeight
from ..weight import QuantWeight
from . import gemm, hopper, paths
from .config import KEPT_ROWS
from .launch import chip, scratch_floats
from .ready import Ready

if TYPE_CHECKING:
    from ..pack import PackedWeight

Tensor = torch.Tensor
log = logging.getLogger("tinyloop")
PAIR_ROWS = 4096  # rows at a time of the correction pair, whose product stands in fp32 between its kernels
CROSS_ITER_ROWS = 8  # up to which an iteration's rounding is computed on the way, not as a dense weight
_said: set[str] = set()  # devices whose first product has been logged


def run(x: Tensor, w: PackedWeight, p: Problem, chosen: Plan) -> Tensor:  # [M, K] on cuda → x's dtype [M, N]
    """The product that `chosen` plans."""
    bias = w.bias(x.dtype)
    if chosen.kernel in INT4_KERNELS:
        y = _int4(x, w, bias, chosen.kernel)
        _say_first(p)
        return y
    if chosen.kernel in ("fp16_cache", "dense"):
        return torch.nn.functional.linear(x, w.dense(x.dtype, chosen.kernel == "fp16_cache"), bias)
    weight = w.canonical()
    assert isinstance(weight, QuantWeight)
    iteration = w.iteration if chosen.kernel == "cross_iter" else None
    if iteration is not None and x.shape[0] > CROSS_ITER_ROWS and not p.exact:
        return torch.nn.functional.linear(x, paths.dequantize(weight, x.dtype, iteration).t(), bias)
    return paths.native(x, weight, bias, iteration)


def _int4(x: Tensor, w: PackedWeight, bias: Tensor | None, kernel: str) -> Tensor:
    if kernel in ("tensor_core", "hopper"):
        return ready(w, x.shape[0], x.dtype, kernel)(aligned(x))
    return torch.nn.functional.linear(x, paths.unpack(w.marlin(), x.dtype), bias)


def ready(w: PackedWeight, M: int, dtype: torch.dtype, kernel: str) -> Ready:
    """The product of M rows by one of the two kernels with its arguments in place, kept with the weight where rows are
    few."""
    call = w.ready.get((M, dtype, kernel))
    if call is None:
        make = gemm.ready if kernel == "tensor_core" else hopper.ready
        call = make(M, dtype, w.marlin(), w.bias(dtype))
        if M <= KEPT_ROWS:
            w.ready[M, dtype, kernel] = call
    return call


def dense(w: PackedWeight, dtype: torch.dtype) -> Tensor:  # dtype [N, K] on cuda
    """W dequantised, from the device format where there is one."""
    if dtype != torch.float32 and w.unpackable is None:
        return paths.unpack(w.marlin(), dtype)
    weight = w.canonical()
    if isinstance(weight, QuantWeight):
        return paths.dequantize(weight, dtype).t().contiguous()
    return weight.weight.to(dtype)


def swiglu(x: Tensor, gate: PackedWeight, up: PackedWeight, p: Problem) -> Tensor:  # fp16 | bf16 [M, K] → [M, N]
    """silu(x @ gate)·(x @ up) in one launch; both weights have a device format of one shape and group size."""
    pair = up.marlin(), up.bias(x.dtype)
    y = gemm.product(aligned(x), gate.marlin(), gate.bias(x.dtype), pair=pair)
    _say_first(p)
    return y


def pairs(a: MarlinWeight, b: MarlinWeight) -> bool:
    """Whether two weights can share a launch."""
    one, other = ((w.K, w.N, w.group_size, w.S.dtype, w.delta.dtype) for w in (a, b))
    return one == other


def aligned(x: Tensor) -> Tensor:  # [M, K], any strides → the same values, rows aligned to 16 bytes
    """x itself where the kernel's sixteen-byte copies can read it, else a copy with padded rows."""
    if _is_aligned(x):
        return x
    M, K = x.shape
    copy = torch.empty(M, -(-K // 8) * 8, dtype=x.dtype, device=x.device)[:, :K]
    return copy.copy_(x)


def _is_aligned(x: Tensor) -> bool:
    """Rows that overlap, as those of `expand` do, count as not aligned: the copy engine has no such strides."""
    M, K = x.shape
    apart = M <= 1 or (x.stride(0) % 8 == 0 and x.stride(0) >= K)
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and apart


class Status(enum.IntEnum):
    """What `mm_asymmetric` did, for a dispatcher that wants to fall back rather than to catch."""

    OK = 0
    NOT_CUDA = 1  # x, y, bias or the weight is not on one CUDA device
    DTYPE = 2  # x is not fp16 or bf16, or y or bias is not x's dtype
    SHAPE = 3  # x [M, K], y [M, N], bias [N] and the weight do not go together, or strides are not the kernel's
    NO_KERNELS = 4  # the GPU is too old, or kernels cannot be compiled


def mm_asymmetric(x: Tensor, w: MarlinWeight, y: Tensor, bias: Tensor | None = None) -> Status:
    """The reference composition, y = x @ W_sym + group_sum(x) @ δ: a symmetric product, then the correction pair.

    x fp16 or bf16 [M, K] with adjacent elements and rows aligned to 16 bytes, y [M, N] contiguous. Never raises for
    what it cannot serve; scratch only grows, and in the steady state nothing is allocated.
    """
    status = _admissible(x, w, y, bias)
    if status is not Status.OK:
        return status
    device, group = x.device.index, w.K if w.group_size == -1 else w.group_size
    for first in range(0, x.shape[0], PAIR_ROWS):
        rows = x[first : first + PAIR_ROWS]
        M = rows.shape[0]
        floats = scratch_floats(device, M * (w.N + w.groups), "pair")
        c, sums = floats[: M * w.N].view(M, w.N), floats[M * w.N : M * (w.N + w.groups)].view(M, w.groups)
        paths.group_sums(rows, group, out=sums)  # first, so that it runs while the product's weights are on their way
        gemm.product(rows, w, symmetric=True, out=c)
        paths.correction(c, sums, w, bias, y[first : first + PAIR_ROWS])
    return Status.OK


def _admissible(x: Tensor, w: MarlinWeight, y: Tensor, bias: Tensor | None) -> Status:
    others = (y,) if bias is None else (y, bias)
    if x.device.type != "cuda" or any(t.device != x.device for t in (w.B, *others)):
        return Status.NOT_CUDA
    if x.dtype not in (torch.float16, torch.bfloat16) or any(t.dtype != x.dtype for t in others):
        return Status.DTYPE
    if x.dim() != 2 or x.shape[1] != w.K or not _is_aligned(x) or list(y.shape) != [x.shape[0], w.N]:
        return Status.SHAPE
    if (bias is not None and list(bias.shape) != [w.N]) or not all(t.is_contiguous() for t in others):
        return Status.SHAPE
    return Status.NO_KERNELS if chip(x.device.index).refusal else Status.OK


def _say_first(p: Problem) -> None:
    """One line per device, so that a log shows that the path is taken at all."""
    if p.device not in _said:
        _said.add(p.device)
        log.info("first INT4 tensor-core product: M=%d N=%d K=%d gs=%d on %s", p.M, p.N, p.K, p.G, p.device)
