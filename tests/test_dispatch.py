"""The dispatcher as a function of values: which kernel for which problem on which machine, and each refusal's text."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from tinyloop import dispatch
from tinyloop.dispatch import CPU_KERNELS, Machine, Plan, Problem, default_dtype, plan

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = Machine(numba=True, int4pack=True, bf16=True, memory=16 << 30)
NO_NUMBA = dataclasses.replace(ALL, numba=False)
BARE = Machine(numba=False, int4pack=False, bf16=False, memory=16 << 30)
FEW, FEW_FP32, FEW_UNKEPT = dispatch.PANEL_ROWS, dispatch.PANEL_ROWS_FP32, dispatch.PANEL_ROWS_UNKEPT


def problem(M: int = 1, dtype: torch.dtype = BF16, **changes: Any) -> Problem:
    return dataclasses.replace(Problem(M, 96, 128, 32, 4, dtype), **changes)


def reason(kernel: str, on: Machine = ALL, **changes: Any) -> str | None:
    """What `kernel` says of a problem, whatever comes before it in the table."""
    return next(k for k in CPU_KERNELS if k.name == kernel).refuses(problem(**changes), on)


CHOSEN = {
    "few rows": (problem(1), ALL, "panel"),
    "few rows, kept": (problem(FEW, cached=True), ALL, "panel"),
    "one row more, kept": (problem(FEW + 1, cached=True), ALL, "dense_cache"),
    "one row more, not kept": (problem(FEW + 1), ALL, "panel"),
    "most rows, not kept": (problem(FEW_UNKEPT), ALL, "panel"),
    "many rows, not kept": (problem(FEW_UNKEPT + 1), ALL, "dense"),
    "many rows, kept": (problem(1024, cached=True), ALL, "dense_cache"),
    "fp32, few rows": (problem(FEW_FP32, F32, cached=True), ALL, "panel"),
    "fp32, many rows": (problem(FEW_FP32 + 1, F32, cached=True), ALL, "dense_cache"),
    "fp32, many rows, not kept": (problem(FEW_FP32 + 1, F32), ALL, "native"),
    "fp16, few rows": (problem(FEW_FP32, F16), ALL, "panel"),
    "fp16, many rows": (problem(FEW_FP32 + 1, F16, cached=True), ALL, "native"),
    "exact, few rows": (problem(1, exact=True), ALL, "panel"),
    "exact, many rows": (problem(64, exact=True, cached=True), ALL, "native"),
    "exact fp32, many rows": (problem(64, F32, exact=True, cached=True), ALL, "dense_cache"),
    "no numba": (problem(1), NO_NUMBA, "int4pack"),
    "no numba, odd columns": (problem(1, N=97), NO_NUMBA, "dense"),
    "no numba, fp32": (problem(1, F32), NO_NUMBA, "native"),
    "no numba, no bf16": (problem(64), dataclasses.replace(NO_NUMBA, bf16=False), "native"),
    "nothing": (problem(1), BARE, "native"),
    "nothing, kept": (problem(64, F32, cached=True), BARE, "dense_cache"),
    "bare weight": (problem(1, packed=False), ALL, "dense"),
    "bare weight, fp32": (problem(1, F32, packed=False), ALL, "native"),
    "eight bits": (problem(1, bits=8), ALL, "panel"),
    "eight bits, no numba": (problem(1, bits=8), NO_NUMBA, "dense"),
    "dense weight": (problem(1, bits=16, cached=True), ALL, "dense_cache"),
    "dense weight, fp16": (problem(1, F16, bits=16, cached=True), ALL, "native"),
    "channel, an iteration": (problem(1, channel="frac4", iteration=0), ALL, "cross_iter"),
    "channel, exact, fp16": (problem(64, F16, channel="sign_bit", iteration=1, exact=True), BARE, "cross_iter"),
    "channel, none asked for": (problem(1, channel="frac4"), ALL, "panel"),
    "ragged": (problem(3, F32, K=7, N=1, G=3), ALL, "panel"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_chosen_kernel(case: str) -> None:
    p, on, kernel = CHOSEN[case]
    assert plan(p, on).kernel == kernel


REFUSED = {
    "cross_iter, no channel": (
        ("cross_iter", ALL, {"iteration": 1}), "the weight has no channel (frac4 or sign_bit)",
    ),
    "cross_iter, off": (
        ("cross_iter", ALL, {"channel": "frac4"}),
        "no iteration's rounding is asked for: TINYLOOP_CROSS_ITER_ROUND is not 1, or nothing loops",
    ),
    "panel, dense weight": (("panel", ALL, {"bits": 16}), "the weight is dense (16 bits)"),
    "panel, no numba": (("panel", NO_NUMBA, {}), "numba is not installed: pip install 'tinyloop[cpu]'"),
    "panel, bare": (("panel", ALL, {"packed": False}), "the weight is not packed; pack it once with tinyloop.pack"),
    "panel, rows": (
        ("panel", ALL, {"M": 9, "cached": True}), f"M=9 > {FEW}: the dense product's arithmetic is faster",
    ),
    "panel, fp32 rows": (
        ("panel", ALL, {"M": 99, "dtype": F32}), f"M=99 > {FEW_FP32}: the dense product's arithmetic is faster",
    ),
    "int4pack, bits": (("int4pack", ALL, {"bits": 8}), "the weight has 8 bits"),
    "int4pack, no op": (("int4pack", BARE, {}), "this torch or CPU lacks the op"),
    "int4pack, fp32": (
        ("int4pack", ALL, {"dtype": F32}), "activations are float32; the op is fast in bfloat16 only",
    ),
    "int4pack, exact": (
        ("int4pack", ALL, {"exact": True}), "activations are bfloat16, exact; the op is fast in bfloat16 only",
    ),
    "int4pack, bare": (
        ("int4pack", ALL, {"packed": False}), "the weight is not packed; pack it once with tinyloop.pack",
    ),
    "int4pack, group": (("int4pack", ALL, {"G": 48}), "group size 48 is none of 32, 64, 128, 256, K"),
    "int4pack, columns": (
        ("int4pack", ALL, {"N": 40}), "N=40 is not a multiple of 16, or K=128 not one of the group",
    ),
    "int4pack, short group": (
        ("int4pack", ALL, {"K": 100}), "N=96 is not a multiple of 16, or K=100 not one of the group",
    ),
    "int4pack, odd column group": (
        ("int4pack", ALL, {"K": 100, "G": 100}), "N=96 is not a multiple of 16, or K=100 not one of the group",
    ),
    "int4pack, rows": (
        ("int4pack", ALL, {"M": 99}), f"M=99 > {FEW_UNKEPT}: the dense product's arithmetic is faster",
    ),
    "dense_cache, exact": (
        ("dense_cache", ALL, {"exact": True, "cached": True}), "exact asked for, the copy would be bfloat16",
    ),
    "dense_cache, fp16": (
        ("dense_cache", ALL, {"dtype": F16}), "activations are float16, which this CPU does not multiply",
    ),
    "dense_cache, none": (("dense_cache", ALL, {}), "no dense copy is kept (memory budget, or a bare weight)"),
    "dense, fp32": (("dense", ALL, {"dtype": F32}), "activations are float32; native is as fast"),
    "dense, exact": (("dense", ALL, {"exact": True}), "activations are bfloat16, exact; native is as fast"),
    "dense, no bf16": (("dense", BARE, {}), "this CPU has no bf16 arithmetic"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    (kernel, on, changes), text = REFUSED[case]
    assert reason(kernel, on, **changes) == text


def test_every_kernel_but_native_is_refused_somewhere() -> None:
    assert {kernel for (kernel, *_), _ in REFUSED.values()} == {k.name for k in CPU_KERNELS} - {"native"}


def test_dsp08_refusals_travel_in_order() -> None:
    """All that stands before the chosen kernel, and no more."""
    for p, on, kernel in CHOSEN.values():
        chosen = plan(p, on)
        names = [k.name for k in CPU_KERNELS]
        assert [name for name, _ in chosen.refused] == names[: names.index(kernel)]
        assert all(text for _, text in chosen.refused)
        assert chosen.why


@pytest.mark.parametrize("on", [ALL, NO_NUMBA, BARE], ids=["all", "no numba", "bare"])
def test_dsp07_native_is_last_and_takes_everything(on: Machine) -> None:
    assert CPU_KERNELS[-1].name == "native"
    for M in (0, 1, 65536, 1 << 33):
        for bits in (4, 8, 16, 32):
            for dtype in (F32, BF16, F16):
                odd = Problem(M, 1, 1, 1, bits, dtype, packed=False, exact=True)
                assert CPU_KERNELS[-1].refuses(odd, on) is None
                assert isinstance(plan(odd, on), Plan)


def test_a_plan_is_a_value() -> None:
    assert plan(problem(3), ALL) == plan(problem(3), ALL)
    assert hash(plan(problem(3), ALL)) == hash(plan(problem(3), ALL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(problem(), ALL).kernel = "other"  # type: ignore[misc]


def test_planning_touches_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made, no op looked up, no module imported: a plan for any machine can be made on any other."""

    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            if name in ("float32", "bfloat16", "float16"):
                return {"float32": F32, "bfloat16": BF16, "float16": F16}[name]
            raise AssertionError(f"torch.{name} was touched")

    monkeypatch.setattr(dispatch, "torch", Untouchable())
    before = set(sys.modules)
    for p, on, kernel in CHOSEN.values():
        assert plan(p, on).kernel == kernel
    assert set(sys.modules) == before


def test_without_a_machine_it_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "machine", lambda: BARE)
    assert plan(problem(1)).kernel == "native"
    assert default_dtype() == F32
    monkeypatch.setattr(dispatch, "machine", lambda: ALL)
    assert plan(problem(1)).kernel == "panel"
    assert default_dtype() == BF16


def test_the_machine_is_looked_at_once() -> None:
    assert dispatch.machine() is dispatch.machine()
    assert dispatch.machine().memory > 1 << 28


@pytest.mark.parametrize("capability", ["DEFAULT", "NO AVX", "VSX"])
def test_dsp07_no_avx_no_int4pack(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not dispatch.machine.__wrapped__().int4pack


def test_numba_is_looked_for_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert not dispatch.machine.__wrapped__().numba
