"""From a checkpoint to a quantised file: calibration, resumption after every way to die, rules, the gate, refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyloop as tl
from helpers import LOOPED, ids_of, tiny_checkpoint
from tinyloop.config import Segment
from tinyloop.errors import InputError, NumericalError
from tinyloop.marlin import MarlinWeight
from tinyloop.quantize import Calibration, Output, QuantSpec, Settings, convert, gptq, pipeline, quantize, store
from tinyloop.quantize.calibration import BUNDLED, bundled, sample
from tinyloop.score import Protocol, score
from tinyloop.weight import DenseWeight, QuantWeight

pytestmark = pytest.mark.usefixtures("one_thread")
Tensor = torch.Tensor
DEEP = (Segment("pre", 1), Segment("loop", 2, 3), Segment("coda", 1))
SHORT = Calibration(texts=3, length=48)
WITH_EMBED = Settings(QuantSpec(32), rules=(("embed", QuantSpec(32)),))


@pytest.fixture(scope="module")
def dense() -> tl.Checkpoint:
    return tiny_checkpoint(quantized=False, segments=DEEP)


@pytest.fixture(scope="module")
def whole(dense: tl.Checkpoint) -> tl.Checkpoint:
    """What an undisturbed run makes."""
    return quantize(dense, settings=WITH_EMBED, calibration=SHORT).checkpoint


def same(a: tl.Checkpoint, b: tl.Checkpoint) -> None:
    for name, w in a.weights.items():
        other = b.weights[name]
        assert type(w) is type(other), name
        for field in ("packed", "scale", "zero") if isinstance(w, QuantWeight) else ("weight",):
            assert torch.equal(getattr(w, field), getattr(other, field)), (name, field)


# What it makes.


@pytest.mark.parametrize("method", ["gptq", "nearest"])
def test_a_checkpoint_in_bf16_gets_scales_that_bf16_holds(dense: tl.Checkpoint, method: str) -> None:
    """So that on a GPU products in bf16 are as fast as in fp16."""
    weights = {n: DenseWeight(w.weight.bfloat16()) for n, w in dense.weights.items() if isinstance(w, DenseWeight)}
    settings = Settings(QuantSpec(32), method)
    made = [
        quantize(c, settings=settings, calibration=SHORT) for c in (dense, dataclasses.replace(dense, weights=weights))
    ]
    coarse = [
        {MarlinWeight.of(w).coarse for w in found.checkpoint.weights.values() if isinstance(w, QuantWeight)}
        for found in made
    ]
    assert coarse == [{False}, {True}]
    if method == "gptq":
        assert made[1].report.perplexity_after == pytest.approx(made[0].report.perplexity_after, rel=0.02)


def test_file_loads_and_scores(dense: tl.Checkpoint, whole: tl.Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.tinyloop"
    found = quantize(dense, path, settings=WITH_EMBED, calibration=SHORT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.tinyloop"]
    same(found.checkpoint, whole)
    r = found.report
    assert 0.8 < r.perplexity_after / r.perplexity_before < 1.25
    assert tl.load(path).score("It is a truth.").perplexity == tl.Model(whole).score("It is a truth.").perplexity
    assert r.bytes_after == found.checkpoint.nbytes < r.bytes_before / 4
    assert r.bits_per_weight == 4 + 2 * 16 / 32
    assert [x.name for x in r.layers] == list(pipeline.order(dense.config))
    assert all(x.relative_loss is not None and 1e-5 < x.relative_loss < 0.02 and x.note is None for x in r.layers)
    record = tl.inspect(path).source["quantised"]
    assert record == "gptq, group 32, float zero, embed=32, 3 windows of 48 tokens of the bundled sample"
    json.dumps(r.to_dict(), allow_nan=False)


def test_sources_are_told_by_content(dense: tl.Checkpoint, tmp_path: Path) -> None:
    path = tl.save(dense, tmp_path / "no-suffix")
    same(convert.open_checkpoint(path), dense)
    looped = convert.open_checkpoint(Path(__file__).parents[1] / "examples" / "looped-12m")
    assert looped.config.loops == 8


def test_second_moment_is_summed_over_all_iterations(
    dense: tl.Checkpoint, whole: tl.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage of the loop against a model whose earlier weights are quantised and whose later ones are dense."""
    seen: list[Tensor] = []

    def spy(W: Tensor, H: Tensor, spec: QuantSpec, bias: Tensor | None = None) -> gptq.Quantized:
        seen.append(H.clone())
        return gptq.gptq(W, H, spec, bias)

    monkeypatch.setattr(pipeline, "gptq", spy)
    windows = sample(tl.Model(dense), SHORT).windows
    pipeline.quantize_weights(dense, windows, WITH_EMBED)
    names = list(pipeline.order(dense.config))
    assert len(seen) == len(names)
    for i, name in enumerate(names):
        if name == "layers.0.attn_qkv" or name.startswith("layers.2") or name == "embed":
            done = names[: i - 1] if name.endswith("mlp_up") else names[:i]
            weights = {n: whole.weights[n] if n in done else w for n, w in dense.weights.items()}
            torch.testing.assert_close(seen[i], moment(dense, weights, name, windows), rtol=1e-3, atol=1e-2)


