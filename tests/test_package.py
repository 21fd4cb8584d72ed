"""The package as others get it: built from the tracked files alone, whole, quick to import, and touching no device."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers import tracked_files

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel built from that sdist, so that a file missing in it shows."""
    for module in ("build", "hatchling"):
        pytest.importorskip(module, reason=f"{module} is in the extra dev")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(*pip, "--target", target, wheel, cwd=target)
    return target


def test_wheel_holds_the_package_and_no_more(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if not name.startswith("tinyloop-")}
    assert code == {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/tinyloop/")}
    assert "tinyloop/py.typed" in code
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_holds_everything_to_test_and_build(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {"PKG-INFO"} == {name for name in tracked_files() if not name.startswith(".ci/")} | {".gitignore"}


def test_installed_wheel_imports(installed: Path) -> None:
    script = (
        "import tinyloop; print(tinyloop.__file__, [getattr(tinyloop, n) for n in getattr(tinyloop, '__all__', ())])"
    )
    assert run(sys.executable, "-c", script, cwd=installed, PYTHONPATH=str(installed)).startswith(str(installed))
    assert (installed / "bin" / "tinyloop").exists()


ON_IMPORT = """
import sys, time
start = time.process_time()
import torch
middle = time.process_time()
import tinyloop
end = time.process_time()
assert not torch.cuda.is_initialized(), "importing touches the GPU"
late = {"numba", "gguf", "onnx", "transformers", "typer", "rich"} & sys.modules.keys()
assert not late, f"importing loads {late}, which belong to what uses them"
print((end - middle) / (middle - start))
"""


def test_import_is_quick_and_touches_no_device(installed: Path) -> None:
    """At most a tenth on top of importing torch, in CPU time of one process: a busy machine changes neither."""
    runs = [run(sys.executable, "-c", ON_IMPORT, cwd=installed, PYTHONPATH=str(installed)) for _ in range(3)]
    assert statistics.median(map(float, runs)) <= 0.1


def test_a_file_of_tests_that_skips_itself_whole(tmp_path: Path) -> None:
    """As those of an extra do where it is not installed; the count of GPU tests at the end stands."""
    (tmp_path / "test_it.py").write_text("import pytest\npytest.skip('no extra', allow_module_level=True)\n")
    call = (sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "-p", "tests.conftest", tmp_path)
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert "GPU tests skipped: 0" in done.stdout, done.stdout + done.stderr
