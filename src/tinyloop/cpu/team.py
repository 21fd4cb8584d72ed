"""A team of threads that run one compiled function together: `run` calls `function(t, T, *args)` on each.

The caller is thread 0; the others are Python threads that hold no lock while they compute. They wait in a queue between
calls, which costs 20–60 µs a call, so a call should be worth a millisecond: a whole decode step, or a large product.
The count is torch's, and torch's own threads sleep meanwhile: two pools that compute at once would share the cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch


class Team:
    """T threads with a barrier counter (see kernels.sync). One call at a time: `run` takes a lock."""

    def __init__(self, threads: int):
        self.T = threads
        self.pid = os.getpid()
        self._counter = np.zeros(8, np.int64)  # a cache line of its own
        self._arrivals = 0
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[Callable[[], None]]] = [SimpleQueue() for _ in range(threads - 1)]
        for queue in self._queues:
            threading.Thread(target=_work, args=(queue,), daemon=True, name="tinyloop-team").start()

    def run(self, function: Callable[..., None], args: tuple[Any, ...], syncs: int) -> None:
        """Call `function(t, T, *args, counter, arrivals)` on every thread; it must pass the barrier `syncs` times, the
        last time as its last act, so that the caller returns when all have finished."""
        with self._lock:
            tail = (*args, self._counter.ctypes.data, self._arrivals)
            for t, queue in enumerate(self._queues, 1):
                queue.put(lambda t=t: function(t, self.T, *tail))  # type: ignore[misc]
            function(0, self.T, *tail)
            self._arrivals += syncs * self.T


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


_team: Team | None = None
_making = threading.Lock()


def team() -> Team:
    """The process's team, remade after a fork or when torch's thread count has changed."""
    global _team
    with _making:
        if _team is None or _team.T != torch.get_num_threads() or _team.pid != os.getpid():
            _team = Team(torch.get_num_threads())
        return _team
