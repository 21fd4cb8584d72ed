"""The linear operation as torch knows it: `tinyloop::quant_gemm`, with a fake for tracing and a gradient for x.

    quant_gemm(x, q, scale, zero, bias, K, group_size, bits) → y        y = x @ W + bias, in x's dtype
    quant_gemm_backward(g, q, scale, zero, K, group_size, bits) → dx     dx = g @ Wᵀ; the weight has no gradient

The op takes the canonical tensors themselves. Layouts that kernels read are derived at the first call and found again
by the addresses of those tensors, for as long as q lives and none of them is written to. So a graph holds no handle:
layers of one shape share one compiled graph, and a copy, a move, a load or an unpickling needs no bookkeeping.

The overload `inference` is the same operation without the gradient's kernel in Python, which costs 5 µs a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .dispatch import plan, use_marlin
from .errors import InputError
from .ops import calls, problem, quant_gemm
from .pack import PackedWeight
from .weight import QuantWeight

Tensor = torch.Tensor

_WEIGHT = "Tensor q, Tensor scale, Tensor zero"
_SHAPE = "int K, int group_size, int bits"
_library: Any = torch.library.Library("tinyloop", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"quant_gemm(Tensor x, {_WEIGHT}, Tensor? bias, {_SHAPE}) -> Tensor")
_library.define(f"quant_gemm.inference(Tensor x, {_WEIGHT}, Tensor? bias, {_SHAPE}) -> Tensor")
_library.define(f"quant_gemm_backward(Tensor g, {_WEIGHT}, {_SHAPE}) -> Tensor")


@dataclass(frozen=True)
class Held:
    """A weight's layouts; `q` is there to forget them by, `version` counts what was written to its tensors.

    `few` are calls for few rows by number, dtype and device of rows, with the kernel that the plan chose: planning and
    checking cost 10 µs, which matters where products are small.
    """

    pack: PackedWeight
    q: weakref.ref[Tensor]
    version: int | None  # None: tensors made in inference mode do not count
    few: dict[tuple[int, torch.dtype, torch.device], Callable[[Tensor], Tensor]] = field(default_factory=dict)


FEW = 32  # rows up to which calls are kept

_held: dict[tuple[int, int, int, int], Held] = {}


def held_for(q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, K: int, group_size: int, bits: int) -> Held:
    """The weight of these tensors with its layouts, made at the first call."""
    key = q.data_ptr(), scale.data_ptr(), zero.data_ptr(), 0 if bias is None else bias.data_ptr()
    held = _held.get(key)
    if held is not None and (held.version is None or held.version == _version(q, scale, zero, bias)):
        return held
    own = [None if t is None else t.detach() for t in (q, scale, zero, bias)]  # not the objects whose death is awaited
    assert own[0] is not None
    assert own[1] is not None
    assert own[2] is not None
    pack = PackedWeight(QuantWeight(own[0], own[1], own[2], K, group_size, bits, bias=own[3]), device=q.device)
    counted = not any(t.is_inference() for t in (q, scale, zero, bias) if t is not None)
    version = _version(q, scale, zero, bias) if counted else None
    held = _held[key] = Held(pack, weakref.ref(q, lambda _: _held.pop(key, None)), version)
    return held


def forget(q: Tensor) -> None:
    """Drop the layouts of the weight with these codes: its tensors were written to."""
    for key in [key for key in list(_held) if key[0] == q.data_ptr()]:
        _held.pop(key, None)


def _version(q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None) -> int:
    return q._version + scale._version + zero._version + (0 if bias is None else bias._version)


def _product(
    x: Tensor, q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, K: int, group_size: int, bits: int
) -> Tensor:
    held = held_for(q, scale, zero, bias, K, group_size, bits)
    call = held.few.get((x.numel() // K, x.dtype, x.device))
    if call is None or x.shape[-1] != K or not x.is_contiguous():
        return _planned(x, held)
    return call(x)


def _planned(x: Tensor, held: Held) -> Tensor:
    """The whole way, with every check; where the plan was a kernel for few rows, the next time goes straight there."""
    y = quant_gemm(x.detach(), held.pack)
    M = x.numel() // x.shape[-1]
    if 0 < M <= FEW:
        kernel = plan(problem(held.pack, M, x.dtype)).kernel
        if kernel == "panel" and x.dtype != torch.float16:
            held.few[M, x.dtype, x.device] = _straight(held.pack.panel())
        if kernel == "tensor_core" and held.pack.perm is None:
            held.few[M, x.dtype, x.device] = _launched(held.pack, M, x.dtype)
    return y


def _launched(pack: PackedWeight, M: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    from .cuda.run import aligned, ready

    product, K, N = ready(pack, M, dtype), pack.weight.K, pack.weight.N

    def call(x: Tensor) -> Tensor:
        if not use_marlin():
            return quant_gemm(x.detach(), pack)
        calls["tensor_core"] += 1
        y = product(aligned(x.view(M, K)))
        return y if x.dim() == 2 else y.view(*x.shape[:-1], N)

    return call


def _straight(panel: Any) -> Callable[[Tensor], Tensor]:
    from .cpu.product import product

    def call(x: Tensor) -> Tensor:
        calls["panel"] += 1
        return product(x, panel)

    return call


def _gradient(g: Tensor, q: Tensor, scale: Tensor, zero: Tensor, K: int, group_size: int, bits: int) -> Tensor:
    """On W in the dtype of g; in fp32 where that is fp16, which CPUs do not multiply."""
    half = g.dtype == torch.float16 and not g.is_cuda
    dtype = torch.float32 if half else g.dtype
    W = held_for(q, scale, zero, None, K, group_size, bits).pack.dense(dtype, keep=False)  # [N, K]
    return (g.reshape(-1, g.shape[-1]).to(dtype) @ W).to(g.dtype).reshape(*g.shape[:-1], K)


def _product_shape(x: Tensor, q: Tensor, *rest: Any) -> Tensor:
    K = rest[-3]
    if x.shape[-1] != K:
        raise InputError(f"x has shape {list(x.shape)}; its last dimension must be K={K}")
    return x.new_empty(*x.shape[:-1], q.shape[1])


def _gradient_shape(g: Tensor, q: Tensor, scale: Tensor, zero: Tensor, K: int, *_: Any) -> Tensor:
    return g.new_empty(*g.shape[:-1], K)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, q, scale, zero, bias, *shape = inputs
    ctx.save_for_backward(q, scale, zero)
    ctx.shape, ctx.biased = shape, bias is not None


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.tinyloop.quant_gemm_backward(g.contiguous(), *ctx.saved_tensors, *ctx.shape)
    db = g.reshape(-1, g.shape[-1]).sum(0) if ctx.biased and ctx.needs_input_grad[4] else None
    return dx, None, None, None, db, None, None, None


for _name, _function, _shape in (
    ("quant_gemm", _product, _product_shape),
    ("quant_gemm.inference", _product, _product_shape),
    ("quant_gemm_backward", _gradient, _gradient_shape),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
    torch.library.register_fake(f"tinyloop::{_name}", _shape, lib=_library)
torch.library.register_autograd("tinyloop::quant_gemm", _backward, setup_context=_keep, lib=_library)

product = torch.ops.tinyloop.quant_gemm.default
product_without_gradient = torch.ops.tinyloop.quant_gemm.inference
