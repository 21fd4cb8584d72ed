"""Where a model runs: a device's name to the device itself, the dtypes it runs in, and the memory it has.

No CUDA context is made before a CUDA device is asked for.
"""

from __future__ import annotations

import torch

from . import dispatch
from .errors import InputError

CPU_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
CUDA_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)


def resolve(device: torch.device | str) -> torch.device:
    """The device, with its index if it is a GPU. Raises InputError where there is none of this name here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is no device; give cpu, cuda, or cuda:1 for a second GPU") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InputError(f"device={str(found)!r}: a model runs on cpu or cuda")
    count = _cuda_devices(str(found))
    if found.index is not None and found.index >= count:
        raise InputError(f"device={str(found)!r}: this machine has {count}; give cuda:0 to cuda:{count - 1}")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def _cuda_devices(asked: str) -> int:
    if torch.version.cuda is None:
        raise InputError(
            f"device={asked!r}: this torch, {torch.__version__}, is built without CUDA; install one with it, or use cpu"
        )
    if not torch.cuda.is_available():
        raise InputError(f"device={asked!r}: no GPU or no driver is visible (nvidia-smi shows what is); use cpu")
    return torch.cuda.device_count()


def dtype_on(device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """What a model on `device` runs in: None takes float16 on a GPU, and on a CPU what it multiplies in hardware."""
    if device.type == "cpu":
        what, known, default = "a CPU", CPU_DTYPES, dispatch.default_dtype()
    else:
        what, known, default = "a GPU", CUDA_DTYPES, torch.float16
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype={dtype!r} is no torch dtype; give torch.bfloat16, say, or None for the default")
    if dtype is not None and dtype not in known:
        *most, last = (str(d).removeprefix("torch.") for d in known)
        raise InputError(f"dtype={dtype}: on {what} a model runs in {', '.join(most)} or {last}")
    return dtype or default


def memory(device: torch.device) -> int:
    """Bytes that new tensors may take: all of a machine's memory, or what is free of a GPU's."""
    if device.type != "cuda":
        return dispatch.machine().memory
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, to give out again
    return int(free + held)


def check_room(device: torch.device, size: int, what: str, way_out: str) -> None:
    """Raises InputError where `size` bytes for `what` are more than `device` has."""
    if size > (room := memory(device)):
        has = f"{device} has {_gb(room)} free" if device.type == "cuda" else f"this machine has {_gb(room)}"
        raise InputError(f"{what} need {_gb(size)}; {has}: {way_out}")


def settle(device: torch.device) -> None:
    """Wait for what was just made of a weight: products on other streams read it without waiting for ours, and kernels
    read it before those ahead of them in the stream have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _gb(size: int) -> str:
    return f"{size / 1e9:.{0 if size >= 10e9 else 1}f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
