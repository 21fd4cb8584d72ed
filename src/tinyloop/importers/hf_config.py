"""config.json of a Hugging Face folder → `ModelConfig`.

In: the parsed file. Out: the description, and notes on what was ignored. A configuration that is misread still writes
fluent, wrong text, so a key has four ways only: it is honoured; it must have the one value that the runtime does; it
is known to change nothing (`_HARMLESS`); or it is unknown. An unknown key that looks structural (a word of
`_STRUCTURAL` in its name, and a value other than null, false, 0 or empty) is refused, any other gets a note. Keys that
smell of loops are refused whatever their value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig, Segment
from ..errors import FormatError, UnsupportedError
from ..rope import resolve
from .formats import KEYS
from .parts import flag

Values = Mapping[str, Any]

_DIMENSIONS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_COMMON = {*_DIMENSIONS, "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
           "model_type", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
           *KEYS}  # fmt: skip
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_LOOPS = {"pre_layers", "loop_layers", "coda_layers", "loops"}

# model_type → keys that it honours beyond _COMMON.
_MODEL_KEYS: dict[str, set[str]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window", "layer_types"},
    "qwen2": _WINDOWS,
    "qwen3": {"attention_bias", *_WINDOWS},
    "tinyloop": {"attention_bias", "mlp_bias", *_LOOPS},
}

# key → the values that mean what the runtime does; anything else is refused. None (null) is always fine.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}

_HARMLESS = {
    "_name_or_path", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_flash_attn_2_enabled", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_llama_config", "label2id", "max_length", "max_sequence_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "encoder_no_repeat_ngram_size", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "problem_type", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "task_specific_params", "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_cache", "diversity_penalty", "length_penalty", "repetition_penalty", "do_sample",
    "early_stopping", "output_scores", "begin_suppress_tokens", "suppress_tokens", "bad_words_ids",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "prefix",
    "exponential_decay_length_penalty", "tf_legacy_loss", "use_bfloat16", "finetuning_task", "mlp_dropout",
}  # fmt: skip

_LOOP_LIKE = re.compile(r"loop|recur|ut_steps|weight_sharing|layer_repeat|repeat_layer", re.IGNORECASE)
_STRUCTURAL = re.compile(
    r"norm|att|head|layer|rope|rotary|window|expert|moe|router|scal|multiplier|softcap|bias|mlp|ffn|embed|resid|kv"
    r"|lora|block|nextn|mtp|dim|size|hidden|num_|sparse|quant|gate|mix|ssm|conv|position|alibi|sink|depth|vision|audio"
    r"|text_config|share|temperature|clip|logit|(^|_)(act|n|tie)",
    re.IGNORECASE,
)


def model_config(values: Values) -> tuple[ModelConfig, list[str]]:
    """Description and notes. Raises FormatError or UnsupportedError naming the key."""
    kind = _model_type(values)
    notes = _check_keys(values, kind)
    missing = [key for key in (*_DIMENSIONS, "rms_norm_eps") if values.get(key) is None]
    # Llama's class takes a missing number of KV heads as all heads; the others have numbers of their own there.
    if "num_key_value_heads" not in values and kind not in ("llama", "tinyloop"):
        missing.append("num_key_value_heads")
    if missing:
        raise FormatError(f"config.json lacks {missing[0]}; the file is incomplete")
    if not isinstance(values["rms_norm_eps"], (int, float)):
        raise FormatError(f"config.json has rms_norm_eps={values['rms_norm_eps']!r}; it must be a number")
    heads, hidden = _count(values, "num_attention_heads"), _count(values, "hidden_size")
    segments = _segments(values, kind)
    head_dim = _head_dim(values, kind)
    windows = _windows(values, kind, sum(s.layers for s in segments), notes)
    return ModelConfig(
        architecture=kind, vocab_size=values["vocab_size"], hidden_size=hidden,
        intermediate_size=values["intermediate_size"], num_attention_heads=heads,
        num_key_value_heads=heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"],
        head_dim=head_dim, rms_norm_eps=float(values["rms_norm_eps"]),
        max_position_embeddings=values["max_position_embeddings"], segments=segments,
        rope=resolve(_rope_recipe(values), head_dim, values["max_position_embeddings"]),
        tie_word_embeddings=flag(values, "tie_word_embeddings", False), qk_norm=kind == "qwen3", sliding_window=windows,
    ), notes  # fmt: skip


def biased(values: Values) -> set[str]:
    """The linears of a block that carry a bias, by their name in the checkpoint."""
    if values["model_type"] == "qwen2":
        return {"q_proj", "k_proj", "v_proj"}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"} if flag(values, "attention_bias", False) else set()
    return attention | ({"gate_proj", "up_proj", "down_proj"} if flag(values, "mlp_bias", False) else set())


def _model_type(values: Values) -> str:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _MODEL_KEYS:
        raise UnsupportedError(f"model_type={kind!r} is not supported; known are {', '.join(_MODEL_KEYS)}")
    names = values.get("architectures") or []
    if names and not (isinstance(names, list) and any("ForCausalLM" in str(name) for name in names)):
        raise UnsupportedError(f"architectures={names} is no causal language model (…ForCausalLM)")
    if not isinstance(values.get("auto_map") or {}, dict):
        raise FormatError(f"config.json has auto_map={values['auto_map']!r}; it must be an object")
    if "AutoModelForCausalLM" in (values.get("auto_map") or {}):
        raise UnsupportedError(
            f"auto_map names own model code, {values['auto_map']['AutoModelForCausalLM']}, which is not run; only "
            "checkpoints of the plain architecture are read"
        )
    return kind


def _check_keys(values: Values, kind: str) -> list[str]:
    known = _COMMON | _MODEL_KEYS[kind]
    for key in _nested_keys(values):
        if _LOOP_LIKE.search(key) and key not in known:
            raise UnsupportedError(
                f"config.json key {key} speaks of loops in a way that is not known for model_type={kind}; a wrong loop "
                "count would write fluent, wrong text. Looped models are read as model_type=tinyloop with pre_layers, "
                "loop_layers, coda_layers and loops"
            )
    notes = []
    for key, value in values.items():
        if key in _FIXED and value is not None and value not in _FIXED[key]:
            allowed = " or ".join(repr(v) for v in _FIXED[key]) or "null"
            raise UnsupportedError(f"config.json has {key}={value!r}; the runtime does {allowed} only")
        if key in _FIXED or key in known or key in _HARMLESS or not value:
            continue
        if _STRUCTURAL.search(key):
            raise UnsupportedError(
                f"config.json key {key}={value!r} is not known for model_type={kind} and looks structural; "
                "if it changes nothing, set it to null"
            )
        notes.append(f"config.json key {key} is not known and was ignored.")
    return notes


def _nested_keys(values: Values) -> list[str]:
    return [k for key, v in values.items() for k in (key, *(_nested_keys(v) if isinstance(v, dict) else ()))]


def _segments(values: Values, kind: str) -> tuple[Segment, ...]:
    if kind != "tinyloop":
        return (Segment("pre", _count(values, "num_hidden_layers")),)
    layers = {name: _count(values, f"{name}_layers", 0) for name in ("pre", "loop", "coda")}
    loops = values.get("loops")
    if layers["loop"] and (type(loops) is not int or loops < 1):
        raise FormatError(
            f"config.json has loop_layers={layers['loop']} but loops={loops!r}; give loops as a number ≥ 1"
        )
    if not layers["loop"] and loops is not None:
        raise FormatError(f"config.json has loops={loops!r} but no loop_layers; leave loops out or name the layers")
    total = sum(layers.values())
    if values.get("num_hidden_layers", total) != total:
        raise FormatError(f"num_hidden_layers={values['num_hidden_layers']} but pre, loop and coda layers are {total}")
    repeats = {"pre": 1, "loop": loops or 1, "coda": 1}
    return tuple(Segment(name, n, repeats[name]) for name, n in layers.items() if n)


def _count(values: Values, key: str, missing: int | None = None) -> int:
    value = values.get(key, missing)
    if type(value) is not int or value < (0 if missing == 0 else 1):
        raise FormatError(f"config.json has {key}={value!r}; it must be a whole number")
    return value


def _head_dim(values: Values, kind: str) -> int:
    if "head_dim" not in values and kind == "qwen3":
        return 128  # the default of Qwen3's class; the others have none
    if values.get("head_dim") is not None:
        return _count(values, "head_dim")
    if values["hidden_size"] % values["num_attention_heads"]:
        raise FormatError(
            f"hidden_size={values['hidden_size']} is not a multiple of num_attention_heads="
            f"{values['num_attention_heads']} and there is no head_dim"
        )
    return int(values["hidden_size"] // values["num_attention_heads"])


def _rope_recipe(values: Values) -> dict[str, Any]:
    """One flat recipe from the new spelling (rope_parameters) or the old (rope_theta, rope_scaling)."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key) or {}, dict):
            raise FormatError(f"config.json has {key}={values[key]!r}; it must be an object")
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if new and old and new != old:
        raise FormatError("config.json has both rope_parameters and rope_scaling, and they differ; keep the right one")
    recipe = dict(new or old)
    if nested := [v for v in recipe.values() if isinstance(v, dict)]:
        if len(nested) != len(recipe) or any(v != nested[0] for v in nested):
            raise UnsupportedError("rope_parameters differ between layer types; the runtime has one rotation for all")
        recipe = dict(nested[0])
    for key in ("rope_theta", "partial_rotary_factor"):
        if values.get(key) is not None:
            recipe.setdefault(key, values[key])
    return recipe