def moment(dense: tl.Checkpoint, weights: dict[str, Any], name: str, windows: Tensor) -> Tensor:
    """Σ xᵀx of all that weight `name` is given, iteration by iteration, by the model itself."""
    model = tl.Model(dataclasses.replace(dense, weights=weights), linear=lambda x, w: record(x, w))
    inputs: list[Tensor] = []

    def record(x: Tensor, w: tl.PackedWeight) -> Tensor:
        if w is model.weights[name]:
            inputs.append(x.reshape(-1, x.shape[-1]).float())
        return tl.quant_gemm(x, w)

    for row in windows:
        hidden = model.hidden(row[None])
        if name == "embed":
            model.head(hidden)
    applied = 3 if name.startswith(("layers.1", "layers.2")) else 1
    assert sum(len(x) for x in inputs) == applied * windows.numel()
    x = torch.cat(inputs)
    return x.t() @ x


def test_rules(dense: tl.Checkpoint) -> None:
    rules = (("layers.0.*", None), ("*.mlp_down", QuantSpec(16)), ("embed", QuantSpec(64, integer_zero=True)))
    made = quantize(dense, settings=Settings(QuantSpec(32), rules=rules), calibration=SHORT).checkpoint
    for name, w in made.weights.items():
        if name.startswith("layers.0."):
            assert w is dense.weights[name]
        else:
            assert isinstance(w, QuantWeight)
            assert w.group_size == (16 if name.endswith("mlp_down") else 64 if name == "embed" else 32)
            assert w.integer_zero == (name == "embed")
    made = quantize(dense, settings=Settings(QuantSpec(32)), calibration=SHORT).checkpoint
    assert isinstance(made.weights["embed"], DenseWeight)


def test_gate_skipped_alone_leaves_up_calibrated(dense: tl.Checkpoint) -> None:
    settings = Settings(QuantSpec(32), rules=(("*.mlp_gate", None),))
    report = quantize(dense, settings=settings, calibration=SHORT).report
    assert all(r.note is None and r.relative_loss for r in report.layers)


def test_untied_head_with_bias_and_one_group_per_column() -> None:
    checkpoint = tiny_checkpoint(quantized=False, tied=False, bias=True, segments=(Segment("pre", 1),))
    rules = (("head", QuantSpec(None)), ("embed", QuantSpec(None)))
    made = quantize(checkpoint, settings=Settings(QuantSpec(None), rules=rules), calibration=SHORT).checkpoint
    for name, w in made.weights.items():
        assert isinstance(w, QuantWeight)
        assert w.group_size == w.K
        assert (w.bias is None) == (not name.endswith("attn_qkv"))


