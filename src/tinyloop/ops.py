"""The one linear operation: `quant_gemm(x, w)` makes the `Problem`, asks for a `Plan`, and runs it.

Activations of any float dtype and of 1 to 4 (or more) dimensions come back in their own dtype and shape.
"""

from __future__ import annotations

from collections import Counter

import torch

from .dispatch import REQUIRE, Plan, Problem, machine, marlin_mode, plan
from .errors import InputError
from .pack import PackedWeight, dense_product, pack
from .weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor

calls: Counter[str] = Counter()
"""Products since the last `calls.clear()`, by kernel."""

_SLAB = 1 << 22  # weights that `native` dequantises at a time: 16 MB of fp32
_ROWS = 2048  # rows of x that `native` converts and sums at a time


def quant_gemm(
    x: Tensor,  # fp32 | bf16 | fp16 [..., K]
    w: PackedWeight | LinearWeight,
    exact_int4: bool = False,
) -> Tensor:  # x's dtype [..., N]
    """`x @ W + bias` with `W = q·scale + zero`.

    A `PackedWeight` (see `pack`) keeps the layouts that make repeated products fast; a bare weight keeps nothing.
    `pack(w).at(i)` is the weight as loop iteration i rounds it, where it has a channel.
    `exact_int4` forbids arithmetic below fp32. Raises InputError for a wrong last dimension, dtype or device, where a
    gradient is expected, and where `set_marlin_dispatch("require")` holds and the product cannot follow it.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"x is {type(x).__name__}; activations are a torch tensor")
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):  # y has x's dtype, and layouts are what they are
            return quant_gemm(x, w, exact_int4)
    packed = w if isinstance(w, PackedWeight) else pack(w)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"x is {x.dtype}; activations are float32, bfloat16 or float16: cast it first")
    if x.device != packed.device:
        raise InputError(f"x is on {x.device}, the weight on {packed.device}; move one of them")
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError("x requires grad, and this product has no gradient; detach it or use torch.inference_mode()")
    if x.dim() < 1 or x.shape[-1] != packed.weight.K:
        raise InputError(f"x has shape {list(x.shape)}; its last dimension must be K={packed.weight.K}")
    if not x.numel():
        return x.new_empty(*x.shape[:-1], packed.weight.N)
    x2 = x.reshape(-1, packed.weight.K)
    if packed.perm is not None:
        x2 = x2[:, packed.perm]  # kernels read rows as they are stored
    y = _run(x2, packed, problem(packed, x2.shape[0], x.dtype, exact_int4, bare=w is not packed))
    return y.reshape(*x.shape[:-1], packed.weight.N)


def quant_swiglu(
    x: Tensor,  # fp32 | bf16 | fp16 [..., K]
    gate: PackedWeight | LinearWeight,
    up: PackedWeight | LinearWeight,
) -> Tensor:  # x's dtype [..., N]
    """`silu(x @ gate)·(x @ up)`, in one launch where both weights take the tensor-core path on a GPU, never with one
    half of the pair on another kernel than the other. Raises InputError as `quant_gemm` does."""
    gate, up = (w if isinstance(w, PackedWeight) else pack(w) for w in (gate, up))
    if isinstance(x, Tensor) and x.device.type == "cuda" and x.dim() and _one_launch(x, gate, up):
        from .cuda import run

        calls["tensor_core"] += 2
        x2 = x.reshape(-1, gate.weight.K)
        y = run.swiglu(x2, gate, up, problem(gate, x2.shape[0], x.dtype))
        return y.reshape(*x.shape[:-1], gate.weight.N)
    return torch.nn.functional.silu(quant_gemm(x, gate), inplace=True).mul_(quant_gemm(x, up))


def _one_launch(x: Tensor, gate: PackedWeight, up: PackedWeight) -> bool:
    if not x.device == gate.device == up.device or x.shape[-1] != gate.weight.K or not x.numel():
        return False
    if gate.perm is not None or up.perm is not None:  # an order of x for each
        return False
    if x.requires_grad and torch.is_grad_enabled():  # refused by quant_gemm, in words
        return False
    M = x.numel() // x.shape[-1]
    if any(plan(problem(w, M, x.dtype)).kernel != "tensor_core" for w in (gate, up)):
        return False
    from .cuda.run import pairs

    return pairs(gate.marlin(), up.marlin())


def problem(w: PackedWeight, M: int, dtype: torch.dtype, exact: bool = False, bare: bool = False) -> Problem:
    """The problem that M rows of `dtype` pose to this weight."""
    weight = w.weight
    if isinstance(weight, DenseWeight):
        G, bits = weight.K, 8 * weight.weight.element_size()
    else:
        G, bits = weight.group_size, weight.bits
    cpu = w.device.type == "cpu"
    mode = True if cpu else marlin_mode()
    return Problem(
        M, weight.N, weight.K, G, bits, dtype, not bare, w.keep_dense and not bare, exact, w.channel, w.iteration,
        str(w.device), mode is not False, None if cpu else w.unpackable, w.coarse, w.scale32, mode == REQUIRE,
    )  # fmt: skip


def _run(x: Tensor, w: PackedWeight, p: Problem) -> Tensor:
    chosen: Plan = plan(p)
    calls[chosen.kernel] += 1
    if x.is_cuda and chosen.kernel != "slabs":
        from .cuda.run import run

        return run(x, w, p, chosen)
    if chosen.kernel == "cross_iter":
        return _cross_iter(x, w, p.exact)
    if chosen.kernel == "panel":
        return _panel(x, w)
    if chosen.kernel == "int4pack":
        codes, params = w.int4()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, w.int4_group, params)
        bias = w.bias(x.dtype)
        return y if bias is None else y.add_(bias)
    if chosen.kernel in ("dense_cache", "dense"):
        return dense_product(x.contiguous(), w.dense(x.dtype, chosen.kernel == "dense_cache"), w.bias(x.dtype))
    return _native(x, w.canonical())


def _panel(x: Tensor, w: PackedWeight) -> Tensor:  # any float [M, K] → x's dtype [M, N]
    from .cpu.product import product

    wide = x.float() if x.dtype == torch.float16 else x
    return product(wide.contiguous(), w.panel()).to(x.dtype)


def _cross_iter(x: Tensor, w: PackedWeight, exact: bool) -> Tensor:  # any float [M, K] → x's dtype [M, N]
    """bf16 where that is allowed and fast, else fp32; without room for this rounding's copy, one made for the call."""
    half = x.dtype == torch.bfloat16 and not exact and machine().bf16
    dtype = torch.bfloat16 if half else torch.float32
    assert w.iteration is not None
    keep = w.iteration < w.keep_roundings
    if not (keep or half):
        return _native(x, w.rounding())
    return dense_product(x.to(dtype).contiguous(), w.dense(dtype, keep), w.bias(dtype)).to(x.dtype)


def _native(x: Tensor, w: LinearWeight) -> Tensor:  # any float [M, K] → x's dtype [M, N]
    """fp32 throughout, by slabs of weights and of rows: extra memory is a few slabs and fp32 sums of 2048 rows."""
    y = x.new_empty(x.shape[0], w.N)
    for m in range(0, x.shape[0], _ROWS):
        y[m : m + _ROWS] = _native_rows(x[m : m + _ROWS], w)
    return y


def _native_rows(x: Tensor, w: LinearWeight) -> Tensor:  # any float [M, K] → fp32 [M, N]
    y = torch.zeros(x.shape[0], w.N, dtype=torch.float32, device=x.device)
    step = max(1, _SLAB // w.N)  # whatever the group: one may span all of K
    for k in range(0, w.K, step):
        end = min(w.K, k + step)
        rows = w.rows(k, end) if isinstance(w, QuantWeight) else w.weight[:, k:end].float().t()
        y.addmm_(x[:, k:end].float(), rows)
    return y if w.bias is None else y.add_(w.bias.float())
