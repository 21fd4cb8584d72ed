"""What a launch hands to the driver, and scratch, without a GPU: the driver's entry is a function of ours, which reads
the structs at the addresses it is given."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinyloop as tl
from helpers import random_quant_weight
from tinyloop import torch_op
from tinyloop.cuda import build, gemm, launch, run
from tinyloop.cuda.config import KINDS, Chip
from tinyloop.cuda.ready import Ready
from tinyloop.dispatch import USE_MARLIN
from tinyloop.errors import InputError
from tinyloop.marlin import MarlinWeight
from tinyloop.pack import pack

HOPPER = Chip("fake", (9, 0), 132, 227 << 10, 80 << 30)


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Gpu:
    """The driver, and of torch what asks for the current device and stream. `launches` are config, function and the
    first argument's address, as the driver sees them."""

    def __init__(self) -> None:
        self.launches: list[tuple[dict[str, Any], int, int]] = []
        self.result, self.device, self.stream, self.capture = 0, 0, 0x100, 0
        self.contexts: list[tuple[str, int]] = []
        self.switches: list[int] = []
        self.allowed: list[int] = []  # bytes of shared memory that the one kernel may have
        self.inside: Callable[[int], None] = lambda address: None
        self.entry: Any = launch._LAUNCH(self.launch)

    def launch(self, config_at: int, function: int, parameters_at: int, extra: int | None) -> int:
        c = launch.LaunchConfig.from_address(config_at)
        assert extra is None
        seen: dict[str, Any] = {name: getattr(c, name) for name, _ in c._fields_ if name != "attrs"}
        seen["attrs"] = [(a.id, list(a.value)) for a in c.attrs[: c.numAttrs]]
        address = ctypes.c_void_p.from_address(parameters_at).value or 0
        self.launches.append((seen, function, address))
        self.inside(address)
        return self.result

    def api(self) -> SimpleNamespace:
        def bound(what: str) -> Callable[..., Any]:
            return lambda given: (self.contexts.append((what, int(given))) or 0, 77)

        return SimpleNamespace(
            CUresult=Result, CUdevice=int, CUstream=int,
            CUdriverProcAddress_flags=SimpleNamespace(CU_GET_PROC_ADDRESS_LEGACY_STREAM=1),
            CUlaunchAttributeID=SimpleNamespace(
                CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
            ),
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            cuGetProcAddress=lambda name, since, flags: (0, ctypes.cast(self.entry, ctypes.c_void_p).value, 0),
            cuKernelSetAttribute=lambda attribute, given, *rest: self.allowed.append(given) or (0,),
            cuKernelGetAttribute=lambda *given: (0, max(self.allowed, default=48 << 10)),
            cuCtxGetCurrent=lambda: (0, 0),
            cuDevicePrimaryCtxRetain=bound("retain"), cuCtxSetCurrent=bound("set"),
            cuStreamGetCaptureInfo=lambda stream: (0, 1, self.capture, None),
        )  # fmt: skip

    def torch(self) -> SimpleNamespace:
        @contextlib.contextmanager
        def device(index: int) -> Iterator[None]:
            before, self.device = self.device, index
            yield
            self.device = before

        def capturing() -> bool:
            assert self.device == 0, "asked about another device than the stream's"
            return self.capture != 0

        def set_device(index: int) -> None:
            self.switches.append(index)
            self.device = index

        return SimpleNamespace(
            _C=SimpleNamespace(
                _cuda_getDevice=lambda: self.device, _cuda_getCurrentRawStream=lambda index: self.stream,
                _cuda_isCurrentStreamCapturing=capturing,
            ),
            cuda=SimpleNamespace(device=device, set_device=set_device), device=lambda *name: "cpu",
            empty=torch.empty, zeros=torch.zeros, float32=torch.float32, int32=torch.int32,
        )  # fmt: skip


