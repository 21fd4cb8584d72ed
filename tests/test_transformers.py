"""`transformers` models on our weights: from a file, by quantising in place, saved and loaded again, evaluated by code
of others, with adapters on top. Models are random and tiny; nothing is downloaded."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tinyloop as tl
from helpers import LOOPED, PLAIN, VOCAB, tiny_checkpoint, with_random_perm
from tinyloop.quantize import Calibration, nearest

transformers = pytest.importorskip("transformers", reason="transformers is in the extra transformers")
Tensor = torch.Tensor
ROOT = Path(__file__).parents[1]
SPEC = tl.QuantSpec(group_size=32)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def llama(tied: bool = True, seed: int = 0, kind: str = "Llama", **config: Any) -> Any:
    """A random model of the shape of `tiny_checkpoint(segments=PLAIN)`; its block's inputs have unequal energies."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
             "initializer_range": 0.15, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 1,
             "pad_token_id": 0}  # fmt: skip
    made = getattr(transformers, f"{kind}Config")(**sizes | config)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.copy_(torch.exp(torch.randn(p.shape)))
    return model


def tokens(rows: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def error(y: Tensor, exact: Tensor) -> float:
    return float((y - exact).norm() / exact.norm())


# ── a file into a model ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_file_s_weights_in_a_model(tied: bool, quantized: bool, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(segments=PLAIN, tied=tied, quantized=quantized)
    model, ids = llama(tied), tokens()
    tl.load_into(model, tl.save(checkpoint, tmp_path / "m.tinyloop"))
    wanted = tl.Model(checkpoint, dtype=torch.float32).logits(ids)
    assert error(logits(model, ids), wanted) < 1e-5
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(isinstance(m, tl.QuantLinear) == quantized for m in linears)
    assert isinstance(model.get_input_embeddings(), tl.QuantEmbedding) == quantized
    if quantized and tied:  # one weight, read by both
        assert model.lm_head.q.data_ptr() == model.model.embed_tokens.q.data_ptr()
        assert not model.config.tie_word_embeddings


@pytest.mark.parametrize(("kind", "config", "about"), [
    ("Qwen2", {}, {"bias": True}), ("Qwen3", {"head_dim": 16}, {"qk_norm": True}),
    ("Mistral", {"sliding_window": 8}, {"sliding_window": (8, 8)}),
])  # fmt: skip
def test_other_families(kind: str, config: dict[str, Any], about: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(segments=PLAIN, **about)
    model = llama(kind=kind, **config)
    tl.load_into(model, checkpoint)
    assert error(logits(model, tokens()), tl.Model(checkpoint, dtype=torch.float32).logits(tokens())) < 1e-5


def test_a_model_that_does_not_fit_is_left_as_it_was() -> None:
    checkpoint = tiny_checkpoint(segments=PLAIN)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"intermediate_size": 128}, r"intermediate_size is 128 in the model, 96 in the file"),
        ({"num_hidden_layers": 3}, r"the model has 3 layers, the file 2"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, r"the model rotates by .*500"),
        ({"attention_bias": True}, r"q_proj has a bias in the model only"),
    ]
    for config, message in cases:
        model = llama(**config)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(tl.InputError, match=message):
            tl.load_into(model, checkpoint)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with pytest.raises(tl.UnsupportedError, match=r"the file's model loops \(loops=3\)"):
        tl.load_into(llama(), tiny_checkpoint(segments=LOOPED))
    with pytest.raises(tl.InputError, match=r"hf_model is Linear; give a causal model of transformers"):
        tl.load_into(nn.Linear(2, 2), checkpoint)
    with pytest.raises(tl.InputError, match=r"source=3 is int; give the path of a .tinyloop file, or a Checkpoint"):
        tl.load_into(llama(), 3)  # type: ignore[arg-type]


# ── quantising in place ────────────────────────────────────────────────────────────────────────────────────────────


