"""Every GPU kernel compiled for every chip without a GPU: no error, no warning, no register spilled, no local memory.

What is compiled: each kernel file with every combination of its macros for every chip; of the tensor-core kernels, for
each chip, every combination of flags of the tiles that `config.choose` and `config.choose_hopper` may give there. Where
a chip has the tiles of one before it, those with scales in 16 bits and with δ: a third of them, for the time it takes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import io
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinyloop.cuda import build, gemm, hopper, paths
from tinyloop.cuda.config import KINDS, Config, hopper_configs, hopper_variants, variants
from tinyloop.cuda.gemm import defines

CHIPS = {build.arch(chip.capability): chip for chip in KINDS}
ENTRIES = {
    "tensor_core": {"tensor_core"},
    "hopper": {"hopper"},
    "correction": {"a_group_sum", "correction_accum"},
    "native": {"native", "dequantize"},
    "unpack": {"unpack"},
}
STATIC_SHARED = 2 << 10  # bytes beside the stages that `config.choose` leaves room for
REGISTERS = 1 << 16  # of a multiprocessor, whatever the chip
Flags = dict[str, int]
NUMBERS: list[Flags] = [{"BF16": bf16, "SCALE32": scale32} for bf16 in (0, 1) for scale32 in (0, 1)]  # x; the scales


def tool(name: str) -> str:
    """A program of the CUDA toolkit, from its package or from the PATH."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(p) / "cu13" / "bin" for p in spec.submodule_search_locations or ()]
    found = shutil.which(name, path=os.pathsep.join(map(str, folders))) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'tinyloop[dev]'")
    return found


def flags_of(tile: Config, pair: bool, halves: bool) -> list[Flags]:
    """What a tile may be compiled with. COLUMN is one group over K, so groups cannot begin in the middle of a chunk,
    where alone δ is in two parts and one row has variants of its own; a pair is never SYMMETRIC."""
    layouts = [{"HALVES": 1, "COLUMN": 0}] if halves else [{"HALVES": 0, "COLUMN": column} for column in (0, 1)]
    uses = [{"SYMMETRIC": 0, "PAIR": 1}] if pair else [{"SYMMETRIC": 0, "PAIR": 0}, {"SYMMETRIC": 1, "PAIR": 0}]
    found = []
    for layout, use, numbers in itertools.product(layouts, uses, NUMBERS):
        parts = int(halves and not (numbers["SCALE32"] or use["SYMMETRIC"]))
        rows = (0, 1) if halves and tile.MT == 1 and not (tile.DECODE or use["SYMMETRIC"]) else (0,)
        found += [layout | use | numbers | {"IN_PARTS": parts, "ONE_ROW": one} for one in rows]
    return found


@dataclass(frozen=True)
class Job:
    """One compilation."""

    name: str
    macros: tuple[tuple[str, int], ...]
    arch: str
    threads: int = 128
    tile: Config | None = None

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{k}={v}' for k, v in self.macros)} on {self.arch}"


@dataclass(frozen=True)
class Use:
    """What a kernel takes, as cuobjdump reads it from the machine code."""

    registers: int
    stack: int
    shared: int
    local: int
    constants: int


@dataclass(frozen=True)
class Built:
    code: bytes = b""
    log: str = ""
    error: str = ""
    uses: tuple[tuple[str, Use], ...] = ()


def tensor_core_jobs() -> Iterator[Job]:
    seen = set[tuple[bool, bool, Config]]()
    for (arch, chip), pair, halves in itertools.product(CHIPS.items(), (False, True), (False, True)):
        tiles = variants([chip], [pair], [halves])
        for tile, flags in ((t, flags) for t in tiles for flags in flags_of(t, pair, halves)):
            known = (pair, halves, tile) in seen and chip.capability != (9, 0)
            if known and (flags["SCALE32"] or flags["SYMMETRIC"]):
                continue
            macros = defines(tile, **{k: bool(v) for k, v in flags.items()})
            yield Job("tensor_core", tuple(macros.items()), arch, tile.threads, tile)
        seen |= {(pair, halves, tile) for tile in tiles}


