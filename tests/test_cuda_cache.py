"""Compiled kernels on disk: what a killed build, a second builder, a damaged entry, or no place to write leave behind.

`native.cu` stands for all kernels: it compiles fastest, and nothing here needs a GPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyloop import InputError
from tinyloop.cuda import build

DEFINES = {"BITS": 4, "CHANNEL": 0, "PARAM32": 0, "X32": 0, "BF16": 0}
needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=f"nothing compiles here: {build.missing()}")
Make = Callable[..., bytes]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What the module remembers of this process is forgotten before and after."""
    for remembered in (build.missing, build.disk_cache, build.source):
        remembered.cache_clear()
    yield
    for remembered in (build.missing, build.disk_cache, build.source):
        remembered.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tinyloop" / "kernels"


def entries(home: Path) -> list[Path]:
    return sorted(p for p in (home / "entries").rglob("*") if p.is_file())


def make(defines: dict[str, int] = DEFINES, arch: str = "sm_80") -> bytes:
    return bytes(build.compile_kernels("native", defines, arch, build.disk_cache()).code)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every run of NVRTC."""
    module, seen = importlib.import_module("cuda.core._program"), list[str]()
    original = module._program_compile_uncached

    @functools.wraps(original)
    def counted(*args: Any) -> Any:
        seen.append("one")
        return original(*args)

    monkeypatch.setattr(module, "_program_compile_uncached", counted)
    return seen


@needs_compiler
def test_an_entry_is_used(home: Path, compilations: list[str]) -> None:
    first, second = make(), make()
    assert first == second
    assert first.startswith(b"\x7fELF")
    assert len(entries(home)) == len(compilations) == 1


@needs_compiler
def test_the_key_is_all_that_decides_the_code(
    home: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source, macros, chip and NVRTC's version: each changed, and each changed back."""
    text, keys = build.source("native"), importlib.import_module("cuda.core.utils._program_cache._keys")
    changes: list[tuple[str, Callable[[], object]]] = [
        ("first", lambda: make()),
        ("macro", lambda: make(DEFINES | {"X32": 1})),
        ("chip", lambda: make(arch="sm_86")),
    ]
    for count, (name, change) in enumerate(changes, start=1):
        change(), change()
        assert (len(entries(home)), len(compilations)) == (count, count), name
    with monkeypatch.context() as m:
        m.setattr(build, "source", lambda name: text + "\n// changed\n")
        make(), make()
        assert (len(entries(home)), len(compilations)) == (4, 4)
    with monkeypatch.context() as m:
        m.setattr(keys, "_nvrtc_version", lambda: (99, 0))
        make(), make()
        assert (len(entries(home)), len(compilations)) == (5, 5)
    make()
    assert len(compilations) == 5


def cut(entry: bytes) -> bytes:
    return entry[: len(entry) // 2]


def flipped(entry: bytes) -> bytes:
    return entry[:-600] + bytes([entry[-600] ^ 1]) + entry[-599:]


def nothing(entry: bytes) -> bytes:
    return b""


def bare(entry: bytes) -> bytes:
    return entry[:-32]


@needs_compiler
@pytest.mark.parametrize("damage", [cut, flipped, nothing, bare])
def test_a_damaged_entry_is_compiled_anew(
    home: Path, compilations: list[str], damage: Callable[[bytes], bytes]
) -> None:
    right = make()
    (entry,) = entries(home)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert make() == right
    assert len(compilations) == 2
    assert entry.read_bytes() == whole  # and mended
    assert make() == right
    assert len(compilations) == 2


@needs_compiler
def test_an_entry_that_cannot_be_read(home: Path, compilations: list[str], caplog: pytest.LogCaptureFixture) -> None:
    right = make()
    (entry,) = entries(home)
    entry.unlink()
    entry.mkdir()
    assert make() == right
    assert make(DEFINES | {"X32": 1}) != right
    assert len(compilations) == 3
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == ["compiled kernels are not kept"]


@needs_compiler
def test_a_disk_that_fails_is_said_once_and_costs_no_kernel(
    home: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    build.disk_cache()
    (home / "tmp").rmdir()
    (home / "tmp").write_text("no folder to write to")
    kernels = [make(DEFINES | {"BF16": bf16}) for bf16 in (0, 1)]
    assert all(kernel.startswith(b"\x7fELF") for kernel in kernels)
    assert len(compilations) == 2  # not compiled a second time for want of a cache
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "compiled kernels are not kept" in warning
    assert str(home / "tmp") in warning


def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def home_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))


def cache_home_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")  # where not even root makes folders
        return
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "locked"))


