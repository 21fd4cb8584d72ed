"""Hugging Face folders made by transformers: every tensor in its place, every refusal by its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyloop.checkpoint import Checkpoint
from tinyloop.config import Segment
from tinyloop.errors import FormatError, UnsupportedError
from tinyloop.importers import import_model
from tinyloop.importers.hf_config import model_config
from tinyloop.rope import resolve
from tinyloop.tokenizer import Tokenizer
from tinyloop.weight import DenseWeight

transformers = pytest.importorskip("transformers")

LAYERS = 3
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5}  # fmt: skip
PARTS = {
    "attn_out": "self_attn.o_proj",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_down": "mlp.down_proj",
}


def save(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "1GB", **extra: Any
) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | {"bos_token_id": 1, "eos_token_id": 2} | extra))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms and biases too, so that a swap shows
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def edit(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; ... removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def check(checkpoint: Checkpoint, t: dict[str, torch.Tensor], prefix: str = "model.") -> None:
    """Every tensor of `t` is in the checkpoint, unchanged."""
    seen = {"embed": f"{prefix}embed_tokens", "head": "lm_head"}
    for ours, theirs in seen.items():
        if ours in checkpoint.weights:
            assert torch.equal(checkpoint.weights[ours].weight, t[f"{theirs}.weight"])
    assert torch.equal(checkpoint.norms["final_norm"], t[f"{prefix}norm.weight"])
    for i in range(checkpoint.config.num_layers):
        layer = f"{prefix}layers.{i}."
        groups = {"attn_qkv": [f"self_attn.{n}_proj" for n in "qkv"]} | {k: [v] for k, v in PARTS.items()}
        for ours, parts in groups.items():
            w = checkpoint.weights[f"layers.{i}.{ours}"]
            assert isinstance(w, DenseWeight)
            assert torch.equal(w.weight, torch.cat([t[f"{layer}{p}.weight"] for p in parts])), (i, ours)
            biases = [t[f"{layer}{p}.bias"] for p in parts if f"{layer}{p}.bias" in t]
            assert (w.bias is None) == (not biases)
            if w.bias is not None:
                assert torch.equal(w.bias, torch.cat(biases))
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if checkpoint.config.qk_norm:
            norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        for ours, theirs in norms.items():
            assert torch.equal(checkpoint.norms[f"layers.{i}.{ours}"], t[f"{layer}{theirs}.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_families(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    extra = {"head_dim": 12} if kind == "qwen3" else {}
    folder = save(tmp_path / "model", kind, dtype, **extra)
    ticks: list[tuple[int, int]] = []
    checkpoint = import_model(folder, lambda done, total: ticks.append((done, total)))
    check(checkpoint, stored(folder))
    config = checkpoint.config
    assert config.architecture == kind
    assert config.segments == (Segment("pre", LAYERS, 1),)
    assert config.head_dim == (12 if kind == "qwen3" else 8)
    assert config.qk_norm == (kind == "qwen3")
    assert (config.num_key_value_heads, config.rms_norm_eps, config.tie_word_embeddings) == (2, 1e-5, False)
    assert checkpoint.weights["layers.0.mlp_up"].weight.dtype == dtype
    assert ticks[-1] == (17, 17)
    assert checkpoint.source == {"format": "huggingface", "file": "model", "model_type": kind}
    assert [n for n in checkpoint.notes if "tokenizer.json" not in n] == []


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attention_biases(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path, kind, attention_bias=True, **({"mlp_bias": True} if kind == "llama" else {}))
    checkpoint = import_model(folder)
    assert checkpoint.weights["layers.2.attn_out"].bias is not None
    assert (checkpoint.weights["layers.2.mlp_down"].bias is not None) == (kind == "llama")
    check(checkpoint, stored(folder))


def test_biases_must_be_those_of_the_configuration(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen2")
    rewrite(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(FormatError, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.bias is missing"):
        import_model(folder)
    folder = save(tmp_path / "llama", attention_bias=True)
    edit(folder, attention_bias=False)
    with pytest.raises(
        UnsupportedError, match=r"12 tensors have no place .* model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        import_model(folder)


def test_shards(tmp_path: Path) -> None:
    folder = save(tmp_path, shard="30KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    check(import_model(folder), stored(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = min(k for k, v in index["weight_map"].items() if v == shards[1].name)
    whole = shards[1].read_bytes()

    shards[1].write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=rf"{shards[1].name} cannot be read .*truncated"):
        import_model(folder)
    shards[1].unlink()
    with pytest.raises(FormatError, match=rf"{shards[1].name} is missing; .*such as {name}"):
        import_model(folder)
    shards[1].write_bytes(whole)

    def reindex(change: Callable[[dict[str, str]], Any]) -> None:
        changed = dict(index["weight_map"])
        change(changed)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}))

    reindex(lambda m: m.update({name: shards[0].name}))
    with pytest.raises(FormatError, match=rf"{shards[0].name} does not hold tensor {name}"):
        import_model(folder)
    reindex(lambda m: m.pop(name))
    with pytest.raises(FormatError, match=rf"{shards[1].name} holds tensor {name}, which .* does not put there"):
        import_model(folder)
    reindex(lambda m: m.update({name: "../" + shards[1].name}))
    with pytest.raises(FormatError, match=rf"puts tensor {name} in '\.\./"):
        import_model(folder)
    reindex(lambda m: m.clear())
    with pytest.raises(FormatError, match="has no weight_map"):
        import_model(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"has both model\.safetensors\.index\.json and model"):
        import_model(folder)


def test_missing_misshapen_and_unknown_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    cases: list[tuple[Callable[[dict[str, torch.Tensor]], Any], type[Exception], str]] = [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), FormatError,
         r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), FormatError, r"tensor lm_head\.weight is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), FormatError, r"has 0 of the tensors model\.embed_tokens"),
        (lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(2, 2)}), UnsupportedError,
         r"1 tensors have no place .* model\.layers\.0\.mlp\.router\.weight in model\.safetensors"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), FormatError, r"final_norm .*\[5\]"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(16, 32),
                             "model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}), FormatError,
         r"self_attn\.q_proj\.weight has shape \[16, 32\]; the configuration needs \[32, 32\]"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8)}),
         UnsupportedError, r"up_proj\.weight is torch\.int8; read are fp16, bf16 and fp32"),
    ]  # fmt: skip
    for change, error, text in cases:
        (folder / "model.safetensors").write_bytes(whole)
        rewrite(folder, change)
        with pytest.raises(error, match=text):
            import_model(folder)


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert len(import_model(folder).weights) == 17


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    folder = save(tmp_path)
    before = stored(folder)
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    save_file({head if k == "lm_head.weight" else k.replace("model.", prefix, 1): v for k, v in before.items()},
              folder / "model.safetensors")  # fmt: skip
    check(import_model(folder), before)


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    folder = save(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in stored(folder)
    checkpoint = import_model(folder)
    assert checkpoint.config.tie_word_embeddings
    assert "head" not in checkpoint.weights

    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert import_model(folder).config.tie_word_embeddings
    edit(folder, tie_word_embeddings=False)
    assert "head" in import_model(folder).weights

    edit(folder, tie_word_embeddings=True)
    rewrite(folder, lambda t: t["lm_head.weight"].mul_(2))
    checkpoint = import_model(folder)
    assert not checkpoint.config.tie_word_embeddings
    check(checkpoint, stored(folder))
    assert "the file has another head: kept apart" in checkpoint.notes[0]


@pytest.mark.parametrize(
    "recipe",
    [{"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, {"rope_type": "dynamic", "factor": 2.0},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
     {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32}],
)  # fmt: skip
def test_rope_in_both_spellings(tmp_path: Path, recipe: dict[str, Any]) -> None:
    folder = save(tmp_path, rope_parameters=dict(recipe))
    want = resolve(recipe, 8, 64)
    read = import_model(folder).config.rope
    assert (read.inv_freq, read.attention_scaling) == (want.inv_freq, want.attention_scaling)
    old = {k: v for k, v in recipe.items() if k != "rope_theta"}
    old["type"] = old.pop("rope_type")
    edit(folder, rope_parameters=..., rope_scaling=old, rope_theta=recipe.get("rope_theta", 10000.0))
    assert import_model(folder).config.rope.inv_freq == want.inv_freq


BASE = SIZES | {"model_type": "llama", "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]}


def config_of(**changes: Any) -> Any:
    return model_config({k: v for k, v in (BASE | changes).items() if v is not ...})[0]


def test_sliding_windows() -> None:
    def windows(kind: str, **changes: Any) -> tuple[int | None, ...]:
        return tuple(config_of(model_type=kind, **changes).sliding_window)

    assert windows("llama") == ()
    assert windows("mistral", sliding_window=16) == (16, 16, 16)
    assert windows("mistral", sliding_window=None) == ()
    assert windows("mistral") == (4096, 4096, 4096)
    assert windows("qwen2", sliding_window=16, use_sliding_window=False, max_window_layers=0) == ()
    assert windows("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=2) == (None, None, 16)
    assert windows("qwen3", sliding_window=16, use_sliding_window=True, max_window_layers=3) == ()
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen3", sliding_window=16, use_sliding_window=True, layer_types=types) == (16, None, 16)


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert import_model(folder).config.sliding_window == (None, 16, 16)


def test_partial_rotation_and_sizes() -> None:
    assert len(config_of(head_dim=16, partial_rotary_factor=0.5).rope.inv_freq) == 4
    assert config_of(num_key_value_heads=None).num_key_value_heads == 4
    assert config_of(num_key_value_heads=...).num_key_value_heads == 4
    assert config_of(model_type="qwen3").head_dim == 128
    nested = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert config_of(rope_parameters=nested).rope.inv_freq == resolve({"rope_theta": 5e5}, 8, 64).inv_freq


def test_looped_layout(tmp_path: Path) -> None:
    folder = save(tmp_path, num_hidden_layers=4)
    before = stored(folder)
    edit(folder, model_type="tinyloop", architectures=..., pre_layers=1, loop_layers=2, coda_layers=1, loops=5)
    checkpoint = import_model(folder)
    assert checkpoint.config.architecture == "tinyloop"
    assert checkpoint.config.segments == (Segment("pre", 1), Segment("loop", 2, 5), Segment("coda", 1))
    check(checkpoint, before)
    edit(folder, num_hidden_layers=...)
    assert import_model(folder).config.num_layers == 4


LOOPED = {"model_type": "tinyloop", "architectures": ..., "num_hidden_layers": ...}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model_type": "gemma2"}, UnsupportedError, "model_type='gemma2' is not supported; known are llama, mistral"),
    ({"model_type": ...}, UnsupportedError, "model_type=None is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedError, "is no causal language model"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, UnsupportedError, r"own model code, modeling_x\.X"),
    ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'; the runtime does 'silu' or 'swish' only"),
    ({"pretraining_tp": 2}, UnsupportedError, "pretraining_tp=2; the runtime does 1 only"),
    ({"attn_logit_softcapping": 50.0}, UnsupportedError, "attn_logit_softcapping=50.0; the runtime does null only"),
    ({"num_loops": 4}, UnsupportedError, "key num_loops speaks of loops .* read as model_type=tinyloop"),
    ({"loops": 1}, UnsupportedError, "key loops speaks of loops"),
    ({"total_ut_steps": 4}, UnsupportedError, "key total_ut_steps speaks"),
    ({"mean_recurrence": None}, UnsupportedError, "key mean_recurrence speaks"),
    ({"extra": {"n_loops": 2}}, UnsupportedError, "key n_loops speaks"),
    (LOOPED | {"loop_layers": 2, "loops": 3, "num_recurrent": 1}, UnsupportedError, "num_recurrent speaks"),
    (LOOPED | {"pre_layers": 1, "loop_layers": 2}, FormatError, "loop_layers=2 but loops=None; give loops"),
    (LOOPED | {"pre_layers": 1, "loop_layers": 2, "loops": 0}, FormatError, "loop_layers=2 but loops=0"),
    (LOOPED | {"pre_layers": 3, "loops": 2}, FormatError, "loops=2 but no loop_layers"),
    (LOOPED | {"pre_layers": -1, "loop_layers": 2, "loops": 2}, FormatError, "pre_layers=-1"),
    (LOOPED | {"loop_layers": 2, "loops": 2, "num_hidden_layers": 3}, FormatError, "num_hidden_layers=3 but .* are 2"),
    ({"num_experts": 8}, UnsupportedError, "num_experts=8 is not known for model_type=llama and looks structural"),
    ({"residual_multiplier": 0.5}, UnsupportedError, "residual_multiplier=0.5 is not known"),
    ({"sliding_window": 16}, UnsupportedError, "sliding_window=16 is not known for model_type=llama"),
    ({"vocab_size": ...}, FormatError, r"config\.json lacks vocab_size"),
    ({"model_type": "mistral", "num_key_value_heads": ...}, FormatError, "lacks num_key_value_heads"),
    ({"num_hidden_layers": 2.5}, FormatError, "num_hidden_layers=2.5; it must be a whole number"),
    ({"num_attention_heads": 0}, FormatError, "num_attention_heads=0; it must be a whole number"),
    ({"rms_norm_eps": "1e-5"}, FormatError, "rms_norm_eps='1e-5'; it must be a number"),
    ({"rms_norm_eps": float("nan")}, FormatError, "rms_norm_eps=nan must be a number ≥ 0"),
    ({"rms_norm_eps": -1.0}, FormatError, r"rms_norm_eps=-1\.0 must be a number ≥ 0"),
    ({"head_dim": "a"}, FormatError, "head_dim='a'; it must be a whole number"),
    ({"model_type": ["llama"]}, UnsupportedError, r"model_type=\['llama'\] is not supported"),
    ({"architectures": 5}, UnsupportedError, "architectures=5 is no causal language model"),
    ({"rope_scaling": "yarn"}, FormatError, "rope_scaling='yarn'; it must be an object"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, UnsupportedError, r"rope_type=\['yarn'\] is not supported"),
    ({"hidden_size": 30}, FormatError, "hidden_size=30 is not a multiple of num_attention_heads=4"),
    ({"rope_scaling": {"type": "longrope"}}, UnsupportedError, "rope_type='longrope' is not supported"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, FormatError,
     "both rope_parameters and rope_scaling"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
     UnsupportedError, "differ between layer types"),
    ({"model_type": "mistral", "sliding_window": 16, "layer_types": ["full_attention"] * 3}, UnsupportedError,
     "layer_types and sliding_window disagree"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, FormatError, "use_sliding_window is off"),
    ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, UnsupportedError, "must name full_attention or"),
    ({"model_type": "mistral", "sliding_window": -1}, FormatError, "sliding_window=-1; it must be a number of tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[t for _, _, t in REFUSED])
def test_configuration_refusals(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        config_of(**changes)


def test_unknown_keys_that_change_nothing_get_a_note() -> None:
    _, notes = model_config(BASE | {"favourite_colour": "blue", "num_experts": 0, "router_bias": False})
    assert notes == ["config.json key favourite_colour is not known and was ignored."]


def test_pickles_and_incomplete_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json is not JSON"):
        import_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(FormatError, match=r"has neither model\.safetensors nor"):
        import_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: pickles can run code and are not read"):
        import_model(tmp_path)


def tokenizer_folder(folder: Path, adds_bos: bool = False) -> Path:
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, processors

    save(folder)
    texts = ["<s>", "</s>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:90]]
    raw = Raw(models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(texts[:3])
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(folder / "tokenizer.json"))
    return folder


def settings(folder: Path, **values: Any) -> Any:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return import_model(folder).tokenizer


def test_tokenizer(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    data = settings(folder, bos_token="<s>", eos_token={"content": "</s>"}, chat_template="{{ bos_token }}!")
    assert (data.bos, data.eos, data.add_bos) == (0, (2, 7, 1), False)
    assert data.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer(data).chat([]) == "<s>!"
    assert Tokenizer(data).decode(Tokenizer(data).encode("abc")) == "abc"
    assert settings(folder, bos_token="<s>", add_bos_token=True).add_bos
    assert settings(folder, bos_token=None, eos_token="<end>").bos is None
    (folder / "generation_config.json").unlink()
    assert settings(folder, eos_token="</s>").eos == (2, 1)
    assert settings(folder, eos_token="<end>").eos == (2,)
    (folder / "chat_template.jinja").write_text("from the file")
    assert settings(folder, chat_template="from the settings").chat_template == "from the file"


def test_post_processor_that_begins_texts(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, adds_bos=True)
    assert settings(folder, bos_token="<s>").add_bos
    assert not settings(folder, bos_token="<s>", add_bos_token=False).add_bos


def test_named_chat_templates(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    checkpoint = import_model(folder)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.chat_template == "D"
    assert "not: tool_use." in checkpoint.notes[0]


def test_tokenizer_faults(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    with pytest.raises(FormatError, match=r"bos_token '<none>' is not in"):
        settings(folder, bos_token="<none>")
    with pytest.raises(FormatError, match="add_bos_token=true but no bos_token"):
        settings(folder, add_bos_token=True)
    edit(folder, vocab_size=50)
    rewrite(folder, lambda t: t.update({k: t[k][:50].clone() for k in ("model.embed_tokens.weight", "lm_head.weight")}))
    (folder / "tokenizer_config.json").unlink()
    assert "93 tokens, the embedding 50" in import_model(folder).notes[0]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json cannot be read"):
        import_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    assert import_model(folder).tokenizer is None
    assert "tokenizer.model is not read" in import_model(folder).notes[0]