def test_rounding_in_place() -> None:
    model, dense = llama(), llama()
    reports = tl.quantize_(model, SPEC, rules=[("*.layers.1.mlp.down_proj", None), ("*v_proj", tl.QuantSpec(16))])
    assert len(reports) == 13
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    v = model.model.layers[0].self_attn.v_proj
    assert v.group_size == 16
    wanted = nearest(dense.model.layers[0].self_attn.v_proj.weight.detach().t(), tl.QuantSpec(16))
    assert torch.equal(v.q, wanted.packed)
    assert error(logits(model, tokens()), logits(densified(model), tokens())) < 1e-5


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_model_in_bf16_gets_scales_that_bf16_holds(calibrated: bool) -> None:
    for dtype, coarse in ((torch.float32, False), (torch.bfloat16, True)):
        model = llama().to(dtype)
        tl.quantize_(model, SPEC, tokens(4, 16) if calibrated else None)
        scale = model.model.layers[0].mlp.down_proj.quant_weight.scale
        assert torch.equal(scale.bfloat16().float(), scale.float()) == coarse


def test_gptq_in_place_beats_rounding() -> None:
    """On tokens it did not see; and its layers' own losses are told."""
    dense, rounded, calibrated = llama(), llama(), llama()
    tl.quantize_(rounded, SPEC)
    reports = tl.quantize_(calibrated, SPEC, tokens(32, 64, seed=1))
    assert [r.name for r in reports[:4]] == [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
    assert all(r.relative_loss is not None and 0 < r.relative_loss < 0.05 and r.note is None for r in reports)
    exact = logits(dense, tokens(8, 64, seed=2))
    assert error(logits(calibrated, tokens(8, 64, seed=2)), exact) < 0.9 * error(
        logits(rounded, tokens(8, 64, seed=2)), exact
    )


def test_layers_that_share_an_input_are_calibrated_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four inputs in a block: of q, k and v; of o; of gate and up; of down. Each is added up once a text."""
    from tinyloop import hf_quantize

    added: list[int] = []
    real = hf_quantize.add_outer
    monkeypatch.setattr(hf_quantize, "add_outer", lambda H, x: (added.append(len(H)), real(H, x)))
    tl.quantize_(llama(), SPEC, tokens(3, 8))
    assert added == 2 * (9 * [64] + 3 * [96])


def test_gptq_sees_the_inputs_that_a_layer_really_gets() -> None:
    """down_proj of block 1, by hand: from the model whose other layers are already quantised."""
    ids = tokens(4, 16)
    model, other = llama(), llama()
    tl.quantize_(model, SPEC, ids)
    tl.quantize_(other, SPEC, ids, rules=[("*.layers.1.mlp.down_proj", None)])
    H, down = torch.zeros(96, 96), other.model.layers[1].mlp.down_proj

    def add(m: nn.Module, args: tuple[Tensor, ...]) -> None:
        H.add_(args[0].reshape(-1, 96).t() @ args[0].reshape(-1, 96))

    down.register_forward_pre_hook(add)
    for row in ids:
        logits(other, row[None])
    wanted = tl.gptq_quantize(down.weight.detach().t(), H, SPEC)
    got = model.model.layers[1].mlp.down_proj.quant_weight
    assert float((got.codes() != wanted.codes()).float().mean()) < 0.01  # sums of H in another order


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("chosen", ["both", "head", "embedding"])
@pytest.mark.parametrize("tied", [True, False])
def test_imp08_head_and_embedding(tied: bool, chosen: str, calibrated: bool) -> None:
    rules = [
        (name, SPEC) for name, of in (("lm_head", "head"), ("*embed_tokens", "embedding")) if chosen in (of, "both")
    ]
    model, dense, ids = llama(tied), llama(tied), tokens()
    before = dense.lm_head.weight.detach().clone()
    tl.quantize_(model, SPEC, tokens(8, 32) if calibrated else None, rules=rules)
    assert isinstance(model.lm_head, tl.QuantLinear) == (chosen != "embedding")
    assert isinstance(model.model.embed_tokens, tl.QuantEmbedding) == (chosen != "head")
    assert not model.config.tie_word_embeddings
    model.tie_weights()  # as transformers does now and then
    assert error(model.lm_head.weight + 0, before) < 0.25  # another weight would be 1.4 off
    assert error(logits(model, ids), logits(densified(model), ids)) < 1e-5
    if tied and chosen == "both" and not calibrated:
        assert model.lm_head.q.data_ptr() == model.model.embed_tokens.q.data_ptr()


def test_an_input_that_never_fires_and_experts_without_tokens() -> None:
    """Every token goes to one expert; the other one's layers are rounded, and say why."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    model = llama()
    for block in model.model.layers:
        block.mlp = Experts()
    reports = {r.name: r for r in tl.quantize_(model, SPEC, tokens(4, 16))}
    assert reports["model.layers.0.mlp.a"].relative_loss is not None
    assert isinstance(model.model.layers[0].mlp.b, tl.QuantLinear)
    assert reports["model.layers.0.mlp.b"].relative_loss is None


def test_experts_in_one_parameter_stay_dense() -> None:
    model = llama(kind="Mixtral", num_local_experts=2, num_experts_per_tok=1)
    names = [r.name.rpartition(".")[2] for r in tl.quantize_(model, SPEC, tokens(8, 32))]
    assert names == 2 * [f"{n}_proj" for n in "qkvo"]
    assert model.model.layers[0].mlp.experts.gate_up_proj.dim() == 3


def test_qnt04_what_cannot_be_is_refused_before_anything_is_changed() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rules": [("*.q_prj", None)]}, r"rule '\*.q_prj' fits no dense linear layer; names are like model\."),
        ({"spec": tl.QuantSpec(96)}, r"12 modules cannot be quantised: .*q_proj has K=64 < group 96"),
        ({"spec": 32}, r"spec=32 must be a QuantSpec, such as QuantSpec\(group_size=32\), or None"),
        (
            {"rules": "lm_head"},
            r"rules has 'lm_head'; it must be a list of pairs \(pattern of names, QuantSpec or None",
        ),
        ({"rules": {"lm_head": None}}, r"rules has \{'lm_head': None\}; it must be a list of pairs"),
        ({"rules": [("lm_head", 4)]}, r"rules has \('lm_head', 4\); it must be"),
        ({"rules": ["ab"]}, r"rules has 'ab'; it must be"),
        ({"rules": [("*", None)]}, r"no dense linear layer is left"),
        ({"spec": tl.QuantSpec(32, channel="frac4")}, r"channel='frac4': transformers applies every layer once"),
        ({"calibration": tokens().float()}, r"calibration is torch.float32 \[2, 24\]; it needs .*give int64"),
        (
            {"calibration": tokens()[0]},
            r"calibration is torch.int64 \[24\]; it needs texts of 2 tokens .*give",
        ),
        ({"calibration": tokens()[:0]}, r"calibration is torch.int64 \[0, 24\]; it needs texts of 2 tokens"),
        ({"calibration": tokens().tolist()}, r"calibration is list; give int64 \[texts, length\] \(calibration_tokens"),
        ({"calibration": tokens() + VOCAB}, r"calibration holds token \d+; the model has tokens 0\.\.271: use its own"),
        ({"calibration": tokens() - VOCAB}, r"calibration holds token -\d+; the model has tokens 0\.\.271"),
    ]
    for given, message in wrong:
        with pytest.raises(tl.InputError, match=message):
            tl.quantize_(model, **{"spec": SPEC, **given})
    with pytest.raises(tl.UnsupportedError, match=r"no list of blocks to calibrate"):
        tl.quantize_(nn.Sequential(nn.Linear(64, 64)), SPEC, tokens())
    with pytest.raises(tl.InputError, match=r"group_size=True must be a whole number, or None"):
        tl.QuantSpec(group_size=True)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_blocks_that_do_not_follow_one_another() -> None:
    model = llama()
    model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
    with pytest.raises(tl.UnsupportedError, match=r"model.layers.1 does not take what the block before it gives"):
        tl.quantize_(model, SPEC, tokens())