def hopper_jobs() -> Iterator[Job]:
    for tile in hopper_variants():
        groups = [G for G in (32, 64, 128, 256) if tile in dict(hopper_configs(1 << 20, G))]
        layouts = [*((runs, False) for runs in sorted({tile.runs(G) for G in groups})), (1, True)]
        for (runs, column), numbers in itertools.product(layouts, [*NUMBERS, {"BF16": 1, "SCALE32": 0, "COARSE": 1}]):
            parts = (tile.DEPTH // runs) % 64 != 0 and not numbers["SCALE32"]
            flags = {k: bool(v) for k, v in numbers.items()}
            macros = hopper.defines(tile, runs, COLUMN=column, IN_PARTS=parts, **flags)
            yield Job("hopper", tuple(macros.items()), "sm_90a", tile.threads)


def product_of(name: str, **values: tuple[int, ...]) -> Iterator[Job]:
    for row in itertools.product(*values.values()):
        macros = dict(zip(values, row, strict=True))
        if (macros.get("BITS") == 8 and macros["CHANNEL"]) or (macros.get("X32", 0) and macros["BF16"]):
            continue  # a channel belongs to 4-bit codes; fp32 is not bf16
        if macros.get("IN_PARTS") and (macros["SCALE32"] or macros["COLUMN"]):
            continue  # δ is in two parts beside scales in fp16, of groups of 32, say
        yield from (Job(name, tuple(macros.items()), arch) for arch in CHIPS)


def jobs() -> list[Job]:
    two = (0, 1)
    return [
        *tensor_core_jobs(),
        *hopper_jobs(),
        *product_of("correction", BF16=two, COLUMN=two, SCALE32=two, IN_PARTS=two),
        *product_of("native", BITS=(4, 8), CHANNEL=(0, 1, 2), PARAM32=two, X32=two, BF16=two),
        *product_of("unpack", BF16=two, SCALE32=two, COLUMN=two, IN_PARTS=two),
    ]


def resources(code: bytes, folder: Path) -> tuple[tuple[str, Use], ...]:
    with tempfile.NamedTemporaryFile(suffix=".cubin", dir=folder, delete=False) as file:  # two variants may be the same
        file.write(code)
    path = Path(file.name)
    text = subprocess.run([tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) CONSTANT\[0\]:(\d+)", text
    )  # fmt: skip
    return tuple((name, Use(*map(int, numbers))) for name, *numbers in found)


def compiled(job: Job, folder: Path) -> Built:
    log = io.StringIO()
    try:
        code = build.compile_kernels(job.name, dict(job.macros), job.arch, logs=log).code
    except RuntimeError as e:
        return Built(error=str(e), log=log.getvalue())
    return Built(code, log.getvalue(), uses=resources(code, folder))


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    """Processes: NVRTC runs without the interpreter's lock, and has one of its own."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module", params=CHIPS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, workers: Executor
) -> dict[Job, Built]:
    """Every variant for one chip."""
    if reason := build.missing():
        pytest.skip(f"nothing compiles here: {reason}")
    tool("cuobjdump")
    work = [job for job in jobs() if job.arch == request.param]
    one = functools.partial(compiled, folder=tmp_path_factory.mktemp("cubins"))
    return dict(zip(work, workers.map(one, work, chunksize=4), strict=True))


def test_every_variant_compiles(built: dict[Job, Built]) -> None:
    assert not [f"{job}: {b.error}" for job, b in built.items() if b.error]
    assert not [str(job) for job, b in built.items() if {name for name, _ in b.uses} != ENTRIES[job.name]]


def test_no_warnings(built: dict[Job, Built]) -> None:
    assert not [f"{job}: {b.log}" for job, b in built.items() if b.log.strip("\0 \n")]


def test_no_spill_and_no_local_memory(built: dict[Job, Built]) -> None:
    """Registers are spilled to the stack, and the stack is local memory."""
    uses = [(job, name, use) for job, b in built.items() for name, use in b.uses]
    assert not [f"{job}, {name}: {use}" for job, name, use in uses if use.stack or use.local]


def test_registers_and_static_shared_memory_leave_room_to_launch(built: dict[Job, Built]) -> None:
    for job, b in built.items():
        for name, use in b.uses:
            assert -(-use.registers // 8) * 8 * job.threads <= REGISTERS, f"{job}, {name}: {use}"
            assert job.name != "tensor_core" or use.shared <= STATIC_SHARED, f"{job}, {name}: {use}"


def test_no_load_or_store_of_local_memory_in_the_machine_code(built: dict[Job, Built], tmp_path: Path) -> None:
    """The same, seen in the instructions of the variant that has the fewest registers to spare."""
    tightest = max(built, key=lambda job: max(use.registers for _, use in built[job].uses))
    sass = instructions(built[tightest].code, tmp_path)
    assert "MMA" in sass  # it is a listing
    assert not local_accesses(sass), tightest


def instructions(code: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run([tool("nvdisasm"), "-c", path], capture_output=True, text=True, check=True).stdout


def local_accesses(sass: str) -> list[str]:
    return re.findall(r".*(?:\bLDL\b|\bSTL\b|SpillRefill).*", sass)


def test_the_checks_see_a_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control: an array that is indexed at run time cannot stay in registers; an unused variable is warned of."""
    if reason := build.missing():
        pytest.skip(f"nothing compiles here: {reason}")
    text = """extern "C" __global__ void k(int* p) {
        int unused, v[32];
        for (int i = 0; i < 32; i++) v[i] = p[i];
        for (int i = 0; i < 32; i++) v[p[i] & 31] += i;
        for (int i = 0; i < 32; i++) p[i] = v[i];
    }"""
    monkeypatch.setattr(build, "source", lambda name: text)
    log = io.StringIO()
    code = build.compile_kernels("control", {}, "sm_80", logs=log).code
    ((name, use),) = resources(code, tmp_path)
    assert name == "k"
    assert use.stack >= 128
    assert local_accesses(instructions(code, tmp_path))
    assert "never referenced" in log.getvalue()


LAUNCH_BYTES = {"sm_80": 352, "sm_90a": 528}  # constants of bank 0 that are the launch's own


@pytest.mark.parametrize("built", LAUNCH_BYTES, indirect=True)
def test_python_and_kernels_agree_on_the_size_of_arguments(built: dict[Job, Built]) -> None:
    """After the launch's own constants come the arguments, which begin where their alignment wants them: on 9.0 at 576
    where that is 64."""
    structs = {
        "tensor_core": gemm._Arguments,
        "hopper": hopper._Arguments,
        "a_group_sum": paths._Sums,
        "correction_accum": paths._Correction,
        "native": paths._Native,
        "dequantize": paths._Dequantize,
        "unpack": paths._Unpack,
    }
    arch = next(iter(built)).arch
    seen = {(name, use.constants - LAUNCH_BYTES[arch]) for b in built.values() for name, use in b.uses}
    want = {name: ctypes.sizeof(struct) for name, struct in structs.items()}
    if arch == "sm_90a":
        want["hopper"] += 576 - LAUNCH_BYTES[arch]
    else:
        del want["hopper"]
    assert seen == set(want.items())


def test_the_set_of_variants() -> None:
    """Each tile for the first of its chips, and for Hopper, with all its flags, for the others with a third; once. One
    row folds groups that begin in the middle of a chunk by a variant of its own."""
    assert list(CHIPS) == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]
    work = list(tensor_core_jobs())
    assert len(work) == len(set(work))
    before = set[tuple[bool, bool, Config]]()
    for arch, chip in CHIPS.items():
        own = Counter((dict(j.macros)["PAIR"], dict(j.macros)["HALVES"], j.tile) for j in work if j.arch == arch)
        here = {
            (pair, halves, tile)
            for pair, halves in itertools.product((False, True), (False, True))
            for tile in variants([chip], [pair], [halves])
        }
        for pair, halves, tile in here:
            one_row = halves and tile.MT == 1 and not tile.DECODE
            if arch == "sm_90a" or (pair, halves, tile) not in before:  # in 16 bits and in 32, fp16 and bf16
                want = 4 * ((1 if halves else 2) * (1 if pair else 2) + one_row)
            else:
                want = 2 * ((1 if halves else 2) + one_row)
            assert own[pair, halves, tile] == want, (arch, pair, halves, tile)
        assert len(own) == len(here)
        before |= here
    seen = {(job.arch, flag, value) for job in work for flag, value in job.macros if value in (0, 1)}
    flags = ("BF16", "SCALE32", "COLUMN", "HALVES", "SYMMETRIC", "PAIR", "DECODE", "IN_PARTS", "ONE_ROW")
    left_out = set(itertools.product(("sm_89", "sm_120"), ("SCALE32", "SYMMETRIC"), (1,)))
    assert seen >= set(itertools.product(CHIPS, flags, (0, 1))) - left_out
    of = [dict(job.macros) for job in jobs() if "IN_PARTS" in dict(job.macros)]
    assert {m["IN_PARTS"] for m in of if not m["SCALE32"]} == {0, 1}
    assert not any(m["IN_PARTS"] and (m["SCALE32"] or m["COLUMN"]) for m in of)
    tiles = Counter(
        tuple(dict(job.macros)[k] for k in ("BM", "CW", "TEAMS", "SPLITS", "DEPTH")) for job in hopper_jobs()
    )
    assert len(tiles) == len(hopper_variants())
    assert min(tiles.values()) >= 8


def test_every_kernel_file_is_compiled() -> None:
    folder = Path(build.__file__).parent / "kernels"
    assert {path.stem for path in folder.glob("*.cu")} == {job.name for job in jobs()} == set(ENTRIES)


def test_kernels_include_nothing() -> None:
    for path in (Path(build.__file__).parent / "kernels").iterdir():
        assert "#include" not in path.read_text("utf-8"), path.name
