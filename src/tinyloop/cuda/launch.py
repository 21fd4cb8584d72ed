"""Launching: one struct by value, on the current stream of the tensors' device, with errors raised at the call.

cuda.core builds the kernels; the launch itself is a foreign call of the driver's `cuLaunchKernelEx` with the driver's
own structs, filled once in each thread. cuda.core's `launch` takes 9 µs and no structs; cuda.bindings, which it stands
on, copies the configuration out of its Python objects and into them at every call.

Scratch is fp32 for partial sums and counters that every kernel leaves at zero. It belongs to one stream, grows, and is
never shared: two streams that overlap have one each. During graph capture it comes from the graph's own memory pool,
so it lives as long as the graph does; the counters' zeroing is then part of the graph.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..devices import resolve
from . import build
from .config import SPARE, Chip

log = logging.getLogger("tinyloop")
Tensor = torch.Tensor


class Arguments(ctypes.Structure):
    """Base of the structs that kernels take; subclasses mirror the `.cu` file's, field for field."""

    @functools.cached_property
    def parameters_at(self) -> int:
        """Where the driver finds the address of this struct, its one parameter. What is there lives as long as self."""
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self))
        return ctypes.addressof(self._parameters)


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute; of its value's 64 bytes we set the first int, for a cluster three."""

    _fields_: ClassVar[Any] = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_: ClassVar[Any] = [
        ("gridDimX", ctypes.c_uint), ("gridDimY", ctypes.c_uint), ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint), ("blockDimY", ctypes.c_uint), ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint), ("hStream", ctypes.c_void_p), ("attrs", ctypes.POINTER(Attribute)),
        ("numAttrs", ctypes.c_uint),
    ]  # fmt: skip


@functools.cache
def chip(index: int) -> Chip:
    """The GPU `cuda:index`, looked at once, with a warning where no kernel runs on it. Raises InputError where there is
    no such GPU."""
    resolve(f"cuda:{index}")
    p = torch.cuda.get_device_properties(index)
    shared = getattr(p, "shared_memory_per_block_optin", 99 << 10)
    capability = p.major, p.minor
    found = Chip(p.name, capability, p.multi_processor_count, shared, p.total_memory, build.missing(capability))
    if found.refusal:
        log.warning("cuda:%d computes with torch's dense products alone: %s", index, found.refusal)
    return found


@functools.cache
def driver() -> Any:
    """The CUDA driver's own functions."""
    from cuda.bindings import driver

    return driver


class LaunchError(RuntimeError):
    """The driver refused a launch; raised at the call that asked for it."""


LAUNCH_SINCE = 11060  # the CUDA version that brought cuLaunchKernelEx
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def launch_function() -> Callable[[int, int, int, None], int]:
    """`cuLaunchKernelEx(config, function, parameters, extra)`, by addresses.

    The driver itself is asked for it, through the library that cuda.bindings has found: so no file name of any platform
    stands here, and no second copy is loaded. The call lets other Python threads run: a launch waits where the queue is
    full, and what it waits for may be a host function that needs the interpreter.
    """
    api = driver()
    flags = int(api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM)  # torch's default stream
    result, address, *_ = api.cuGetProcAddress(b"cuLaunchKernelEx", LAUNCH_SINCE, flags)
    raise_for(result, "cuGetProcAddress of cuLaunchKernelEx")
    if not address:
        raise LaunchError("the driver has no cuLaunchKernelEx: it is older than CUDA 11.6; update it")
    return _LAUNCH(int(address))


_OVERLAP = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
_CLUSTER = "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
_UNASKED = 48 << 10  # bytes of shared memory that a kernel may have unasked, its variables included
_allowing = threading.Lock()


class Launcher:
    """One kernel on one device, ready to be launched.

    `overlaps` says that the kernel calls `wait_for_predecessor` (ptx.cuh) before it reads or writes what another kernel
    may write: where the chip can, it is then started while the one before it in the stream still runs, unless
    `Launcher.overlapping` is off, for all kernels made from then on. Blocks run in clusters of `cluster`.
    """

    overlapping = True

    def __init__(
        self, name: str, entry: str, defines: dict[str, int], device: int, threads: int, shared: int = 0,
        overlaps: bool = False, cluster: int = 1,
    ):  # fmt: skip
        self.entry, self.threads, self.shared, self.device = entry, threads, shared, device
        kernel, self._code = build.kernel(name, entry, tuple(sorted(defines.items())), chip(device).capability)
        overlaps = overlaps and self.overlapping and chip(device).capability >= (9, 0)
        self._attributes = ([(_OVERLAP, 1)] if overlaps else []) + ([(_CLUSTER, cluster, 1, 1)] if cluster > 1 else [])
        self._local = threading.local()  # a launch fills in its own thread's configuration, and lets others run
        self._function, self._launch = int(kernel.handle), launch_function()
        if shared > _UNASKED - SPARE:
            _allow_shared(kernel.handle, device, shared)

    def __call__(self, arguments: Arguments, blocks: int, stream: int | None = None) -> None:
        """Launch `blocks` blocks on the device's current stream, which may be given; `arguments` must not change
        meanwhile. Raises LaunchError."""
        previous = torch._C._cuda_getDevice()
        if previous != self.device:
            torch.cuda.set_device(self.device)
        try:
            try:
                own = self._local.own
            except AttributeError:
                own = self._own()
            if stream is None:
                stream = current_stream(self.device)
            if own.blocks != blocks or own.stream != stream:
                own.set(blocks, stream)
            result = self._launch(own.config_at, self._function, arguments.parameters_at, None)
        finally:
            if previous != self.device:
                torch.cuda.set_device(previous)
        if result != 0:
            raise_for(result, f"{self.entry} with {blocks} blocks of {self.threads} threads, {self.shared} bytes")

    def _own(self) -> _Own:
        """The calling thread's configuration, at its first launch."""
        bind_thread(self.device)
        config = LaunchConfig(1, 1, 1, self.threads, 1, 1, self.shared)
        kinds = driver().CUlaunchAttributeID
        given = [Attribute(int(getattr(kinds, kind)), value=tuple(value)) for kind, *value in self._attributes]
        config.attrs, config.numAttrs = (Attribute * len(given))(*given), len(given)
        self._local.own = own = _Own(config)
        return own


