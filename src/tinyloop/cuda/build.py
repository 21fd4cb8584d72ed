"""From a `.cu` file to a kernel that can be launched: NVRTC through cuda.core, at first use, kept on disk.

    kernels/ptx.cuh + kernels/NAME.cu + macros ──NVRTC──▶ machine code for one chip ──▶ cache folder ──▶ driver

The files include nothing, so neither a CUDA toolkit nor a compiler is needed, and compiling needs no GPU: CI builds all
variants for all chips. A cache entry is written whole or not at all, so a killed build or two builders at once leave
nothing wrong behind; without a folder to write to, kernels are compiled anew in each process (0.2 s each).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError

log = logging.getLogger("tinyloop")
CACHE_BYTES = 256 << 20
Defines = Mapping[str, int]


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be compiled here, in a sentence; None where they can."""
    try:
        import cuda.core
        import cuda.core.utils
    except ImportError as e:
        return f"cuda.core is not installed ({e}): pip install 'tinyloop[cuda]'"
    if not hasattr(cuda.core.utils, "FileStreamProgramCache"):
        return f"cuda.core {cuda.core.__version__} is too old: pip install -U 'tinyloop[cuda]'"
    return None


HEADERS = {"tensor_core": ("ptx.cuh", "weight.cuh"), "hopper": ("ptx.cuh", "weight.cuh")}


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


def compile_kernels(name: str, defines: Defines, for_arch: str, cache: Any = None) -> Any:
    """Machine code (a cuda.core ObjectCode) of one file for one chip. Raises RuntimeError with NVRTC's own log."""
    from cuda.core import Program, ProgramOptions

    macros = [(k, str(int(v))) for k, v in sorted(defines.items())]
    options = ProgramOptions(name=f"{name}.cu", arch=for_arch, std="c++17", define_macro=macros)
    program = Program(source(name), code_type="c++", options=options)
    if cache is None:
        return program.compile("cubin")
    try:
        return program.compile("cubin", cache=cache)
    except OSError as e:  # a full or vanished disk: the kernel matters, the cache does not
        log.warning("compiled kernels are not kept: %s", e)
        return program.compile("cubin")


@functools.cache
def disk_cache() -> Any:
    """Where compiled kernels are kept, or None where no folder can be written."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyloop" / "kernels"
        return FileStreamProgramCache(folder, max_size_bytes=CACHE_BYTES)
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home
        log.warning("compiled kernels are not kept: %s", e)
        return None


@functools.cache
def kernel(name: str, entry: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]) -> Any:
    """The driver's handle of `entry`, compiled or taken from the cache. Raises InputError where that cannot be."""
    reason = missing()
    if reason is not None:
        raise InputError(f"no CUDA kernels: {reason}")
    code = compile_kernels(name, dict(defines), arch(capability), disk_cache())
    return code.get_kernel(entry), code  # the code owns the kernel
