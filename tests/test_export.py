"""Export: what comes back by import is what went in, code by code; what a format cannot hold is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tinyloop as tl
from helpers import LOOPED, PLAIN, random_quant_weight, tiny_checkpoint, with_random_channel, with_random_perm
from tinyloop import container
from tinyloop.checkpoint import Checkpoint
from tinyloop.config import Rope
from tinyloop.errors import InputError, UnsupportedError
from tinyloop.importers import import_model
from tinyloop.rope import resolve
from tinyloop.weight import DenseWeight, QuantWeight

FIXTURES = Path(__file__).parent / "fixtures"
LOSSLESS = ("gptq_v2", "compressed-tensors")


def integer_checkpoint(group: int = 32, perm: bool = False, **config: Any) -> Checkpoint:
    """A whole model with integer zero points and fp16 scales; q, k and v share an order."""
    plain = tiny_checkpoint(**{"segments": PLAIN, "tied": False, **config})
    weights: dict[str, Any] = {}
    for i, (name, w) in enumerate(plain.weights.items()):
        if name == "embed":
            weights[name] = DenseWeight(w.dequantize().t().contiguous().half())
            continue
        v = random_quant_weight(w.K, w.N, min(group, w.K), seed=i, integer_zero=True)
        z = -v.zero.float() / v.scale.float()
        scale = v.scale.half().float()
        v = QuantWeight.from_codes(v.codes(), scale, -(z.round() * scale), v.group_size, 4, w.bias, True)
        weights[name] = with_random_perm(v, seed=i) if perm else v
    rope = resolve({"rope_theta": 10000.0}, plain.config.head_dim, plain.config.max_position_embeddings)
    return dataclasses.replace(plain, weights=weights, config=dataclasses.replace(plain.config, rope=rope))


def assert_same_model(a: Checkpoint, b: Checkpoint) -> None:
    """To the bit: codes, parameters, order, biases, norms, description and tokenizer."""
    assert dataclasses.replace(a.config, rope=b.config.rope) == b.config
    assert (a.config.rope.inv_freq, a.config.rope.attention_scaling) == (
        b.config.rope.inv_freq, b.config.rope.attention_scaling)  # fmt: skip
    assert a.tokenizer == b.tokenizer
    for name, w in a.weights.items():
        v = b.weights[name]
        assert type(v) is type(w), name
        for field in dataclasses.fields(w):
            x, y = getattr(w, field.name), getattr(v, field.name)
            if field.name == "perm" and x is not None:
                continue  # rows may be stored in another order within a group
            if field.name == "packed" and getattr(w, "perm", None) is not None:
                x, y = w.codes()[w.perm.argsort()], v.codes()[v.perm.argsort()]
            same = torch.equal(x, y) if isinstance(x, torch.Tensor) and y is not None else x is y or x == y
            assert same, (name, field.name)
        assert torch.equal(w.dequantize(), v.dequantize())
    assert all(torch.equal(t.float(), b.norms[name].float()) for name, t in a.norms.items())


@pytest.mark.parametrize("format", LOSSLESS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"group": 1000}, {"perm": True}, {"segments": LOOPED, "architecture": "tinyloop"}, {"tied": True},
     {"qk_norm": True, "architecture": "qwen3"},
     {"bias": True, "architecture": "qwen2"}, {"sliding_window": (16, 16), "architecture": "mistral"},
     {"sliding_window": (None, 16), "architecture": "qwen2", "bias": True}],
    ids=str,
)  # fmt: skip
def test_export_then_import_is_the_identity(tmp_path: Path, format: str, settings: dict[str, Any]) -> None:
    checkpoint = integer_checkpoint(**settings)
    folder = tl.export(checkpoint, tmp_path / "model", format)
    assert_same_model(checkpoint, import_model(folder))


@pytest.mark.parametrize("format", LOSSLESS)
@pytest.mark.parametrize(
    "kind", ["gptq-sym", "gptq-act-order", "gptq-one-group", "gptqmodel-v1", "awq", "ct-asym", "ct-sym"]
)
def test_what_others_packed_goes_from_one_format_to_another(tmp_path: Path, kind: str, format: str) -> None:
    """GRP-11: zero points 0 and 15 survive every way."""
    checkpoint = import_model(FIXTURES / kind)
    assert_same_model(checkpoint, import_model(tl.export(FIXTURES / kind, tmp_path / "out", format)))


@pytest.mark.parametrize(("kind", "format"), [("gptqmodel-v2", "gptq_v2"), ("ct-asym", "compressed-tensors"),
                                              ("ct-sym", "compressed-tensors")])  # fmt: skip
def test_tensors_are_those_that_the_original_packer_wrote(tmp_path: Path, kind: str, format: str) -> None:
    written = load_file(tl.export(FIXTURES / kind, tmp_path / "out", format) / "model.safetensors")
    original = load_file(FIXTURES / kind / "model.safetensors")
    assert written.keys() == original.keys()
    for name, t in original.items():
        assert written[name].dtype == t.dtype, name
        assert torch.equal(written[name], t), name


@pytest.mark.parametrize(("format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("segments", [PLAIN, LOOPED])
def test_dense_export_rounds_once(tmp_path: Path, format: str, dtype: torch.dtype, segments: Any) -> None:
    checkpoint = integer_checkpoint(segments=segments)
    again = import_model(tl.export(checkpoint, tmp_path / "model", format))
    for name, w in checkpoint.weights.items():
        v = again.weights[name]
        assert isinstance(v, DenseWeight)
        assert torch.equal(v.weight, w.dequantize().to(dtype).t())
    assert again.config.segments == checkpoint.config.segments
    assert again.tokenizer == checkpoint.tokenizer


@pytest.mark.parametrize("format", ["fp16", "gptq_v2"])
def test_transformers_reads_the_configuration(tmp_path: Path, format: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tl.export(integer_checkpoint(), tmp_path / "model", format)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.hidden_size, config.num_key_value_heads) == ("llama", 64, 2)
    if format == "fp16":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = torch.arange(20)[None] + 30
        with torch.no_grad():
            want = model(tokens).logits
        got = tl.Model(import_model(folder), torch.float32).logits(tokens)
        assert float((got - want).norm() / want.norm()) <= 1e-5


def test_groups_of_their_own_are_named(tmp_path: Path) -> None:
    checkpoint = integer_checkpoint()
    w = random_quant_weight(96, 64, 96, seed=9, integer_zero=True)
    scale = w.scale.half().float()
    z = (-w.zero.float() / w.scale.float()).round()
    one = QuantWeight.from_codes(w.codes(), scale, -(z * scale), 96, integer_zero=True)
    dense = DenseWeight(checkpoint.weights["layers.0.mlp_up"].dequantize().t().half())
    weights = {**checkpoint.weights, "layers.1.mlp_down": one, "layers.0.mlp_up": dense}
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    for format in LOSSLESS:
        folder = tl.export(checkpoint, tmp_path / format, format)
        again = import_model(folder)
        assert_same_model(checkpoint, again)
        assert not [note for note in again.notes if "tokenizer" not in note]
    settings = json.loads((tmp_path / "gptq_v2" / "config.json").read_text())["quantization_config"]
    assert settings["dynamic"] == {r"+:^model\.layers\.1\.mlp\.down_proj$": {"group_size": -1},
                                   r"-:^model\.layers\.0\.mlp\.up_proj$": {}}  # fmt: skip


def test_eight_bits_and_embeddings_become_dense_of_the_same_values(tmp_path: Path) -> None:
    checkpoint = integer_checkpoint(tied=True)
    embed = random_quant_weight(64, 272, 32, seed=1, bits=8, integer_zero=True)
    checkpoint = dataclasses.replace(checkpoint, weights={**checkpoint.weights, "embed": embed})
    again = import_model(tl.export(checkpoint, tmp_path / "m", "gptq_v2")).weights["embed"]
    assert isinstance(again, DenseWeight)
    assert torch.equal(again.dequantize(), embed.dequantize())


def refused(checkpoint: Checkpoint, tmp_path: Path, format: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tl.export(checkpoint, tmp_path / "refused", format)
    assert not list(tmp_path.iterdir()), "something was written before the refusal"


def with_weight(name: str, w: Any, **config: Any) -> Checkpoint:
    checkpoint = integer_checkpoint(**config)
    return dataclasses.replace(checkpoint, weights={**checkpoint.weights, name: w})


@pytest.mark.parametrize("format", LOSSLESS)
def test_zeros_that_are_no_steps_are_refused(tmp_path: Path, format: str) -> None:
    odd = with_weight("layers.1.mlp_up", random_quant_weight(64, 96, 32, seed=1))
    refused(odd, tmp_path, format, InputError,
            r"model\.layers\.1\.mlp\.up_proj has \d+ zeros that are no whole number of steps")  # fmt: skip


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    narrow = integer_checkpoint(intermediate=92)
    refused(narrow, tmp_path, "gptq_v2", InputError, r"gate_proj has K=64, N=92; .* must be multiples of 8")
    uneven = with_weight("layers.0.mlp_up", random_quant_weight(64, 96, 24, seed=1, integer_zero=True))
    refused(uneven, tmp_path, "compressed-tensors", InputError, r"up_proj has K=64, no multiple of its group 24")
    wide = with_weight("layers.0.mlp_up", random_quant_weight(64, 96, 32, seed=1, integer_zero=True))
    refused(wide, tmp_path, "gptq_v2", InputError, r"up_proj has scales that fp16 does not hold; export as compressed")
    looped = integer_checkpoint(segments=LOOPED)
    channel = with_random_channel(looped.weights["layers.1.mlp_up"], "frac4")
    looped = dataclasses.replace(looped, weights={**looped.weights, "layers.1.mlp_up": channel})
    refused(looped, tmp_path, "gptq_v2", InputError, r"up_proj has the channel frac4, which no other format holds")
    large = with_weight("layers.0.mlp_up", DenseWeight(torch.full((96, 64), 1e5)))
    refused(large, tmp_path, "fp16", InputError, r"up_proj has values that fp16 does not hold; export as bf16")


def test_wide_scales_go_to_compressed_tensors(tmp_path: Path) -> None:
    wide = with_weight("layers.0.mlp_up", random_quant_weight(64, 96, 32, seed=1, integer_zero=True))
    assert_same_model(wide, import_model(tl.export(wide, tmp_path / "m", "compressed-tensors")))


def test_what_config_json_has_no_words_for_is_refused(tmp_path: Path) -> None:
    def changed(**config: Any) -> Checkpoint:
        plain = integer_checkpoint()
        return dataclasses.replace(plain, config=dataclasses.replace(plain.config, **config))

    refused(
        changed(architecture="gpt9"),
        tmp_path,
        "bf16",
        UnsupportedError,
        "architecture 'gpt9' has no Hugging Face layout",
    )
    rope = Rope((1.0, 0.5), source={"rope_theta": 10000.0})
    refused(changed(rope=rope), tmp_path, "bf16", UnsupportedError, "the model's rotation has no recipe")
    refused(
        changed(sliding_window=(16, 16)), tmp_path, "bf16", UnsupportedError, "sliding windows do not go with .* llama"
    )
    refused(integer_checkpoint(bias=True, architecture="mistral"), tmp_path, "bf16", UnsupportedError,
            "biases of attn_qkv do not go with model_type mistral")  # fmt: skip
    refused(integer_checkpoint(architecture="mistral", sliding_window=(16, None)), tmp_path, "bf16", UnsupportedError,
            "differ between layers; model_type mistral has one for all")  # fmt: skip


def test_targets(tmp_path: Path) -> None:
    checkpoint = integer_checkpoint()
    file = container.write(checkpoint, tmp_path / "m.tinyloop")
    folder = tl.export(file, tmp_path / "out", "compressed-tensors")
    with pytest.raises(InputError, match=r"out exists; give another name"):
        tl.export(file, folder, "bf16")
    tl.export(file, folder, "bf16", overwrite=True)
    assert isinstance(import_model(folder).weights["layers.0.mlp_up"], DenseWeight)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"out also holds thesis\.txt, which no export wrote; give another name"):
        tl.export(file, folder, "bf16", overwrite=True)
    assert (folder / "thesis.txt").read_text() == "mine"
    with pytest.raises(InputError, match=r"m\.tinyloop is a file; give the name of a folder"):
        tl.export(checkpoint, file, overwrite=True)
    with pytest.raises(InputError, match=r"nowhere is not a folder; make it first"):
        tl.export(checkpoint, tmp_path / "nowhere" / "out")
    with pytest.raises(InputError, match=r"format='gguf' is none of gptq_v2, compressed-tensors, fp16, bf16"):
        tl.export(checkpoint, tmp_path / "other", "gguf")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m.tinyloop", "out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinyloop.safefile.write", full)
    with pytest.raises(
        InputError, match=r"out could not be written: .*No space left on device; nothing was left behind"
    ):
        tl.export(integer_checkpoint(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_into_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = integer_checkpoint()
    folder = tmp_path / "here"
    folder.mkdir()
    for _ in range(2):  # an empty one, and then its own export
        monkeypatch.chdir(folder)
        assert tl.export(checkpoint, ".", overwrite=True) == Path()
        assert_same_model(import_model(folder), checkpoint)


def test_a_folder_that_cannot_be_replaced_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    folder, replace = tmp_path / "out", os.replace
    tl.export(integer_checkpoint(), folder, "bf16")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def refuse(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError("the disk says no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="the disk says no; nothing was left behind"):
        tl.export(integer_checkpoint(), folder, "fp16", overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    tl.export(integer_checkpoint(), real, "bf16")
    link.symlink_to(real)
    tl.export(integer_checkpoint(), link, "fp16", overwrite=True)
    assert not link.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"real", "link"}
    assert json.loads((real / "config.json").read_text())["torch_dtype"] == "bfloat16"
