"""Products with everything but x and y in place: what a call then costs is the launch."""

from __future__ import annotations

from typing import Any

import torch

from .launch import Launcher, current_stream, scratch_addresses

Tensor = torch.Tensor


class Ready:
    """One product of M rows of x's dtype with a weight of N columns. Subclasses say how x goes into the arguments."""

    def __init__(
        self, M: int, N: int, dtype: torch.dtype, run: Launcher, arguments: Any, blocks: int, floats: int, counters: int
    ):
        """`dtype` is y's. `arguments` are a struct whose field `p` has `y`, `partial` and `arrived`. The launch takes
        scratch of so many floats, for partial sums, and counters, unless there are no floats."""
        self.M, self.N, self.dtype = M, N, dtype
        self._run, self._arguments, self._blocks = run, arguments, blocks
        self._floats, self._counters = floats, counters
        self._free = [(arguments, arguments.p)]  # a launch takes one away, as it lets other threads run

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x fp16 | bf16 [M, K], rows aligned to 16 bytes, elements adjacent → [M, N], in `out` if given."""
        y = out
        if y is None:  # without a dtype it is made in 0.8 µs, with one in 1.1
            y = x.new_empty(self.M, self.N) if x.dtype is self.dtype else x.new_empty(self.M, self.N, dtype=self.dtype)
        if self.M:
            self.launch(x.data_ptr(), y.data_ptr(), x.stride(0))
        return y

    def launch(self, x: int, y: int, ldx: int) -> None:
        """The product by addresses: x with `ldx` elements from row to row, y contiguous."""
        try:
            free = self._free.pop()
        except IndexError:  # in a thread beside another
            copy = type(self._arguments).from_buffer_copy(self._arguments)
            free = copy, copy.p
        arguments, p = free
        p.y = y
        self._place(p, x, ldx)
        stream = current_stream(self._run.device)
        if self._floats:
            p.partial, p.arrived = scratch_addresses(self._run.device, stream, self._floats, self._counters)
        self._run(arguments, self._blocks, stream)
        self._free.append(free)

    def _place(self, p: Any, x: int, ldx: int) -> None:
        raise NotImplementedError