def on_device_0(name: str, entry: str, defines: dict[str, int], device: None, *rest: Any, **given: Any) -> Any:
    """Where the tensors are on a CPU, which has no number."""
    return launch.Launcher(name, entry, defines, 0, *rest, **given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake = Gpu()
    api = fake.api()
    monkeypatch.setattr(launch, "torch", fake.torch())
    monkeypatch.setattr(launch, "driver", lambda: api)
    monkeypatch.setattr(launch, "_local", launch._Local())
    monkeypatch.setattr(build, "kernel", lambda *given: (SimpleNamespace(handle=0x7000), None))
    for module in (launch, gemm):
        monkeypatch.setattr(module, "chip", lambda index: HOPPER)
    monkeypatch.setattr(gemm, "Launcher", on_device_0)
    launch.launch_function.cache_clear()
    gemm._launcher.cache_clear()
    yield fake
    launch.launch_function.cache_clear()
    gemm._launcher.cache_clear()


class One(launch.Arguments):
    _fields_ = (("value", ctypes.c_int),)


def launcher(**given: Any) -> launch.Launcher:
    return launch.Launcher("correction", "an_entry", {}, given.pop("device", 0), 128, **given)


# ── structs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_structs_are_the_driver_s() -> None:
    """Ours laid over those that cuda.bindings fills: the fields of one, and two of the other, which tell its size."""
    api = pytest.importorskip("cuda.bindings.driver")
    theirs, attributes = api.CUlaunchConfig(), [api.CUlaunchAttribute(), api.CUlaunchAttribute()]
    names = api.CUlaunchAttributeID
    attributes[0].id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[0].value.programmaticStreamSerializationAllowed = 1
    attributes[1].id = names.CU_LAUNCH_ATTRIBUTE_PRIORITY
    attributes[1].value.priority = -3
    plain = [name for name, _ in launch.LaunchConfig._fields_ if name not in ("hStream", "attrs", "numAttrs")]
    for value, name in enumerate(plain, start=1):
        setattr(theirs, name, value)
    theirs.hStream, theirs.attrs, theirs.numAttrs = 0x1234_5678_9ABC, attributes, 2
    ours = launch.LaunchConfig.from_address(theirs.getPtr())
    assert [getattr(ours, name) for name in plain] == list(range(1, 8))
    assert (ours.hStream, ours.numAttrs) == (0x1234_5678_9ABC, 2)
    assert [ours.attrs[i].id for i in (0, 1)] == [int(a.id) for a in attributes]
    assert [ours.attrs[i].value[0] for i in (0, 1)] == [1, -3]
    assert (ctypes.sizeof(launch.LaunchConfig), ctypes.sizeof(launch.Attribute)) == (56, 72)


def test_the_names_that_are_asked_of_cuda_bindings() -> None:
    api = pytest.importorskip("cuda.bindings.driver")
    assert int(api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM) == 1
    assert int(api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) == 6
    assert int(api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) == 4
    assert callable(api.cuKernelGetAttribute)
    assert launch._name(1) == "CUDA_ERROR_INVALID_VALUE"
    assert launch._name(123456) == "error 123456, which this cuda.bindings does not know"
    assert callable(api.cuGetProcAddress)


# ── launches ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_driver_is_given(gpu: Gpu) -> None:
    run_it, arguments, others = launcher(shared=100 << 10, overlaps=True), One(42), One(43)
    values: list[int] = []
    gpu.inside = lambda address: values.append(One.from_address(address).value)
    run_it(arguments, 7)
    gpu.stream = 0x200
    run_it(others, 8)
    assert values == [42, 43]
    first, second = (seen for seen, function, _ in gpu.launches if function == 0x7000)
    assert first == {
        "gridDimX": 7, "gridDimY": 1, "gridDimZ": 1, "blockDimX": 128, "blockDimY": 1, "blockDimZ": 1,
        "sharedMemBytes": 100 << 10, "hStream": 0x100, "attrs": [(6, [1] + [0] * 15)], "numAttrs": 1,
    }  # fmt: skip
    assert second == first | {"gridDimX": 8, "hStream": 0x200}


def test_clusters(gpu: Gpu) -> None:
    launcher(cluster=4)(One(), 8)
    launcher(cluster=2, overlaps=True)(One(), 8)
    assert [seen["attrs"] for seen, *_ in gpu.launches] == [
        [(4, [4, 1, 1] + [0] * 13)], [(6, [1] + [0] * 15), (4, [2, 1, 1] + [0] * 13)],
    ]  # fmt: skip


def test_launchers_of_one_kernel_leave_each_other_their_shared_memory(gpu: Gpu) -> None:
    """A kernel has one limit, and the same kernel takes more where its blocks are a cluster."""
    for kilobytes in (100, 90, 120, 40):
        launcher(shared=kilobytes << 10)
    assert gpu.allowed == [100 << 10, 120 << 10]


def test_shared_memory_is_asked_for_where_variables_may_take_what_is_missing(gpu: Gpu) -> None:
    """48 KB need no asking, of which a kernel's own variables take some: 49152 bytes did not launch."""
    for kilobytes in (40, 48):
        launcher(shared=kilobytes << 10)
    assert gpu.allowed == [48 << 10]


def test_the_default_stream_and_no_overlap(gpu: Gpu) -> None:
    gpu.stream = 0
    launcher()(One(), 1)
    ((seen, *_),) = gpu.launches
    assert (seen["hStream"], seen["numAttrs"], seen["attrs"]) == (None, 0, [])


def test_another_device_is_current_during_the_launch_alone(gpu: Gpu) -> None:
    during: list[int] = []
    gpu.inside = lambda address: during.append(gpu.device)
    run_it = launcher(device=3)
    run_it(One(), 1)
    assert (during, gpu.device, gpu.switches) == ([3], 0, [3, 0])
    gpu.result = 1
    with pytest.raises(launch.LaunchError):
        run_it(One(), 1)
    assert (during, gpu.device) == ([3, 3], 0)
    gpu.result, gpu.device = 0, 3
    run_it(One(), 1)
    assert gpu.switches == [3, 0, 3, 0]


@pytest.mark.parametrize(
    ("result", "name"),
    [(1, "CUDA_ERROR_INVALID_VALUE$"), (987, "error 987, which this cuda.bindings does not know$")],
)
def test_a_refused_launch_raises_at_the_call(gpu: Gpu, result: int, name: str) -> None:
    gpu.result = result
    with pytest.raises(launch.LaunchError, match=f"^an_entry with 9 blocks of 128 threads, 64 bytes: {name}"):
        launcher(shared=64)(One(), 9)


def test_a_driver_without_the_function(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.driver(), "cuGetProcAddress", lambda *given: (0, 0, 1))
    with pytest.raises(launch.LaunchError, match=r"no cuLaunchKernelEx: it is older than CUDA 11\.6"):
        launcher()
    monkeypatch.setattr(launch.driver(), "cuGetProcAddress", lambda *given: (1, 0, 1))
    with pytest.raises(launch.LaunchError, match="of cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"):
        launcher()


def in_threads(count: int, work: Callable[[int], object]) -> None:
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))


