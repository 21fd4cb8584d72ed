"""Which tile and pipeline of a tensor-core kernel serve a problem on a chip: values and pure functions of them.
`Config` is tensor_core.cu's, `HopperConfig` is hopper.cu's.

Needs no GPU and no torch, so that plans can be made, tested and explained anywhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

CHUNK = 64  # k per stage
FIRST_CAPABILITY = (8, 0)  # cp.async, mma.sync of 16×8×16, and conversions of two floats at once
KEPT_ROWS = 64  # up to which a product's arguments are kept, and the call of the op that has it
SPARE = 2 << 10  # bytes of shared memory per block that the driver and static variables take


@dataclass(frozen=True)
class Chip:
    """What plans and configurations need to know of a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes that one block may have
    memory: int  # bytes
    missing: str | None = None  # why kernels cannot be compiled, or None

    @property
    def refusal(self) -> str | None:
        """Why no kernel of this package runs here, in a sentence; None where they do."""
        if self.capability < FIRST_CAPABILITY:
            has, needs = (f"{major}.{minor}" for major, minor in (self.capability, FIRST_CAPABILITY))
            return f"{self.name} has compute capability {has}; the GPU kernels need {needs}"
        return self.missing


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of one launch; the capital names are the macros of tensor_core.cu."""

    MT: int  # tiles of eight rows per warp
    WM: int  # warps along rows
    WN: int  # warps along columns
    WK: int  # teams of warps that divide the block's slice of K
    STAGES: int
    DECODE: bool  # scale and δ while decoding, not when a group ends
    splits: int = 1  # blocks that divide K of a tile, where tiles do not fill a round
    cluster: bool = False  # whether those are a cluster, and add through each other's shared memory
    WORDS: int = 4  # of a lane's four that a warp takes, sixteen columns each
    lead: int = 0  # chunks of the first of two slices, where they differ

    @property
    def rows(self) -> int:
        return self.WM * self.MT * 8

    @property
    def columns(self) -> int:
        return self.WN * self.WORDS * 16

    @property
    def threads(self) -> int:
        return self.WM * self.WN * self.WK * 32

    def whole(self, tiles: int, multiprocessors: int) -> int:
        """How many tiles are not cut along K: full rounds of blocks, as whole clusters, or all."""
        if self.splits == 1:
            return tiles
        rounds = tiles - tiles % multiprocessors
        return rounds - rounds % self.splits if self.cluster else rounds

    def shared_memory(self, scale32: bool = False, halves: bool = False, symmetric: bool = False) -> int:
        """Bytes of shared memory per block: the stages of all teams, and a cluster's sums."""
        params = (2 if halves else 1) * ((256 if scale32 else 128) + (0 if symmetric else 256))
        stage = self.rows * CHUNK * 2 + self.columns // 64 * (CHUNK * 32 + params)
        return stage * self.STAGES * self.WK + (self.rows * self.columns * 4 if self.cluster else 0)

    def __str__(self) -> str:
        way = "decode" if self.DECODE else "fold"
        how = " in a cluster" if self.cluster else f", the first of {self.lead} chunks" if self.lead else ""
        slices = f"{self.splits} slice{'s' * (self.splits > 1)}{how}"
        return f"{self.rows}×{self.columns} tiles, {self.WK} teams, {self.STAGES} stages, {slices}, {way}"


