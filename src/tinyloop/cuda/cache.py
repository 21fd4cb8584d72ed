"""Compiled kernels on disk: cuda.core's folder of atomic files, with two properties that it leaves to its users.

    entry = machine code + SHA-256 of it

An entry that was cut short or changed on disk is no entry: the kernel is compiled anew and the entry replaced, where
the driver would refuse the code at load, or run it. And a disk that fails costs the cache, never the kernel.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from cuda.core.utils import FileStreamProgramCache

log = logging.getLogger("tinyloop")
_DIGEST = hashlib.sha256().digest_size


class KernelCache(FileStreamProgramCache):  # type: ignore[misc]  # cuda.core has no types that mypy finds
    """A `FileStreamProgramCache` for `Program.compile(cache=…)`, whose reads and writes do not raise OSError."""

    _said = False

    def __getitem__(self, key: object) -> bytes:
        try:
            entry: bytes = super().__getitem__(key)
        except OSError as e:
            raise KeyError(key) from e
        code, digest = entry[:-_DIGEST], entry[-_DIGEST:]
        if hashlib.sha256(code).digest() != digest:
            log.info("a compiled kernel in the cache is damaged and is compiled anew")
            raise KeyError(key)
        return code

    def __setitem__(self, key: object, value: Any) -> None:
        code = bytes(value.code)
        try:
            super().__setitem__(key, code + hashlib.sha256(code).digest())
        except OSError as e:
            if not self._said:
                log.warning("compiled kernels are not kept: %s", e)
            self._said = True
