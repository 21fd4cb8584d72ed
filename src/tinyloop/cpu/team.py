"""Run one compiled function on several threads at once: `run` calls `function(t, T, *args)` on each of them.

Torch computes on a pool of OpenMP threads, which spin for milliseconds after each operation. A second pool beside it
would fight it for the cores, so the team *is* that pool: the function enters through `GOMP_parallel` of the OpenMP
runtime that torch has loaded (20 µs a call, from Python). Where torch brings another runtime, plain threads serve.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def threads() -> int:
    """Size of the team: torch's."""
    return torch.get_num_threads()


def run(function: Callable[..., None], *args: Any) -> None:
    """Call `function(t, T, *args, counter)` on T threads and return when all have returned.

    `function` is compiled, releases the GIL and raises nothing; `counter` is the address of a barrier for this call
    (kernels.sync). An interrupt from the keyboard is held back until the call is over, because a thread that never
    starts would leave the others at the barrier.
    """
    T = threads()
    barrier = np.zeros(8, np.int64)
    call = (*args, barrier.ctypes.data)
    with _uninterrupted():
        if T == 1:
            function(0, 1, *call)
        elif openmp := _openmp():
            errors: list[BaseException] = []
            member = _CALLBACK(lambda _: _member(openmp, function, call, errors))
            openmp.GOMP_parallel(member, None, T, 0)
            if errors:
                raise errors[0]
        else:
            _plain(function, call, T)


def _member(openmp: Any, function: Callable[..., None], call: tuple[Any, ...], errors: list[BaseException]) -> None:
    """One thread's part. Errors can only arise before the compiled code runs, on every thread alike."""
    try:
        function(openmp.omp_get_thread_num(), openmp.omp_get_num_threads(), *call)
    except BaseException as error:  # carried to the caller: nothing may unwind through the runtime  # noqa: BLE001
        errors.append(error)


def _plain(function: Callable[..., None], call: tuple[Any, ...], T: int) -> None:
    others = [threading.Thread(target=function, args=(t, T, *call)) for t in range(1, T)]
    for thread in others:
        thread.start()
    function(0, T, *call)
    for thread in others:
        thread.join()


@functools.cache
def _openmp() -> Any:
    """The OpenMP runtime in this process, or None where it is not one that can be entered by name."""
    try:
        library = ctypes.CDLL(None)
        entries = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    return library if all(entries) else None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C inside is delivered at the end. Only the main thread receives it, so others need no guard."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)  # to whatever stood there before, the system's own action included
