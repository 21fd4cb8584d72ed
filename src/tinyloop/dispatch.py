"""Which kernel computes a product, and why not the others: a pure function from `Problem` to `Plan`.

Nothing here touches a tensor or a device. A kernel is a row of `CPU_KERNELS`: a name, what it is, and one predicate
that returns the reason for refusing a problem, or None. The first row that does not refuse is the plan; the reasons of
those before it travel with it, so that `explain` can print them.

The order and the limits in M are measured (docs/log.md, 2026-11-29; two cores, AVX-512 with bf16), within one run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from .cuda.config import Chip
from .dispatch_cuda import CUDA_KERNELS, INT4_KERNELS, Kernel, On, padded
from .errors import InputError

log = logging.getLogger("tinyloop")

# Rows up to which the panel kernel, which decodes 4-bit weights once for four rows, beats the dense product: on a kept
# bf16 copy, on a kept fp32 copy (half the arithmetic rate), and on a bf16 copy made for this call alone.
PANEL_ROWS, PANEL_ROWS_FP32, PANEL_ROWS_UNKEPT = 4, 12, 24

CROSS_ITER_ROUND = "TINYLOOP_CROSS_ITER_ROUND"
USE_MARLIN = "TINYLOOP_USE_MARLIN"
FP16_BODY = "TINYLOOP_EXPERIMENTAL_FP16_BODY"
REQUIRE = "require"
_marlin_dispatch: bool | str | None = None  # what set_marlin_dispatch said last


@dataclass(frozen=True)
class Machine:
    """What the kernels need to know of the CPU and of the installed packages."""

    numba: bool  # the panel kernels can be compiled
    int4pack: bool  # torch has its int4 product for this CPU
    bf16: bool  # the CPU multiplies bf16 in hardware
    memory: int  # bytes of physical memory


@dataclass(frozen=True)
class Problem:
    """One product `y[M, N] = x[M, K] @ W`. dtype is x's and y's."""

    M: int
    N: int
    K: int
    G: int
    bits: int  # 4, 8, or 16 and 32 for dense weights
    dtype: torch.dtype
    packed: bool = True  # device layouts may be derived and kept (false for a bare QuantWeight)
    cached: bool = False  # a dense copy is kept
    exact: bool = False  # fp32 arithmetic whatever dtype is
    channel: str | None = None  # the weight's, for cross-iteration rounding
    iteration: int | None = None  # of the loop, whose rounding is asked for
    device: str = "cpu"  # or "cuda:0" …
    marlin: bool = True  # dispatch to the INT4 tensor-core path is on
    unpackable: str | None = None  # why the weight has no device format, or None
    coarse: bool = False  # whether bf16 holds the scales, as far as a device format has been made
    scale32: bool = False  # whether the device format has them in fp32, likewise
    require: bool = False  # on a GPU, a 4-bit weight takes that path or a kept dense copy, or is refused


@dataclass(frozen=True)
class Plan:
    """The kernel chosen, why it, and why each one before it in order was refused."""

    kernel: str
    why: str
    refused: tuple[tuple[str, str], ...]
    config: str = ""  # tile and pipeline, where the kernel has a choice of them


@functools.cache
def machine() -> Machine:
    """This machine, looked at once, at first use."""
    capability = torch.backends.cpu.get_cpu_capability()
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    bf16 = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    int4pack = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and capability in ("AVX512", "AVX2")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    return Machine(numba=find_spec("numba") is not None, int4pack=int4pack, bf16=bf16, memory=memory)


def default_dtype(m: Machine | None = None) -> torch.dtype:
    """bf16 where the CPU multiplies it in hardware, else fp32."""
    return torch.bfloat16 if (m or machine()).bf16 else torch.float32


def cross_iter_round() -> bool:
    """What TINYLOOP_CROSS_ITER_ROUND asks for: 1 is on, 0 or unset is off. Raises InputError for anything else."""
    return _switch(CROSS_ITER_ROUND, False)


def use_marlin() -> bool:
    """Whether products may take the INT4 tensor-core path: what `set_marlin_dispatch` said last, else what
    TINYLOOP_USE_MARLIN says (1, require or unset is on)."""
    return marlin_mode() is not False


def marlin_mode() -> bool | str:
    """`use_marlin`, with "require" where products of 4-bit weights on a GPU must take the path."""
    if _marlin_dispatch is not None:
        return _marlin_dispatch
    return REQUIRE if os.environ.get(USE_MARLIN) == REQUIRE else _switch(USE_MARLIN, True, REQUIRE)


def fp16_body() -> bool:
    """What TINYLOOP_EXPERIMENTAL_FP16_BODY asks for: 1 keeps loop blocks dequantised on a GPU, 0 or unset does not."""
    return _switch(FP16_BODY, False)


def set_marlin_dispatch(on: bool | str | None) -> None:
    """Switch the INT4 tensor-core path on or off for all models; None follows TINYLOOP_USE_MARLIN again.

    "require" is on, and a product of a 4-bit weight on a GPU that would take neither the path nor a kept dense copy
    raises InputError with the reasons, where else it would be computed on a slower kernel.
    """
    global _marlin_dispatch
    if not (on is None or isinstance(on, bool) or (isinstance(on, str) and on == REQUIRE)):
        raise InputError(f"set_marlin_dispatch({on!r}): give True, False, 'require', or None to follow {USE_MARLIN}")
    _marlin_dispatch = on


def _switch(name: str, default: bool, *others: str) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        known = " nor ".join(map(repr, ("0", "1", *others)))
        raise InputError(f"{name}={value!r} is neither {known}; set one of them, or unset it")
    return value == "1"


def _cross_iter(p: Problem, m: Machine) -> str | None:
    if p.channel is None:
        return "the weight has no channel (frac4 or sign_bit)"
    if p.iteration is None:
        return f"no iteration's rounding is asked for: {CROSS_ITER_ROUND} is not 1, or nothing loops"
    return None


def _panel(p: Problem, m: Machine) -> str | None:
    if p.bits not in (4, 8):
        return f"the weight is dense ({p.bits} bits)"
    if not m.numba:
        return "numba is not installed: pip install 'tinyloop[cpu]'"
    if not p.packed:
        return "the weight is not packed; pack it once with tinyloop.pack"
    if p.M > (limit := _few_rows(p)):
        return f"M={p.M} > {limit}: the dense product's arithmetic is faster"
    return None


def _few_rows(p: Problem) -> int:
    """Rows up to which reading 4 bits a weight pays more than dense arithmetic."""
    if p.dtype != torch.bfloat16 or p.exact:
        return PANEL_ROWS_FP32
    return PANEL_ROWS if p.cached else PANEL_ROWS_UNKEPT


def _int4pack(p: Problem, m: Machine) -> str | None:
    if p.bits != 4:
        return f"the weight has {p.bits} bits"
    if not m.int4pack:
        return "this torch or CPU lacks the op"
    if p.dtype != torch.bfloat16 or p.exact:
        return f"activations are {_name(p.dtype)}{', exact' if p.exact else ''}; the op is fast in bfloat16 only"
    if not p.packed:
        return "the weight is not packed; pack it once with tinyloop.pack"
    if p.G not in (32, 64, 128, 256) and p.G != p.K:
        return f"group size {p.G} is none of 32, 64, 128, 256, K"
    if p.N % 16 or p.K % (p.G if p.G != p.K else 32):
        return f"N={p.N} is not a multiple of 16, or K={p.K} not one of the group"
    if p.M > (limit := _few_rows(p)):
        return f"M={p.M} > {limit}: the dense product's arithmetic is faster"
    return None


def _dense_cache(p: Problem, m: Machine) -> str | None:
    if p.exact and p.dtype != torch.float32:
        return f"exact asked for, the copy would be {_name(p.dtype)}"
    if p.dtype == torch.float16:
        return "activations are float16, which this CPU does not multiply"
    if not p.cached:
        return "no dense copy is kept (memory budget, or a bare weight)"
    return None


def _dense(p: Problem, m: Machine) -> str | None:
    if p.exact or p.dtype != torch.bfloat16:
        return f"activations are {_name(p.dtype)}{', exact' if p.exact else ''}; native is as fast"
    if not m.bf16:
        return "this CPU has no bf16 arithmetic"
    return None


# cross_iter is first, since every other kernel reads the codes alone.
CPU_KERNELS: tuple[Kernel[Machine], ...] = (
    Kernel("cross_iter", "dense product on the loop iteration's own rounding", _cross_iter),
    Kernel("panel", "exact fp32 product on 4- or 8-bit panels, compiled by LLVM", _panel),
    Kernel("int4pack", "torch's int4 product, bf16 activations", _int4pack),
    Kernel("dense_cache", "dense product on a dequantised copy that is kept", _dense_cache),
    Kernel("dense", "dense bf16 product on a dequantised copy made for this call", _dense),
    Kernel("native", "fp32 product, dequantised slab by slab: any shape, any dtype, little memory", lambda p, m: None),
)


def plan(problem: Problem, on: Machine | Chip | None = None) -> Plan:
    """The first kernel that does not refuse, and the refusals before it. `on` is by default the problem's device.

    Raises InputError where the problem requires the INT4 tensor-core path of a GPU and that is refused.
    """
    if on is None:
        on = machine() if problem.device == "cpu" else chip(problem.device)
    return _plan_on_gpu(problem, on) if isinstance(on, Chip) else _first(CPU_KERNELS, problem, on)


@functools.lru_cache(maxsize=1 << 12)  # a plan is 30 µs of refusals in words, and a launch 5
def _plan_on_gpu(problem: Problem, on: Chip) -> Plan:
    chosen = _first(CUDA_KERNELS, problem, on)
    if problem.require and problem.bits == 4 and chosen.kernel not in ("fp16_cache", *INT4_KERNELS):
        raise InputError(_required(problem, chosen))
    return dataclasses.replace(chosen, config=_config(chosen.kernel, problem, on))


def _required(p: Problem, chosen: Plan) -> str:
    """What stands in the way of the path that is required, each reason once, and the way out."""
    reasons: dict[str, list[str]] = {}
    for kernel, reason in chosen.refused:
        if kernel in ("fp16_cache", *INT4_KERNELS):
            reasons.setdefault(reason, []).append(kernel)
    refused = "; ".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in reasons.items())
    return (
        f"M={p.M} K={p.K} N={p.N} on {p.device} would take the kernel {chosen.kernel}, and {USE_MARLIN}=require or "
        f"set_marlin_dispatch('require') allows the INT4 tensor-core path alone. Refused: {refused}. Remove the "
        f"reasons, or allow slower kernels with {USE_MARLIN}=1 or set_marlin_dispatch(True)"
    )


def _first(table: Iterable[Kernel[On]], problem: Problem, on: On) -> Plan:
    refused: list[tuple[str, str]] = []
    for kernel in table:
        if (reason := kernel.refuses(problem, on)) is None:
            return Plan(kernel.name, kernel.about, tuple(refused))
        refused.append((kernel.name, reason))
    raise AssertionError("the last kernel of a table refuses nothing")


def chip(device: str | torch.device) -> Chip:
    """The GPU behind a torch device. Raises InputError where there is none."""
    from .cuda.launch import chip as look
    from .devices import resolve

    found = torch.device(device)
    if found.type != "cuda":
        raise InputError(f"device={str(device)!r} is no GPU; give cuda, or cuda:1 for a second one")
    return look(resolve(found).index if found.index is None else found.index)


def marlin_available(device: str | torch.device = "cuda") -> bool:
    """Whether the INT4 tensor-core path can run on `device`: a GPU of capability 8.0 or later, and cuda.core.

    Where it cannot, the reason is logged.
    """
    try:
        reason = chip(device).refusal
    except InputError as e:
        reason = str(e)
    if reason is not None:
        log.info("no INT4 tensor-core path: %s", reason)
    return reason is None


def _config(kernel: str, p: Problem, on: Chip) -> str:
    from .cuda.config import choose, choose_hopper, in_halves

    group = -1 if p.G == p.K else p.G
    N, K = padded(p)
    if kernel == "hopper":
        return str(choose_hopper(p.M, N, K, group, on.multiprocessors, p.dtype == torch.bfloat16 and not p.coarse))
    if kernel != "tensor_core":
        return ""
    return str(choose(p.M, N, K, on, halves=in_halves(group), scale32=p.scale32))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
