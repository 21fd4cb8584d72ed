"""Launching: one struct by value, on the current stream of the tensors' device, with errors raised at the call.

cuda.core builds the kernels; the launch itself goes to the driver through cuda.bindings, which cuda.core stands on:
cuda.core's `launch` takes 9 µs and no structs, this 2–3 µs.

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
from typing import Any

import torch

from ..devices import resolve
from . import build
from .config import Chip

log = logging.getLogger("tinyloop")
Tensor = torch.Tensor
_local = threading.local()


class Arguments(ctypes.Structure):
    """Base of the structs that kernels take; subclasses mirror the `.cu` file's, field for field."""


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


class Launcher:
    """One kernel on one device, ready to be launched.

    `overlaps` says that the kernel calls `wait_for_predecessor` (ptx.cuh) before it reads or writes what another kernel
    may write: where the chip can, it is then started while the one before it in the stream still runs, unless
    `Launcher.overlapping` is off, for all kernels made from then on.
    """

    overlapping = True

    def __init__(
        self, name: str, entry: str, defines: dict[str, int], device: int, threads: int, shared: int = 0,
        overlaps: bool = False,
    ):  # fmt: skip
        self.entry, self.threads, self.shared, self.device = entry, threads, shared, device
        kernel, self._code = build.kernel(name, entry, tuple(sorted(defines.items())), chip(device).capability)
        self._overlaps = overlaps and self.overlapping and chip(device).capability >= (9, 0)
        self._configs = threading.local()  # a launch fills in its own thread's
        api = driver()
        self._function = api.CUfunction(int(kernel.handle))
        if shared > 48 << 10:
            attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            raise_for(api.cuKernelSetAttribute(attribute, shared, kernel.handle, api.CUdevice(device))[0], entry)

    def __call__(self, arguments: Arguments, blocks: int) -> None:
        """Launch `blocks` blocks on the device's current stream. Raises LaunchError."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = getattr(self._configs, "config", None)
        previous = torch.cuda.current_device()
        if previous != self.device:
            torch.cuda.set_device(self.device)
        try:
            if config is None:
                bind_thread(self.device)
                config = self._configs.config = self._config()
            config.gridDimX, config.hStream = blocks, current_stream(self.device)
            (result,) = driver().cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0)
        finally:
            if previous != self.device:
                torch.cuda.set_device(previous)
        if result != 0:
            raise_for(result, f"{self.entry} with {blocks} blocks of {self.threads} threads, {self.shared} bytes")

    def _config(self) -> Any:
        api = driver()
        config = api.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = self.threads, self.shared
        if self._overlaps:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config


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
        raise LaunchError(f"{what}: {result.name}")


def current_stream(device: int) -> int:
    """The handle of the device's current stream, looked up per call."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@dataclass
class _Held:
    tensor: Tensor
    capture: int | None  # of which graph capture, if any


def scratch_floats(device: int, count: int, purpose: str) -> Tensor:  # fp32 [≥ count]
    """Scratch of the device's current stream for one purpose, kept and only ever grown; contents are undefined."""
    return _scratch(device, count, purpose, torch.empty, torch.float32)


def scratch_counters(device: int, count: int) -> Tensor:  # int32 [≥ count]
    """Counters at zero, which kernels leave at zero."""
    return _scratch(device, count, "counters", torch.zeros, torch.int32)


def _scratch(device: int, count: int, purpose: str, make: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
    kept: dict[tuple[int, int, str], _Held] = _local.__dict__.setdefault("scratch", {})
    stream = current_stream(device)
    with torch.cuda.device(device):
        capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else None
    held = kept.get((device, stream, purpose))
    if held is None or held.capture != capture or held.tensor.numel() < count:
        held = _Held(make(count, dtype=dtype, device=torch.device("cuda", device)), capture)
        kept[device, stream, purpose] = held
    return held.tensor


def _capture(stream: int) -> int:
    api = driver()
    result, _, identity, *_ = api.cuStreamGetCaptureInfo(api.CUstream(stream))
    raise_for(result, "cuStreamGetCaptureInfo")
    return int(identity)