@pytest.mark.parametrize(("what", "text"), [
    (nn.Linear(64, 64), r"hf_model is a Linear itself, .*; use QuantLinear\.from_linear or QuantEmbedding"),
    (nn.Embedding(64, 64), r"hf_model is a Embedding itself"),
    (None, r"hf_model is NoneType; give a model"),
    ("model", r"hf_model is str; give a model"),
])  # fmt: skip
def test_what_is_no_model(what: Any, text: str) -> None:
    with pytest.raises(tl.InputError, match=text):
        tl.quantize_(what, SPEC)
    assert type(what) is not nn.Linear or not list(what.children())


def test_weights_without_usable_values_are_named_before_anything_is_changed() -> None:
    damaged = llama()
    with torch.no_grad():
        damaged.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    cases = [
        (damaged, r"1 modules cannot be quantised: model\.layers\.1\.mlp\.up_proj holds NaN or infinite values"),
        (llama().double(), r"14 modules .*q_proj is torch\.float64, but a product takes float32, bfloat16 or float16"),
        (llama().to("meta"), r"14 modules .*q_proj is on the meta device and has no values, load them first"),
    ]
    for model, text in cases:
        for calibration in (None, tokens()):
            with pytest.raises(tl.InputError, match=text):
                tl.quantize_(model, SPEC, calibration)
        assert not any(isinstance(m, tl.QuantLinear) for m in model.modules())
    reports = tl.quantize_(damaged, SPEC, rules=[("*.layers.1.mlp.up_proj", None)])
    assert len(reports) == 13