def test_each_thread_has_the_context_and_a_configuration(gpu: Gpu) -> None:
    """And all are in the driver at once: a launch that waits holds nobody else up."""
    assert not launch._LAUNCH._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]  # lets go of the GIL
    run_it, together = launcher(device=0), threading.Barrier(4, timeout=20)
    gpu.inside = lambda address: together.wait() and None
    in_threads(4, lambda i: run_it(One(i), 10 + i))
    assert sorted(seen["gridDimX"] for seen, *_ in gpu.launches) == [10, 11, 12, 13]
    assert gpu.contexts.count(("retain", 0)) == gpu.contexts.count(("set", 77)) == 4
    together.reset()
    gpu.inside = lambda address: None
    run_it(One(), 1), run_it(One(), 1)
    assert gpu.contexts.count(("set", 77)) == 5


# ── a product with its arguments in place ──────────────────────────────────────────────────────────────────────────


def product(M: int = 2, splits: int = 1, cluster: bool = False, **given: Any) -> Ready:
    w = MarlinWeight.of(random_quant_weight(256, 128, 64, seed=1))
    config = replace(gemm.choose(2, 128, 256, HOPPER, False), splits=splits, cluster=cluster)
    return gemm.ready(M, torch.float16, w, config=config, **given)


def problem_at(address: int) -> Any:
    return gemm._Problem.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(gemm._Problem)))


def test_threads_do_not_see_each_other_s_arguments(gpu: Gpu) -> None:
    """Three are in the driver at once, each with its own x and y, read after all have come."""
    ready, together = product(), threading.Barrier(3, timeout=20)
    xs = [torch.zeros(2, 256, dtype=torch.float16) for _ in range(3)]
    ys = [torch.empty(2, 128, dtype=torch.float16) for _ in range(3)]
    seen: list[tuple[int, int, int, int]] = []

    def inside(address: int) -> None:
        together.wait()
        p = problem_at(address)
        seen.append((p.x, p.y, p.ldx, p.N))

    gpu.inside = inside
    for _ in range(2):
        in_threads(3, lambda i: ready(xs[i], ys[i]))
        assert sorted(seen) == sorted((x.data_ptr(), y.data_ptr(), 256, 128) for x, y in zip(xs, ys, strict=True))
        seen.clear()
    assert len(ready._free) == 3  # what the first three took, and no more


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_output_of_a_product(gpu: Gpu, symmetric: bool) -> None:
    x = torch.zeros(2, 512, dtype=torch.float16)[:, :256]
    y = product(symmetric=symmetric)(x)
    assert (y.dtype, y.shape) == (torch.float32 if symmetric else torch.float16, (2, 128))
    assert len(gpu.launches) == 1
    assert product(M=0)(x[:0]).shape == (0, 128)
    assert len(gpu.launches) == 1


