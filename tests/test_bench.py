"""What `bench/gemm.py` says to arguments that it cannot use, and the chart that it draws of a result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "gemm.py"
RESULT = {"device": "a chip", "dtype": "float16", "rows": [{"K": 64, "N": 64, "M": M, "ratio": 1.0} for M in (1, 2)]}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gemm_bench", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rows", "1,two"], "argument --rows: 'two' is no number from 1 on"),
        (["--shapes", "4096*4096"], "argument --shapes: '4096*4096' is no shape; give K and N as 4096x4096"),
        (["--group", "256", "--shapes", "128x64"], "argument --group: 256 is more than K of 128x64; give -1"),
        (["--chart", "nowhere.txt", "a.png"], "argument --chart: nowhere.txt is no result of this bench"),
        (["--chart", str(BENCH), "a.png"], "is no result of this bench (Expecting value"),
    ],
    ids=["rows", "shapes", "group", "no file", "no result"],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    text: str,
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert text in capsys.readouterr().err


def test_chart(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the last line of a run; a result without ratios, and a place that is not there, are named."""
    pytest.importorskip("matplotlib")
    run, other, png = tmp_path / "run.txt", tmp_path / "pair.txt", tmp_path / "a.png"
    run.write_text("| a table |\n" + json.dumps(RESULT) + "\n", encoding="utf-8")
    other.write_text(json.dumps(RESULT | {"rows": [{"K": 64}]}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gemm.py", "--chart", str(run), str(png)])
    bench.main()
    assert png.read_bytes()[:4] == b"\x89PNG"
    for source, target, text in (
        (other, png, "pair.txt is no result of this bench (no ratios in it)"),
        (run, tmp_path / "none" / "a.png", "a.png cannot be drawn"),
    ):
        monkeypatch.setattr(sys, "argv", ["gemm.py", "--chart", str(source), str(target)])
        with pytest.raises(SystemExit, match="2"):
            bench.main()
        assert text in capsys.readouterr().err
