"""Products with everything but x and y in place: what a call then costs is the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .launch import Launcher, current_stream, scratch_addresses

Tensor = torch.Tensor


@dataclass(frozen=True)
class Launch:
    """What is launched: a kernel, its arguments, a struct whose field `p` has `y`, `partial` and `arrived`, and scratch
    of so many floats, for partial sums, and counters, unless there are no floats."""

    run: Launcher
    arguments: Any
    blocks: int
    floats: int
    counters: int


class Ready:
    """One product of M rows with a weight of N columns."""

    def __init__(
        self, M: int, N: int, dtype: torch.dtype, launch: Launch, place: Callable[[Any, int, int], None], keep: Any
    ):
        """`dtype` is y's. `place` puts x, by its address and the elements from row to row, into `launch.arguments.p`;
        `keep` has the memory whose addresses the arguments hold."""
        self.M, self.N, self.dtype = M, N, dtype
        self._launch, self._place, self._keep = launch, place, keep
        self._free = [(launch.arguments, launch.arguments.p)]  # a launch takes one away, as it lets other threads run

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x fp16 | bf16 [M, K], rows aligned to 16 bytes, elements adjacent → [M, N], in `out` if given, which is
        contiguous and aligned to 16 bytes."""
        y = out
        if y is None:  # without a dtype it is made in 0.8 µs, with one in 1.1
            y = x.new_empty(self.M, self.N) if x.dtype is self.dtype else x.new_empty(self.M, self.N, dtype=self.dtype)
        if self.M:
            self.launch(x.data_ptr(), y.data_ptr(), x.stride(0))
        return y

    def launch(self, x: int, y: int, ldx: int) -> None:
        """The product by addresses: x with `ldx` elements from row to row, y contiguous, both aligned to 16 bytes."""
        own = self._launch
        try:
            free = self._free.pop()
        except IndexError:  # in a thread beside another
            copy = type(own.arguments).from_buffer_copy(own.arguments)
            free = copy, copy.p
        arguments, p = free
        p.y = y
        self._place(p, x, ldx)
        stream = current_stream(own.run.device)
        if own.floats:
            p.partial, p.arrived = scratch_addresses(own.run.device, stream, own.floats, own.counters)
        own.run(arguments, own.blocks, stream)
        self._free.append(free)