@pytest.mark.parametrize("calibrated", [False, True])
def test_an_interrupted_model_is_as_it_was(calibrated: bool) -> None:
    model = llama().train()
    model.model.layers[0].eval()
    before, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]

    def stop(done: int, *_: Any) -> None:
        if done == 13:
            raise KeyboardInterrupt

    rules = [("lm_head", SPEC), ("*embed_tokens", SPEC)]
    with pytest.raises(KeyboardInterrupt):
        tl.quantize_(model, SPEC, tokens() if calibrated else None, rules=rules, progress=stop)
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(m is before[name] for name, m in after.items())
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert [m.training for m in model.modules()] == modes
    tl.quantize_(model, SPEC, tokens() if calibrated else None)
    assert [m.training for m in model.modules()] == modes


def test_a_layer_under_two_names_is_one_layer() -> None:
    first = nn.Linear(64, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Sequential(first))
    assert [r.name for r in tl.quantize_(model, SPEC)] == ["0"]
    assert isinstance(model[0], tl.QuantLinear)
    assert model[2][0] is model[0]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A subclass that computes what its base does."""


def test_a_layer_that_computes_more_stays_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Scaled(64, 64), Named(64, 64), nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(
        nn.Linear(64, 64)))  # fmt: skip
    model[2].forward = model[2].forward
    with caplog.at_level(logging.WARNING, "tinyloop"):
        reports = tl.quantize_(model, SPEC)
    assert [r.name for r in reports] == ["1"]
    assert [type(m).__name__ for m in model] == ["Scaled", "QuantLinear", "Linear", "ParametrizedLinear"]
    assert "0 is kept dense: its class Scaled has a forward of its own, which would be lost." in caplog.messages
    assert "2 is kept dense: it has a forward of its own, which would be lost." in caplog.messages
    assert any(m.startswith("3 is kept dense: its weight is computed anew") for m in caplog.messages)
    with pytest.raises(tl.InputError, match=r"rule '0' asks to quantise 0, but its class Scaled has a forward of its"):
        tl.quantize_(nn.Sequential(Scaled(64, 64), nn.Linear(64, 64)), SPEC, rules=[("0", SPEC)])
    tl.quantize_(nn.Sequential(Scaled(64, 64), nn.Linear(64, 64)), SPEC, rules=[("0", None)])


@pytest.mark.parametrize("calibrated", [False, True])
def test_hooks_pass_to_the_layer_in_place(calibrated: bool) -> None:
    model, seen = llama(), []
    down = model.model.layers[1].mlp.down_proj
    down.register_forward_pre_hook(lambda m, args, kwargs: seen.append(m), with_kwargs=True)
    doubling = down.register_forward_hook(lambda m, args, y: 2 * y)
    tl.quantize_(model, SPEC, tokens() if calibrated else None)
    new, x = model.model.layers[1].mlp.down_proj, torch.randn(3, 96)
    seen.clear()
    y = new(x)
    assert seen == [new]
    doubling.remove()
    assert torch.allclose(y, 2 * new(x))


class Words:
    """As much of a tokenizer as is asked for: one id a character."""

    bos_token_id: int | None = 7

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_calibration_tokens_are_spread_over_the_text() -> None:
    ids = tl.calibration_tokens(Words(), Calibration("abcdefghij", texts=3, length=3))
    assert ids.tolist() == [[7, 97, 98], [7, 101, 102], [7, 105, 106]]
    assert tl.calibration_tokens(Words()).shape == (40, 1024)
    with pytest.raises(tl.InputError, match=r"the given text has 3 tokens; 2 windows of 3 need 6"):
        tl.calibration_tokens(Words(), Calibration("abc", texts=2, length=4))


# ── saved and loaded ───────────────────────────────────────────────────────────────────────────────────────────────


def made(how: str) -> Any:
    if how == "file":
        model = llama()
        tl.load_into(model, tiny_checkpoint(segments=PLAIN))
        return model
    if how == "act-order":
        checkpoint, model = tiny_checkpoint(segments=PLAIN), llama()
        weights = {n: with_random_perm(w) if n.startswith("layers.") else w for n, w in checkpoint.weights.items()}
        tl.load_into(model, dataclasses.replace(checkpoint, weights=weights))
        return model
    model = llama(tied=how != "untied", kind="Qwen2" if how == "bias" else "Llama")
    rules = [("lm_head", SPEC)] if how in ("head", "both", "moved") else []
    rules += [("*embed_tokens", SPEC)] if how in ("both", "moved") else []
    tl.quantize_(model, tl.QuantSpec(group_size=32, integer_zero=how == "integer"), rules=rules)
    if how == "moved":  # to another device: what was shared is there twice
        for m in model.modules():
            m._buffers.update({n: t.clone() for n, t in m._buffers.items() if t is not None})
    return model


@pytest.mark.parametrize("how", ["file", "act-order", "tied", "untied", "head", "both", "moved", "bias", "integer"])
def test_imp03_saved_and_loaded_again(how: str, tmp_path: Path) -> None:
    model, ids = made(how), tokens()
    wanted = logits(model, ids)
    model.save_pretrained(tmp_path)
    back = tl.load_transformers(tmp_path)
    assert torch.equal(logits(back, ids), wanted)
    state, again = model.state_dict(), back.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(t, again[n]) and t.dtype == again[n].dtype for n, t in state.items())
    assert {m.weight.device.type for m in back.modules() if isinstance(m, tl.QuantLinear)} == {"cpu"}
    half = tl.load_transformers(tmp_path, dtype=torch.bfloat16)
    assert half.model.norm.weight.dtype == half.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert half.model.layers[0].mlp.down_proj.scale.dtype == model.model.layers[0].mlp.down_proj.scale.dtype
    back.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tl.load_transformers(tmp_path / "again"), ids), wanted)


def test_load01_a_folder_with_something_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made("untied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    name = "model.layers.0.mlp.up_proj.q"
    save_file({n: t for n, t in state.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(tl.FormatError, match=rf"1 missing keys, the first is {re.escape(name)}; copy the folder"):
        tl.load_transformers(tmp_path)
    extra = "model.layers.0.mlp.up_proj._extra_state"
    save_file({**state, extra: state[extra] + torch.tensor([0, 0, -16, 0, 0])}, file, {"format": "pt"})
    with pytest.raises(tl.FormatError, match=r"the state is of .*group_size=16.* the layer of .*group_size=32"):
        tl.load_transformers(tmp_path)
    save_file({**state, name: state[name][:-1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(tl.FormatError, match=rf"1 mismatched keys, the first is {re.escape(name)}: \[31, 96\]; copy"):
        tl.load_transformers(tmp_path)


@pytest.mark.parametrize(("change", "text"), [
    (lambda q: q.pop("modules"), r"quantization_config has modules=None, shared=\{\}; both must be objects"),
    (lambda q: q["modules"].update({"lm_head": 3}), r"quantization_config has lm_head with embedding=None, which no"),
    (lambda q: q["modules"]["model.layers.0.mlp.up_proj"].update(bits=3), r"up_proj with bits=3, which no layer of"),
    (lambda q: q["modules"]["model.layers.0.mlp.up_proj"].pop("perm"), r"up_proj with perm=None"),
    (lambda q: q["modules"]["model.layers.0.mlp.up_proj"].update(parameters="int7"), r"up_proj with parameters='int7'"),
    (lambda q: q["modules"].update(gone=q["modules"]["lm_head"]), r"names gone, which the model has not; copy config"),
    (lambda q: q["modules"].update({"model.norm": q["modules"]["lm_head"]}), r"makes a LlamaRMSNorm quantised"),
])  # fmt: skip
def test_settings_that_do_not_describe_the_model(change: Callable[[Any], Any], text: str, tmp_path: Path) -> None:
    made("head").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text("utf-8"))
    change(values["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
    with pytest.raises(tl.FormatError, match=text):
        tl.load_transformers(tmp_path)


def test_folders_that_are_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(tl.InputError, match=r"has no config.json"):
        tl.load_transformers(tmp_path)
    llama().save_pretrained(tmp_path)
    with pytest.raises(tl.InputError, match=r"holds no model of ours \(quant_method None\); load it with transformers"):
        tl.load_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    made("tied").save_pretrained(tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert ours["quantization_config"]["quant_method"] == "tinyloop"
    (tmp_path / "config.json").write_text(json.dumps(ours | {"architectures": ["NoSuchModel"]}), "utf-8")
    with pytest.raises(tl.InputError, match=r"architectures=\['NoSuchModel'\] is no class"):
        tl.load_transformers(tmp_path)
    assert "quantization_config" not in config


# ── GPT-2, whose linear layers are Conv1D ──────────────────────────────────────────────────────────────────────────


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_inner=96, n_layer=2, n_head=4, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.copy_(0.2 * torch.randn(p.shape) + (name.endswith("weight")))
    return model


@pytest.mark.parametrize("calibrated", [False, True])
def test_conv1d_is_a_linear_layer(calibrated: bool, tmp_path: Path) -> None:
    model, dense, ids = gpt2(), gpt2(), tokens()
    rules = [("*.1.mlp.c_fc", None), ("*.0.mlp.c_proj", tl.QuantSpec(96))]
    reports = tl.quantize_(model, SPEC, tokens(16, 32, seed=1) if calibrated else None, rules=rules)
    assert [r.name.removeprefix("transformer.h.") for r in reports] == [
        "0.attn.c_attn", "0.attn.c_proj", "0.mlp.c_fc", "0.mlp.c_proj", "1.attn.c_attn", "1.attn.c_proj", "1.mlp.c_proj"
    ]  # fmt: skip
    assert all((r.relative_loss is not None and r.relative_loss < 0.05) == calibrated for r in reports)
    same = copy.deepcopy(dense)
    for r in reports:
        layer, theirs = model.get_submodule(r.name), dense.get_submodule(r.name)
        assert isinstance(layer, tl.QuantLinear)
        assert (layer.in_features, layer.out_features) == (theirs.nx, theirs.nf)
        if not calibrated:
            wanted = nearest(theirs.weight.detach(), tl.QuantSpec(layer.group_size))
            assert torch.equal(layer.q, wanted.packed)
        same.get_submodule(r.name).weight.data.copy_(layer.weight.t())
    assert type(model.transformer.h[1].mlp.c_fc) is type(dense.transformer.h[1].mlp.c_fc)
    assert error(logits(model, ids), logits(same, ids)) < 1e-5
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(
        written, same.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    )
    model.save_pretrained(tmp_path)
    back = tl.load_transformers(tmp_path)
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert back.lm_head.weight is back.transformer.wte.weight
    back.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tl.load_transformers(tmp_path / "again"), ids), logits(model, ids))


def test_no_file_of_ours_holds_gpt2() -> None:
    with pytest.raises(tl.UnsupportedError, match=r"model_type='gpt2' is not supported; known are llama, mistral"):
        tl.load_into(gpt2(), tiny_checkpoint(segments=PLAIN))


# ── others' code ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["file", "head"])
def test_generate_is_greedy_over_the_same_logits(how: str) -> None:
    model, ids = made(how), tokens(2, 6)
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=-1
    )
    step = ids
    for _ in range(8):
        step = torch.cat((step, logits(model, step)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(written, step)


def test_the_model_compiles_whole() -> None:
    model = made("head")
    compiled = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, fullgraph=True, backend=compiled, dynamic=True)
    with torch.no_grad():
        for length in (5, 9, 12):
            ids = tokens(1, length)
            assert error(fast(ids, use_cache=False).logits, logits(model, ids)) < 1e-5
    assert compiled.frame_count <= 2


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = tokens(4, 24)[i]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("loaded", [False, True])
def test_trainer_evaluates(loaded: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is in the extra peft")
    model = made("head")
    if loaded:
        model.save_pretrained(tmp_path)
        model = tl.load_transformers(tmp_path)
    arguments = transformers.TrainingArguments(tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True)
    found = transformers.Trainer(model, arguments, eval_dataset=Texts()).evaluate()
    ids = tokens(4, 24)
    wanted = nn.functional.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert found["eval_loss"] == pytest.approx(float(wanted), rel=1e-4)


def test_lm_eval_scores() -> None:
    """Its own model class around ours: log-likelihoods of continuations are those of the logits."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is in the extra lm-eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    assert lm_eval
    model, tokenizer = made("head"), fast_tokenizer()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    pairs = [("Once upon", " a time"), ("It is", " so")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, continuation), (found, _) in zip(pairs, lm.loglikelihood(requests), strict=True):
        a, b = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (context, continuation))
        scores = logits(model, torch.tensor([a + b])).log_softmax(-1)[0]
        assert found == pytest.approx(sum(float(scores[len(a) + i - 1, t]) for i, t in enumerate(b)), abs=1e-3)


