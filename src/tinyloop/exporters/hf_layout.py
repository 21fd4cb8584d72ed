"""ModelConfig and tokenizer → the small files of a Hugging Face folder, and our weights → its modules.

The reverse of `importers/hf_config.py` and `importers/hf_tokenizer.py`: what they read out of these files is what went
in. What an architecture's config.json has no words for is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import UnsupportedError
from ..importers.huggingface import LINEARS, NORMS
from ..rope import resolve
from ..tokenizer import Tokenizer, TokenizerData
from ..weight import LinearWeight

CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
           "qwen3": "Qwen3ForCausalLM", "tinyloop": None}  # fmt: skip

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def modules(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Our weight, and its modules: name, first and last output."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for ours, (_, N) in config.linear_shapes().items():
        if ours in ("embed", "head"):
            yield ours, [("model.embed_tokens" if ours == "embed" else "lm_head", 0, N)]
            continue
        layer, _, name = ours.rpartition(".")
        theirs = [f"model.{layer}.{part}" for part in LINEARS[name]]
        cuts = [0, q, q + kv, q + 2 * kv] if len(theirs) == 3 else [0, N]
        yield ours, [*zip(theirs, cuts[:-1], cuts[1:], strict=True)]


def norm_name(ours: str) -> str:
    if ours == "final_norm":
        return "model.norm.weight"
    layer, _, name = ours.rpartition(".")
    return f"model.{layer}.{NORMS[name]}.weight"


def kind_of(config: ModelConfig) -> str:
    """model_type: tinyloop where anything loops, since no other has words for it."""
    kind = "tinyloop" if [s.name for s in config.segments] != ["pre"] else config.architecture
    if kind not in CLASSES:
        raise UnsupportedError(f"architecture {kind!r} has no Hugging Face layout here; known are {', '.join(CLASSES)}")
    if config.qk_norm != (kind == "qwen3"):
        raise UnsupportedError(f"qk_norm={config.qk_norm} does not go with model_type {kind}")
    if config.sliding_window and kind not in ("mistral", "qwen2", "qwen3"):
        raise UnsupportedError(f"sliding windows do not go with model_type {kind}")
    return kind


def biased(kind: str, weights: Mapping[str, LinearWeight]) -> set[str]:
    """Last names of the linears that config.json will say have a bias, so that each must be written with one."""
    have = {name.rpartition(".")[2] for name, w in weights.items() if w.bias is not None}
    attention, mlp = have & {"attn_qkv", "attn_out"}, have & {"mlp_gate", "mlp_up", "mlp_down"}
    if kind == "qwen2":
        fits, names = not have - {"attn_qkv"}, {"q_proj", "k_proj", "v_proj"}
    else:
        names = {"q_proj", "k_proj", "v_proj", "o_proj"} if attention else set()
        names |= {"gate_proj", "up_proj", "down_proj"} if mlp else set()
        allowed = {"llama": attention | mlp, "tinyloop": attention | mlp, "qwen3": attention}.get(kind, set())
        fits = not have - allowed
    if not fits:
        raise UnsupportedError(f"biases of {', '.join(sorted(have))} do not go with model_type {kind}")
    return names


def config_json(checkpoint: Checkpoint, biases: set[str], dtype: str) -> dict[str, Any]:
    c, kind = checkpoint.config, kind_of(checkpoint.config)
    values: dict[str, Any] = {
        "model_type": kind, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "rms_norm_eps": c.rms_norm_eps, "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings, "hidden_act": "silu", "torch_dtype": dtype,
        **_rope(c), **_windows(c, kind),
    }  # fmt: skip
    if CLASSES[kind]:
        values["architectures"] = [CLASSES[kind]]
    if kind in ("llama", "qwen3", "tinyloop"):
        values["attention_bias"] = "o_proj" in biases
    if kind in ("llama", "tinyloop"):
        values["mlp_bias"] = "up_proj" in biases
    if kind == "tinyloop":
        layers = {s.name: s.layers for s in c.segments}
        values |= {f"{name}_layers": layers.get(name, 0) for name in ("pre", "loop", "coda")} | {"loops": c.loops}
    if checkpoint.tokenizer is not None:
        values |= {"bos_token_id": checkpoint.tokenizer.bos, "eos_token_id": list(checkpoint.tokenizer.eos)}
    return values


def _rope(c: ModelConfig) -> dict[str, Any]:
    """The recipe, in the spelling that all releases of transformers know, if it still means the same."""
    recipe = dict(c.rope.source)
    divided = recipe.pop("rope_freqs", None) is not None
    again = None if divided else resolve(recipe, c.head_dim, c.max_position_embeddings)
    if again is None or (again.inv_freq, again.attention_scaling) != (c.rope.inv_freq, c.rope.attention_scaling):
        raise UnsupportedError(
            "the model's rotation has no recipe that config.json could name; it stays a .tinyloop file"
        )
    flat = {"rope_theta": recipe.pop("rope_theta", 10000.0)}
    if "partial_rotary_factor" in recipe:
        flat["partial_rotary_factor"] = recipe.pop("partial_rotary_factor")
    recipe.pop("type", None)
    return flat | ({} if recipe.get("rope_type", "default") == "default" else {"rope_scaling": recipe})


def _windows(c: ModelConfig, kind: str) -> dict[str, Any]:
    if kind not in ("mistral", "qwen2", "qwen3"):
        return {}
    windows = set(c.sliding_window) - {None}
    if len(windows) > 1 or (kind == "mistral" and None in c.sliding_window):
        raise UnsupportedError(f"windows {c.sliding_window} differ between layers; model_type {kind} has one for all")
    window = windows.pop() if windows else None
    if kind == "mistral":
        return {"sliding_window": window}
    types = ["full_attention" if w is None else "sliding_attention" for w in c.sliding_window or (None,) * c.num_layers]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}


def write_tokenizer(folder: Path, data: TokenizerData) -> None:
    """tokenizer.json as it came, and what begins and ends a text in the files that readers look into."""
    (folder / "tokenizer.json").write_text(data.json, encoding="utf-8")
    special = dict(data.special)
    if data.bos is not None and "bos_token" not in special:
        special["bos_token"] = Tokenizer(data).decode([data.bos], False)
    settings = {**special, "add_bos_token": data.add_bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if data.chat_template is not None:
        settings["chat_template"] = data.chat_template
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"bos_token_id": data.bos, "eos_token_id": list(data.eos)})


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
