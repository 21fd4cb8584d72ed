"""From a `.cu` file to a kernel that can be launched: NVRTC through cuda.core, at first use, kept on disk.

    kernels/ptx.cuh + kernels/NAME.cu + macros ──NVRTC──▶ machine code for one chip ──▶ cache folder ──▶ driver

The files include nothing, so neither a CUDA toolkit nor a compiler is needed, and compiling needs no GPU: CI builds all
variants for all chips. A cache entry is written whole or not at all, so a killed build or two builders at once leave
nothing wrong behind; without a folder to write to, kernels are compiled anew in each process (0.3 s each).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError

log = logging.getLogger("tinyloop")
CACHE_BYTES = 256 << 20
Defines = Mapping[str, int]
_importing = threading.RLock()  # while it is imported, cuda.core renames its modules: a second thread sees half of it


@functools.cache
def missing(capability: tuple[int, int] | None = None) -> str | None:
    """Why kernels cannot be compiled here (for a chip of this capability), in a sentence; None where they can."""
    try:
        with _importing:
            import cuda.core
            import cuda.core.utils
            from cuda.bindings import nvrtc
    except ImportError as e:
        return f"cuda.core is not installed ({e}): pip install 'tinyloop[cuda]'"
    if not hasattr(cuda.core.utils, "FileStreamProgramCache"):
        return f"cuda.core {cuda.core.__version__} is too old: pip install -U 'tinyloop[cuda]'"
    try:
        _, major, minor = nvrtc.nvrtcVersion()
        _, known = nvrtc.nvrtcGetSupportedArchs()
    except RuntimeError as e:  # the library that compiles is a package of its own
        return f"NVRTC cannot be loaded ({str(e).splitlines()[0]}): pip install 'tinyloop[cuda]'"
    if capability is not None and (number := 10 * capability[0] + capability[1]) not in known:
        return (
            f"NVRTC {major}.{minor} compiles for sm_{min(known)} to sm_{max(known)} and not for sm_{number}: "
            "take the torch and the extra (tinyloop[cuda] or tinyloop[cuda12]) of a CUDA version that knows this GPU"
        )
    return None


HEADERS = dict.fromkeys(("tensor_core", "hopper", "unpack", "correction"), ("ptx.cuh", "weight.cuh"))


@functools.cache
def source(name: str) -> str:
    """The text that is compiled for `kernels/{name}.cu`: what it builds on, then itself."""
    folder = resources.files(__package__) / "kernels"
    files = (*HEADERS.get(name, ("ptx.cuh",)), f"{name}.cu")
    return "\n".join((folder / f).read_text(encoding="utf-8") for f in files)


def arch(capability: tuple[int, int]) -> str:
    """NVRTC's name of a chip. Hopper and datacenter Blackwell get the instructions that only they have."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major in (9, 10) else "")


def compile_kernels(name: str, defines: Defines, for_arch: str, cache: Any = None, logs: Any = None) -> Any:
    """Machine code (a cuda.core ObjectCode) of one file for one chip. `logs.write` gets NVRTC's warnings; raises
    RuntimeError with its errors."""
    with _importing:
        from cuda.core import Program, ProgramOptions

    macros = [(k, str(int(v))) for k, v in sorted(defines.items())]
    options = ProgramOptions(name=f"{name}.cu", arch=for_arch, std="c++17", define_macro=macros or None)
    try:
        return Program(source(name), code_type="c++", options=options).compile("cubin", logs=logs, cache=cache)
    except Exception as e:  # cuda.core's type of error is private
        raise RuntimeError(f"{name}.cu does not compile for {for_arch} with {dict(macros)}: {e}") from e


@functools.cache
def disk_cache() -> Any:
    """Where compiled kernels are kept, or None where no folder can be written."""
    from .cache import KernelCache

    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyloop" / "kernels"
        return KernelCache(folder, max_size_bytes=CACHE_BYTES)
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home
        log.warning("compiled kernels are not kept: %s", e)
        return None


@functools.cache
def kernel(name: str, entry: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]) -> Any:
    """The driver's handle of `entry`, compiled or taken from the cache. Raises InputError where that cannot be."""
    reason = missing(capability)
    if reason is not None:
        raise InputError(f"no CUDA kernels: {reason}")
    code = compile_kernels(name, dict(defines), arch(capability), disk_cache())
    return code.get_kernel(entry), code  # the code owns the kernel