class _Few(NamedTuple):
    rows: int  # of x, up to which
    blocks: int  # of 64 columns, likewise
    chunks: int  # of K, likewise
    teams: int = 0  # none: wgmma is faster
    stages: int = 0
    slices: int = 1  # a cluster, where there are several
    warps: int = 1  # along columns
    decode: bool = False

    @property
    def config(self) -> Config | None:
        if self.teams == 0:
            return None
        tile = -(-self.rows // 8), 1, self.warps, self.teams, self.stages, self.decode
        return Config(*tile, splits=self.slices, cluster=self.slices > 1)


_ANY = 1 << 62
# Hopper's tiles for few rows, the first that fits. Measured on an H200, as all that follows (docs/log.md).
_FEW = (
    _Few(8, 24, 24, 4, 4, 4),
    _Few(8, 66, 24, 16, 2),
    _Few(8, 132, 24, 8, 3),
    _Few(8, 16, 48, 4, 4, 8),
    _Few(8, 28, 48, 4, 4, 4),
    _Few(8, 36, 48, 16, 2, 2),
    _Few(8, 52, 48, 8, 3, 2),
    _Few(8, 66, 48, 16, 2),
    _Few(8, 87, 48, 8, 3, 2),
    _Few(8, 100, 48, 4, 4, 2),
    _Few(8, 28, 96, 4, 4, 8),
    _Few(8, 60, 96, 8, 3, 4),
    _Few(8, 68, 96, 4, 4, 4),
    _Few(8, 118, 96, 8, 3, 2),
    _Few(8, 28, _ANY, 8, 3, 8),
    _Few(8, 36, _ANY, 4, 4, 8),
    _Few(8, 60, _ANY, 8, 3, 4),
    _Few(8, 66, _ANY, 16, 2, 2),
    _Few(8, 76, _ANY, 4, 4, 4),
    _Few(8, 118, _ANY, 8, 3, 2),
    _Few(8, 132, _ANY, 16, 2),
    _Few(8, 198, _ANY, 8, 4, 2),
    _Few(8, 264, _ANY, 8, 3),
    _Few(8, 372, 96, 4, 4, 2),
    _Few(8, 470, 96, 4, 4),
    _Few(8, 470, _ANY, 8, 4, 2),
    _Few(8, 570, _ANY, 4, 4),
    _Few(8, 720, _ANY, 4, 4, 2),
    _Few(8, 900, _ANY, 4, 4),
    _Few(8, _ANY, _ANY, 2, 4, warps=2),
    _Few(16, 36, 24, 8, 3, 2),
    _Few(16, 132, 24, 8, 2),
    _Few(16, 12, 48, 8, 3, 4),
    _Few(16, 28, 48, 4, 4, 4),
    _Few(16, 60, 48, 8, 3, 2),
    _Few(16, 100, 48, 8, 3),
    _Few(16, 20, 96, 4, 5, 8),
    _Few(16, 28, 96, 4, 4, 4),
    _Few(16, 66, 96, 8, 3, 2),
    _Few(16, 87, 96, 4, 4, 4),
    _Few(16, 100, 96, 4, 4, 2),
    _Few(16, 132, 96, 8, 2),
    _Few(16, 12, _ANY, 8, 3, 8),
    _Few(16, 28, _ANY, 8, 3, 4),
    _Few(16, 44, _ANY, 4, 4, 8),
    _Few(16, 66, _ANY, 8, 3, 2),
    _Few(16, 87, _ANY, 4, 4, 4),
    _Few(16, 132, _ANY, 16, 2),
    _Few(16, 198, _ANY, 4, 5, 2),
    _Few(16, 264, _ANY, 8, 2, warps=2, decode=True),
    _Few(16, 372, 48, 4, 4),
    _Few(16, 470, 48, 4, 3, 2, 2, decode=True),
    _Few(16, 470, _ANY, 4, 4, 2),
    _Few(16, 570, _ANY, 4, 3, 2, 2, decode=True),
    _Few(16, 720, _ANY, 4, 4, 2),
    _Few(16, 900, _ANY, 2, 3),
    _Few(16, _ANY, _ANY, 4, 3, 2, 2, decode=True),
    _Few(32, 28, 48),
    _Few(32, 40, 48, 8, 2, 2, decode=True),
    _Few(32, 132, 24, 8, 2, decode=True),
    _Few(32, 66, 48, 8, 2, 2, decode=True),
    _Few(32, 12, 144, 8, 2, 8, decode=True),
    _Few(32, 60, _ANY),
    _Few(32, 66, 144, 8, 2, 2, decode=True),
    _Few(32, 132, 48, 8, 2, decode=True),
    _Few(_ANY, _ANY, _ANY),
)
# Before those where groups begin in the middle of a chunk, as of 32: parameters are read twice a chunk. For scales in
# fp32, whose decoding takes twice as long, see `_few`.
_FEW_HALVES = (
    _Few(1, 32, 24, 8, 4, 2),
    _Few(1, 64, 24, 8, 4),
    _Few(1, 80, 24, 8, 3),
    _Few(1, 132, 24, 4, 4, 2),
    _Few(1, 16, 48, 4, 4, 8),
    _Few(1, 32, 48, 8, 4, 2),
    _Few(1, 80, 48, 8, 3, 2),
    _Few(1, 132, 48, 4, 4, 2),
    _Few(1, 256, 48, 8, 3),
    _Few(1, 344, 48, 4, 4),
    _Few(1, 500, 48, 4, 3, warps=2),
    _Few(1, 640, 48, 2, 4, 2, 2),
    _Few(1, _ANY, 48, 2, 4, warps=2),
    _Few(1, 24, 96, 4, 4, 8),
    _Few(1, 48, 96, 8, 3, 4),
    _Few(1, 172, 96, 8, 3, 2),
    _Few(1, 256, 96, 8, 3),
    _Few(1, 344, 96, 4, 4),
    _Few(1, 500, 96, 4, 3, warps=2),
    _Few(1, 786, 96, 4, 4),
    _Few(1, _ANY, 96, 2, 4, warps=2),
    _Few(1, 24, _ANY, 8, 3, 8),
    _Few(1, 32, _ANY, 4, 4, 8),
    _Few(1, 64, _ANY, 16, 2, 2),
    _Few(1, 80, _ANY, 4, 4, 4),
    _Few(1, 132, _ANY, 8, 3, 2),
    _Few(1, 140, _ANY, 2, 4, 4, 2),
    _Few(1, 256, _ANY, 8, 3),
    _Few(1, 400, _ANY, 4, 4, 2),
    _Few(1, _ANY, _ANY, 4, 3, warps=2),
    _Few(8, 32, 24, 8, 4, 2, decode=True),
    _Few(8, 64, 24, 16, 2, decode=True),
    _Few(8, 96, 24, 8, 3, decode=True),
    _Few(8, 132, 24, 4, 4, 2, decode=True),
    _Few(8, 24, 48, 8, 2, 4, decode=True),
    _Few(8, 32, 48, 8, 4, 2, decode=True),
    _Few(8, 48, 48, 8, 2, 4, decode=True),
    _Few(8, 64, 48, 16, 2, decode=True),
    _Few(8, 172, 48, 8, 2, 2, decode=True),
    _Few(8, 256, 48, 8, 2, decode=True),
    _Few(8, 344, 48, 4, 4, decode=True),
    _Few(8, _ANY, 48, 4, 3, warps=2, decode=True),
    _Few(8, 24, 96, 8, 3, 8, decode=True),
    _Few(8, 64, 96, 16, 2, 2, decode=True),
    _Few(8, 172, 96, 8, 2, 2, decode=True),
    _Few(8, 256, 96, 8, 2, decode=True),
    _Few(8, 344, 96, 4, 4, decode=True),
    _Few(8, 500, 96, 4, 3, warps=2, decode=True),
    _Few(8, 640, 96, 4, 4, 2, 2, decode=True),
    _Few(8, _ANY, 96, 4, 3, warps=2, decode=True),
    _Few(8, 24, _ANY, 8, 2, 8, decode=True),
    _Few(8, 32, _ANY, 4, 4, 8, decode=True),
    _Few(8, 64, _ANY, 16, 2, 2, decode=True),
    _Few(8, 80, _ANY, 4, 4, 4, decode=True),
    _Few(8, 132, _ANY, 16, 2, decode=True),
    _Few(8, 172, _ANY, 16, 2, 2, decode=True),
    _Few(8, 256, _ANY, 8, 2, decode=True),
    _Few(8, 448, _ANY, 8, 3, 2, decode=True),
    _Few(8, _ANY, _ANY, 4, 3, warps=2, decode=True),
    _Few(16, 32, 24, 8, 3, 2, decode=True),
    _Few(16, 132, 24, 8, 3, decode=True),
    _Few(16, 16, 48, 8, 2, 4, decode=True),
    _Few(16, 64, 48, 8, 3, 2, decode=True),
    _Few(16, 140, 48, 8, 2, 2, decode=True),
    _Few(16, 256, 48, 8, 2, decode=True),
    _Few(16, 344, 48, 8, 2, 2, decode=True),
    _Few(16, 500, 48, 4, 2, warps=2, decode=True),
    _Few(16, 640, 48, 4, 2, 2, 2, decode=True),
    _Few(16, _ANY, 48, 4, 3, warps=2, decode=True),
    _Few(16, 24, 96, 8, 2, 8, decode=True),
    _Few(16, 48, 96, 8, 2, 4, decode=True),
    _Few(16, 64, 96, 8, 3, 2, decode=True),
    _Few(16, 172, 96, 8, 2, 2, decode=True),
    _Few(16, 256, 96, 8, 2, decode=True),
    _Few(16, 448, 96, 8, 2, 2, decode=True),
    _Few(16, 500, 96, 4, 3, warps=2, decode=True),
    _Few(16, 640, 96, 4, 3, 2, 2, decode=True),
    _Few(16, _ANY, 96, 4, 3, warps=2, decode=True),
    _Few(16, 24, _ANY, 8, 2, 8, decode=True),
    _Few(16, 64, _ANY, 16, 2, 2, decode=True),
    _Few(16, 80, _ANY, 8, 2, 4, decode=True),
    _Few(16, 132, _ANY, 16, 2, decode=True),
    _Few(16, 172, _ANY, 16, 2, 2, decode=True),
    _Few(16, 256, _ANY, 8, 2, decode=True),
    _Few(16, 448, _ANY, 8, 2, 2, decode=True),
    _Few(16, _ANY, _ANY, 4, 2, warps=2, decode=True),
)
# Before both for a pair, whose blocks are those of one of its weights.
_FEW_PAIRS = (range(9, 17), range(67, _ANY), Config(2, 1, 2, 4, 3, True, 2, True))
# Elsewhere, and on Hopper for what wgmma does not serve, pairs and symmetric products: rows up to, columns from.
_TILES = (
    (8, 32768, Config(1, 1, 2, 4, 3, False)),
    (8, 8512, Config(1, 1, 1, 8, 3, False)),
    (8, 4352, Config(1, 1, 1, 16, 2, False)),
    (8, 0, Config(1, 1, 1, 16, 4, False)),
    (16, 16384, Config(2, 1, 1, 4, 4, False)),
    (16, 0, Config(2, 1, 1, 8, 3, False)),
    (32, 10240, Config(4, 1, 1, 4, 4, True)),
    (32, 0, Config(4, 1, 1, 8, 3, True)),
)
# More rows: tiles of 64×128 per multiprocessor up to, with as many slices as fill a round.
_MANY = (
    (0.4, Config(8, 1, 2, 4, 3, True, WORDS=2)),
    (1.0, Config(8, 1, 2, 4, 3, True)),
    (1.5, Config(8, 1, 6, 2, 3, True, WORDS=2)),
    (2.0, Config(8, 1, 4, 2, 3, True)),
    (float("inf"), Config(8, 1, 4, 1, 4, True)),
)
_ADDING = 2.6  # µs that slices cost: sums through global memory, and a wait for the last block
# µs: of 64×64 of a tile's outputs for a chunk, with more than 32 rows; of a slice's beginning and end; of adding two
_STEP, _SLICE, _ADDING_TWO = 0.185, 4.4, 5.5
_WORTH = 0.03  # of a tile's time, what one run differs from the next by: less is not worth slices


def in_halves(group: int) -> bool:
    """Whether groups of this size, -1 for one over K, begin in the middle of a chunk."""
    return group > 0 and group % CHUNK != 0


def wgmma_is_faster(M: int, N: int, K: int) -> bool:
    """Whether, on Hopper, hopper.cu is faster than tensor_core.cu for M rows, N and K as padded."""
    return _few(M, N, K) is None


def _few(M: int, N: int, K: int, pair: bool = False, halves: bool = False, scale32: bool = False) -> Config | None:
    blocks, chunks = -(-N // 64), K // CHUNK
    rows, columns, of_pairs = _FEW_PAIRS
    if pair and M in rows and blocks in columns:
        return of_pairs
    table = _FEW_HALVES + _FEW if halves else _FEW
    if halves and scale32 and M <= 16:  # none decodes: tiles of one row, and of groups of 64
        M, table = (1, table) if M <= 8 else (M, _FEW)
    return next(f.config for f in table if f.rows >= M and f.blocks >= blocks and f.chunks >= chunks)


def choose(M: int, N: int, K: int, on: Chip, pair: bool = False, halves: bool = False, scale32: bool = False) -> Config:
    """The configuration for M rows, N and K as padded, two weights of N columns for a pair, groups that begin in the
    middle of a chunk, scales in fp32."""
    hopper, chunks = on.capability == (9, 0), K // CHUNK
    few = _few(M, N, K, pair, halves, scale32) if hopper else None
    config = few or _tile(M, N, chunks, on.multiprocessors, pair)
    if pair and config.WN == 1:
        config = replace(config, WN=2, WK=config.WK // 2)
    if config.MT > 1 and config.threads > 384 and (pair or not hopper):
        config = replace(config, WK=config.WK // 2)  # 512 threads have 128 registers each; ptxas wants up to 137
    while config.shared_memory(scale32=True, halves=True) + SPARE > on.shared_memory:
        config = _smaller(config)
    tiles = max(1, -(-M // config.rows)) * -(-N * (2 if pair else 1) // config.columns)
    if config.MT == 8:
        if config.WK == 1 and 0 < tiles % on.multiprocessors <= on.multiprocessors // 2:
            return replace(config, splits=2)  # of the tiles that are left after the last full round
        splits = next(
            s for s in (4, 2, 1) if s == 1 or (tiles * s <= on.multiprocessors and chunks >= 4 * s * config.WK)
        )
        if splits == 1 and (lead := _lead(config, tiles, chunks, on.multiprocessors)):
            return replace(config, splits=2, lead=lead)
        return replace(config, splits=splits, cluster=hopper and splits == 2)  # a cluster's sums fit: 26 KB are left
    if few is None:
        return replace(config, splits=_slices(config, tiles, chunks, on.multiprocessors))
    most = config.splits
    if few.WN > 1 and tiles > on.multiprocessors and tiles % on.multiprocessors > on.multiprocessors // 2:
        most = 1  # where two blocks share a multiprocessor: half as long, but a round more
    splits = next(s for s in (8, 4, 2, 1) if s == 1 or (s <= most and s * config.WK <= chunks))
    return replace(config, splits=splits, cluster=splits > 1)


def _tile(M: int, N: int, chunks: int, multiprocessors: int, pair: bool) -> Config:
    N *= 2 if pair else 1
    if M <= 32:
        return next(c for rows, columns, c in _TILES if rows >= M and columns <= N)
    load = -(-M // 64) * -(-N // 128) / multiprocessors
    if 0.4 < load <= 0.5 and chunks <= 48:
        load = 0.4  # two slices of so few chunks would cost more than narrow tiles

    def one_round(c: Config) -> bool:
        return -(-M // c.rows) * -(-N // c.columns) <= multiprocessors

    usual = _MANY[-1][1]
    return next(
        c for most, c in _MANY if load <= most and not (pair and c.columns % 128) and (c is usual or one_round(c))
    )


def _lead(c: Config, tiles: int, chunks: int, multiprocessors: int) -> int:
    """How many chunks to leave a tile where multiprocessors without a tile of their own do the others, a few of each;
    0 where that would not pay."""
    free = multiprocessors - tiles
    if free <= 0:
        return 0
    step, rounds = _STEP * c.columns / 64, -(-tiles // free)
    rest = int((chunks * step - rounds * _SLICE) / ((1 + rounds) * step))
    saved = rest * step - _ADDING_TWO
    return chunks - rest if rest >= c.WK and saved > _WORTH * chunks * step else 0


def _slices(c: Config, tiles: int, chunks: int, multiprocessors: int) -> int:
    """Into how many slices to cut K of the last tiles, too few for a round. Powers of two cut it evenly; each team of
    each block needs a chunk."""
    last = tiles % multiprocessors

    def cost(slices: int) -> float:  # µs: one multiprocessor decodes a 64×64 chunk in 0.08 at up to 8 rows
        load = -(-last * slices // multiprocessors) * -(-chunks // slices) * (c.columns // 64)
        return load * (0.06 + 0.02 * c.MT * c.WM) + (_ADDING if slices > 1 else 0)

    room = multiprocessors * 4 // 3 // max(1, last)  # more blocks than that come one after another
    return min((s for s in (1, 2, 4, 8, 16) if s == 1 or (s * c.WK <= chunks and s <= room)), key=cost)


def _smaller(c: Config) -> Config:
    """One step down in shared memory: fewer stages, then half the teams with about as much on its way, then the last
    stages."""
    if c.STAGES > 3 or (c.WK == 1 and c.STAGES > 2):
        return replace(c, STAGES=c.STAGES - 1)
    if c.WK > 1:
        return replace(c, WK=c.WK // 2, STAGES=2 * c.STAGES - 1)
    raise AssertionError(f"no smaller pipeline than {c}")


@dataclass(frozen=True)
class Work:
    """How tiles are dealt to blocks: `whole` of them in rounds, the chunks of the others cut into `pieces`."""

    whole: int
    piece: int  # chunks
    total: int  # chunks
    pieces: int

    def blocks(self, multiprocessors: int) -> int:
        """Of a launch, at most one to a multiprocessor."""
        return max(self.pieces, min(self.whole, multiprocessors))


WHOLE = 1 << 30  # more k than a weight has


@dataclass(frozen=True)
class HopperConfig:
    """Tile of hopper.cu; the capital names are its macros."""

    BM: int  # rows
    CW: int = 2  # consumer warpgroups along the columns, 64 each
    DEPTH: int = 128  # k per stage
    SPLITS: int = 1  # blocks of a cluster that divide K of one tile
    TEAMS: int = 1  # of consumers, which divide the k of each stage
    least: int = 512  # k below which a tile is not cut further; WHOLE: none is cut

    @property
    def columns(self) -> int:
        return 64 * self.CW

    @property
    def consumers(self) -> int:
        return self.CW * self.TEAMS

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def runs(self, group: int) -> int:
        """Runs of parameters per stage for a group size, -1 for one group over K; 0 for one that the format has not."""
        return next((n for n in (1, 2, 4, 8) if group == -1 or group % (self.DEPTH // n) == 0), 0)

    def _bytes(self, scale32: bool, runs: int) -> tuple[int, int, int]:
        """Of a stage of x, of a stage of words, and of the rest."""
        out_rows = min(32 if runs == 8 else 64, self.BM // self.SPLITS // self.TEAMS)
        words = self.CW * (self.DEPTH * 32 + runs * (1024 if scale32 else 896))
        sums = self.BM * self.columns * 4 if self.TEAMS > 1 else 0
        return self.BM * self.DEPTH * 2, words, self.consumers * out_rows * (64 + 8) * 2 + sums + _BARRIERS

    def stages(self, scale32: bool = False, runs: int = 1) -> tuple[int, int]:
        """Of x and of words: as many as shared memory holds, up to eleven and thirteen."""
        x, words, rest = self._bytes(scale32, runs)
        room = _HOPPER_SHARED - rest
        of_x = min(11, (room - words) // (x + words))
        return of_x, min(of_x + 2, (room - of_x * x) // words)

    def shared_memory(self, scale32: bool = False, runs: int = 1) -> int:
        """Bytes of shared memory per block."""
        x, words, rest = self._bytes(scale32, runs)
        of_x, of_words = self.stages(scale32, runs)
        return of_x * x + of_words * words + rest

    def schedule(self, tiles: int, chunks: int, blocks: int) -> Work:
        """Whole tiles while they fill every block; what remains is cut evenly, unless that would save little or a piece
        would be a whole tile."""
        rest = tiles % blocks
        if self.SPLITS > 1 or rest == 0 or rest > blocks * 7 // 8:
            return Work(tiles, 0, 0, 0)
        total = rest * chunks
        piece = max(-(-total // blocks), min(self.least // self.DEPTH, chunks))
        if piece >= chunks:
            return Work(tiles, 0, 0, 0)
        return Work(tiles - rest, piece, total, -(-total // piece))

    def work(self, M: int, N: int, K: int, blocks: int) -> Work:
        """The schedule of M rows, N and K as padded."""
        return self.schedule(-(-M // self.BM) * -(-N // self.columns), -(-K // self.DEPTH), blocks)

    def __str__(self) -> str:
        teams = f" in {self.TEAMS} teams" if self.TEAMS > 1 else ""
        clusters = f", clusters of {self.SPLITS} along K" if self.SPLITS > 1 else ""
        tiles = f"{self.BM}×{self.columns} tiles" + (", none cut" if self.least >= WHOLE else "")
        return f"{tiles}, {self.consumers} consumers{teams}, {self.DEPTH} k per stage{clusters}"


_HOPPER_SHARED = (227 << 10) - 1024  # of a block, less what moving its base to a multiple of 1024 may take
_BARRIERS = 512  # bytes: 16 for each stage of x, 24 for each of words, 8 for a cluster's sums


class _Rated(NamedTuple):
    tile: HopperConfig
    step: float  # µs that a block takes for 64 k of it
    clusters: bool  # whether clusters of four may divide its K
    most_runs: int  # of parameters per stage, beyond which registers or shared memory are short
    fine: float = 1.0  # times the step where bf16 takes two parts of a scale; fitted to the choices it leads to


# Measured on an H200, as the constants below are (docs/log.md).
_HOPPER_TILES = (
    _Rated(HopperConfig(32, 1, 256, TEAMS=2), 0.109, False, 8),
    _Rated(HopperConfig(32, 2, 256), 0.198, True, 8),
    _Rated(HopperConfig(32, 4, 128), 0.387, False, 1),
    _Rated(HopperConfig(64, 1, 256, TEAMS=2), 0.145, False, 8),
    _Rated(HopperConfig(64, 2, 256), 0.255, True, 8),
    _Rated(HopperConfig(128, 1, 128, TEAMS=2), 0.252, False, 4),
    _Rated(HopperConfig(128, 1, 256, TEAMS=2), 0.207, False, 8),
    _Rated(HopperConfig(128, 2, 128), 0.454, False, 4, 0.9),
    _Rated(HopperConfig(128, 2, 256), 0.381, False, 4, 1.18),
    _Rated(HopperConfig(128, 3, 128), 0.570, False, 2, 0.98),
    _Rated(HopperConfig(256, 2, 128), 0.701, False, 4),
)
_BEGIN, _TILE = 1.94, 0.82  # µs per launch, and per tile of a block
# µs of a launch that pass on multiprocessors which the launch before has left free. Where another kind of kernel comes
# next they do not, and what is chosen for them costs 0.2 to 1 µs too much at the worst.
_OVERLAP = 1.2
_CUT, _CLUSTER = 1.73, 0.80  # µs more where tiles are cut, where clusters divide K
_FEW_CLUSTERS = 1.0  # µs less where clusters have three eighths of the multiprocessors or less
_SUMS_CUT, _SUMS_PIECE, _SUMS_CLUSTER = 2.11, 1.42, 6.05  # µs per 128 KB of sums: once, per piece added, in a cluster


@functools.lru_cache(maxsize=1 << 12)
def choose_hopper(M: int, N: int, K: int, group: int, multiprocessors: int, fine: bool = False) -> HopperConfig:
    """The tile that takes the least time by `hopper_cost`, for M rows, N and K as padded, group -1 for one over K.
    `fine` is bf16 with scales that it does not hold."""
    return min(hopper_configs(K, group, fine), key=lambda c: hopper_cost(c[0], c[1], M, N, K, multiprocessors))[0]


@functools.lru_cache(maxsize=1 << 8)
def hopper_configs(K: int, group: int, fine: bool = False) -> tuple[tuple[HopperConfig, float], ...]:
    """Every tile for K as padded and a group size, cut along K or not, with its µs per 64 k. Each block of a cluster
    has a chunk."""

    return tuple(
        (replace(rated.tile, SPLITS=splits, least=least), rated.step * (rated.fine if fine else 1))
        for rated in _HOPPER_TILES
        for splits, least in ((1, 512), (1, WHOLE), *(((4, 512),) if rated.clusters else ()))
        if rated.tile.runs(group) <= rated.most_runs and (splits == 1 or splits * rated.tile.DEPTH <= K)
    )


def hopper_cost(c: HopperConfig, step: float, M: int, N: int, K: int, multiprocessors: int) -> float:
    """µs of one product: steps of 64 k, tiles begun and written, and sums that move between blocks."""
    tiles, chunks, per_chunk = -(-M // c.BM) * -(-N // c.columns), -(-K // c.DEPTH), step * c.DEPTH / 64
    sums = c.BM * c.columns * 4 / (128 << 10)

    def begin(blocks: int) -> float:
        return _BEGIN - _OVERLAP * min(1.0, max(0.0, multiprocessors / max(1, blocks) - 1))

    if c.SPLITS > 1:
        rounds = -(-tiles // (multiprocessors * 10 // 11 // c.SPLITS))  # 30 clusters of four fit on an H200's 132
        moved = sums * (c.SPLITS - 1) / c.SPLITS
        each = -(-chunks // c.SPLITS) * per_chunk + _TILE + moved * _SUMS_CLUSTER
        few = _FEW_CLUSTERS if tiles * c.SPLITS <= multiprocessors * 3 // 8 else 0.0
        return begin(tiles * c.SPLITS) + _CLUSTER - few + rounds * each
    work = c.schedule(tiles, chunks, multiprocessors)
    us = begin(work.blocks(multiprocessors)) + -(-work.whole // multiprocessors) * (chunks * per_chunk + _TILE)
    if work.pieces:
        added = chunks / work.piece - 1
        us += work.piece * per_chunk + _TILE + _CUT + sums * (_SUMS_CUT + added * _SUMS_PIECE)
    return us


# The chips that kernels are compiled for without a GPU: what a block may have of shared memory, in KB.
KINDS = tuple(
    Chip(f"a GPU of capability {major}.{minor}", (major, minor), 108, kilobytes << 10, 0)
    for (major, minor), kilobytes in (
        ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99),
    )
)  # fmt: skip


def variants(
    chips: Iterable[Chip] = KINDS, pairs: Iterable[bool] = (False, True), halves: Iterable[bool] = (False, True)
) -> list[Config]:
    """Every configuration that `choose` may give on one of the chips, for one weight, a pair, or both, and groups that
    begin in the middle of a chunk or do not, but for the number of slices."""
    rows = sorted({f.rows for f in _FEW_HALVES + _FEW[:-1]} | {rows for rows, _, _ in _TILES} | {64, 1 << 16})
    columns = {64, *(f.blocks * 64 for f in _FEW + _FEW_HALVES), *(n for _, n, _ in _TILES), 64 * _FEW_PAIRS[1][0]}
    depths = {f.chunks * CHUNK for f in _FEW + _FEW_HALVES if f.chunks < _ANY} | {1024, 8192, 14336}
    found = {
        replace(choose(M, min(max(N, 64), 1 << 20), K, on, pair, *numbers), splits=1, cluster=False, lead=0)
        for on, pair, numbers in itertools.product(chips, pairs, itertools.product(halves, (False, True)))
        for M in rows for K in depths
        for N in columns | {int(most * on.multiprocessors) * 128 for most, _ in _MANY[:-1]}
    }  # fmt: skip
    return sorted(found, key=str)


def hopper_variants() -> list[HopperConfig]:
    """Every configuration that `choose_hopper` may give."""
    return sorted((c for c, _ in hopper_configs(1 << 30, -1) if c.least < WHOLE), key=str)
