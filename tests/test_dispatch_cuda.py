"""The dispatcher on a GPU as a function of values: no GPU is needed to know what one would do.

Chips are mocked by what torch reports of them: capability, multiprocessors, shared memory of a block.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinyloop as tl
from helpers import random_quant_weight, with_random_channel
from tinyloop import dispatch, marlin, ops
from tinyloop.cuda import build, hopper, launch, run
from tinyloop.cuda.config import (
    _BARRIERS,
    CHUNK,
    KINDS,
    WHOLE,
    Chip,
    Config,
    HopperConfig,
    Work,
    choose,
    choose_hopper,
    hopper_configs,
    hopper_cost,
    hopper_variants,
    variants,
    wgmma_is_faster,
)  # fmt: skip
from tinyloop.dispatch import Plan, Problem, plan
from tinyloop.dispatch_cuda import CUDA_KERNELS, INT4_KERNELS, NATIVE_ROWS, dense_rows, padded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def mocked(name: str, capability: tuple[int, int], multiprocessors: int, kilobytes: int) -> Chip:
    return Chip(name, capability, multiprocessors, kilobytes << 10, 24 << 30)


CHIPS = {
    "7.0": mocked("Tesla V100", (7, 0), 80, 96),
    "7.5": mocked("Tesla T4", (7, 5), 40, 64),
    "8.0": mocked("NVIDIA A100", (8, 0), 108, 163),
    "8.6": mocked("NVIDIA A10", (8, 6), 72, 99),
    "8.9": mocked("NVIDIA L4", (8, 9), 58, 99),
    "9.0": mocked("NVIDIA H200", (9, 0), 132, 227),
    "10.0": mocked("NVIDIA B200", (10, 0), 148, 227),
    "10.3": mocked("NVIDIA B300", (10, 3), 160, 227),
    "12.0": mocked("NVIDIA RTX PRO 6000", (12, 0), 188, 99),
    "12.1": mocked("NVIDIA GB10", (12, 1), 48, 99),
}
OLD = ("7.0", "7.5")
NEW = tuple(name for name in CHIPS if name not in OLD)
AMPERE, HOPPER = CHIPS["8.6"], CHIPS["9.0"]
BARE = dataclasses.replace(HOPPER, missing="cuda.core is not installed: pip install 'tinyloop[cuda]'")
DENSE, DENSE_HOPPER = dense_rows(AMPERE), dense_rows(HOPPER)
ROWS = (0, 1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 384, 385, 1024, 1025, 4096, 65536, 131072)
SHAPES = ((64, 128), (2048, 6144), (8192, 2048), (8192, 28672), (2048, 50257), (128, 1), (7, 3), (1 << 16, 1 << 17))


def problem(M: int = 1, dtype: torch.dtype = F16, **changes: Any) -> Problem:
    return dataclasses.replace(Problem(M, 6144, 2048, 128, 4, dtype, device="cuda:0"), **changes)


def reason(kernel: str, on: Chip = AMPERE, **changes: Any) -> str | None:
    """What `kernel` says of a problem, whatever comes before it in the table."""
    return next(k for k in CUDA_KERNELS if k.name == kernel).refuses(problem(**changes), on)


CHOSEN = {
    "one row": (problem(1), AMPERE, "tensor_core"),
    "one row, bf16": (problem(1, BF16), AMPERE, "tensor_core"),
    "ragged": (problem(3, N=1, K=7, G=7), AMPERE, "tensor_core"),
    "the head": (problem(1, N=50257), AMPERE, "tensor_core"),
    "most rows": (problem(DENSE), AMPERE, "tensor_core"),
    "one row more": (problem(DENSE + 1), AMPERE, "unpack_dense"),
    "Hopper, few rows": (problem(32), HOPPER, "tensor_core"),
    "Hopper, one row more": (problem(33), HOPPER, "hopper"),
    "Hopper, few rows of a large weight": (problem(16, K=8192, N=8192), HOPPER, "tensor_core"),
    "Hopper, one row more of it": (problem(17, K=8192, N=8192), HOPPER, "hopper"),
    "Hopper, most rows": (problem(DENSE_HOPPER), HOPPER, "hopper"),
    "Hopper, many rows": (problem(DENSE_HOPPER + 1), HOPPER, "unpack_dense"),
    "kept": (problem(1, cached=True), HOPPER, "fp16_cache"),
    "kept, exact": (problem(1, cached=True, exact=True), HOPPER, "native"),
    "kept, exact fp32": (problem(1, F32, cached=True, exact=True), HOPPER, "fp16_cache"),
    "kept, an iteration": (problem(1, cached=True, channel="frac4", iteration=1), HOPPER, "cross_iter"),
    "exact, few rows": (problem(NATIVE_ROWS, exact=True), HOPPER, "native"),
    "exact, many rows": (problem(4096, exact=True), HOPPER, "native"),
    "fp32, few rows": (problem(NATIVE_ROWS, F32), HOPPER, "native"),
    "fp32, many rows": (problem(NATIVE_ROWS + 1, F32), HOPPER, "dense"),
    "switched off, few rows": (problem(1, marlin=False), HOPPER, "native"),
    "switched off, many rows": (problem(64, marlin=False), HOPPER, "dense"),
    "no device format": (problem(64, unpackable="group_size=48 is odd"), HOPPER, "dense"),
    "eight bits": (problem(1, bits=8), HOPPER, "native"),
    "eight bits, many rows": (problem(64, bits=8), HOPPER, "dense"),
    "dense weight": (problem(1, bits=16, cached=True), HOPPER, "fp16_cache"),
    "dense weight, not kept": (problem(1, bits=16), HOPPER, "dense"),
    "dense weight, exact": (problem(1, bits=16, cached=True, exact=True), HOPPER, "slabs"),
    "channel, an iteration": (problem(1, channel="sign_bit", iteration=0), HOPPER, "cross_iter"),
    "channel, none asked for": (problem(1, channel="sign_bit"), HOPPER, "tensor_core"),
    "iteration, no channel": (problem(1, iteration=2), HOPPER, "tensor_core"),
    "no cuda.core": (problem(1), BARE, "dense"),
    "no cuda.core, exact": (problem(1, exact=True), BARE, "slabs"),
    "no cuda.core, an iteration": (problem(1, channel="frac4", iteration=0), BARE, "dense"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_chosen_kernel(case: str) -> None:
    p, on, kernel = CHOSEN[case]
    assert plan(p, on).kernel == kernel


OFF = "dispatch to it is switched off (TINYLOOP_USE_MARLIN=0 or set_marlin_dispatch(False))"
TURING = "Tesla T4 has compute capability 7.5; the GPU kernels need 8.0"
REFUSED = {
    "fp16_cache, none": (("fp16_cache", AMPERE, {}), "no dense copy is kept"),
    "fp16_cache, exact": (
        ("fp16_cache", AMPERE, {"cached": True, "exact": True}), "exact_int4 asks for fp32 arithmetic",
    ),
    "fp16_cache, iteration": (
        ("fp16_cache", AMPERE, {"cached": True, "channel": "frac4", "iteration": 0}),
        "this loop iteration rounds on its own, and the copy is of the stored codes",
    ),
    "tensor_core, bits": (("tensor_core", AMPERE, {"bits": 8}), "the weight has 8 bits"),
    "tensor_core, exact": (
        ("tensor_core", AMPERE, {"exact": True}),
        "exact_int4 asks for fp32 arithmetic, tensor cores take 16-bit factors",
    ),
    "tensor_core, off": (("tensor_core", AMPERE, {"marlin": False}), OFF),
    "tensor_core, old": (("tensor_core", CHIPS["7.5"], {}), TURING),
    "tensor_core, no cuda.core": (("tensor_core", BARE, {}), BARE.missing),
    "tensor_core, fp32": (
        ("tensor_core", AMPERE, {"dtype": F32}), "activations are float32; tensor cores take float16 or bfloat16",
    ),
    "tensor_core, iteration": (
        ("tensor_core", AMPERE, {"channel": "frac4", "iteration": 0}),
        "this loop iteration rounds on its own, and the device format holds the stored codes",
    ),
    "tensor_core, unpackable": (("tensor_core", AMPERE, {"unpackable": "no groups of 48"}), "no groups of 48"),
    "tensor_core, rows": (
        ("tensor_core", AMPERE, {"M": DENSE + 1}),
        f"M={DENSE + 1} > {DENSE}: arithmetic decides, and a dense copy for this call has more of it",
    ),
    "tensor_core, Hopper": (
        ("tensor_core", HOPPER, {"M": 64}),
        "M=64: Hopper's own instructions are faster for so many rows of this weight",
    ),
    "hopper, other": (
        ("hopper", AMPERE, {}), "NVIDIA A10 has compute capability 8.6; wgmma runs on 9.0 alone",
    ),
    "hopper, off": (("hopper", HOPPER, {"marlin": False}), OFF),
    "hopper, rows": (
        ("hopper", HOPPER, {"M": 9999}),
        f"M=9999 > {DENSE_HOPPER}: arithmetic decides, and a dense copy for this call has more of it",
    ),
    "unpack_dense, off": (("unpack_dense", HOPPER, {"marlin": False}), OFF),
    "unpack_dense, old": (("unpack_dense", CHIPS["7.5"], {}), TURING),
    "cross_iter, no channel": (
        ("cross_iter", AMPERE, {"iteration": 1}), "the weight has no channel (frac4 or sign_bit)",
    ),
    "cross_iter, off": (
        ("cross_iter", AMPERE, {"channel": "frac4"}),
        "no iteration's rounding is asked for: TINYLOOP_CROSS_ITER_ROUND is not 1, or nothing loops",
    ),
    "cross_iter, no cuda.core": (("cross_iter", BARE, {"channel": "frac4", "iteration": 1}), BARE.missing),
    "cross_iter, old": (("cross_iter", CHIPS["7.5"], {"channel": "frac4", "iteration": 1}), TURING),
    "dense, exact": (("dense", AMPERE, {"exact": True}), "exact_int4 asks for fp32 arithmetic"),
    "dense, rows": (
        ("dense", AMPERE, {"M": 3}),
        f"M=3 ≤ {NATIVE_ROWS}: one thread per output is faster than dequantising the whole weight",
    ),
    "native, no cuda.core": (("native", BARE, {}), BARE.missing),
    "native, old": (("native", CHIPS["7.5"], {}), TURING),
    "native, dense weight": (("native", AMPERE, {"bits": 16}), "the weight is dense (16 bits)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    (kernel, on, changes), text = REFUSED[case]
    assert reason(kernel, on, **changes) == text


def test_every_kernel_but_slabs_is_refused_somewhere() -> None:
    assert {kernel for (kernel, *_), _ in REFUSED.values()} == {k.name for k in CUDA_KERNELS} - {"slabs"}


def test_dsp08_refusals_travel_in_order() -> None:
    """All that stands before the chosen kernel, and no more."""
    names = [k.name for k in CUDA_KERNELS]
    for p, on, kernel in CHOSEN.values():
        chosen = plan(p, on)
        assert [name for name, _ in chosen.refused] == names[: names.index(kernel)]
        assert all(text for _, text in chosen.refused)
        assert chosen.why
        assert bool(chosen.config) == (kernel in ("tensor_core", "hopper"))


@pytest.mark.parametrize("chip", CHIPS)
def test_dsp01_hopper_is_exactly_9_0(chip: str) -> None:
    on = CHIPS[chip]
    kernels = {plan(problem(M, dtype), on).kernel for M in ROWS for dtype in (F16, BF16)}
    assert ("hopper" in kernels) == (chip == "9.0")
    assert (reason("hopper", on, M=64) is None) == (chip == "9.0")
    assert build.arch(on.capability).endswith("a") == (chip in ("9.0", "10.0", "10.3"))
    assert ("tensor_core" in kernels) == (chip in NEW)
    assert kernels <= set(INT4_KERNELS) or chip in OLD


@pytest.mark.parametrize("chip", OLD)
def test_dsp02_dsp06_old_chips_say_what_they_lack_and_get_torch(chip: str) -> None:
    """The GPU, the capability that is needed, and what is used instead: no kernel of ours, which would not compile."""
    for M, dtype, exact, bits in itertools.product(ROWS, (F16, BF16, F32), (False, True), (4, 8, 16)):
        chosen = plan(problem(M, dtype, exact=exact, bits=bits), CHIPS[chip])
        assert chosen.kernel == ("slabs" if exact and dtype != F32 else "dense")
    chosen = plan(problem(64), CHIPS[chip])
    assert (
        dict(chosen.refused)["tensor_core"]
        == f"{CHIPS[chip].name} has compute capability {chip}; the GPU kernels need 8.0"
    )
    assert "dense product" in chosen.why


@pytest.mark.parametrize("chip", CHIPS)
def test_dsp05_all_is_decided_before_anything_runs(chip: str) -> None:
    """Each bucket of rows on each shape: a plan, and on tensor cores a configuration, whatever the numbers."""
    for M, (K, N), G in itertools.product(ROWS, SHAPES, (32, 64, 128, 256)):
        chosen = plan(problem(M, N=N, K=K, G=min(G, K)), CHIPS[chip])
        assert isinstance(chosen, Plan)
        assert chosen.kernel in (*INT4_KERNELS, "dense")


def test_slabs_are_last_and_take_everything() -> None:
    assert CUDA_KERNELS[-1].name == "slabs"
    for M, bits, dtype in itertools.product((0, 1, 1 << 33), (4, 8, 16, 32), (F32, BF16, F16)):
        odd = Problem(M, 1, 1, 1, bits, dtype, exact=True, device="cuda:0", channel="frac4", iteration=1)
        assert CUDA_KERNELS[-1].refuses(odd, BARE) is None


# ---- knobs -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def switch() -> Any:
    tl.set_marlin_dispatch(None)
    yield
    tl.set_marlin_dispatch(None)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), (None, True)])
def test_use_marlin(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    if value is None:
        monkeypatch.delenv(dispatch.USE_MARLIN, raising=False)
    else:
        monkeypatch.setenv(dispatch.USE_MARLIN, value)
    assert dispatch.use_marlin() is on
    tl.set_marlin_dispatch(not on)
    assert dispatch.use_marlin() is not on
    tl.set_marlin_dispatch(None)
    assert dispatch.use_marlin() is on


@pytest.mark.parametrize("value", ["", "yes", "2", "True", " 1"])
@pytest.mark.parametrize(
    ("name", "ask"),
    [
        (dispatch.USE_MARLIN, dispatch.use_marlin), (dispatch.FP16_BODY, dispatch.fp16_body),
        (dispatch.CROSS_ITER_ROUND, dispatch.cross_iter_round),
    ],
)  # fmt: skip
def test_rubbish_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, ask: Any, value: str) -> None:
    monkeypatch.setenv(name, value)
    strict = " nor 'require'" if name == dispatch.USE_MARLIN else ""
    with pytest.raises(
        tl.InputError, match=rf"^{name}='{value}' is neither '0' nor '1'{strict}; set one of them, or unset it$"
    ):
        ask()


def test_what_is_said_in_code_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.USE_MARLIN, "rubbish")
    tl.set_marlin_dispatch(False)
    assert dispatch.use_marlin() is False


@pytest.mark.parametrize("value", [1, 0, "1", "off", 1.0])
def test_set_marlin_dispatch_takes_truth_values(value: Any) -> None:
    with pytest.raises(
        tl.InputError, match=r"^set_marlin_dispatch\(.*\): give True, False, 'require', or None to follow TINYLOOP"
    ):
        tl.set_marlin_dispatch(value)
    assert dispatch.use_marlin() is True


REQUIRED = {
    "fp32": ({"dtype": F32}, HOPPER, "native", "activations are float32"),
    "exact": ({"exact": True}, AMPERE, "native", "exact_int4 asks for fp32 arithmetic, tensor cores"),
    "old": ({}, CHIPS["7.5"], "dense", TURING),
    "no cuda.core": ({"M": 64}, BARE, "dense", str(BARE.missing)),
    "no device format": ({"M": 64, "unpackable": "no groups of 48"}, HOPPER, "dense", "no groups of 48"),
    "an iteration": ({"channel": "frac4", "iteration": 1}, HOPPER, "cross_iter", "rounds on its own"),
}


@pytest.mark.parametrize("case", REQUIRED)
def test_dsp04_strict_mode_refuses_to_be_slow(case: str) -> None:
    """All reasons once each, and the way out; what is not strict gets the kernel that is named."""
    changes, on, kernel, text = REQUIRED[case]
    p = problem(**changes)
    assert plan(p, on).kernel == kernel
    with pytest.raises(tl.InputError) as refused:
        plan(dataclasses.replace(p, require=True), on)
    said = str(refused.value)
    assert said.startswith(f"M={p.M} K=2048 N=6144 on cuda:0 would take the kernel {kernel}, and TINYLOOP_USE_MARLIN=")
    assert said.count(text) == 1
    assert "fp16_cache: no dense copy is kept; " in said
    assert said.endswith("allow slower kernels with TINYLOOP_USE_MARLIN=1 or set_marlin_dispatch(True)")


def test_strict_mode_changes_nothing_where_the_path_is_taken() -> None:
    """Nor for weights that are not of 4 bits, nor on a CPU."""
    strict = functools.partial(dataclasses.replace, require=True)
    for p, on, kernel in CHOSEN.values():
        if kernel in (*INT4_KERNELS, "fp16_cache") or p.bits != 4:
            assert plan(strict(p), on) == plan(p, on)
    here = problem(dtype=F32, device="cpu")
    assert plan(strict(here)) == plan(here)


def test_strict_mode_from_the_environment_to_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.USE_MARLIN, "require")
    w, here = Elsewhere(random_quant_weight(256, 96, 64, seed=0)), random_quant_weight(256, 96, 64, seed=0)
    assert dispatch.use_marlin() is True
    assert ops.problem(w, 5, BF16).require
    assert tl.quant_gemm(torch.ones(2, 256), here).shape == (2, 96)
    tl.set_marlin_dispatch(True)
    assert not ops.problem(w, 5, BF16).require
    monkeypatch.delenv(dispatch.USE_MARLIN)
    tl.set_marlin_dispatch("require")
    assert ops.problem(w, 5, BF16).require
    assert not ops.problem(tl.pack(here), 5, BF16).require


def test_strict_mode_is_shown_by_explain_and_not_raised(gpu: Any) -> None:
    gpu("9.0")
    strict = problem(dtype=F32, require=True)
    assert "native" in str(tl.explain(strict))


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), (None, False)])
def test_fp16_body(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv(dispatch.FP16_BODY, raising=False)
    if value is not None:
        monkeypatch.setenv(dispatch.FP16_BODY, value)
    assert dispatch.fp16_body() is on


class Elsewhere(tl.PackedWeight):
    """A weight that says it is on a GPU, and is never touched."""

    def __init__(self, weight: tl.QuantWeight):
        super().__init__(weight)
        self.device = torch.device("cuda", 0)


def test_the_problem_that_a_weight_poses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.USE_MARLIN, raising=False)
    w = Elsewhere(random_quant_weight(256, 96, 64, seed=0))
    p = ops.problem(w, 5, BF16)
    assert p == Problem(5, 96, 256, 64, 4, BF16, device="cuda:0", marlin=True, unpackable=None)
    tl.set_marlin_dispatch(False)
    assert ops.problem(w, 5, BF16).marlin is False
    assert dict(plan(ops.problem(w, 5, BF16), HOPPER).refused)["tensor_core"] == OFF
    assert ops.problem(w, 5, BF16, exact=True).exact


def test_a_weight_without_device_format() -> None:
    w = Elsewhere(random_quant_weight(96, 64, 48, seed=0))
    p = ops.problem(w, 64, F16)
    assert p.unpackable == marlin.refusal(w.weight)
    assert dict(plan(p, HOPPER).refused)["tensor_core"] == (
        "group_size=48 is neither a multiple of 32 below K=96, nor K or −1 for one group"
    )
    assert plan(p, HOPPER).kernel == "dense"


def test_a_weight_with_a_channel_in_an_iteration() -> None:
    w = Elsewhere(with_random_channel(random_quant_weight(128, 64, 64, seed=0), "frac4"))
    assert plan(ops.problem(w, 1, F16), HOPPER).kernel == "tensor_core"
    assert plan(ops.problem(w.at(3), 1, F16), HOPPER).kernel == "cross_iter"


# ---- no GPU, an old GPU, no cuda.core -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_no_gpu_is_a_sentence(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tinyloop"):
        assert tl.marlin_available(device) is False
    (text,) = [r.getMessage() for r in caplog.records]
    assert text.startswith(f"no INT4 tensor-core path: device={str(device)!r}: ")
    assert text.endswith("use cpu")
    with pytest.raises(tl.InputError, match=r"use cpu$"):
        tl.explain(problem(device=str(device)))
    with pytest.raises(tl.InputError, match=r"use cpu$"):
        plan(problem(device=str(device)))


def test_a_cpu_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tinyloop"):
        assert tl.marlin_available("cpu") is False
    assert "device='cpu' is no GPU; give cuda, or cuda:1 for a second one" in caplog.text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch as it looks beside one GPU: `gpu("9.0")`, or with a reason why nothing compiles."""

    def install(name: str, missing: str | None = None) -> None:
        c = CHIPS[name]
        properties = SimpleNamespace(
            name=c.name, major=c.capability[0], minor=c.capability[1], multi_processor_count=c.multiprocessors,
            shared_memory_per_block_optin=c.shared_memory, total_memory=c.memory,
        )  # fmt: skip
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for attribute, value in {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
            "get_device_properties": lambda index: properties,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, attribute, value)
        monkeypatch.setattr(build, "missing", lambda capability: missing)
        monkeypatch.setattr(launch, "chip", functools.cache(launch.chip.__wrapped__))

    return install