def test_a_split_product_has_scratch(gpu: Gpu) -> None:
    seen: list[tuple[int, int]] = []
    gpu.inside = lambda address: seen.append(((p := problem_at(address)).partial, p.arrived))
    ready, x = product(splits=2), torch.zeros(2, 256, dtype=torch.float16)
    ready(x), ready(x)
    assert seen[0] == seen[1]
    assert None not in seen[0]
    assert seen[0] == launch.scratch_addresses(0, gpu.stream, 1, 1)
    counters = launch._local.scratch[0, gpu.stream, "counters"].tensor
    assert (counters.data_ptr(), counters.dtype) == (seen[0][1], torch.int32)
    assert not counters.any()
    gpu.stream = 0x200
    ready(x)
    assert not set(seen[2]) & set(seen[0])


def test_a_cluster_has_no_scratch(gpu: Gpu) -> None:
    seen: list[tuple[int, int, int]] = []
    gpu.inside = lambda address: seen.append(((p := problem_at(address)).splits, p.clustered, p.partial))
    x = torch.zeros(2, 256, dtype=torch.float16)
    product(splits=2, cluster=True)(x), product(splits=2)(x)
    assert [s[:2] for s in seen] == [(2, 1), (2, 0)]
    assert seen[0][2] is None
    assert seen[1][2]
    assert [config["gridDimX"] for config, *_ in gpu.launches] == [4, 4]


def test_clusters_are_refused_where_a_chip_has_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have no scratch, and nothing to add through."""
    monkeypatch.setattr(gemm, "chip", lambda index: KINDS[1])
    with pytest.raises(
        InputError, match=r"asks for clusters, which a GPU of capability 8\.6 does not have; give cluster=F"
    ):
        product(splits=2, cluster=True)
    product(splits=2)


# ── scratch ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scratch_is_one_stream_s_and_grows(gpu: Gpu) -> None:
    first = launch.scratch_floats(0, 100, "partial")
    assert launch.scratch_floats(0, 50, "partial") is first
    assert launch.scratch_floats(0, 50, "pair") is not first
    gpu.stream = 0x200
    other = launch.scratch_floats(0, 100, "partial")
    assert other is not first
    gpu.stream = 0x100
    assert launch.scratch_floats(0, 100, "partial") is first
    grown = launch.scratch_floats(0, 101, "partial")
    assert (grown.numel(), grown is first) == (101, False)
    assert launch.scratch_floats(0, 100, "partial") is grown


def test_sums_and_counters_grow_each_for_itself(gpu: Gpu) -> None:
    partial, counters = launch.scratch_addresses(0, gpu.stream, 100, 10)
    assert launch.scratch_addresses(0, gpu.stream, 50, 10) == (partial, counters)
    more = launch.scratch_addresses(0, gpu.stream, 50, 11)
    assert (more[0], more[1] != counters) == (partial, True)
    assert launch._local.scratch[0, gpu.stream, "counters"].tensor.numel() == 11
    assert launch.scratch_addresses(0, gpu.stream, 101, 11)[1] == more[1]
    assert launch._local.scratch[0, gpu.stream, "partial"].tensor.numel() == 101
    assert launch.scratch_addresses(0, 0x200, 1, 1) not in (partial, more)


def test_scratch_is_one_thread_s(gpu: Gpu) -> None:
    found = [launch.scratch_addresses(0, gpu.stream, 10, 10)]
    in_threads(1, lambda i: found.append(launch.scratch_addresses(0, gpu.stream, 10, 10)))
    assert not set(found[0]) & set(found[1])


def test_scratch_of_a_capture_is_that_capture_s(gpu: Gpu) -> None:
    outside = launch.scratch_floats(0, 100, "partial")
    found = [outside]
    for gpu.capture in (5, 6):
        found.append(launch.scratch_floats(0, 100, "partial"))
        assert launch.scratch_addresses(0, gpu.stream, 100, 1)[0] == found[-1].data_ptr()
    gpu.capture = 0
    found.append(launch.scratch_floats(0, 100, "partial"))
    assert len({id(t) for t in found}) == 4


def test_the_default_stream_is_never_captured(gpu: Gpu) -> None:
    """So it is not asked about; while another stream is captured, to ask is an error (cudaStreamIsCapturing)."""
    gpu.stream = 0
    outside = launch.scratch_addresses(0, gpu.stream, 100, 1)
    gpu.capture, gpu.device = 5, 1
    assert launch.scratch_addresses(0, gpu.stream, 100, 1) == outside


def test_scratch_while_another_device_is_current(gpu: Gpu) -> None:
    """Whether its stream is captured is asked of its device, and the other one is current again after."""
    gpu.device, gpu.capture = 1, 5
    inside = launch.scratch_floats(0, 100, "partial")
    assert gpu.device == 1
    gpu.device = gpu.capture = 0
    assert launch.scratch_floats(0, 100, "partial") is not inside


# ── the kept call of the torch op ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def addressed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The launches of a kept call, by addresses of x and y and the step between rows."""
    seen: list[tuple[int, int, int]] = []
    fake = SimpleNamespace(launch=lambda x, y, ldx: seen.append((x, y, ldx)))
    monkeypatch.setattr(run, "ready", lambda w, M, dtype, kernel: fake)
    return seen