@needs_compiler
@pytest.mark.parametrize("place", [no_home, home_is_a_file, cache_home_is_a_file, unwritable])
def test_no_place_to_write(
    place: Callable[[pytest.MonkeyPatch, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    place(monkeypatch, tmp_path)
    assert build.disk_cache() is None
    assert make() == make()
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith("compiled kernels are not kept: ")


@needs_compiler
def test_no_home_but_a_cache_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    make()
    assert len(entries(home)) == 1


BUILDER = """
import os, sys
from tinyloop.cuda import build

if "stop" in sys.argv:  # where the entry is written and not yet in its place
    replace = os.replace
    def stop(*names):
        print("writing", flush=True)
        sys.stdin.readline()
        replace(*names)
    os.replace = stop
build.disk_cache()
print("ready", flush=True)
sys.stdin.readline()
for bf16 in (0, 1):
    defines = {"BITS": 4, "CHANNEL": 0, "PARAM32": 0, "X32": 0, "BF16": bf16}
    code = build.compile_kernels("native", defines, "sm_80", build.disk_cache()).code
    print(len(code), flush=True)
"""


def builder(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str], line: str) -> bool:
    assert process.stdout is not None
    return process.stdout.readline().strip() == line


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@needs_compiler
def test_pkg04_a_build_that_is_killed_while_it_writes(home: Path, compilations: list[str]) -> None:
    """What it had begun is no entry, and nobody waits for it."""
    with builder("stop") as process:
        assert said(process, "ready")
        go_on(process)
        assert said(process, "writing")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(list((home / "tmp").iterdir())) == 1
    assert not entries(home)
    made = make()
    assert make() == made == bytes(build.compile_kernels("native", DEFINES, "sm_80").code)
    assert len(entries(home)) == 1
    assert len(compilations) == 2  # the second without the cache


@needs_compiler
def test_pkg04_leftovers_of_killed_builds_go(home: Path) -> None:
    (home / "tmp").mkdir(parents=True)
    leftover = home / "tmp" / "entry-old"
    leftover.write_bytes(b"half of a kernel")
    os.utime(leftover, (0, 0))
    build.disk_cache()
    assert not leftover.exists()


@needs_compiler
def test_pkg04_two_builders_at_once(home: Path) -> None:
    with builder() as one, builder() as two:
        assert said(one, "ready")
        assert said(two, "ready")
        go_on(one)
        go_on(two)
        sizes = [process.communicate()[0].split() for process in (one, two)]
        assert one.returncode == two.returncode == 0
    assert len(entries(home)) == 2
    assert not list((home / "tmp").iterdir())
    assert sizes[0] == sizes[1] == [str(len(make(DEFINES | {"BF16": bf16}))) for bf16 in (0, 1)]


THREADS = """
import sys, threading
from tinyloop.cuda import build

sys.setswitchinterval(1e-6)
start, seen = threading.Barrier(8), []
def first_use(i):
    start.wait()
    if i % 2:
        seen.append(build.missing())
    build.compile_kernels("correction", {"BF16": 0, "COLUMN": 0}, "sm_80")
threads = [threading.Thread(target=first_use, args=(i,)) for i in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
assert seen == [None] * 4, seen
"""


@needs_compiler
def test_eight_threads_at_first_use() -> None:
    """cuda.core is half a package while it is imported; no thread may see that half."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_compiler
@pytest.mark.parametrize("first_use", [build.missing.__wrapped__, make])
def test_one_thread_at_a_time_imports(home: Path, first_use: Callable[[], object]) -> None:
    other = threading.Thread(target=first_use)
    with build._importing:
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join()


@needs_compiler
def test_threads_share_a_cache(home: Path) -> None:
    made, cache = list[bytes](), build.disk_cache()
    work = [threading.Thread(target=lambda: made.append(make())) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert len(entries(home)) == 1
    assert cache is build.disk_cache()


def test_pkg03_no_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = build.missing()
    assert reason is not None
    assert reason.startswith("cuda.core is not installed (")
    assert reason.endswith("): pip install 'tinyloop[cuda]'")
    build.kernel.cache_clear()
    with pytest.raises(InputError, match=r"^no CUDA kernels: cuda\.core is not installed \("):
        build.kernel("native", "native", tuple(DEFINES.items()), (9, 0))


@needs_compiler
def test_pkg03_an_old_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cuda.core.utils.FileStreamProgramCache")
    reason = build.missing()
    assert reason is not None
    assert reason.endswith("is too old: pip install -U 'tinyloop[cuda]'")


@needs_compiler
def test_pkg03_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of its own: cuda.core imports without it."""

    def absent() -> None:
        raise RuntimeError("Failure finding libnvrtc.so\nwith a list of all places")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", absent)
    expected = "NVRTC cannot be loaded (Failure finding libnvrtc.so): pip install 'tinyloop[cuda]'"
    assert build.missing() == expected


@needs_compiler
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_chips_that_nvrtc_knows(capability: tuple[int, int]) -> None:
    assert build.missing(capability) is None


@needs_compiler
@pytest.mark.parametrize(("capability", "name"), [((3, 5), "sm_35"), ((99, 0), "sm_990")])
def test_a_chip_that_nvrtc_does_not_know(capability: tuple[int, int], name: str) -> None:
    reason = build.missing(capability)
    assert reason is not None
    assert f"and not for {name}: " in reason
    assert "tinyloop[cuda12]" in reason
    build.kernel.cache_clear()
    with pytest.raises(InputError, match=name):
        build.kernel("native", "native", tuple(DEFINES.items()), capability)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120"), ((12, 1), "sm_121"),
    ],
)  # fmt: skip
def test_names_of_chips(capability: tuple[int, int], name: str) -> None:
    """What only Hopper and datacenter Blackwell have is asked for there alone: sm_90a code runs on no later chip."""
    assert build.arch(capability) == name


@needs_compiler
def test_errors_carry_the_compilers_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source", lambda name: "this is no kernel")
    with pytest.raises(
        RuntimeError, match=r"(?s)^native\.cu does not compile for sm_80 .*native\.cu\(1\): error: expected"
    ):
        build.compile_kernels("native", DEFINES, "sm_80")
