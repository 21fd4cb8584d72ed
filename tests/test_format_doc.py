"""docs/format.md against the writer: its tables, its example, and a reader written from the page alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import LOOPED, PLAIN, random_quant_weight, tiny_checkpoint, with_random_channel, with_random_perm
from tinyloop import channel, container
from tinyloop.checkpoint import Checkpoint
from tinyloop.weight import QuantWeight

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text("utf-8")


def table(section: str, first: str) -> list[list[str]]:
    """Rows of the table under a heading whose first header cell is `first`; backticks removed."""
    body = re.split(r"^##+ ", PAGE.split(f"# {section}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    lines = body.split(f"| {first} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def column(section: str, first: str) -> list[str]:
    return [row[0] for row in table(section, first)]


@dataclasses.dataclass
class Raw:
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, list[int], bytes]]

    def json(self, key: str) -> Any:
        return json.loads(self.metadata[key])


def read_raw(path: Path) -> Raw:
    """Sections "Container" and "Checksums" of the page, word for word."""
    data = path.read_bytes()
    (H,) = struct.unpack("<Q", data[:8])
    assert data[8:9] == b"{"
    assert H % 8 == 0
    header = json.loads(data[8 : 8 + H].decode("utf-8"))
    metadata = header.pop("__metadata__")
    lines = "".join(f"{key}={metadata[key]}\n" for key in sorted(metadata) if key != "metadata_sha256")
    assert metadata["metadata_sha256"] == hashlib.sha256(lines.encode("utf-8")).hexdigest()
    tensors, offset = {}, 0
    for name, t in header.items():
        begin, end = t["data_offsets"]
        assert begin == offset
        offset = end
        tensors[name] = (t["dtype"], t["shape"], data[8 + H + begin : 8 + H + end])
        line = f"{t['dtype']} [{', '.join(map(str, t['shape']))}]\n".encode()
        assert json.loads(metadata["checksums"])[name] == hashlib.sha256(line + tensors[name][2]).hexdigest()
    assert 8 + H + offset == len(data)
    return Raw(metadata, tensors)


def array(raw: Raw, name: str) -> np.ndarray[Any, Any]:
    dtype, shape, data = raw.tensors[name]
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, {"U8": "u1", "I32": "<i4", "F16": "<f2", "F32": "<f4"}[dtype]).reshape(shape)


def nibbles(packed: np.ndarray[Any, Any], K: int) -> np.ndarray[Any, Any]:
    both = np.empty((2 * packed.shape[0], packed.shape[1]), np.uint8)
    both[0::2], both[1::2] = packed & 15, packed >> 4
    assert not both[K:].any()
    return both[:K]


def place_hash(k: int, n: int, N: int) -> int:
    """Section "Cross-iteration rounding", one place at a time."""
    h = (k * N + n) % 2**32
    h ^= h >> 16
    h = h * 0x7FEB352D % 2**32
    h ^= h >> 15
    h = h * 0x846CA68B % 2**32
    return h ^ h >> 16


def channel_steps(kind: str, packed: np.ndarray[Any, Any], spec: dict[str, Any], i: int) -> np.ndarray[Any, Any]:
    """The same section: what iteration i adds to q, int [K, N]."""
    step = np.zeros((spec["K"], spec["N"]), int)
    for k, n in np.ndindex(step.shape):
        h = place_hash(k, n, spec["N"])
        if kind == "frac4":
            f = int(packed[k // 2, n]) >> 4 * (k % 2) & 15
            step[k, n] = (f > (h + i * 0x9E3779B9) % 2**32 // 2**28) - (f >= 8)
        else:
            b = int(packed[k // 8, n]) >> k % 8 & 1
            step[k, n] = i % 2 * (b if h < 2**31 else -b)
    return step


def weight(raw: Raw, name: str, iteration: int | None = None) -> np.ndarray[Any, Any]:
    """Section "Tensors": W [K, N] in fp32, without its channel or as of a loop iteration."""
    spec = raw.json("weights")[name]
    if spec["kind"] == "dense":
        return array(raw, f"{name}.weight").astype(np.float32).T
    q = array(raw, f"{name}.q")
    if spec["bits"] == 4:
        q = nibbles(q, spec["K"])
    if spec["channel"] and iteration is not None:
        q = q + channel_steps(spec["channel"], array(raw, f"{name}.{spec['channel']}"), spec, iteration)
        assert 0 <= q.min() <= q.max() <= 15
    g = np.arange(spec["K"]) // spec["group_size"]
    scale, zero = (array(raw, f"{name}.{part}").astype(np.float32)[g] for part in ("scale", "zero"))
    rows = q.astype(np.float32) * scale + zero
    if f"{name}.perm" not in raw.tensors:
        return rows
    W = np.empty_like(rows)
    W[array(raw, f"{name}.perm")] = rows
    return W


def with_every_tensor() -> Checkpoint:
    """Affine weights of 4 and 8 bits, odd K, both channels, rows in another order, a dense one, biases, norms of every
    kind, a tokenizer."""
    checkpoint = tiny_checkpoint(segments=LOOPED, bias=True, qk_norm=True, tied=False, hidden=36, intermediate=51)
    weights = dict(checkpoint.weights)
    weights["embed"] = random_quant_weight(36, 272, 20, seed=1, bits=8, integer_zero=True)
    for name, kind in (("mlp_down", "frac4"), ("attn_qkv", "frac4"), ("mlp_up", "sign_bit"), ("attn_out", "sign_bit")):
        weights[f"layers.1.{name}"] = with_random_channel(weights[f"layers.1.{name}"], kind)
    weights["layers.0.mlp_down"] = with_random_perm(weights["layers.0.mlp_down"])
    weights["head"] = tiny_checkpoint(quantized=False, tied=False, hidden=36, dtype=torch.bfloat16).weights["head"]
    return dataclasses.replace(checkpoint, weights=weights)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Raw]:
    checkpoint = with_every_tensor()
    return checkpoint, read_raw(container.write(checkpoint, tmp_path_factory.mktemp("doc") / "m.tinyloop"))


def test_metadata_keys_are_those_of_the_page(written: tuple[Checkpoint, Raw]) -> None:
    raw = written[1]
    rows = table("Metadata", "key")
    assert sorted(raw.metadata) == sorted(row[0] for row in rows)
    for key, kind, value in rows:
        if kind == "JSON":
            json.loads(raw.metadata[key])
        elif key != "metadata_sha256":
            assert raw.metadata[key] == value


def test_inner_keys_are_those_of_the_page(written: tuple[Checkpoint, Raw]) -> None:
    raw = written[1]
    model = raw.json("model")
    rows = {row[0]: row[1] for row in table("`model`", "key")}
    assert sorted(model) == sorted(rows)
    for key, values in (("segments", model["segments"][0]), ("rope", model["rope"])):
        named = re.search(r"\{(.*)\}", rows[key])
        assert named
        assert sorted(values) == sorted(re.findall(r'"(\w+)"', named[1]))
    assert sorted(raw.json("tokenizer")) == sorted(column("`tokenizer`", "key"))
    kinds = {row[0]: sorted(row[1].split(", ")) for row in table("`weights`", "kind")}
    for name, spec in raw.json("weights").items():
        assert sorted(spec) == kinds[spec["kind"]], name
    assert {spec["kind"] for spec in raw.json("weights").values()} == kinds.keys()


def test_weight_names_are_those_of_the_page(written: tuple[Checkpoint, Raw]) -> None:
    text = PAGE.split("### `weights`\n", 1)[1].split("|", 1)[0]
    listed = [n for n in re.findall(r"`([\w.]+)`", text) if n in ("embed", "head") or n.startswith("layers.i.")]
    assert {re.sub(r"\.\d+\.", ".i.", name) for name in written[0].weights} == set(listed)


def test_tensors_are_those_of_the_page(written: tuple[Checkpoint, Raw]) -> None:
    """Each written tensor matches one row in name, dtype and shape, and no row goes unused."""
    raw, config = written[1], written[0].config
    unused = {tuple(row) for row in table("Tensors", "tensor")}
    rows = list(unused)
    for name, (dtype, shape, data) in raw.tensors.items():
        owner = name.rsplit(".", 1)[0]
        spec = raw.json("weights").get(owner)
        pattern = name.replace(owner, "{weight}") if spec else re.sub(r"\.\d+\.", ".i.", name)
        kind = f"{spec['kind']}, {spec['bits']} bits" if spec and pattern.endswith(".q") else ""
        (row,) = [r for r in rows if r[0] == pattern and kind in r[1]]
        sizes = {"D": config.hidden_size, "head_dim": config.head_dim, "bytes": len(data)} | (spec or {})
        if spec and spec["kind"] == "affine":
            sizes |= {
                "⌈K/2⌉": -(-spec["K"] // 2),
                "⌈K/8⌉": -(-spec["K"] // 8),
                "⌈K/G⌉": -(-spec["K"] // spec["group_size"]),
            }
        wanted = [sizes[part] for part in row[3].split("]")[0].strip("[ ").split(", ")]
        assert shape == wanted, name
        allowed = row[2] if row[2] != "as scale" else raw.tensors[f"{owner}.scale"][0]
        assert dtype in allowed, name
        unused.discard(row)
    assert not unused


@pytest.mark.parametrize(
    "build",
    [
        with_every_tensor,
        lambda: tiny_checkpoint(segments=PLAIN, group=64),
        lambda: tiny_checkpoint(quantized=False, dtype=torch.float16),
    ],
)
def test_reader_written_from_the_page_agrees(tmp_path: Path, build: Callable[[], Checkpoint]) -> None:
    checkpoint = build()
    raw = read_raw(container.write(checkpoint, tmp_path / "m.tinyloop"))
    for name, w in checkpoint.weights.items():
        assert np.array_equal(weight(raw, name), w.dequantize().numpy()), name
        for i in range(5) if isinstance(w, QuantWeight) and w.channel else ():
            assert np.array_equal(weight(raw, name, i), w.rounding(i).dequantize().numpy()), (name, i)
        if w.bias is not None:
            assert np.array_equal(array(raw, f"{name}.bias"), w.bias.numpy()), name
    for name, norm in checkpoint.norms.items():
        assert np.array_equal(array(raw, name), norm.numpy()), name
    assert checkpoint.tokenizer is not None
    assert raw.tensors["tokenizer.json"][2].decode("utf-8") == checkpoint.tokenizer.json
    segments_read = [(s["name"], s["layers"], s["repeats"]) for s in raw.json("model")["segments"]]
    assert segments_read == [dataclasses.astuple(s) for s in checkpoint.config.segments]


def test_example_is_what_the_code_makes() -> None:
    values = {row[0]: [float(cell) for cell in row[1:]] for row in table("Example", "row")}
    q = torch.tensor([values[f"q[{k}]"] for k in range(3)]).to(torch.uint8)
    scale, zero = (torch.tensor([values[f"{part}[{g}]"] for g in range(2)]) for part in ("scale", "zero"))
    w = QuantWeight.from_codes(q, scale, zero, 2)
    assert w.dequantize().tolist() == [values[f"W[{k}]"] for k in range(3)]
    tensors = {"example.q": w.packed, "example.scale": w.scale, "example.zero": w.zero}
    names = {torch.uint8: "U8", torch.float16: "F16"}
    for name, shown, octets in table("Example", "tensor"):
        t = tensors.pop(name)
        assert shown == f"{names[t.dtype]} {list(t.shape)}"
        assert octets == t.numpy().tobytes().hex(" ")
    assert not tensors
    (checksum,) = re.findall(r"`([0-9a-f]{64})`", PAGE)
    assert checksum == hashlib.sha256(b"U8 [2, 2]\n" + w.packed.numpy().tobytes()).hexdigest()


def test_example_with_channels_is_what_the_code_makes() -> None:
    rows = {row[0]: [int(cell) for cell in row[1:]] for row in table("Example with channels", "row")}
    plain = {row[0]: [float(cell) for cell in row[1:]] for row in table("Example", "row")}
    q = torch.tensor([plain[f"q[{k}]"] for k in range(3)]).to(torch.uint8)
    w = QuantWeight.from_codes(q, torch.ones(2, 2), torch.zeros(2, 2), 2)
    packed = {name: octets for name, _, octets in table("Example with channels", "tensor")}
    for kind, letter in (("frac4", "f"), ("sign_bit", "b")):
        values = torch.tensor([rows[f"{letter}[{k}]"] for k in range(3)], dtype=torch.uint8)
        v = w.with_channel(kind, values)
        assert packed[f"example.{kind}"] == getattr(v, kind).numpy().tobytes().hex(" ")
        shown = [re.fullmatch(rf"{kind}, i = (\d), k = (\d)", row) for row in rows]
        for i, k in ((int(m[1]), int(m[2])) for m in shown if m):
            assert v.rounding(i).codes()[k].tolist() == rows[f"{kind}, i = {i}, k = {k}"]
    (listed,) = re.findall(r"h of places (.*?): ((?:\w{8}(?:, )?)+)", PAGE)
    places = [tuple(map(int, place)) for place in re.findall(r"\((\d), (\d)\)", listed[0])]
    assert [f"{place_hash(k, n, 2):08x}" for k, n in places] == listed[1].split(", ")
    assert [f"{channel.hashes(k, k + 1, 2)[0, n]:08x}" for k, n in places] == listed[1].split(", ")


def test_bounds_of_the_golden_sequence_are_those_of_the_page() -> None:
    """Over a grid of offsets that meets every interval of 2²⁰, the largest |Σ codes − n·mean| for each n."""
    h = np.arange(0, 2**32, 2**20, dtype=np.uint64)
    total, worst = np.zeros((16, h.size)), {}
    f = np.arange(16)[:, None]
    for n in range(1, 65):
        theta = (h + (n - 1) * 0x9E3779B9) % 2**32 >> 28
        total += f > theta
        worst[n] = np.abs(total - n * f / 16).max()
    assert max(worst[n] for n in (1, 8, 16)) <= 1
    assert max(worst[2], worst[4]) <= 1.5
    assert 2.4 <= max(worst.values()) <= 2.5