def test_lm_eval_runs_a_task(tmp_path: Path) -> None:
    """A whole evaluation, of a task in a file: nothing is downloaded."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is in the extra lm-eval")
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = made("head"), fast_tokenizer()
    texts, choices = ["It is", "Once upon", "a time", "so it was"], ["yes", "no", "a time"]

    def score(text: str, choice: str) -> float:
        a, b = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, f" {choice}"))
        scores = logits(model, torch.tensor([a + b])).log_softmax(-1)[0]
        return sum(float(scores[len(a) + i - 1, t]) for i, t in enumerate(b))

    best = [max(range(3), key=lambda i: score(text, choices[i])) for text in texts]
    gold = [*best[:3], (best[3] + 1) % 3]  # three of four are right
    docs = [json.dumps({"text": text, "choices": choices, "gold": i}) for text, i in zip(texts, gold, strict=True)]
    (tmp_path / "docs.jsonl").write_text("\n".join(docs))
    kwargs = {"data_files": {"test": str(tmp_path / "docs.jsonl")}, "cache_dir": str(tmp_path)}
    task = {"task": "tiny", "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test",
            "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    found = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
    assert found["results"]["tiny"]["acc,none"] == 0.75


def fast_tokenizer() -> Any:
    from tokenizers import Tokenizer

    from helpers import SPECIAL, tiny_tokenizer

    tokenizer = Tokenizer.from_str(tiny_tokenizer().json)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[0], pad_token=SPECIAL[1]
    )


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_lora_on_top(targets: Any) -> None:
    """It learns, the base does not move, and its gradients are those over dense layers of the same values."""
    peft = pytest.importorskip("peft", reason="peft is in the extra peft")
    base, ids = made("tied"), tokens(4, 16)
    before = {n: t.clone() for n, t in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    optimizer = torch.optim.AdamW(adapters(model), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    after = base.state_dict()
    assert all(torch.equal(t, after[n.replace("_proj.", "_proj.base_layer.")] if n not in after else after[n])
               for n, t in before.items())  # fmt: skip
    both = model, densified(model)
    gradients = [torch.autograd.grad(m(input_ids=ids, labels=ids).loss, adapters(m)) for m in both]
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs) < 1e-4


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def densified(model: nn.Module) -> nn.Module:
    """A copy in which every layer of ours is an ordinary one with the same values."""
    model = copy.deepcopy(model)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, tl.QuantLinear):
                dense: nn.Module = nn.Linear(child.in_features, child.out_features, bias=False)
            elif isinstance(child, tl.QuantEmbedding):
                dense = nn.Embedding(child.num_embeddings, child.embedding_dim)
            else:
                continue
            dense.weight = nn.Parameter(child.weight + 0, requires_grad=False)
            setattr(m, name, dense)
    return model


@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_not_merged_into_four_bits(safe: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is in the extra peft")
    model = peft.get_peft_model(made("tied"), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(tl.InputError, match=r"adapters cannot be merged into 4 bits"):
        model.merge_adapter(safe_merge=safe)


# ── the page ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of docs/transformers.md in order, in one namespace; a comment `# → …` says what its line prints."""
    page = (ROOT / "docs/transformers.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    assert len(blocks) >= 5
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in blocks:
        if "peft" in block:
            pytest.importorskip("peft", reason="peft is in the extra peft")
        exec(compile(block, "docs/transformers.md", "exec"), space)
