"""The file: what goes in comes out, a write is whole or absent, damage is found, and reading costs no copy."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers import LOOPED, PLAIN, random_quant_weight, tiny_checkpoint, with_random_perm
from tinyloop import container
from tinyloop.checkpoint import Checkpoint, Deferred
from tinyloop.config import Segment
from tinyloop.errors import FormatError, InputError
from tinyloop.weight import DenseWeight, LinearWeight, QuantWeight

# As small as a model can be, so that a file is a few kilobytes and hundreds of damaged copies cost little.
SMALL: dict[str, Any] = {"hidden": 8, "intermediate": 6, "heads": (2, 1), "group": 5, "vocab_size": 20}


def without_tokenizer(checkpoint: Checkpoint) -> Checkpoint:
    return dataclasses.replace(checkpoint, tokenizer=None)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = without_tokenizer(tiny_checkpoint(segments=LOOPED, bias=True, **SMALL))
    return container.write(checkpoint, tmp_path_factory.mktemp("good") / "good.tinyloop")


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.config == b.config
    assert a.tokenizer == b.tokenizer
    assert dict(a.source) == dict(b.source)
    assert a.weights.keys() == b.weights.keys()
    for name, w in a.weights.items():
        v = b.weights[name]
        assert type(v) is type(w)
        for field in dataclasses.fields(w):
            x, y = getattr(w, field.name), getattr(v, field.name)
            same = x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
            assert same, (name, field.name)
    assert a.norms.keys() == b.norms.keys()
    assert all(torch.equal(t, b.norms[name]) for name, t in a.norms.items())


# --- round trips ---


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    segments = [Segment(name, draw(st.integers(1, 2))) for name in ("pre", "loop", "coda") if draw(st.booleans())]
    segments = [dataclasses.replace(s, repeats=draw(st.integers(1, 9))) if s.name == "loop" else s for s in segments]
    kv = draw(st.integers(1, 2))
    checkpoint = tiny_checkpoint(
        segments=segments or PLAIN, quantized=draw(st.booleans()), tied=draw(st.booleans()),
        bias=draw(st.booleans()), qk_norm=draw(st.booleans()), seed=draw(st.integers(0, 99)),
        group=draw(st.integers(1, 40)), hidden=draw(st.integers(1, 9)), heads=(kv * 2, kv), head_dim=4,
        intermediate=draw(st.integers(1, 33)), vocab_size=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
    )  # fmt: skip
    return checkpoint if draw(st.booleans()) else without_tokenizer(checkpoint)


@hypothesis.given(checkpoints())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> None:
    path = tmp_path_factory.mktemp("round") / "m.tinyloop"
    assert container.write(checkpoint, path) == path
    assert_same(checkpoint, container.read(path))
    assert_same(checkpoint, container.read(path, verify=False))
    about = container.describe(path)
    assert about.config == checkpoint.config
    assert about.file_bytes == path.stat().st_size
    assert about.weights.keys() == checkpoint.weights.keys()


def test_one_group_per_column_and_eight_bits(tmp_path: Path) -> None:
    """GRP-09, and SHP-08: G = K with a K that is no multiple of anything."""
    checkpoint = tiny_checkpoint(hidden=36, group=10**6)
    weights = {**checkpoint.weights, "embed": random_quant_weight(36, 272, 36, seed=1, bits=8, integer_zero=True)}
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    again = container.read(container.write(checkpoint, tmp_path / "m.tinyloop"))
    assert_same(checkpoint, again)
    assert all(isinstance(w, QuantWeight) and w.groups == 1 and w.codes().any() for w in again.weights.values())


def test_transposed_and_shared_tensors_are_written_by_value(tmp_path: Path) -> None:
    dense = tiny_checkpoint(quantized=False, tied=False)
    shared = DenseWeight(dense.weights["embed"].dequantize().t())
    checkpoint = dataclasses.replace(dense, weights={**dense.weights, "embed": shared, "head": shared})
    assert_same(checkpoint, container.read(container.write(checkpoint, tmp_path / "m.tinyloop")))


def test_same_model_same_bytes_and_open_to_any_library(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(bias=True)
    a, b = container.write(checkpoint, tmp_path / "a.tinyloop"), container.write(checkpoint, tmp_path / "b.tinyloop")
    assert a.read_bytes() == b.read_bytes()
    tensors = load_file(a)
    assert torch.equal(tensors["layers.0.attn_qkv.q"], checkpoint.weights["layers.0.attn_qkv"].packed)  # type: ignore[union-attr]
    assert a.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_progress_reaches_the_end(good: Path) -> None:
    seen: list[tuple[int, int]] = []
    container.read(good, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(e - b for _, _, b, e in container.describe(good).tensors.values())


def test_a_file_can_replace_the_one_it_is_mapped_from(tmp_path: Path) -> None:
    path = container.write(tiny_checkpoint(seed=1), tmp_path / "m.tinyloop")
    mapped = container.read(path)
    container.write(mapped, path, overwrite=True)
    assert_same(mapped, container.read(path))
    assert os.listdir(tmp_path) == ["m.tinyloop"]


def test_rows_in_another_order_come_back(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(segments=LOOPED)
    weights = {name: with_random_perm(w) for name, w in checkpoint.weights.items()}
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    assert_same(checkpoint, container.read(container.write(checkpoint, tmp_path / "m.tinyloop")))


@pytest.mark.parametrize("verify", [True, False])
def test_a_perm_that_is_none_is_refused(tmp_path: Path, verify: bool) -> None:
    """Checked even where checksums are not: an index beyond K would read foreign memory."""
    checkpoint = tiny_checkpoint()
    embed = dataclasses.replace(with_random_perm(checkpoint.weights["embed"]), perm=torch.full((64,), 70).int())
    path = container.write(
        dataclasses.replace(checkpoint, weights={**checkpoint.weights, "embed": embed}), tmp_path / "m.tinyloop"
    )
    with pytest.raises(FormatError, match=r"embed: perm is no permutation of 0\.\.63"):
        container.read(path, verify=verify)


# --- deferred weights ---


def outline(w: LinearWeight) -> LinearWeight:
    tensors = {f.name: v.to("meta") for f in dataclasses.fields(w) if isinstance(v := getattr(w, f.name), torch.Tensor)}
    return dataclasses.replace(w, **tensors)  # type: ignore[arg-type]


def test_deferred_weights_are_made_one_ahead_into_the_same_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(bias=True)
    alive: list[list[weakref.ref[Any]]] = []
    ahead = threading.Event()

    def make(name: str) -> LinearWeight:
        assert not [ref for refs in alive[:-1] for ref in refs if ref() is not None], "more than one is still held"
        if alive:
            ahead.set()
        w = checkpoint.weights[name]
        copies = {f.name: v.clone() for f in dataclasses.fields(w) if isinstance(v := getattr(w, f.name), torch.Tensor)}
        made: LinearWeight = dataclasses.replace(w, **copies)  # type: ignore[arg-type]
        alive.append([weakref.ref(t) for t in (made, *copies.values())])
        return made

    def progress(done: int, size: int) -> None:
        assert ahead.wait(60), "the second weight waits for the first to be written"

    outlines = {name: outline(w) for name, w in checkpoint.weights.items()}
    deferred = dataclasses.replace(checkpoint, weights=Deferred(outlines, make))
    assert (deferred.nbytes, len(alive)) == (checkpoint.nbytes, 0)
    path = container.write(deferred, tmp_path / "deferred", progress=progress)
    assert len(alive) == len(checkpoint.weights)
    assert path.read_bytes() == container.write(checkpoint, tmp_path / "whole").read_bytes()
    with pytest.raises(KeyError):
        deferred.weights["nothing"]


def test_deferred_weights_must_be_as_announced(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    outlines = {name: outline(w) for name, w in checkpoint.weights.items()}
    other = random_quant_weight(64, 272, 16, seed=0)
    deferred = Deferred(outlines, lambda name: other if name == "embed" else checkpoint.weights[name])
    with pytest.raises(FormatError, match=r"embed\.scale is F32 \[4, 272\], announced was F32 \[2, 272\]"):
        container.write(dataclasses.replace(checkpoint, weights=deferred), tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_progress_ends_with_every_byte(tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    checkpoint = without_tokenizer(tiny_checkpoint())
    container.write(checkpoint, tmp_path / "m", progress=lambda done, size: ticks.append((done, size)))
    assert ticks[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert ticks == sorted(ticks)


# --- writing: whole or absent ---

KILLED_WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from helpers import tiny_checkpoint
from tinyloop import container
whole, left = container.octets, [3]
def dies(t):  # in the middle of the tensors, some of them on the disk
    if sys._getframe(1).f_code.co_name == "_save":
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return whole(t)
container.octets = dies
container.write(tiny_checkpoint(seed=2), sys.argv[1], overwrite=True)
"""


