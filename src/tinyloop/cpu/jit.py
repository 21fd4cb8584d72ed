"""numba's compiler with a cache on disk that can be trusted.

numba decides by date and size of a function's own file whether a cached binary is still right. Here functions inline
others from other files, and files installed from a wheel all carry one date; so the key also holds a digest of every
source file of this package. Where no folder for the cache is writable, functions are compiled in each process.
"""
# mypy: ignore-errors

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numba
from numba.core.caching import FunctionCache

_DIGEST = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


class _Cache(FunctionCache):
    def _index_key(self, sig, codegen):
        return (*super()._index_key(sig, codegen), _DIGEST)


def jit(function=None, *, fastmath=False):
    """Compile at first call, without the interpreter's lock; `fastmath` as in `numba.njit`.

    A division by zero gives infinity, as in numpy: an exception on one thread would leave the others at a barrier.
    """
    if function is None:
        return lambda f: jit(f, fastmath=fastmath)
    dispatcher = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    with suppress(RuntimeError):  # numba found no writable place
        dispatcher._cache = _Cache(function)
    return dispatcher
