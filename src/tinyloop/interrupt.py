"""Ctrl-C between steps, never within one.

A step runs on several threads that meet at barriers; an exception in the middle of it would leave the others waiting,
and the next step with a wrong count. So the signal is noted, and raised as soon as the step is over.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone SIGINT to the end of the block. Only the main thread receives signals; elsewhere this does nothing."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])