@pytest.mark.parametrize("existing", [False, True])
def test_killed_writer_leaves_nothing_under_the_name(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "m.tinyloop"
    before = container.write(tiny_checkpoint(seed=1), path).read_bytes() if existing else None
    command = [sys.executable, "-c", KILLED_WRITER, str(path), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    assert [p.name.startswith(".m.tinyloop.") for p in tmp_path.iterdir() if p != path] == [True]
    assert (path.read_bytes() if path.exists() else None) == before
    container.write(tiny_checkpoint(seed=2), path, overwrite=True)
    assert_same(tiny_checkpoint(seed=2), container.read(path))


LARGE: dict[str, Any] = {"hidden": 1024, "intermediate": 4096, "heads": (16, 16), "vocab_size": 40_000}

SLOW_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_container import LARGE
from helpers import tiny_checkpoint
from tinyloop import container
container.write(tiny_checkpoint(**LARGE), sys.argv[1], overwrite=True)
"""


def test_what_appears_under_the_name_is_complete(tmp_path: Path) -> None:
    """The writer is killed the moment that the name shows another file."""
    path = container.write(tiny_checkpoint(seed=1), tmp_path / "m.tinyloop")
    before = path.stat()
    with subprocess.Popen([sys.executable, "-c", SLOW_WRITER, str(path), str(Path(__file__).parent)]) as writer:
        while writer.poll() is None and (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size):
            time.sleep(0.001)
        writer.kill()
    assert path.stat().st_size > 40e6
    assert container.read(path).config.hidden_size == LARGE["hidden"]


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs rights that this user lacks: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=64k"):
        with pytest.raises(InputError, match=r"m\.tinyloop could not be written: .*No space left on device"):
            container.write(tiny_checkpoint(), tmp_path / "m.tinyloop")
        assert not list(tmp_path.iterdir())
        container.write(without_tokenizer(tiny_checkpoint(**SMALL)), tmp_path / "m.tinyloop")


def test_file_size_limit(tmp_path: Path) -> None:
    """What a full disk looks like to a user without the right to mount one."""
    resource = pytest.importorskip("resource", reason="no limits on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match=r"could not be written: .*File too large.*; nothing was left behind"):
            container.write(tiny_checkpoint(), tmp_path / "m.tinyloop")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_read_only_folder(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(InputError, match=r"could not be written: .*Read-only file system"):
        container.write(tiny_checkpoint(), tmp_path / "m.tinyloop")


def test_write_refusals(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(**SMALL)
    path = container.write(checkpoint, tmp_path / "m.tinyloop")
    with pytest.raises(InputError, match=r"m\.tinyloop exists; give another name, or allow overwriting \(--force\)"):
        container.write(checkpoint, path)
    with pytest.raises(InputError, match=r"nowhere is not a folder; make it first"):
        container.write(checkpoint, tmp_path / "nowhere" / "m.tinyloop")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder could not be written"):
        container.write(checkpoint, tmp_path / "folder", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["folder", "m.tinyloop"]


def test_write_refuses_what_a_reader_would(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(**SMALL)
    w = checkpoint.weights["embed"]
    assert isinstance(w, QuantWeight)
    damaged = dataclasses.replace(w, zero=torch.full_like(w.zero, float("inf")))
    with pytest.raises(FormatError, match=r"embed: scale or zero is NaN or infinite"):
        container.write(
            dataclasses.replace(checkpoint, weights={**checkpoint.weights, "embed": damaged}), tmp_path / "m"
        )
    norms = {**checkpoint.norms, "final_norm": checkpoint.norms["final_norm"].double()}
    with pytest.raises(FormatError, match=r"final_norm is torch\.float64; a file holds uint8, int32, float16"):
        container.write(dataclasses.replace(checkpoint, norms=norms), tmp_path / "m")
    assert not list(tmp_path.iterdir())


# --- damage ---


def refuses(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        container.read(path)
    except (FormatError, InputError):  # any other exception is a fault, and escapes
        return True
    return False


def test_every_flipped_bit_is_found(good: Path, tmp_path: Path) -> None:
    """200 places spread over header and tensors, and every byte of the length and of the padding, one bit each."""
    data = good.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    text = data[8:start].rstrip(b" ")
    places = {*range(9), *range(8 + len(text) - 1, start), *range(0, len(data), len(data) // 200)}
    bits = {(place, bit) for place in places for bit in (range(8) if place < 9 else [place % 8])}
    undetected = [
        (place, bit)
        for place, bit in sorted(bits)
        if not refuses(tmp_path / "m", data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
    ]
    assert not undetected


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_any_flipped_bit_is_found(good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    assert refuses(tmp_path_factory.getbasetemp() / "flipped", bytes(content))


def test_any_truncation_or_extension_is_found(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    about = container.describe(good)
    edges = {0, 1, 7, 8, 9, len(data)} | {
        place for _, _, begin, end in about.tensors.values() for place in (begin, end)
    }
    for cut in sorted({cut + shift for cut in edges for shift in (-1, 0, 1)} & set(range(len(data)))):
        assert refuses(tmp_path / "m", data[:cut]), cut
    assert refuses(tmp_path / "m", data + b"\0")


def test_truncation_is_named(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    (tmp_path / "m").write_bytes(data[:6])
    with pytest.raises(FormatError, match=r"m \(6 bytes\) is truncated or not a \.tinyloop file; copy it again"):
        container.read(tmp_path / "m")
    (tmp_path / "m").write_bytes(data[:-1])
    with pytest.raises(FormatError, match=rf"m has {len(data) - 1} bytes, its header says {len(data)}; truncated"):
        container.read(tmp_path / "m")


def test_a_header_length_that_spells_a_magic_is_no_foreign_file(good: Path, tmp_path: Path) -> None:
    """A length whose low bytes are 80 02 is where a pickle's magic would be."""
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")
    longer = length + (0x0280 - length) % 65536
    content = longer.to_bytes(8, "little") + data[8 : 8 + length].ljust(longer) + data[8 + length :]
    assert content[:2] == b"\x80\x02"
    (tmp_path / "m").write_bytes(content)
    assert_same(container.read(good), container.read(tmp_path / "m"))


# --- files that are whole, but wrong ---

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def forge(good: Path, path: Path, edit: Edit) -> Path:
    """A file whose checksums fit, after `edit` changed its metadata (JSON parsed) or its tensors."""
    _, length = container._header(good)
    header = json.loads(good.read_bytes()[8:length])
    fields = {k: json.loads(v) if k in container._FIELDS else v for k, v in header["__metadata__"].items()}
    tensors = load_file(good)
    edit(fields, tensors)
    if "checksums" in fields:
        names = {torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32"}
        for name, t in tensors.items():
            line = f"{names.get(t.dtype, t.dtype)} {list(t.shape)}\n".encode()
            fields["checksums"][name] = hashlib.sha256(line + t.contiguous().numpy().tobytes()).hexdigest()
    fields.pop("metadata_sha256")
    metadata = {k: json.dumps(v) if k in container._FIELDS else v for k, v in fields.items()}
    lines = "".join(f"{k}={v}\n" for k, v in sorted(metadata.items()))
    metadata["metadata_sha256"] = hashlib.sha256(lines.encode()).hexdigest()
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    return path


def segment(i: int, **change: Any) -> Edit:
    def edit(fields: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        fields["model"]["segments"][i].update(change)

    return edit


def cut(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, :-1]


EMBED_NAN = torch.full((2, 20), float("nan"))

WRONG: dict[str, tuple[Edit, str]] = {
    "version": (lambda f, t: f.update(format_version="2"), r"has format version 2; this release reads version 1"),
    "no version": (lambda f, t: f.pop("format_version"), r"has format version None; this release reads version 1"),
    "format": (lambda f, t: f.update(format="other"), r"is a safetensors file, but not a \.tinyloop file; convert it"),
    "metadata key": (lambda f, t: f.update(more="1"), r"metadata key more is missing or not of version 1"),
    "no metadata key": (lambda f, t: f.pop("source"), r"metadata key source is missing or not of version 1"),
    "weights a list": (lambda f, t: f.update(weights=[]), r"m: the description is damaged"),
    "no loop count": (lambda f, t: f["model"]["segments"][1].pop("repeats"), r"segment key repeats is missing"),
    "zero loops": (segment(1, repeats=0), r"segment loop: layers=1, repeats=0; both are whole numbers ≥ 1"),
    "half a loop": (segment(1, repeats=1.5), r"segment loop: layers=1, repeats=1\.5; both are whole numbers ≥ 1"),
    "repeated pre": (segment(0, repeats=2), r"segment pre has repeats=2; only the loop segment repeats"),
    "two segments alike": (segment(0, name="loop"), r"config segments \['loop', 'loop', 'coda'\] must be some of"),
    "unknown segment": (segment(0, name="exit"), r"segment name 'exit' is none of pre, loop, coda"),
    "segment key": (segment(1, adapter=True), r"segment key adapter has no place in this format version"),
    "model key": (lambda f, t: f["model"].update(sandwich=1), r"model key sandwich has no place in this format"),
    "negative epsilon": (lambda f, t: f["model"].update(rms_norm_eps=-1.0), r"rms_norm_eps=-1\.0 must be a number ≥ 0"),
    "source is a list": (lambda f, t: f.update(source=[1]), r"source is \[1\]; it must be an object"),
    "no model key": (lambda f, t: f["model"].pop("sliding_window"), r"model key sliding_window is missing"),
    "rope key": (lambda f, t: f["model"]["rope"].update(theta=1), r"rope key theta has no place"),
    "weight kind": (lambda f, t: f["weights"]["embed"].update(kind="ternary"), r"kind 'ternary' are not known"),
    "weight key": (lambda f, t: f["weights"]["embed"].update(g_idx=1), r"embed: g_idx is missing in the weight's"),
    "no weight key": (lambda f, t: f["weights"]["embed"].pop("bits"), r"embed: bits is missing in the weight's descr"),
    "text for K": (lambda f, t: f["weights"]["embed"].update(K="8"), r"embed: K='8' must be a whole number"),
    "wrong N": (lambda f, t: f["weights"]["embed"].update(N=21), r"embed is K=8, N=20; its description says K=8, N=21"),
    "wrong group": (lambda f, t: f["weights"]["embed"].update(group_size=2), r"embed: scale is .* needs .* \[4, 20\]"),
    "5 bits": (lambda f, t: f["weights"]["embed"].update(bits=5), r"embed: bits=5 is not supported"),
    "no weight": (lambda f, t: f["weights"].pop("embed"), r"tensor embed\.q has no checksum or no place"),
    "vocabulary": (lambda f, t: f["model"].update(vocab_size=21), r"embed .*; the configuration needs K=8, N=21"),
    "missing tensor": (lambda f, t: t.pop("embed.zero"), r"tensor embed\.zero is missing; the file is incomplete"),
    "missing norm": (lambda f, t: t.pop("final_norm"), r"tensor final_norm is missing; the file is incomplete"),
    "missing bias": (lambda f, t: t.pop("layers.0.attn_qkv.bias"), r"tensor layers\.0\.attn_qkv\.bias is missing"),
    "extra tensor": (lambda f, t: t.update(ghost=torch.zeros(3)), r"tensor ghost has no checksum or no place"),
    "reserved channel": (lambda f, t: t.update({"embed.frac4": t["embed.q"].clone()}), r"tensor embed\.frac4 has no"),
    "unchecked tensor": (lambda f, t: f.pop("checksums"), r"metadata key checksums is missing"),
    "NaN in scale": (lambda f, t: t.update({"embed.scale": EMBED_NAN}), r"m: embed: scale or zero is NaN or infinite"),
    "infinite zero": (lambda f, t: t["embed.zero"].fill_(float("inf")), r"m: embed: scale or zero is NaN or infinite"),
    "short codes": (lambda f, t: cut(t, "embed.q"), r"m: embed: scale is .* \[2, 20\]; K=8, N=19, group 5 needs"),
    "float codes": (lambda f, t: t.update({"embed.q": torch.zeros(4, 20)}), r"embed: packed codes are torch\.float32"),
    "integer norm": (lambda f, t: t.update(final_norm=torch.ones(8).byte()), r"final_norm is torch\.uint8 \[8\]"),
    "wide tensor": (lambda f, t: t.update(final_norm=torch.ones(8).double()), r"tensor final_norm is F64 \[8\]"),
    "tokenizer without its tensor": (lambda f, t: f.update(tokenizer={}), r"tensor tokenizer\.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_whole_but_wrong(good: Path, tmp_path: Path, case: str) -> None:
    edit, text = WRONG[case]
    assert_same(container.read(good), container.read(forge(good, tmp_path / "unchanged", lambda f, t: None)))
    path = forge(good, tmp_path / "m", edit)
    with pytest.raises(FormatError, match=text) as raised:
        container.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("shift", [8, -8])
def test_gap_and_overlap(good: Path, tmp_path: Path, shift: int) -> None:
    """The last tensor moved by eight bytes, its content with it, so that only the table is odd."""
    data = good.read_bytes()
    header, base = container._header(good)
    last = max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
    begin, end = header[last]["data_offsets"]
    header[last]["data_offsets"] = [begin + shift, end + shift]
    text = json.dumps(header).encode()
    body = data[base : base + begin + min(shift, 0)] + bytes(max(shift, 0)) + data[base + begin : base + end]
    (tmp_path / "m").write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(
        FormatError, match=rf"m: tensor {last}, .* cannot lie at bytes {begin + shift} to {end + shift}"
    ):
        container.describe(tmp_path / "m")


def test_tokenizer_settings_must_be_complete(tmp_path: Path) -> None:
    whole = container.write(tiny_checkpoint(**SMALL), tmp_path / "whole.tinyloop")
    path = forge(whole, tmp_path / "m", lambda f, t: f["tokenizer"].pop("add_bos"))
    with pytest.raises(FormatError, match=r"m: tokenizer key add_bos is missing or unknown to this version"):
        container.read(path)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), r"is a GGUF file, not a \.tinyloop file; convert it with: tinyloop "),
    "zip": (b"PK\x03\x04" + bytes(64), r"is a zip archive or PyTorch pickle, not a \.tinyloop file"),
    "pickle": (pickle.dumps(list(range(99))), r"is a pickle, not a \.tinyloop file"),
    "text": (b"Once upon a time, there was a file.\n" * 9, r"is truncated or not a \.tinyloop file"),
    "JSON": (b'{"model_type": "llama", "hidden_size": 64}', r"is truncated or not a \.tinyloop file"),
    "empty": (b"", r"\(0 bytes\) is truncated or not a \.tinyloop file"),
    "zeros": (bytes(4096), r"the header is damaged"),
    "a list": ((8).to_bytes(8, "little") + b"[1, 2]  ", r"the header is damaged"),
    "no offsets": ((16).to_bytes(8, "little") + b'{"a":{"b":[1]}} ', r"the header is damaged"),
    "short offsets": ((28).to_bytes(8, "little") + b'{"a":{"data_offsets":[0]}}  ', r"the header is damaged"),
    "metadata a list": ((24).to_bytes(8, "little") + b'{"__metadata__":[1,2,3]}', r"m: the header is damaged"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files(tmp_path: Path, kind: str) -> None:
    content, text = FOREIGN[kind]
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(FormatError, match=text):
        container.read(tmp_path / "m")


def test_plain_safetensors_folder_and_missing(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "m")
    with pytest.raises(FormatError, match=r"is a safetensors file, but not a \.tinyloop file; convert it with"):
        container.read(tmp_path / "m")
    with pytest.raises(InputError, match=r"is a folder; give a \.tinyloop file"):
        container.read(tmp_path)
    with pytest.raises(InputError, match=r"nothing is not there; give a \.tinyloop file"):
        container.read(tmp_path / "nothing")


# --- memory ---

MEASURE = """
import re, sys
from tinyloop import container
def rss(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
path, verify = sys.argv[1], sys.argv[2] == "verify"
container.read(sys.argv[3], verify)  # pays for what is loaded once
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
before = rss("VmRSS")
checkpoint = container.read(path, verify)
print(rss("VmRSS") - before, rss("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    checkpoint = tiny_checkpoint(**LARGE)
    return container.write(checkpoint, tmp_path_factory.mktemp("large") / "large.tinyloop"), checkpoint


def measure(large: Path, verify: str) -> list[int]:
    small = large.with_name("small.tinyloop")
    container.write(tiny_checkpoint(), small, overwrite=True)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux's /proc to measure memory")
    command = [sys.executable, "-c", MEASURE, str(large), verify, str(small)]
    return [int(n) for n in subprocess.run(command, check=True, capture_output=True, timeout=120).stdout.split()]


def test_tensors_are_mapped(large: tuple[Path, Checkpoint]) -> None:
    """Without verify no weight is read: what is resident grows by less than a twentieth of the file."""
    growth, peak = measure(large[0], "no")
    assert large[0].stat().st_size > 40e6
    assert growth <= peak < large[0].stat().st_size / 20


def test_peak_memory_of_a_verified_read(large: tuple[Path, Checkpoint]) -> None:
    path, checkpoint = large
    _, peak = measure(path, "verify")
    assert peak <= checkpoint.nbytes + 1.2 * max(w.nbytes for w in checkpoint.weights.values())
    # Far below that bound: only the parameters that the search for NaN has looked at are resident.
    parameters = sum(2 * w.scale.nbytes for w in checkpoint.weights.values() if isinstance(w, QuantWeight))
    assert peak < parameters + 16e6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["norm", "bias"])
def test_norms_and_biases_are_finite(tmp_path: Path, where: str, bad: float) -> None:
    """Refused when written, by name, and nothing is left."""
    checkpoint = tiny_checkpoint(bias=True)
    t = checkpoint.norms["final_norm"] if where == "norm" else checkpoint.weights["layers.0.attn_qkv"].bias
    name = "final_norm" if where == "norm" else "layers.0.attn_qkv: bias"
    good = float(t[0])
    t[0] = bad
    with pytest.raises(FormatError, match=f"{name} is NaN or infinite"):
        container.write(checkpoint, tmp_path / "a.tinyloop")
    assert not list(tmp_path.iterdir())
    t[0] = good
    container.write(checkpoint, tmp_path / "a.tinyloop")