def kept(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = pack(random_quant_weight(x.shape[-1], 24, 4, seed=1))
    return torch_op._launched(packed, x.shape, x.dtype, torch_op._switches(), "tensor_core")


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (3, 64), (3, 1, 64), (1, 20), (3, 20)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_kept_call_launches_by_addresses(
    addressed: list[tuple[int, int, int]], shape: tuple[int, ...], offset: int
) -> None:
    """x itself where its rows are at multiples of 16 bytes, else a copy whose rows are."""
    K, M = shape[-1], math.prod(shape[:-1])
    x = torch.zeros(M * K + offset)[offset:].view(shape)
    y = kept(x)(x)
    assert y.shape == (*shape[:-1], 24)
    ((source, target, ldx),) = addressed
    assert target == y.data_ptr()
    itself = offset == 0 and (M == 1 or K % 8 == 0)
    assert (source == x.data_ptr()) == itself
    assert source % 16 == 0
    assert M == 1 or ldx == (K if itself else -(-K // 8) * 8)


def test_a_kept_call_s_output_is_on_its_device(
    addressed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiled graphs allocate with does so on the current device, which is asked at every call."""
    x, current, made = torch.zeros(2, 3, 64), [1], list[Any]()

    def empty(*given: Any) -> torch.Tensor:
        made.append(given)
        return torch.empty_strided(given[0], given[1], dtype=given[2])

    monkeypatch.setattr(torch_op, "_guards", SimpleNamespace(_empty_strided_cuda=empty))
    monkeypatch.setattr(torch_op, "_C", SimpleNamespace(_cuda_getDevice=lambda: current[0]))
    packed: Any = SimpleNamespace(device=torch.device("cuda", 1), weight=SimpleNamespace(N=24))
    call = torch_op._launched(packed, x.shape, x.dtype, torch_op._switches(), "tensor_core")
    for current[0], on_it in ((1, True), (0, False), (1, True)):
        made.clear()
        y = call(x)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((2, 3, 24), x.dtype, True)
        assert addressed[-1][1] == y.data_ptr()
        assert made == ([((2, 3, 24), (72, 24, 1), x.dtype)] if on_it else [])


def test_a_kept_call_follows_the_switches(
    addressed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by either one, `quant_gemm` plans anew; on again, or set to what holds anyhow, the launch is back."""
    monkeypatch.delenv(USE_MARLIN, raising=False)
    x, switched = torch.ones(1, 64), tl.set_marlin_dispatch
    call = kept(x)

    def launched() -> bool:
        before = len(addressed)
        call(x)
        return len(addressed) > before

    try:
        assert launched()
        switched(False)
        assert not launched()
        switched(True)
        assert launched()
        switched(None)
        assert launched()
        for value, on in (("0", False), ("1", True), ("0", False)):
            monkeypatch.setenv(USE_MARLIN, value)
            assert launched() is on
        monkeypatch.setenv(USE_MARLIN, "rubbish")
        with pytest.raises(tl.InputError, match="neither '0' nor '1'"):
            call(x)
        monkeypatch.delenv(USE_MARLIN)
        assert launched()
    finally:
        switched(None)