def _allow_shared(kernel: Any, device: int, shared: int) -> None:
    """Let a kernel have so many bytes of dynamic shared memory, or more where another launcher of it asked for more."""
    api = driver()
    attribute, on = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, api.CUdevice(device)
    with _allowing:
        result, allowed = api.cuKernelGetAttribute(attribute, kernel, on)
        raise_for(result, "the shared memory that a kernel may have")
        if allowed < shared or allowed == _UNASKED:  # of which variables take a part
            most = max(shared, allowed)
            raise_for(api.cuKernelSetAttribute(attribute, most, kernel, on)[0], f"{most} bytes of shared memory")


class _Own:
    """What one thread hands to the driver, and where it lies."""

    __slots__ = ("blocks", "config", "config_at", "stream")

    def __init__(self, config: LaunchConfig):
        self.config, self.config_at, self.blocks, self.stream = config, ctypes.addressof(config), 0, -1

    def set(self, blocks: int, stream: int) -> None:
        self.config.gridDimX, self.config.hStream, self.blocks, self.stream = blocks, stream, blocks, stream


def bind_thread(device: int) -> None:
    """Give a thread that has not touched CUDA the device's context, which the driver, unlike the runtime, asks for."""
    api = driver()
    result, context = api.cuCtxGetCurrent()
    raise_for(result, "cuCtxGetCurrent")
    if int(context) == 0:
        result, context = api.cuDevicePrimaryCtxRetain(api.CUdevice(device))  # torch holds it as long as the process
        raise_for(result, f"the context of cuda:{device}")
        raise_for(api.cuCtxSetCurrent(context)[0], f"the context of cuda:{device} in a new thread")


def raise_for(result: Any, what: str) -> None:
    """Raises LaunchError where a call of the driver has failed."""
    if int(result) != 0:
        raise LaunchError(f"{what}: {_name(int(result))}")


def _name(result: int) -> str:
    try:
        return str(driver().CUresult(result).name)
    except ValueError:
        return f"error {result}, which this cuda.bindings does not know"


def current_stream(device: int) -> int:
    """The handle of the device's current stream, looked up per call."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


@dataclass(frozen=True)
class _Held:
    tensor: Tensor
    count: int  # of its elements
    address: int
    capture: int | None  # of which graph capture, if any


@dataclass(frozen=True)
class _Sums:
    floats: int
    counters: int
    addresses: tuple[int, int]
    capture: int | None


class _Local(threading.local):
    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], _Sums] = {}  # by device and stream: what `scratch` has for it, at one look
        self.scratch: dict[tuple[int, int, str], _Held] = {}  # by device, stream and purpose


_local = _Local()


def scratch_floats(device: int, count: int, purpose: str) -> Tensor:  # fp32 [≥ count]
    """Scratch of the device's current stream for one purpose, kept and only ever grown; contents are undefined."""
    stream = current_stream(device)
    return _scratch(device, stream, _capture_of(device, stream), count, purpose).tensor


def scratch_addresses(device: int, stream: int, floats: int, counters: int) -> tuple[int, int]:
    """Where a product's partial sums lie, and its counters at zero, which kernels leave at zero. The stream is the
    device's current one."""
    capture, kept = _capture_of(device, stream), _local.sums.get((device, stream))
    if kept is None or kept.capture != capture or kept.floats < floats or kept.counters < counters:
        partial = _scratch(device, stream, capture, floats, "partial")
        arrived = _scratch(device, stream, capture, counters, "counters")
        kept = _Sums(partial.count, arrived.count, (partial.address, arrived.address), capture)
        _local.sums[device, stream] = kept
    return kept.addresses


def _capture_of(device: int, stream: int) -> int | None:
    """Which graph capture the device's current stream is in, if any."""
    if stream == 0:  # the default stream cannot be captured
        return None
    if torch._C._cuda_getDevice() == device:  # the question is about the current device's
        capturing = torch._C._cuda_isCurrentStreamCapturing()
    else:
        with torch.cuda.device(device):
            capturing = torch._C._cuda_isCurrentStreamCapturing()
    return _capture(stream) if capturing else None


def _scratch(device: int, stream: int, capture: int | None, count: int, purpose: str) -> _Held:
    kept = _local.scratch
    held = kept.get((device, stream, purpose))
    if held is None or held.capture != capture or held.count < count:
        make, dtype = (torch.zeros, torch.int32) if purpose == "counters" else (torch.empty, torch.float32)
        made = make(count, dtype=dtype, device=torch.device("cuda", device))
        held = kept[device, stream, purpose] = _Held(made, count, made.data_ptr(), capture)
    return held


def _capture(stream: int) -> int:
    api = driver()
    result, _, identity, *_ = api.cuStreamGetCaptureInfo(api.CUstream(stream))
    raise_for(result, "cuStreamGetCaptureInfo")
    return int(identity)
