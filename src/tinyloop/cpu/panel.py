"""Canonical weight → panels, the order in which the CPU kernels read it: one sequential stream per thread.

    panel  uint8 [⌈N/32⌉, groups, record]      a tile of 32 columns; its groups follow each other
    record = rows × 32 bytes of codes │ 32 scales │ 32 zeros        (fp16 or fp32, as the weight has them)

    4 bits: rows = ⌈G/2⌉, byte (i, n) = q[2i, n] | q[2i+1, n] << 4 within the group
    8 bits: rows = G, one code a byte

A group of more than 128 inputs becomes several with the same parameters where 128 divides it or it is the only one:
rounding errors grow with the length of a sum, 20 times torch's own at G = K = 2048 before (log, 2026-11-29).

Columns beyond N and codes beyond K are 0, and so are the parameters of those columns; the activation is padded with
zeros to match. A thread that owns a range of tiles reads its bytes once, front to back: 28 GB/s of 33 GB/s on two
cores, against 20 GB/s for the same kernel on the canonical order, whose rows lie a whole N apart (log, 2026-11-29).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from ..weight import QuantWeight, pack_nibbles

TILE = 32  # columns: two 512-bit vectors of fp32, and fine enough that two threads share 576 columns evenly
TEAM = 1 << 17  # weights from which a second thread gains more than it costs to call (product.py)
SPAN = 128  # inputs summed in one chain


@dataclass(frozen=True)
class Panel:
    """A derived copy of one `QuantWeight`; `data` keeps the memory alive that kernels address."""

    data: np.ndarray  # uint8 [tiles, groups, record]
    K: int
    N: int
    group_size: int
    bits: int
    half: bool  # parameters are fp16
    bias: np.ndarray  # fp32 [N], or empty

    @property
    def groups(self) -> int:
        return int(self.data.shape[1])

    @property
    def rows(self) -> int:
        """Byte rows of codes in a group."""
        return (self.group_size + 1) // 2 if self.bits == 4 else self.group_size

    @functools.cached_property
    def description(self) -> np.ndarray:
        """`describe()` as 64-bit words, made once."""
        return np.array(self.describe(), np.int64)

    @functools.cached_property
    def address(self) -> int:
        """Where `description` lies."""
        return int(self.description.ctypes.data)

    @functools.cached_property
    def large(self) -> bool:
        """Whether a product of few rows is worth more than one thread."""
        return self.K * self.N >= TEAM

    @functools.cached_property
    def tiles(self) -> int:
        return int(self.data.shape[0])

    @functools.cached_property
    def prepared(self) -> int:
        """Words of fp32 that one prepared activation takes, group sums included."""
        return self.groups * (self.rows * (2 if self.bits == 4 else 1) + 1)

    def describe(self) -> tuple[int, ...]:
        """What a kernel needs to know, in the order of `kernels.Field`."""
        return (self.data.ctypes.data, self.tiles, self.groups, self.rows, self.group_size, self.K, self.N, self.bits,
                int(self.half), self.bias.ctypes.data if self.bias.size else 0)  # fmt: skip


def build(w: QuantWeight) -> Panel:
    """Panels of `w`; extra memory is the result and one copy of the codes."""
    w = _shorter_groups(w)
    groups, G = w.groups, w.group_size
    tiles = -(-w.N // TILE)
    rows = (G + 1) // 2 if w.bits == 4 else G
    codes = _group_rows(w, rows)  # uint8 [groups, rows, N]
    params = torch.stack((w.scale, w.zero), dim=1)  # [groups, 2, N]
    pad = tiles * TILE - w.N
    codes, params = (torch.nn.functional.pad(t, (0, pad)) if pad else t for t in (codes, params))
    code_bytes = rows * TILE
    data = torch.empty(tiles, groups, code_bytes + 2 * TILE * params.element_size(), dtype=torch.uint8)
    data[:, :, :code_bytes] = codes.view(groups, rows, tiles, TILE).permute(2, 0, 1, 3).reshape(tiles, groups, -1)
    by_tile = params.view(groups, 2, tiles, TILE).permute(2, 0, 1, 3).reshape(tiles, groups, -1)
    data[:, :, code_bytes:] = by_tile.contiguous().view(torch.uint8)
    bias = np.empty(0, np.float32) if w.bias is None else w.bias.float().numpy()
    return Panel(data.numpy(), w.K, w.N, G, w.bits, w.scale.dtype == torch.float16, np.ascontiguousarray(bias))


def _shorter_groups(w: QuantWeight) -> QuantWeight:
    """The same weight in groups of at most SPAN, where groups can be cut so."""
    if w.group_size <= SPAN or (w.group_size % SPAN and w.groups > 1):
        return w
    repeats, groups = -(-w.group_size // SPAN), -(-w.K // SPAN)
    scale, zero = (t.repeat_interleave(repeats, 0)[:groups] for t in (w.scale, w.zero))
    return dataclasses.replace(w, group_size=SPAN, scale=scale, zero=zero)


def _group_rows(w: QuantWeight, rows: int) -> torch.Tensor:  # uint8 [groups, rows, N]
    """Codes with every group padded to whole byte rows; a view where the canonical order already is that."""
    whole = w.K == w.groups * w.group_size
    if whole and (w.bits == 8 or w.group_size % 2 == 0):
        return w.packed.view(w.groups, rows, w.N)
    codes = w.codes()
    missing = w.groups * w.group_size - w.K
    codes = torch.nn.functional.pad(codes, (0, 0, 0, missing)).view(w.groups, w.group_size, w.N)
    if w.bits == 8:
        return codes
    if w.group_size % 2:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, 1))
    return pack_nibbles(codes.reshape(-1, w.N)).view(w.groups, rows, w.N)