def _windows(values: Values, kind: str, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """The window of each layer; empty where all are full. Missing keys have the defaults of the model's class."""
    types = values.get("layer_types") if kind in ("qwen2", "qwen3", "mistral") else None
    if types is not None and (len(types) != layers or set(types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(
            f"layer_types={types} must name full_attention or sliding_attention for each of {layers} layers"
        )
    if kind == "mistral":
        window = values.get("sliding_window", 4096)
        if "sliding_window" not in values:
            notes.append("config.json lacks sliding_window: 4096 tokens, as Mistral's class has it.")
        slides = [window is not None] * layers
        if types is not None and slides != [t == "sliding_attention" for t in types]:
            raise UnsupportedError("layer_types and sliding_window disagree; mistral has one window for all layers")
    elif kind in ("qwen2", "qwen3"):
        window = values.get("sliding_window", 4096) if flag(values, "use_sliding_window", False) else None
        first = values.get("max_window_layers", 28)
        slides = [t == "sliding_attention" for t in types] if types else [i >= first for i in range(layers)]
        if window is None:
            if types and any(slides):
                raise FormatError(
                    "layer_types names sliding_attention, but sliding_window or use_sliding_window is off"
                )
            slides = [False] * layers
    else:
        return ()
    if any(slides) and (type(window) is not int or window < 1):
        raise FormatError(f"config.json has sliding_window={window!r}; it must be a number of tokens ≥ 1 or null")
    return tuple(window if s else None for s in slides) if any(slides) else ()