def test_nearest_needs_no_calibration_pass(dense: tl.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipeline, "gptq")
    seen: list[str] = []
    settings = Settings(QuantSpec(32), "nearest")
    made = quantize(
        dense, settings=settings, calibration=SHORT, progress=lambda i, n, note: seen.append(f"{i}/{n}")
    ).checkpoint
    name = "layers.1.mlp_up"
    want = gptq.nearest(dense.weights[name].dequantize(), QuantSpec(32))
    assert torch.equal(made.weights[name].dequantize(), want.dequantize())
    assert seen == [f"{i}/20" for i in range(1, 21)]


# Calibration.


def test_windows_are_spread_and_the_end_is_held_back(dense: tl.Checkpoint) -> None:
    text = "".join(chr(33 + i // 40) for i in range(3200))
    found = sample(tl.Model(dense), Calibration(text, texts=5, length=11))
    assert found.windows.shape == (5, 11)
    assert found.windows[:, 0].tolist() == [0] * 5  # as in a scored window
    ids = ids_of(text)
    starts = [0, 777, 1555, 2332, 3110]
    assert found.held == ids[-80:]  # eight windows of ten
    assert found.windows[:, 1:].tolist() == [ids[s : s + 10] for s in starts]


def test_bundled_sample() -> None:
    path = Path(tl.__file__).parent / "data" / BUNDLED
    assert path.stat().st_size <= 300_000
    text = bundled()
    assert 600_000 < len(text) < 900_000
    assert "\r" not in text
    assert "<|endoftext|>" not in text
    assert "calibration.txt.xz" in (path.parent / "README.md").read_text("utf-8")


# Dying and going on.


class Killed(BaseException):
    pass


def die_after(n: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, note: str) -> None:
        if done == n:
            raise Killed

    return progress


@pytest.mark.parametrize("n", [1, 4, 5, 6, 13, 15, 20])
def test_QNT_06_killed_anywhere_goes_on(
    n: int, dense: tl.Checkpoint, whole: tl.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, work = tmp_path / "m.tinyloop", tmp_path / "m.tinyloop.work"
    with pytest.raises(Killed):
        quantize(dense, path, settings=WITH_EMBED, calibration=SHORT, progress=die_after(n))
    finished = len(list(work.glob("layer-*.pt")))
    assert finished == (n - 1) // 5
    assert not path.exists()
    calls: list[int] = []
    real = gptq.gptq
    monkeypatch.setattr(pipeline, "gptq", lambda *a: calls.append(1) or real(*a))
    found = quantize(dense, path, settings=WITH_EMBED, calibration=SHORT)
    assert len(calls) == 21 - 5 * finished
    same(found.checkpoint, whole)
    assert [r.name for r in found.report.layers] == list(pipeline.order(dense.config))
    assert not work.exists()


def test_log_has_a_line_per_weight(dense: tl.Checkpoint, tmp_path: Path) -> None:
    output = Output(work=tmp_path / "w", keep_work=True)
    report = quantize(dense, settings=WITH_EMBED, calibration=SHORT, output=output).report
    lines = [json.loads(line) for line in (tmp_path / "w" / "log.jsonl").read_text().splitlines()]
    assert [(x["name"], x["relative_loss"], x["note"]) for x in lines] == [
        (r.name, r.relative_loss, r.note) for r in report.layers
    ]


def changed_weight(c: tl.Checkpoint) -> tl.Checkpoint:
    w = c.weights["layers.3.mlp_up"]
    assert isinstance(w, DenseWeight)
    other = w.weight.clone()
    other[17, 5] += 1e-3
    return dataclasses.replace(c, weights={**c.weights, "layers.3.mlp_up": DenseWeight(other)})


def changed_norm(c: tl.Checkpoint) -> tl.Checkpoint:
    return dataclasses.replace(c, norms={**c.norms, "final_norm": 1.001 * c.norms["final_norm"]})


@pytest.mark.parametrize(
    "change",
    [
        {"settings": Settings(QuantSpec(16))},
        {"settings": Settings(QuantSpec(32), rules=(("embed", None),))},
        {"calibration": Calibration("Another text. " * 200, texts=3, length=48)},
        {"calibration": Calibration(texts=4, length=48)},
        {"source": changed_weight},
        {"source": changed_norm},
    ],
)
def test_QNT_06_resuming_something_else_is_refused(
    change: dict[str, Any], dense: tl.Checkpoint, tmp_path: Path
) -> None:
    given = {"settings": WITH_EMBED, "calibration": SHORT, "output": Output(work=tmp_path / "w")}
    with pytest.raises(Killed):
        quantize(dense, tmp_path / "m", **given, progress=die_after(7))  # type: ignore[arg-type]
    source = change.pop("source", lambda c: c)(dense)
    with pytest.raises(InputError, match=r"w holds layers of a run with other settings, weights or calibration text"):
        quantize(source, tmp_path / "m", **given | change)  # type: ignore[arg-type]


def test_foreign_or_damaged_work_folder(dense: tl.Checkpoint, tmp_path: Path) -> None:
    output = Output(work=tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty and holds no run; give another folder \(--work\)"):
        quantize(dense, settings=WITH_EMBED, calibration=SHORT, output=output)
    assert (tmp_path / "thesis.txt").exists()
    output = Output(work=tmp_path / "w")
    with pytest.raises(Killed):
        quantize(dense, settings=WITH_EMBED, calibration=SHORT, output=output, progress=die_after(7))
    (tmp_path / "w" / "layer-0000.pt").write_bytes(b"PK\3\4 no more")
    with pytest.raises(InputError, match=r"layer-0000.pt is damaged .*; delete it, and the layer is made again"):
        quantize(dense, settings=WITH_EMBED, calibration=SHORT, output=output)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """What a full disk looks like to a user without the right to mount one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (10_000, r"layer-0000.pt could not be written: File too large; make room and run the same command again"),
        (60_000, r"m could not be written: .*File too large.*nothing was left behind"),
    ],
)
def test_full_disk(room: int, message: str, dense: tl.Checkpoint, whole: tl.Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "m"
    with files_up_to(room), pytest.raises(InputError, match=message):
        quantize(dense, path, settings=WITH_EMBED, calibration=SHORT)
    assert not path.exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert len(list(tmp_path.rglob("*.pt"))) == (0 if room == 10_000 else 5)
    same(quantize(dense, path, settings=WITH_EMBED, calibration=SHORT).checkpoint, whole)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def start(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tinyloop", "quantize", *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.timeout(900)  # four processes, on a machine that may be busy
def test_kill_9_then_ctrl_c_then_done(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(quantized=False, segments=(Segment("pre", 40),))
    source, path, work = tl.save(checkpoint, tmp_path / "dense"), tmp_path / "int4", tmp_path / "int4.work"
    args = (source, path, "--group", 32, "--texts", 8, "--length", 128)
    first = start(*args)
    wait_for(work / "layer-0001.pt", first)
    first.kill()
    first.communicate()
    made = {p: p.stat().st_mtime_ns for p in work.glob("layer-*.pt")}
    assert 2 <= len(made) < 40
    second = start(*args)
    wait_for(work / f"layer-{len(made) + 1:04d}.pt", second)
    second.send_signal(signal.SIGINT)
    _, error = second.communicate(timeout=240)
    assert second.returncode == 130
    assert f"finished layers are kept in {work}; the same command goes on" in error
    assert "Traceback" not in error
    assert not path.exists()
    assert {p: p.stat().st_mtime_ns for p in made} == made
    refused = start(*args[:-1], 64)
    _, error = refused.communicate(timeout=240)
    assert (refused.returncode, path.exists()) == (1, False)
    assert "other settings, weights or calibration text" in error
    third = start(*args, "--json")
    out, error = third.communicate(timeout=240)
    assert third.returncode == 0, error
    found = json.loads(out)
    assert len(found["layers"]) == 200
    assert found["file_bytes"] == path.stat().st_size
    assert not work.exists()
    assert math.isfinite(tl.load(path).score("A truth.").perplexity)


# Memory.

FLAT = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tinyloop.quantize import Calibration, Output, QuantSpec, Settings, quantize

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

seen = {}
def progress(done, total, note):
    if "mlp_down" in note:
        seen[int(note.split(".")[1])] = rss()
quantize(sys.argv[1], sys.argv[2], settings=Settings(QuantSpec(64)), calibration=Calibration(texts=4, length=128),
         progress=progress)
print(sorted(seen[i] for i in (2, 3, 4))[1], sorted(seen[i] for i in (27, 28, 29))[1])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_QNT_05_memory_is_flat_over_layers(tmp_path: Path) -> None:
    """Layers 2 to 4 against the last three, medians. 24 M weights: kept in bf16 they would add a tenth."""
    shape = {"segments": (Segment("pre", 30),), "hidden": 256, "intermediate": 768}
    source = tl.save(tiny_checkpoint(quantized=False, **shape), tmp_path / "dense")
    command = [sys.executable, "-c", FLAT, str(source), str(tmp_path / "int4")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    early, late = map(int, out.stdout.split())
    assert late < 1.05 * early


# The gate, and what is refused.


def broken(change: Callable[[tl.Checkpoint], tl.Checkpoint]) -> Callable[..., Any]:
    real = pipeline.quantize_weights

    def quantize_badly(*args: Any) -> tuple[tl.Checkpoint, list[store.LayerReport]]:
        made, reports = real(*args)
        return change(made), reports

    return quantize_badly


def loud(c: tl.Checkpoint) -> tl.Checkpoint:
    return dataclasses.replace(c, norms={**c.norms, "final_norm": 20 * c.norms["final_norm"]})


def nan(c: tl.Checkpoint) -> tl.Checkpoint:
    return dataclasses.replace(c, norms={**c.norms, "final_norm": math.nan * c.norms["final_norm"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            loud,
            r"the result has perplexity .*, the source .*, on 376 held-back tokens: more than 2 times worse is refus",
        ),
        (nan, r"the result has no perplexity on the held-back text: .*NaN"),
    ],
)
def test_gate(
    change: Callable[[tl.Checkpoint], tl.Checkpoint], message: str, dense: tl.Checkpoint, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(convert, "quantize_weights", broken(change))
    with pytest.raises(NumericalError, match=message) as caught:
        quantize(dense, tmp_path / "m", settings=WITH_EMBED, calibration=SHORT)
    assert f"nothing was written, the layers and their losses are kept in {tmp_path / 'm.work'}" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.work"]
    monkeypatch.undo()
    assert quantize(dense, tmp_path / "m", settings=WITH_EMBED, calibration=SHORT).report.perplexity_after > 1


def test_source_that_is_nan_is_refused_before_work(dense: tl.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match="the source has no perplexity on the held-back text"):
        quantize(nan(dense), tmp_path / "m", settings=WITH_EMBED, calibration=SHORT)
    assert not list(tmp_path.iterdir())


def test_QNT_03_layer_without_calibration_is_named(dense: tl.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.add_outer
    monkeypatch.setattr(pipeline, "add_outer", lambda H, x: H.fill_(math.nan) if len(H) == 96 else real(H, x))
    for r in quantize(dense, settings=WITH_EMBED, calibration=SHORT).report.layers:
        failed = r.name.endswith("mlp_down")
        assert (r.relative_loss is None) == failed
        assert r.note == ("H holds NaN or infinite values: rounded to nearest instead" if failed else None)


def test_QNT_04_every_weight_is_checked_before_any_work(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(quantized=False, hidden=100, intermediate=160, segments=(Segment("pre", 2),))
    with pytest.raises(InputError) as caught:
        quantize(checkpoint, tmp_path / "m", settings=Settings(QuantSpec(128)), calibration=SHORT)
    for part in (
        "8 weights cannot be quantised", "layers.0.attn_qkv has K=100 < group 128", "layers.1.mlp_up has K=100",
        "choose another group (--group), or skip them (--rule 'NAME=skip')",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert "mlp_down" not in str(caught.value)
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": Path("nowhere")}, "nowhere is not there; give a model file or folder"),
    ({"source": tiny_checkpoint()}, r"16 weights cannot .*layers.0.attn_qkv is quantised already \(4 bits\); .* dense"),
    ({"settings": Settings(QuantSpec(32), rules=(("*", None),))}, "no weight is left to quantise"),
    ({"settings": Settings(QuantSpec(32), rules=(("layer.*", None),))}, r"rule 'layer\.\*' fits no weight; names are"),
    ({"calibration": Calibration(Path("nowhere.txt"))}, "calibration nowhere.txt is not there; give a text file"),
    ({"calibration": Calibration(Path())}, "is a folder; give a text file"),
    ({"calibration": Calibration("a\0b")}, "the given text is binary: byte 1 is 0"),
    (
        {"calibration": Calibration("A truth. " * 20, texts=4, length=48)},
        r"the given text has 180 tokens, of which 22 are held back for the final check; 4 windows of 48 need 188: "
        "give a longer text, or lower --texts or --length",
    ),
    ({"calibration": Calibration("")}, "the given text has 0 tokens"),
    ({"calibration": Calibration(length=257)}, "length=257 must be 2 to 256, the model's context"),
    ({"calibration": Calibration(texts=0)}, "texts=0 must be ≥ 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refusals_before_work(given: dict[str, Any], message: str, dense: tl.Checkpoint, tmp_path: Path) -> None:
    given = {"source": dense, "settings": WITH_EMBED, "calibration": SHORT} | given
    with pytest.raises(InputError, match=message):
        quantize(given.pop("source"), tmp_path / "m", **given)
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_utf8(dense: tl.Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(InputError, match=r"latin.txt is not UTF-8: byte 3"):
        quantize(dense, settings=WITH_EMBED, calibration=Calibration(path))


def test_no_tokenizer(dense: tl.Checkpoint) -> None:
    with pytest.raises(InputError, match="this model has no tokenizer, so no text can calibrate it"):
        quantize(dataclasses.replace(dense, tokenizer=None), settings=WITH_EMBED)


def test_destination_exists(dense: tl.Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text("precious")
    with pytest.raises(InputError, match=r"m exists; give another name, or allow overwriting \(--force\)"):
        quantize(dense, path, settings=WITH_EMBED, calibration=SHORT)
    assert path.read_text() == "precious"
    quantize(dense, path, settings=WITH_EMBED, calibration=SHORT, output=Output(overwrite=True))
    assert tl.load(path)
    with pytest.raises(InputError, match="none is no folder; give the path of a file"):
        quantize(dense, tmp_path / "none" / "m", settings=WITH_EMBED, calibration=SHORT)
    with pytest.raises(InputError, match="is a folder; give the path of a file"):
        quantize(dense, tmp_path, settings=WITH_EMBED, calibration=SHORT, output=Output(overwrite=True))


def test_refused_method() -> None:
    with pytest.raises(InputError, match="method='awq' is none of 'gptq', 'nearest'"):
        Settings(method="awq")


# The command line.


def invoke(*args: object) -> tuple[int, str, str]:
    from typer.testing import CliRunner

    from tinyloop.cli import app

    result = CliRunner().invoke(app, ["quantize", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_command(dense: tl.Checkpoint, whole: tl.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = tl.save(dense, tmp_path / "dense"), tmp_path / "int4"
    flags = ("--group", 32, "--rule", "embed=32", "--texts", 3, "--length", 48)
    code, out, error = invoke(source, path, *flags, "--keep-work")
    assert (code, error) == (0, "")
    same(tl.container.read(path), whole)
    for part in ("perplexity", "bytes of weights", "5.000 bits per quantised weight", "held back from calibration"):
        assert part in out
    assert (tmp_path / "int4.work" / "log.jsonl").exists()
    assert invoke(source, path, *flags)[0] == 1
    flags = ("--group", "K", "--zero", "integer", "--no-clip", "--no-order", "--rule", "layers.0.*=skip", "--json")
    work = tmp_path / "elsewhere"
    code, out, _ = invoke(source, path, *flags, "--texts", 3, "--length", 48, "--force", "--work", work)
    assert code == 0
    assert json.loads(out)["path"] == str(path)
    record = tl.inspect(path).source["quantised"]
    assert record.startswith("gptq, group K, integer zero, layers.0.*=skip, no clip, no order, 3 windows")
    assert not work.exists()


def test_command_adds_a_channel_to_the_loop_and_measures_with_it(tmp_path: Path) -> None:
    source = tl.save(tiny_checkpoint(segments=LOOPED, quantized=False), tmp_path / "dense")
    path = tmp_path / "m"
    flags = ("--group", 32, "--texts", 3, "--length", 48, "--channel", "sign_bit", "--json")
    code, out, error = invoke(source, path, *flags)
    assert (code, error) == (0, "")
    made = tl.container.read(path)
    channels = {name: w.channel for name, w in made.weights.items() if isinstance(w, QuantWeight)}
    assert {name for name, channel in channels.items() if channel} == {n for n in channels if made.config.in_loop(n)}
    report = json.loads(out)
    held = sample(tl.Model(made), Calibration(None, 3, 48)).held
    scores = {on: score(tl.Model(made, cross_iter_round=on), held, Protocol(window=48)) for on in (False, True)}
    assert report["perplexity_after"] == scores[True].perplexity != scores[False].perplexity
    assert "sign_bit" in tl.inspect(path).source["quantised"]


def test_command_warns_by_name(dense: tl.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.add_outer
    monkeypatch.setattr(pipeline, "add_outer", lambda H, x: H.fill_(math.nan) if len(H) == 96 else real(H, x))
    source = tl.save(dense, tmp_path / "dense")
    code, _, error = invoke(source, tmp_path / "m", "--group", 32, "--texts", 3, "--length", 48)
    assert code == 0
    assert "warning: layers.0.mlp_down: H holds NaN or infinite values: rounded to nearest instead" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group", "x"), "--group: 'x' is no group; give a whole number from 1 on, or K for one group per column"),
        (("--group", "0"), "--group: '0' is no group; give a whole number from 1 on, or K for one group per column"),
        (("--zero", "none"), "--zero none is none of float, integer"),
        (("--channel", "none"), "channel='none' is none of None, 'sign_bit', 'frac4'"),
        (("--method", "awq"), "method='awq' is none of"),
        (("--rule", "embed"), "--rule 'embed' is not GLOB=skip or GLOB=GROUP, as in"),
        (("--rule", "embed=no"), "--rule 'embed=no': 'no' is no group"),
        (("--rule", "emb=32"), "rule 'emb' fits no weight"),
        (("--calibration", "nowhere.txt"), "calibration nowhere.txt is not there"),
    ],
)
def test_command_refuses(flags: tuple[object, ...], message: str, dense: tl.Checkpoint, tmp_path: Path) -> None:
    source = tl.save(dense, tmp_path / "dense")
    code, out, error = invoke(source, tmp_path / "m", "--group", 32, *flags)
    assert (code, out) == (1, "")
    assert message in error
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]
