"""Which tile and pipeline of the tensor-core kernel serve a problem on a chip: values and a pure function of them.

Needs no GPU and no torch, so that plans can be made, tested and explained anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

CHUNK = 64  # k per stage
FIRST_CAPABILITY = (8, 0)  # cp.async, mma.sync of 16×8×16, and conversions of two floats at once
_SPARE = 2 << 10  # bytes of shared memory per block that the driver and static variables take


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
    WN: int  # warps along columns, 64 columns each
    WK: int  # teams of warps that divide the block's slice of K
    STAGES: int
    DECODE: bool  # scale and δ while decoding, not when a group ends
    splits: int = 1  # blocks that divide K

    @property
    def rows(self) -> int:
        return self.WM * self.MT * 8

    @property
    def columns(self) -> int:
        return self.WN * 64

    @property
    def threads(self) -> int:
        return self.WM * self.WN * self.WK * 32

    def shared_memory(self, scale32: bool = False, halves: bool = False, symmetric: bool = False) -> int:
        """Bytes of shared memory per block: the stages of all teams."""
        params = self.WN * (2 if halves else 1) * ((256 if scale32 else 128) + (0 if symmetric else 256))
        stage = self.rows * CHUNK * 2 + self.WN * CHUNK * 32 + params
        return stage * self.STAGES * self.WK

    def __str__(self) -> str:
        way = "decode" if self.DECODE else "fold"
        return f"{self.rows}×{self.columns} tiles, {self.WK} teams, {self.STAGES} stages, {self.splits} slices, {way}"


# Tiles by rows of x: (rows up to, columns from, config). Measured on an H200 (docs/log.md).
_TILES = (
    (8, 16384, Config(1, 1, 4, 4, 4, False)),
    (8, 0, Config(1, 1, 1, 8, 6, False)),
    (16, 16384, Config(2, 1, 4, 4, 4, False)),
    (16, 0, Config(2, 1, 1, 8, 6, False)),
    (32, 8192, Config(4, 1, 2, 4, 4, False)),
    (32, 6144, Config(4, 1, 1, 4, 4, False)),
    (32, 4096, Config(4, 1, 2, 4, 4, False)),
    (32, 0, Config(4, 1, 1, 4, 4, False)),
    (64, 16384, Config(8, 1, 4, 2, 4, True)),
    (64, 0, Config(8, 1, 2, 4, 4, True)),
    (128, 0, Config(8, 1, 4, 2, 4, True)),
    (1 << 62, 0, Config(8, 1, 4, 1, 4, True)),
)


def choose(M: int, N: int, K: int, on: Chip, pair: bool = False) -> Config:
    """The configuration for M rows, N and K as padded, two weights of N columns for a pair."""
    config = next(c for rows, columns, c in _TILES if rows >= M and columns <= N)
    if pair and config.WN == 1:
        config = replace(config, WN=2, WK=config.WK // 2)
    if config.MT > 1 and config.threads > 256 and on.capability != (9, 0):
        config = replace(config, WK=config.WK // 2)  # 512 threads have 128 registers each; elsewhere ptxas wants 137
    while config.shared_memory(scale32=True, halves=True) + _SPARE > on.shared_memory:
        config = _smaller(config)
    tiles = max(1, -(-M // config.rows)) * -(-N * (2 if pair else 1) // config.columns)
    wanted = min(on.multiprocessors * 4 // 3 // tiles, K // CHUNK // (2 * config.WK), 16)
    return replace(config, splits=1 << max(0, wanted.bit_length() - 1))  # powers of two cut K evenly


def _smaller(c: Config) -> Config:
    """One step down in shared memory: fewer stages, then fewer teams, then the last stages."""
    if c.STAGES > 3 or (c.WK == 1 and c.STAGES > 2):
        return replace(c, STAGES=c.STAGES - 1)
    if c.WK > 1:
        return replace(c, WK=c.WK // 2)
    raise AssertionError(f"no smaller pipeline than {c}")


@dataclass(frozen=True)
class Work:
    """How tiles are dealt to blocks: `whole` of them in rounds, the chunks of the others cut into `pieces`."""

    whole: int
    piece: int  # chunks
    total: int  # chunks
    pieces: int


@dataclass(frozen=True)
class HopperConfig:
    """Tile of hopper.cu; the capital names are its macros."""

    BM: int  # rows
    NJ: int  # words per lane and step: a consumer warpgroup covers 64·NJ columns
    CW: int = 2  # consumer warpgroups
    least: int = 8  # chunks of k below which a tile is not cut further

    @property
    def columns(self) -> int:
        return 64 * self.NJ * self.CW

    @property
    def threads(self) -> int:
        return 128 * (self.CW + 1)

    def _bytes(self, scale32: bool, halves: bool) -> tuple[int, int]:
        blocks = self.NJ * self.CW
        params = blocks * (2 if halves else 1) * (512 if scale32 else 384)
        stage = self.BM * CHUNK * 2 + -(-(blocks * CHUNK * 32 + params) // 1024) * 1024
        return stage, self.CW * self.BM * (64 * self.NJ + 8) * 2 + 256

    def stages(self, scale32: bool = False, halves: bool = False) -> int:
        """As many as shared memory holds, up to six."""
        stage, rest = self._bytes(scale32, halves)
        return min(6, (_HOPPER_SHARED - rest) // stage)

    def shared_memory(self, scale32: bool = False, halves: bool = False) -> int:
        """Bytes of shared memory per block."""
        stage, rest = self._bytes(scale32, halves)
        return stage * self.stages(scale32, halves) + rest

    def schedule(self, tiles: int, chunks: int, blocks: int) -> Work:
        """Whole tiles while they fill every block; what remains is cut evenly, unless that would save little."""
        rest = tiles % blocks
        if rest == 0 or (rest > blocks * 7 // 8 and tiles > blocks):
            return Work(tiles, 0, 0, 0)
        total = rest * chunks
        piece = max(-(-total // blocks), min(self.least, chunks))
        if rest == tiles and piece >= chunks:
            return Work(tiles, 0, 0, 0)
        return Work(tiles - rest, piece, total, -(-total // piece))

    def __str__(self) -> str:
        return f"{self.BM}×{self.columns} tiles, {self.CW} consumers"


_HOPPER_SHARED = (227 << 10) - 1024  # of a block, less what alignment may take


# Tiles by rows of x: (rows up to, columns from, config). Measured on an H200 (docs/log.md).
_HOPPER_TILES = (
    (64, 16384, HopperConfig(64, 2, 3)),
    (64, 8192, HopperConfig(64, 1, 4)),
    (64, 6144, HopperConfig(64, 1, 3)),
    (64, 0, HopperConfig(64, 1)),
    (128, 8192, HopperConfig(128, 2)),
    (128, 6144, HopperConfig(128, 1, 3)),
    (128, 0, HopperConfig(128, 1)),
    (256, 8192, HopperConfig(256, 1)),
    (256, 6144, HopperConfig(128, 1, 3)),
    (256, 4096, HopperConfig(256, 1)),
    (256, 0, HopperConfig(128, 1)),
    (1 << 62, 0, HopperConfig(256, 1)),
)


def choose_hopper(M: int, N: int) -> HopperConfig:
    """The tile for M rows and N columns as padded, on a Hopper chip."""
    return next(c for rows, columns, c in _HOPPER_TILES if rows >= M and columns <= N)


# The chips that kernels are compiled for without a GPU: what a block may have of shared memory, in KB.
KINDS = tuple(
    Chip(f"a GPU of capability {major}.{minor}", (major, minor), 108, kilobytes << 10, 0)
    for (major, minor), kilobytes in (
        ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99),
    )
)  # fmt: skip


def variants(chips: Iterable[Chip] = KINDS) -> list[Config]:
    """Every configuration that `choose` may give on one of the chips, but for the number of slices."""
    found = {
        replace(choose(M, N, 8192, on, pair), splits=1)
        for on in chips for pair in (False, True)
        for M, _, _ in _TILES for N in {max(columns, 64) for _, columns, _ in _TILES}
    }  # fmt: skip
    return sorted(found, key=str)


def hopper_variants() -> list[HopperConfig]:
    """Every configuration that `choose_hopper` may give."""
    return sorted({config for _, _, config in _HOPPER_TILES}, key=str)