@pytest.mark.parametrize("name", CHIPS)
def test_available_from_8_0_on(name: str, gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An old GPU costs one line of log, once."""
    gpu(name)
    assert tl.marlin_available() is tl.marlin_available("cuda:0") is (name in NEW)
    assert dispatch.chip("cuda") == CHIPS[name]
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == (
        [] if name in NEW else [f"cuda:0 computes with torch's dense products alone: {CHIPS[name].refusal}"]
    )


def test_dsp04_no_cuda_core_is_one_visible_warning(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpu("9.0", "cuda.core is not installed (No module named 'cuda'): pip install 'tinyloop[cuda]'")
    for _ in range(2):
        assert plan(problem(64)).kernel == "dense"
        assert tl.marlin_available() is False
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.endswith("cuda.core is not installed (No module named 'cuda'): pip install 'tinyloop[cuda]'")
    assert "not tensor_core: cuda.core is not installed" in " ".join(str(tl.explain(problem(64))).split())


def test_a_second_gpu_that_is_not_there(gpu: Any) -> None:
    gpu("9.0")
    with pytest.raises(tl.InputError, match=r"^device='cuda:1': this machine has 1; give cuda:0 to cuda:0$"):
        plan(problem(device="cuda:1"))


def test_explain_shows_tiles_and_refusals(gpu: Any) -> None:
    gpu("8.6")
    explained = tl.explain(problem(16))
    chosen = explained.weights[0].plans[0]
    text = " ".join(str(explained).split())
    assert chosen == plan(problem(16), AMPERE)
    assert f"tensor_core takes {chosen.config} (M = 16)" in text
    assert "not fp16_cache: no dense copy is kept" in text
    assert explained.to_dict()["weights"][0]["configs"] == {"16": chosen.config}


# ---- configurations ---------------------------------------------------------------------------------------------


PADDED = [(M, N, K) for M in (0, 1, 7, *ROWS[3:]) for N in (64, 128, 2048, 4096, 12672, 16384, 28672, 50304, 1 << 20)
          for K in (128, 256, 2048, 4096, 8192, 28672)]  # fmt: skip


def shares(config: Config, chunks: int) -> list[tuple[int, int]]:
    """(first, count) of each team of each slice, in order, as tensor_core.cu divides the chunks."""
    found, ends = [], [chunks * split // config.splits for split in range(config.splits + 1)]
    if config.lead:
        ends[1] = config.lead
    for slice0, end in itertools.pairwise(ends):
        slice_ = end - slice0
        for team in range(config.WK):
            first = slice0 + slice_ * team // config.WK
            found.append((first, slice0 + slice_ * (team + 1) // config.WK - first))
    return found


@pytest.mark.parametrize("chip", NEW)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("scale32", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_configurations(chip: str, pair: bool, halves: bool, scale32: bool) -> None:
    on = CHIPS[chip]
    known = set(variants([on], [pair], [halves]))
    for M, N, K in PADDED:
        c = choose(M, N, K, on, pair, halves, scale32)
        assert c == choose(M, N, K, on, pair, halves, scale32)
        assert c.shared_memory(scale32=True, halves=True) + 2048 <= on.shared_memory
        assert c.threads <= 512
        assert c.splits >= 1
        assert c.columns % 128 == 0 or not pair
        assert dataclasses.replace(c, splits=1, cluster=False, lead=0) in known
        assert not c.lead or (c.splits == 2 and not c.cluster)
        assert not c.cluster or (on.capability == (9, 0) and c.splits in (2, 4, 8))
        covered = [k for first, count in shares(c, K // CHUNK) for k in range(first, first + count)]
        assert covered == list(range(K // CHUNK))  # each chunk once, in the order in which sums are added
        if c.splits > 1:
            assert min(count for _, count in shares(c, K // CHUNK)) >= 1
            tiles = -(-M // c.rows) * -(-N * (2 if pair else 1) // c.columns)
            cut = tiles - c.whole(tiles, on.multiprocessors)
            assert cut * c.splits * c.rows * c.columns * 4 <= 64 << 20  # bytes of scratch


@pytest.mark.parametrize(("K", "N"), [(7, 3), (128, 64), (129, 65), (2048, 6144)])
def test_the_dispatcher_knows_the_device_format_s_sizes(K: int, N: int) -> None:
    """What it pads by in its head is what packing pads by."""
    m = marlin.MarlinWeight.of(random_quant_weight(K, N, K, seed=1))
    assert padded(problem(K=K, N=N)) == (m.Np, m.Kp)


def test_what_wgmma_does_not_serve_is_cut_too() -> None:
    """Products for the correction pair, and gate and up in one launch."""
    assert choose(32, 2048, 8192, HOPPER).splits > 1
    assert choose(24, 2048, 4096, HOPPER, pair=True).splits > 1


def test_small_groups_have_tiles_of_their_own() -> None:
    """Up to sixteen rows on Hopper, where their parameters are read for every second step."""
    for on, decode in ((HOPPER, True), (AMPERE, False)):
        whole, halves = (choose(16, 8192, 8192, on, halves=halves) for halves in (False, True))
        assert (whole.DECODE, halves.DECODE) == (False, decode)


def test_few_rows_of_wide_weights_follow_the_measured_ones() -> None:
    """The fastest of a sweep on an H200 (docs/log.md): teams need chunks to divide, multiprocessors whole rounds."""
    for M, N, K, wanted in (
        (1, 50304, 2048, (1, 4, 4, 1)),
        (16, 50304, 2048, (1, 2, 3, 1)),
        (1, 16384, 2048, (1, 8, 3, 1)),
        (16, 16384, 2048, (2, 8, 2, 1)),
        (1, 14336, 4096, (1, 8, 3, 1)),
        (16, 14336, 4096, (2, 8, 2, 1)),
        (16, 11008, 4096, (1, 4, 5, 2)),
        (1, 18944, 4096, (1, 4, 4, 2)),
        (16, 18944, 2048, (1, 4, 4, 1)),
        (16, 28672, 2048, (2, 4, 3, 1)),
        (1, 28672, 4096, (1, 4, 4, 1)),
        (16, 28672, 4096, (1, 4, 4, 2)),
        (1, 28672, 8192, (1, 8, 4, 2)),
        (16, 28672, 8192, (1, 4, 4, 2)),
        (16, 12672, 8192, (1, 4, 5, 2)),
        (16, 14336, 8192, (2, 8, 2, 1)),
        (16, 32000, 4096, (2, 4, 3, 1)),
        (1, 57344, 8192, (1, 4, 4, 1)),
        (1, 12672, 8192, (1, 8, 4, 2)),
        (1, 128256, 4096, (2, 2, 4, 1)),
        (16, 128256, 4096, (2, 4, 3, 1)),
        (16, 40960, 2048, (1, 4, 4, 2)),
    ):
        c = choose(M, N, K, HOPPER)
        assert (c.WN, c.WK, c.STAGES, c.splits) == wanted, (M, N, K)
    assert (choose(16, 28672, 8192, HOPPER, halves=True).WK, choose(16, 28672, 8192, HOPPER).WK) == (8, 4)


def test_few_rows_of_the_bench_s_shapes_follow_the_measured_ones() -> None:
    """Likewise; and with groups of 32, whose parameters are read twice a chunk: one row folds, others decode."""
    for K, N, *wanted in (
        (2048, 2048, (16, 2, 2), (8, 3, 2), (8, 4, 2), (8, 4, 2), (8, 3, 2)),
        (2048, 6144, (4, 4, 2), (8, 3, 1), (4, 4, 2), (8, 2, 2), (8, 2, 2)),
        (8192, 2048, (4, 4, 8), (4, 4, 8), (4, 4, 8), (4, 4, 8), (16, 2, 2)),
        (4096, 4096, (4, 4, 4), (8, 3, 2), (8, 3, 2), (16, 2, 2), (8, 3, 2)),
        (8192, 8192, (16, 2, 1), (16, 2, 1), (8, 3, 2), (16, 2, 1), (16, 2, 1)),
        (8192, 28672, (8, 4, 2), (4, 4, 2), (4, 3, 1), (8, 3, 2), (8, 2, 2)),
        (4096, 3072, (8, 3, 4), (8, 3, 2), (8, 3, 4), (16, 2, 2), (8, 2, 4)),
        (4096, 1024, (4, 4, 8), (4, 5, 8), (4, 4, 8), (8, 3, 8), (8, 2, 8)),
    ):
        halves = [choose(M, N, K, HOPPER, halves=True) for M in (1, 8, 16)]
        found = [*(choose(M, N, K, HOPPER) for M in (1, 16)), *halves]
        assert [(c.WK, c.STAGES, c.splits) for c in found] == wanted, (K, N)
        assert [c.DECODE for c in halves] == [False, True, True]


def test_small_groups_of_wide_weights_follow_the_measured_ones() -> None:
    """As the measured ones of a sweep with groups of 32, whose δ is in two parts; beside scales in fp32 it is not."""
    for M, N, K, wanted in (
        (16, 10240, 4096, (1, 8, 2, 2)),
        (16, 10240, 8192, (1, 16, 2, 2)),
        (16, 14336, 4096, (1, 8, 2, 1)),
        (16, 28672, 8192, (1, 8, 2, 2)),
        (16, 40960, 4096, (2, 4, 3, 2)),
        (8, 14336, 4096, (1, 8, 2, 1)),
        (8, 28672, 4096, (2, 4, 3, 1)),
        (8, 18944, 8192, (1, 8, 3, 2)),
        (1, 14336, 4096, (1, 8, 3, 1)),
        (1, 28672, 4096, (2, 4, 3, 1)),
        (1, 40960, 2048, (2, 2, 4, 2)),
        (1, 28672, 8192, (2, 4, 3, 1)),
    ):
        c = choose(M, N, K, HOPPER, halves=True)
        assert (c.WN, c.WK, c.STAGES, c.splits) == wanted, (M, N, K)
        as_one, whole = choose(1, N, K, HOPPER, halves=True), choose(M, N, K, HOPPER)
        assert choose(M, N, K, HOPPER, halves=True, scale32=True) == (as_one if M <= 8 else whole)


def test_gate_and_up_of_some_rows_decode() -> None:
    """Below one round two slices, as two blocks share a multiprocessor; beyond, of half a round of tiles at most."""
    for N, wanted in ((5632, 2), (11008, 2), (14336, 1), (28672, 2)):
        c = choose(16, N, 4096, HOPPER, pair=True)
        assert c.DECODE, N
        assert (c.WN, c.WK, c.STAGES, c.splits, c.cluster) == (2, 4, 3, wanted, wanted == 2), N
    assert not choose(8, 14336, 4096, HOPPER, pair=True).DECODE
    assert not choose(16, 4096, 4096, HOPPER, pair=True).DECODE


def test_only_tiles_beyond_full_rounds_are_cut() -> None:
    c = Config(1, 1, 1, 4, 4, False, splits=2)
    assert [c.whole(tiles, 132) for tiles in (1, 131, 132, 133, 448)] == [0, 0, 132, 132, 396]
    assert dataclasses.replace(c, splits=1).whole(448, 132) == 448
    clusters = dataclasses.replace(c, splits=8, cluster=True)  # all of one kind: whole tiles or a tile's parts
    assert [clusters.whole(tiles, 132) for tiles in (131, 132, 133, 448)] == [0, 128, 128, 392]


def test_multiprocessors_without_a_tile_take_a_part_of_the_others() -> None:
    """As many chunks as they can do while the rest of a tile is done, and none where that saves little."""
    c = choose(64, 28672, 8192, HOPPER)
    free, tiles, chunks = 20, 112, 128
    assert (c.columns, c.splits, c.lead) == (256, 2, 115)
    rounds = -(-tiles // free)
    assert rounds * (chunks - c.lead) < c.lead < chunks
    assert choose(64, 132 * 256, 8192, HOPPER).lead == 0  # none is free
    assert choose(64, 28672, 2048, HOPPER).lead == 0  # the part would be too small
    assert choose(64, 11008, 11008, HOPPER).lead > 0
    assert choose(64, 11008, 4096, HOPPER).lead == 0


def test_wide_tiles_fill_one_round() -> None:
    """Where there are one and a half times as many tiles of 64×128 as multiprocessors, those of 64×192 may be more."""
    for M, N, chip in ((320, 4096, "8.0"), (640, 2048, "8.0"), (256, 6144, "9.0")):
        on = CHIPS[chip]
        c = choose(M, N, 4096, on)
        assert -(-M // c.rows) * -(-N // c.columns) <= on.multiprocessors


def test_few_tiles_are_cut_and_many_are_not() -> None:
    assert choose(1, 2048, 8192, HOPPER).splits > 1
    assert choose(1, 8192, 8192, HOPPER).splits == 1
    assert choose(1, 2048, 128, HOPPER).splits == 1


def test_smaller_memory_gets_a_smaller_pipeline() -> None:
    sizes = [choose(1, 2048, 8192, CHIPS[chip]).shared_memory() for chip in ("8.6", "8.0")]
    assert sizes == sorted(set(sizes))


def test_all_kinds_together_have_all_variants() -> None:
    assert set(variants()) == {c for on in KINDS for c in variants([on])}
    for chip in NEW:
        assert set(variants([CHIPS[chip]])) <= set(variants())


@pytest.mark.parametrize("scale32", [False, True])
@pytest.mark.parametrize("group", [-1, 128, 64, 32, 96])
def test_hopper_configurations(group: int, scale32: bool) -> None:
    for c, step in hopper_configs(1 << 20, group):
        runs = c.runs(group)
        assert min(c.stages(scale32, runs)) >= 2, c  # one is multiplied, the other loads
        assert c.shared_memory(scale32, runs) <= HOPPER.shared_memory
        assert c.BM % (8 * c.SPLITS * c.TEAMS) == 0  # rows that a block of a cluster writes, or a team
        of_x, of_words = c.stages(scale32, runs)
        assert 16 * of_x + 24 * of_words + 8 <= _BARRIERS
        assert group == -1 or group % (c.DEPTH // runs) == 0  # groups begin where runs do
        assert step > 0


def test_hopper_choices() -> None:
    """Those that are compiled; no block of a cluster without a chunk."""
    for M, N, K in PADDED:
        for group, (sms, fine) in itertools.product(
            (-1, 32, 64, 96, 128, 256), ((132, False), (132, True), (78, False))
        ):
            c = choose_hopper(M, N, K, group, sms, fine)
            assert dataclasses.replace(c, least=HopperConfig.least) in hopper_variants()
            assert c.SPLITS == 1 or c.SPLITS * c.DEPTH <= K


def test_hopper_choices_follow_the_measured_ones() -> None:
    """The fastest tile of a sweep on an H200, or one within 5 % of it (docs/log.md)."""
    for M, N, K, tile in (
        (64, 2048, 2048, "32×64 tiles, none cut, 2 consumers in 2 teams, 256 k per stage"),
        (64, 6144, 2048, "64×64 tiles, none cut, 2 consumers in 2 teams, 256 k per stage"),
        (128, 6144, 2048, "128×64 tiles, none cut, 2 consumers in 2 teams, 256 k per stage"),
        (256, 6144, 2048, "128×128 tiles, none cut, 2 consumers, 256 k per stage"),
        (64, 2048, 8192, "64×64 tiles, 2 consumers in 2 teams, 256 k per stage"),
        (32, 28672, 8192, "32×256 tiles, 4 consumers, 128 k per stage"),
        (64, 4096, 4096, "64×64 tiles, 2 consumers in 2 teams, 256 k per stage"),
        (512, 6144, 2048, "128×192 tiles, 3 consumers, 128 k per stage"),
        (1024, 8192, 8192, "256×128 tiles, 2 consumers, 128 k per stage"),
    ):
        assert str(choose_hopper(M, N, K, 128, 132)) == tile
    for dtype, coarse, rows in ((F16, False, 128), (BF16, True, 128), (BF16, False, 256)):
        fine = dtype == BF16 and not coarse  # where decoding takes longer than 128 rows need
        assert choose_hopper(256, 8192, 8192, 128, 132, fine).BM == rows
        chosen = plan(problem(256, dtype, N=8192, K=8192, coarse=coarse), HOPPER)
        assert chosen.config.startswith(f"{rows}×128 tiles")
    assert [str(choose_hopper(1024, 2048, 2048, 128, 132, fine)).split(" k per")[0] for fine in (False, True)] == [
        "128×128 tiles, 2 consumers, 256",
        "128×128 tiles, 2 consumers, 128",
    ]


@pytest.mark.parametrize("G", [1, 8, 16, 24, 48])
def test_a_group_that_no_stage_has_gets_a_plan(G: int) -> None:
    """Weights of such groups have no device format; a problem made by hand need not say so."""
    assert plan(problem(64, G=G), HOPPER).kernel == "hopper"


def test_few_registers_leave_out_the_widest_tiles() -> None:
    """Parameters of small groups take registers that tiles of many columns and rows do not have."""
    assert str(choose_hopper(512, 6144, 2048, 32, 132)) != str(choose_hopper(512, 6144, 2048, 128, 132))
    assert {c.CW for c, _ in hopper_configs(1 << 20, 32)} == {1, 2}


@pytest.mark.parametrize("blocks", [1, 78, 114, 132])
def test_hopper_schedule_covers_each_chunk_once(blocks: int) -> None:
    c = next(c for c in hopper_variants() if c.SPLITS == 1)
    for tiles, chunks in itertools.product((1, 2, 16, 77, 131, 132, 133, 200, 264, 1000), (2, 3, 4, 32, 128, 448)):
        work = c.schedule(tiles, chunks, blocks)
        cut = (tiles - work.whole) * chunks
        assert 0 <= work.whole <= tiles
        assert work.total == cut
        if cut:
            assert work.pieces <= blocks
            assert work.piece * (work.pieces - 1) < cut <= work.piece * work.pieces
        else:
            assert work.pieces == 0


Item = tuple[int, int, int]  # tile, first and end of its chunks


def dealt(work: Work, chunks: int, block: int, blocks: int) -> list[Item]:
    """What hopper.cu's `Schedule` gives to one block of so many, item after item."""
    at = min(work.piece * block, work.total)
    tile, chunk, left = work.whole + at // chunks, at % chunks, min(work.piece * (block + 1), work.total) - at
    items = []
    while left > 0:
        items.append((tile, chunk, min(chunks, chunk + left)))
        left -= items[-1][2] - chunk
        tile, chunk = tile + 1, 0
    return items + [(whole, 0, chunks) for whole in range(block, work.whole, blocks)]


def place_of(work: Work, chunks: int, tile: int) -> tuple[int, int]:
    """What hopper.cu's `reduce` takes for a cut tile: the block that adds, and the last that leaves a part of it."""
    start = (tile - work.whole) * chunks
    return start // work.piece, (start + chunks - 1) // work.piece


def test_hopper_tiles_that_are_not_cut() -> None:
    """All are whole; and it is no tile of its own, which would be compiled: the kernel is the same."""
    plain = next(c for c in hopper_variants() if c.SPLITS == 1)
    for tiles, chunks in itertools.product((1, 96, 131, 132, 133, 200), (2, 8, 448)):
        assert dataclasses.replace(plain, least=WHOLE).schedule(tiles, chunks, 132) == Work(tiles, 0, 0, 0)
    tiles = [c for c, _ in hopper_configs(8192, 128)]
    assert {c.least for c in tiles} == {HopperConfig.least, WHOLE}
    assert {dataclasses.replace(c, least=HopperConfig.least) for c in tiles} == {*hopper_variants()}
    assert hopper.defines(dataclasses.replace(plain, least=WHOLE), 1) == hopper.defines(plain, 1)


def test_hopper_cost_falls_with_multiprocessors_left_free() -> None:
    """On those the next launch begins: one tile costs less than as many as there are, half as many no more than one."""
    tile = HopperConfig(64, 1, 256, TEAMS=2, least=WHOLE)
    one, half, most, all_ = (hopper_cost(tile, 0.1, 64, 64 * tiles, 2048, 132) for tiles in (1, 66, 99, 132))
    assert one == half < most < all_
    assert hopper_cost(tile, 0.1, 64, 64 * 133, 2048, 132) > all_ + 3  # a round more
    clusters = HopperConfig(64, 2, 256, SPLITS=4)
    few, many = (hopper_cost(clusters, 0.1, 64, 128 * tiles, 2048, 132) for tiles in (16, 30))
    assert few + 1 < many


def test_clusters_divide_narrow_weights() -> None:
    """Whose tiles are fewer than a quarter of the multiprocessors."""
    for M, N, K in ((64, 1024, 4096), (32, 2048, 4096), (17, 1024, 2048)):
        assert choose_hopper(M, N, K, 128, 132).SPLITS == 4
        assert choose_hopper(M, 8 * N, K, 128, 132).SPLITS == 1
    for N, K in ((512, 1024), (1536, 1024), (512, 2048)):  # three eighths at most of them: one µs less
        assert choose_hopper(32, N, K, 128, 132).SPLITS == 4


def test_from_17_to_32_rows_the_weight_decides() -> None:
    """Whether wgmma is faster, as measured (docs/log.md): narrow weights and large ones go there."""
    for N, K, wgmma in (
        (512, 1024, True), (2048, 1024, False), (8192, 1024, False), (1024, 2048, True), (2048, 2048, False),
        (6144, 2048, False), (512, 4096, False), (2048, 4096, True), (3072, 4096, True), (4096, 4096, False),
        (8192, 4096, True), (512, 8192, False), (2048, 8192, True), (4096, 8192, False), (4096, 14336, True),
    ):  # fmt: skip
        assert wgmma_is_faster(32, N, K) == wgmma, (N, K)
        assert wgmma or choose(32, N, K, HOPPER).DECODE


def test_weights_share_a_launch_only_if_they_are_stored_alike() -> None:
    """A weight made by hand may have δ whole where `of` has it in two parts."""
    w = random_quant_weight(128, 64, 32, seed=1)
    m = marlin.MarlinWeight.of(dataclasses.replace(w, scale=w.scale.half().float()))
    assert m.in_parts
    assert run.pairs(m, m)
    assert not run.pairs(m, dataclasses.replace(m, delta=torch.zeros_like(m.delta, dtype=torch.float32)))


def test_a_plan_says_the_tile_of_its_scales() -> None:
    for scale32 in (False, True):
        p = problem(8, G=32, scale32=scale32)
        assert plan(p, HOPPER).config == str(choose(8, 6144, 2048, HOPPER, halves=True, scale32=scale32))
    assert choose(8, 6144, 2048, HOPPER, halves=True).DECODE
    assert not choose(8, 6144, 2048, HOPPER, halves=True, scale32=True).DECODE


def test_every_pipeline_has_two_stages() -> None:
    """One is computed while the other loads."""
    assert min(c.STAGES for c in variants()) == 2


def random_work() -> Iterator[tuple[int, int, int, int]]:  # tiles, chunks, multiprocessors, least
    r = random.Random(0)
    for _ in range(3000):
        sms = r.choice((1, 2, 7, 78, 114, 132))
        yield r.choice((r.randint(1, 2 * sms), r.randint(1, 5 * sms))), r.randint(2, 60), sms, r.choice((1, 3, 8))
    yield from ((tiles, chunks, 132, 8) for tiles in (1, 67, 100, 131, 133, 200) for chunks in (2, 8, 16, 448))


def test_hopper_pieces_come_together() -> None:
    """Every chunk of every tile is multiplied once. Of a cut tile, the first of the blocks that `reduce` counts has the
    tile's first chunk, and has it last; the others leave a part each, in the order of k, one per block at most, and
    before anything else they do, so that nobody waits for one who waits."""
    plain = next(c for c in hopper_variants() if c.SPLITS == 1)
    for tiles, chunks, sms, least in random_work():
        work = dataclasses.replace(plain, least=least * plain.DEPTH).schedule(tiles, chunks, sms)
        blocks = work.blocks(sms)  # the grid of cuda/hopper.py
        assert 1 <= blocks <= sms
        covered: dict[int, list[tuple[int, int, int]]] = {}
        for block in range(blocks):
            for i, (tile, first, end) in enumerate(dealt(work, chunks, block, blocks)):
                covered.setdefault(tile, []).append((first, end, block))
                assert first == 0 or (i == 0 and block < work.pieces)  # what is left has the block's slot
        assert sorted(covered) == list(range(tiles))
        for tile, parts in covered.items():
            parts.sort()
            assert [k for first, end, _ in parts for k in range(first, end)] == list(range(chunks))
            if len(parts) > 1:
                assert tile - work.whole < sms  # its counter
                adds, last = place_of(work, chunks, tile)
                assert [block for *_, block in parts] == list(range(adds, last + 1))
