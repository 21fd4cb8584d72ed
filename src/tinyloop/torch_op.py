"""The linear operation as torch knows it: `tinyloop::quant_gemm`, with a fake for tracing and a gradient for x.

    quant_gemm(x, q, scale, zero, bias, K, group_size, bits) → y        y = x @ W + bias, in x's dtype
    quant_gemm_backward(g, q, scale, zero, K, group_size, bits) → dx     dx = g @ Wᵀ; the weight has no gradient

The op takes the canonical tensors themselves. Layouts that kernels read are derived at the first call and found again
by the addresses of those tensors, for as long as q lives and none of them is written to. So a graph holds no handle:
layers of one shape share one compiled graph, and a copy, a move, a load or an unpickling needs no bookkeeping.

The overload `inference` is the same operation without the gradient's kernel in Python, which costs 5 µs a call.
`at_once` is what the op would do where nobody watches, without torch's dispatch, which costs another 5.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad, profiler

from . import dispatch
from .cuda.config import KEPT_ROWS
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


class Kept:
    """A call for few rows, with the kernel that the plan chose: planning and checking cost 10 µs, which matters where
    products are small. `is_like` says whether x is such as came before by the long way (`_guard`)."""

    def __init__(self, call: Callable[[Tensor], Tensor]):
        self.call, self.misses = call, 0
        self.is_like: Callable[[Tensor], bool] = lambda x: False

    def learn(self, x: Tensor) -> None:
        """Take x for the usual, after one, two, four, … that were not: kinds by turns would make guards for ever."""
        self.misses += 1
        if self.misses & (self.misses - 1) == 0:
            self.is_like = _guard(x)


@dataclass
class Held:
    """A weight's layouts. `objects` are there to forget them by, when one of them dies; `version` counts what was
    written to its tensors. Where memory can be moved under a tensor, as `share_memory` does on a CPU, `places` are
    tensors of the weight with the addresses at which the layouts are found.

    `few` are calls for few rows by shape, dtype and device number of x; `latest` is the one that was found last.
    """

    pack: PackedWeight
    objects: tuple[weakref.ref[Tensor], ...]
    version: int | None  # None: tensors made in inference mode do not count
    places: tuple[tuple[Tensor, int], ...]
    few: dict[tuple[torch.Size, torch.dtype, int], Kept] = field(default_factory=dict)
    latest: Kept | None = None


Numbers = tuple[int, int, int, int]  # K, group size, bits, N: tensors that begin at one address may be of two weights

_held: dict[tuple[int, int, int, int, Numbers], Held] = {}


def held_for(q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, numbers: Numbers) -> Held:
    """The weight of these tensors with its layouts, made at the first call."""
    held = _found(q, scale, zero, bias, numbers)
    if held is not None:
        return held
    given = [t for t in (q, scale, zero, bias) if t is not None]
    own = [t.detach() for t in given]  # not the objects whose death is awaited
    K, group_size, bits, _ = numbers
    weight = QuantWeight(own[0], own[1], own[2], K, group_size, bits, bias=None if bias is None else own[3])
    counted = not any(t.is_inference() for t in given)
    key = q.data_ptr(), scale.data_ptr(), zero.data_ptr(), 0 if bias is None else bias.data_ptr(), numbers
    held = _held[key] = Held(
        PackedWeight(weight, device=q.device),
        tuple(weakref.ref(t, lambda _: _held.pop(key, None)) for t in given),
        sum(t._version for t in given) if counted else None,
        tuple((t, t.data_ptr()) for t in own) if q.device.type == "cpu" else (),
    )
    return held


def _found(q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, numbers: Numbers) -> Held | None:
    key = q.data_ptr(), scale.data_ptr(), zero.data_ptr(), 0 if bias is None else bias.data_ptr(), numbers
    held = _held.get(key)
    if held is None:
        return None
    if held.version is not None:
        version = q._version + scale._version + zero._version
        if held.version != (version if bias is None else version + bias._version):
            return None
    for own, place in held.places:
        if own.data_ptr() != place:
            return None
    return held


def forget(q: Tensor) -> None:
    """Drop the layouts of the weight with these codes: its tensors were written to."""
    for key in [key for key in list(_held) if key[0] == q.data_ptr()]:
        _held.pop(key, None)


def at_once(x: Tensor, q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, numbers: Numbers) -> Tensor | None:
    """The product by a kept call, or None where there is none for x or the op must be seen: by a mode, a transform, a
    tracer, a profiler, or autograd. Reads private names of torch, as nothing public says this."""
    if type(x) is not Tensor or _dispatch_modes() or _function_modes() or _interpreter() is not None:
        return None  # here the weight may be without addresses as well
    if x.layout is not torch.strided or x.is_nested:  # of these `is_like` cannot be asked
        return None
    if profiler._is_profiler_enabled or forward_ad._current_level >= 0:  # no dispatch key tells of them
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad or scale.requires_grad or zero.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return None
    held = _found(q, scale, zero, bias, numbers)
    if held is None:
        return None
    kept = held.latest
    if kept is None or not kept.is_like(x):
        kept = _kept(x, held)
    return None if kept is None else kept.call(x)


def _kept(x: Tensor, held: Held) -> Kept | None:
    """The kept call for an x that is unlike the last one; the next like it finds it at once."""
    kept = held.few.get((x.shape, x.dtype, x.get_device()))
    if kept is None:
        return None
    if not kept.is_like(x):
        if not unwatched(x) or not x.is_contiguous():
            return None
        kept.learn(x)
    held.latest = kept
    return kept


def _guard(x: Tensor) -> Callable[[Tensor], bool]:
    """Whether a tensor is like x, which is `unwatched`: of its type, dtype, device, sizes and strides, with grad or
    without, and of its dispatch keys together with those of the thread, which tell of modes, transforms and tracers. It
    is what torch.compile asks before it runs compiled code: one look of 0.14 µs.

    It asks for strides first, which sparse, oneDNN's and nested tensors refuse by an exception that ends the process.
    """
    guard = _guards.TensorGuards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    is_like: Callable[[Tensor], bool] = guard.check
    return is_like


_plain: set[int] = set()  # dispatch keys of tensors that are memory and nothing else, on devices with kept calls


@functools.cache
def _learn_plain(device: torch.device) -> None:
    for inference in (False, True):
        with torch.inference_mode(inference):
            _plain.add(_C._dispatch_keys(torch.empty(0, device=device)).raw_repr())


def unwatched(x: Tensor) -> bool:
    """Whether, beside what `at_once` asks first, torch's dispatch of an op on x would come straight to its kernel: x is
    no more than memory, and no tracer is there to see the op."""
    return _tracer() is None and _keys(x).raw_repr() in _plain


_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack  # how many there are
_interpreter = _C._functorch.peek_interpreter_stack  # of vmap, grad and their like
_tracer, _keys = _C._get_tracing_state, _C._dispatch_keys
_guards: Any = _C._dynamo.guards  # what compiled graphs ask before they run, and allocate with


def _product(
    x: Tensor, q: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, K: int, group_size: int, bits: int
) -> Tensor:
    held = held_for(q, scale, zero, bias, (K, group_size, bits, q.shape[1]))
    kept = held.few.get((x.shape, x.dtype, x.get_device()))
    if kept is not None and x.is_contiguous() and x.device == q.device:  # meta has the number of the CPU
        return kept.call(x)
    return _planned(x, held)


def _planned(x: Tensor, held: Held) -> Tensor:
    """The whole way, with every check; where the plan was a kernel for few rows, the next time goes straight there."""
    y, on = quant_gemm(x.detach(), held.pack), _switches()
    M = x.numel() // x.shape[-1]
    if 0 < M <= KEPT_ROWS:
        _learn_plain(x.device)
        kernel = plan(problem(held.pack, M, x.dtype)).kernel
        if kernel == "panel" and x.dtype != torch.float16:
            held.few[x.shape, x.dtype, x.get_device()] = Kept(_straight(held.pack.panel()))
        if kernel in ("tensor_core", "hopper") and held.pack.perm is None:
            held.few[x.shape, x.dtype, x.get_device()] = Kept(_launched(held.pack, x.shape, x.dtype, on, kernel))
    return y


def _env_look() -> Callable[[], Any]:
    """What TINYLOOP_USE_MARLIN says, undecoded, which else takes 0.6 µs a look."""
    encoded: Any = getattr(os.environ, "_data", None)
    if encoded is None:
        return functools.partial(os.environ.get, dispatch.USE_MARLIN)
    encode: Any = os.environ.encodekey
    return functools.partial(encoded.get, encode(dispatch.USE_MARLIN))


_said = _env_look()


def _switches() -> tuple[Any, Any]:
    """What `use_marlin` decides by, not yet read."""
    return dispatch._marlin_dispatch, _said()


def _launched(
    pack: PackedWeight, shape: torch.Size, dtype: torch.dtype, on: Any, kernel: str
) -> Callable[[Tensor], Tensor]:
    """On contiguous x of this shape; with the switches `on`, the plan is this tensor-core kernel."""
    from .cuda.run import aligned, ready

    K, M = shape[-1], shape.numel() // shape[-1]
    launch, result = ready(pack, M, dtype, kernel).launch, (*shape[:-1], pack.weight.N)
    strides = torch.empty(result, device="meta").stride()
    whole = M == 1 or K % 8 == 0  # rows begin at multiples of 16 bytes where the first does
    cuda, index = pack.device.type == "cuda", pack.device.index
    empty: Callable[..., Tensor] = _guards._empty_strided_cuda if cuda else _guards._empty_strided_cpu
    asked, said = on

    def call(x: Tensor) -> Tensor:
        if (dispatch._marlin_dispatch is not asked or _said() != said) and not use_marlin():
            return quant_gemm(x.detach(), pack)
        calls[kernel] += 1
        here = index is None or _C._cuda_getDevice() == index  # the current device, on which `empty` allocates
        y = empty(result, strides, dtype) if here else x.new_empty(*result)  # 0.4 µs, 0.8 µs
        if whole and not (at := x.data_ptr()) % 16:
            launch(at, y.data_ptr(), K)
        else:
            rows = aligned(x.view(M, K))
            launch(rows.data_ptr(), y.data_ptr(), rows.stride(0))
        return y

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
    W = held_for(q, scale, zero, None, (K, group_size, bits, q.shape[1])).pack.dense(dtype, keep=False)  # [N, K]
    with torch.autocast(g.device.type, enabled=False):
        return (g.reshape(-1, g.shape[-1]).to(dtype) @ W).to(g.dtype).reshape(*g.shape[:-1], K)


def _product_shape(x: Tensor, q: Tensor, *rest: Any) -> Tensor:
    K = rest[-3]
    if x.device != q.device:  # torch takes a fake for the kernel of meta tensors, of which one is enough
        raise InputError(f"x is on {x.device}, the weight on {q.device}")
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
