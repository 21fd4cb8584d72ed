"""ONNX folders that onnxruntime-genai's builder made: weights and logits against onnxruntime, refusals by text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tinyloop.errors import FormatError, TinyLoopError, UnsupportedError
from tinyloop.importers import import_model
from tinyloop.model import Model
from tinyloop.weight import DenseWeight, QuantWeight

onnx = pytest.importorskip("onnx", reason="onnx is in the extra onnx")
FIXTURES = Path(__file__).parent / "fixtures" / "onnx"
sys.path.insert(0, str(FIXTURES.parent))
import make_checkpoints as made  # noqa: E402


@pytest.mark.parametrize("kind", made.ONNX)
def test_weights_and_logits_are_onnxruntime_s(kind: str) -> None:
    checkpoint, expected = import_model(FIXTURES / kind), load_file(FIXTURES / f"{kind}.safetensors")
    qkv = checkpoint.weights["layers.0.attn_qkv"]
    assert isinstance(qkv, QuantWeight)
    assert (qkv.K, qkv.group_size, qkv.integer_zero) == (32, 16, True)
    W, want = qkv.dequantize(), expected[f"{made.KEPT}.weight"].t()
    # Scales are fp32, so −z·scale is rounded once; for z = 8 it is exact.
    step = qkv.scale.float().abs().repeat_interleave(16, dim=0)
    assert ((W - want).abs() <= (0 if kind == "sym" else 2**-23) * 16 * step).all()
    z = -qkv.zero.float() / qkv.scale.float()
    assert torch.equal(z.round(), torch.full_like(z, 8)) == (kind == "sym")
    embedding = checkpoint.weights["embed"]
    assert isinstance(embedding, QuantWeight if kind == "sym" else DenseWeight)
    assert (qkv.bias is not None) == checkpoint.config.tie_word_embeddings == (kind == "sym")
    assert all(isinstance(w, QuantWeight) for name, w in checkpoint.weights.items() if name != "embed")
    assert checkpoint.source["quantisation"] == "onnx"
    logits = Model(checkpoint, torch.float32).logits(made.TOKENS)
    assert float((logits - expected["logits"]).norm() / expected["logits"].norm()) < 1e-6


def changed(kind: str, to: Path, change: Callable[[Any], Any]) -> Path:
    """A copy of a folder with its graph changed."""
    shutil.copytree(FIXTURES / kind, to, dirs_exist_ok=True)
    model = onnx.load(to / "model.onnx", load_external_data=False)
    change(model.graph)
    (to / "model.onnx").write_bytes(model.SerializeToString())
    return to


def refused(folder: Path, error: type[TinyLoopError], text: str) -> None:
    with pytest.raises(error, match=text):
        import_model(folder)


def operator(graph: Any, name: str = "down_proj") -> Any:
    return next(n for n in graph.node if n.op_type == "MatMulNBits" and name in n.name)


def attribute(name: str, value: int) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        node = operator(graph)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return change


def tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda graph: change(next(t for t in graph.initializer if name in t.name))


def as_type(data_type: int) -> Callable[[Any], None]:
    """Another type, with no length that would contradict it."""

    def change(t: Any) -> None:
        t.data_type = data_type
        kept = [e for e in t.external_data if e.key != "length"]
        del t.external_data[:]
        t.external_data.extend(kept)

    return change


def inside(t: Any) -> None:
    t.data_location = 0
    t.raw_data = bytes(4096)
    del t.external_data[:]


def exchanged(*places: int) -> Callable[[Any], None]:
    """Inputs of gate and up, one for the other."""

    def change(graph: Any) -> None:
        gate, up = operator(graph, "gate_proj"), operator(graph, "up_proj")
        for i in places:
            gate.input[i], up.input[i] = up.input[i], gate.input[i]

    return change


def place(key: str, value: str) -> Callable[[Any], None]:
    def change(t: Any) -> None:
        next(e for e in t.external_data if e.key == key).value = value

    return tensor("down_proj.MatMul.weight_Q4", change)


@pytest.mark.parametrize(("change", "error", "text"), [
    (attribute("bits", 8), UnsupportedError, r"down_proj/MatMul_Q4: bits=8, K=64, block_size=16"),
    (attribute("weight_prepacked", 1), UnsupportedError, r"weight_prepacked=1.* not prepacked"),
    (attribute("K", 60), UnsupportedError, r"K=60, block_size=16.* whole blocks"),
    (attribute("K", 32), FormatError, r"weight '.*down_proj.*' is \[32, 4, 8\]; K=32, N=32 need \[32, 2, 8\]"),
    (attribute("N", 16), FormatError, r"K=64, N=16 need \[16, 4, 8\]"),
    (lambda g: operator(g).input.extend(["order"]), UnsupportedError, r"more inputs \['order'\].* without g_idx"),
    (lambda g: operator(g).input.pop(), UnsupportedError, r"1 tensors have no place .* is .*down_proj\..*zero_points"),
    (lambda g: operator(g).input.__setitem__(2, "lost"), FormatError, r"scales 'lost' is None"),
    (place("offset", "99999"), FormatError, r"model\.onnx\.data does not hold tensor .*down_proj.*; it is truncated"),
    (place("offset", "-1"), FormatError, r"model\.onnx\.data does not hold tensor"),
    (place("location", str(FIXTURES / "asym" / "model.onnx.data")), FormatError, r"is no file of this folder"),
    (place("location", "other.data"), FormatError, r"is in 'other\.data', which is no file of this folder"),
    (place("length", "7"), FormatError, r"weight_Q4 has length '7'; U8 \[32, 4, 8\] is 1024 bytes"),
    (place("length", "x"), FormatError, r"weight_Q4 has length 'x'"),
    *((exchanged(i), FormatError, r"gate_proj/MatMul_Q4 takes codes, .* of \S+gate_proj and \S+up_proj; those of one")
      for i in (1, 2, 3)),
    *((tensor(name, inside), UnsupportedError, rf"{name}\S* is stored in the graph itself; read are tensors in a file")
      for name in ("down_proj.MatMul.weight_scales", "input_layernorm", "embed_tokens")),
    (tensor("down_proj.MatMul.weight_Q4", as_type(1)), FormatError,
     r"does not hold tensor .*down_proj"),
    (tensor("down_proj.MatMul.weight_scales", as_type(2)), FormatError,
     r"down_proj\.scales is torch\.uint8 \[32, 4\]"),
    (tensor("qkv_proj.MatMul.weight_scales", lambda t: setattr(t, "name", "val_7")), FormatError,
     r"scales '.*' is None"),
    (tensor("embed_tokens", lambda t: setattr(t, "name", "lm_head.MatMul.weight")), UnsupportedError,
     r"lm_head\.MatMul\.weight is dense; read are graphs of which every linear is MatMulNBits"),
    (tensor("final_norm", lambda t: setattr(t, "name", "val_7")), FormatError, r"model\.norm\.weight is missing"),
])  # fmt: skip
def test_graphs_that_are_not_read(change: Callable[[Any], None], error: Any, text: str, tmp_path: Path) -> None:
    refused(changed("asym", tmp_path, change), error, text)


def test_heads_that_do_not_fit_q_k_and_v(tmp_path: Path) -> None:
    folder = changed("asym", tmp_path, lambda graph: None)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_attention_heads": 3, "head_dim": 16}))
    refused(folder, FormatError, r"qkv_proj\.weight has 64 rows; the configuration has .*'q_proj': 3.* heads")


def test_folders_around_a_graph(tmp_path: Path) -> None:
    folder = changed("sym", tmp_path, lambda graph: None)
    (folder / "config.json").rename(folder / "kept")
    refused(folder, FormatError, r"no model that can be imported: the folder has no config\.json, but model\.onnx")
    (folder / "kept").rename(folder / "config.json")
    (folder / "model.onnx").write_bytes(b"\xff" * 100)
    refused(folder, FormatError, r"model\.onnx is truncated or no ONNX file")
    (folder / "model.onnx").write_bytes(b"")
    refused(folder, FormatError, r"model\.onnx has 0 bytes and no operator; it is truncated, copy it again")
    (folder / "more.onnx").write_bytes(b"")
    refused(folder, UnsupportedError, r"has 2 graphs, model\.onnx and more\.onnx; keep the model's only")
    (folder / "more.onnx").unlink()
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").mkdir()
    refused(folder, FormatError, r"model\.onnx is no file; give the folder that holds the graph itself")
    (folder / "model.onnx").rmdir()
    refused(folder, FormatError, r"has neither model\.safetensors nor")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(FIXTURES / "sym", UnsupportedError, r"reading it needs a package: pip install tinyloop\[onnx\]")
