"""A Hugging Face folder (config.json, *.safetensors, tokenizer.json) → `Checkpoint` of dense weights.

In: a folder of Llama, Mistral, Qwen2, Qwen3 or TinyLoop's own looped layout in fp16, bf16 or fp32. Out: the same
numbers under our names. Tensors stay mapped from the files, so that memory stays flat; only q, k and v are copied,
because they become one weight. The configuration says which tensors there must be; one that is missing, and one that
is too many, is an error with its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import FormatError, UnsupportedError
from ..weight import DenseWeight
from .hf_config import biased, model_config
from .hf_tokenizer import read_json, read_tokenizer

Tensor = torch.Tensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Prefix of the decoder and of the head; multimodal wrappers put theirs before or between.
_PREFIXES = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
# Buffers that old releases saved; all follow from the configuration.
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias", "attn.masked_bias")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LINEARS = {  # ours → theirs, within a layer
    "attn_qkv": _QKV,
    "attn_out": ("self_attn.o_proj",),
    "mlp_gate": ("mlp.gate_proj",),
    "mlp_up": ("mlp.up_proj",),
    "mlp_down": ("mlp.down_proj",),
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a folder: where each lies, and a handle on each file. `used` are those that were asked for."""

    folder: Path
    files: Mapping[str, str]  # tensor → file name
    handles: Mapping[str, Any]  # file name → safe_open
    used: set[str]

    def get(self, name: str) -> Tensor:
        if name not in self.files:
            raise FormatError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        self.used.add(name)
        tensor: Tensor = self.handles[self.files[name]].get_tensor(name)
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UnsupportedError(
                f"{self.folder / self.files[name]}: tensor {name} is {tensor.dtype}; read are fp16, bf16 and fp32"
            )
        return tensor


def import_huggingface(folder: Path, progress: Callable[[int, int], None] | None = None) -> Checkpoint:
    """The checkpoint in `folder`. Raises FormatError or UnsupportedError naming file, tensor or key."""
    values = read_json(folder / "config.json")
    config, notes = model_config(values)
    tensors = _open(folder)
    decoder, head = _prefixes(tensors)
    if config.tie_word_embeddings and not _tied(tensors, decoder, head):
        notes.append(
            "config.json ties the head to the embedding, but the file has another head: kept apart, as stored."
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    weights = _weights(config, tensors, (decoder, head), biased(values), progress)
    norms = {ours: tensors.get(theirs) for ours, theirs in _norm_names(config, decoder).items()}
    _refuse_leftovers(tensors)
    tokenizer, more = read_tokenizer(folder, values)
    source = {"format": "huggingface", "file": folder.resolve().name, "model_type": str(values["model_type"])}
    return Checkpoint(config, weights, norms, tokenizer, source, (*notes, *more))


def _weights(
    config: ModelConfig,
    tensors: _Tensors,
    prefixes: tuple[str, str],
    biases: set[str],
    progress: Callable[[int, int], None] | None,
) -> dict[str, DenseWeight]:
    decoder, head = prefixes
    names: dict[str, tuple[str, ...]] = {"embed": (f"{decoder}embed_tokens",)}
    for i in range(config.num_layers):
        names |= {
            f"layers.{i}.{ours}": tuple(f"{decoder}layers.{i}.{name}" for name in theirs)
            for ours, theirs in _LINEARS.items()
        }
    if not config.tie_word_embeddings:
        names["head"] = (head.removesuffix("."),)
    shapes = _part_shapes(config)
    weights = {}
    for done, (ours, parts) in enumerate(names.items(), 1):
        weights[ours] = _linear(tensors, parts, biases, shapes)
        if progress:
            progress(done, len(names))
    return weights


def _linear(tensors: _Tensors, parts: tuple[str, ...], biases: set[str], shapes: dict[str, list[int]]) -> DenseWeight:
    """One weight from its parts, stacked along N."""
    has_bias = [part.rpartition(".")[2] in biases for part in parts]
    assert all(has_bias) or not any(has_bias)
    matrices = [tensors.get(f"{part}.weight") for part in parts]
    offsets = [tensors.get(f"{part}.bias") for part in parts] if all(has_bias) else []
    for part, matrix in zip(parts, matrices, strict=True):
        want = shapes.get(part.rpartition(".")[2])
        if want is not None and list(matrix.shape) != want:
            raise FormatError(f"tensor {part}.weight has shape {list(matrix.shape)}; the configuration needs {want}")
    if len(parts) == 1:
        return DenseWeight(matrices[0], offsets[0] if offsets else None)
    return DenseWeight(torch.cat(matrices), torch.cat(offsets) if offsets else None)


def _part_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """[N, K] of the parts that are stacked, where a sum of rows would hide a wrong share. The rest is checked whole."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {"q_proj": [q, config.hidden_size]} | {name: [kv, config.hidden_size] for name in ("k_proj", "v_proj")}


def _norm_names(config: ModelConfig, decoder: str) -> dict[str, str]:
    names = {"final_norm": f"{decoder}norm.weight"}
    for ours in config.norm_shapes():
        if ours != "final_norm":
            layer, _, name = ours.rpartition(".")
            names[ours] = f"{decoder}{layer}.{_NORMS[name]}.weight"
    return names


def _prefixes(tensors: _Tensors) -> tuple[str, str]:
    found = [p for p in _PREFIXES if f"{p[0]}embed_tokens.weight" in tensors.files]
    if len(found) != 1:
        wanted = ", ".join(f"{p[0]}embed_tokens.weight" for p in _PREFIXES)
        raise FormatError(f"{tensors.folder} has {len(found)} of the tensors {wanted}; it must have one")
    return found[0]


def _tied(tensors: _Tensors, decoder: str, head: str) -> bool:
    """Whether the head is the embedding: absent, or stored again with the same values."""
    if f"{head}weight" not in tensors.files:
        return True
    return torch.equal(tensors.get(f"{head}weight"), tensors.get(f"{decoder}embed_tokens.weight"))


def _refuse_leftovers(tensors: _Tensors) -> None:
    left = sorted(name for name in tensors.files.keys() - tensors.used if not name.endswith(_BUFFERS))
    if left:
        raise UnsupportedError(
            f"{tensors.folder}: {len(left)} tensors have no place in this architecture, the first is {left[0]} in "
            f"{tensors.files[left[0]]}; the model is more than config.json says"
        )


def _open(folder: Path) -> _Tensors:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file() and single.is_file():
        raise FormatError(f"{folder} has both {INDEX} and {SINGLE}; remove the one that is out of date")
    if index.is_file():
        return _open_shards(folder, _weight_map(index))
    if single.is_file():
        handle = _safe_open(single)
        return _Tensors(folder, dict.fromkeys(handle.keys(), SINGLE), {SINGLE: handle}, set())
    pickles = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in sorted(folder.glob(pattern))]
    if pickles:
        raise UnsupportedError(f"{folder} has its weights in {pickles[0]}: pickles can run code and are not read; "
                               "save the model as safetensors")  # fmt: skip
    raise FormatError(f"{folder} has neither {SINGLE} nor {INDEX}; the folder is incomplete")


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FormatError(f"{index} has no weight_map; the file is damaged")
    for tensor, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise FormatError(f"{index} puts tensor {tensor} in {file!r}; a shard is a file of the same folder")
    return files


def _open_shards(folder: Path, files: dict[str, str]) -> _Tensors:
    """Handles on all shards, after comparing the index with what each shard really holds."""
    handles = {}
    for file in sorted(set(files.values())):
        listed = {tensor for tensor, where in files.items() if where == file}
        if not (folder / file).is_file():
            raise FormatError(f"{folder / file} is missing; {INDEX} puts {len(listed)} tensors there, such as "
                              f"{min(listed)}; copy the shard again")  # fmt: skip
        handles[file] = _safe_open(folder / file)
        held = set(handles[file].keys())
        if listed - held:
            raise FormatError(f"{folder / file} does not hold tensor {min(listed - held)}, which {INDEX} puts there; "
                              "the index or the shard is out of date")  # fmt: skip
        if held - listed:
            raise FormatError(f"{folder / file} holds tensor {min(held - listed)}, which {INDEX} does not put there; "
                              "the index or the shard is out of date")  # fmt: skip
    return _Tensors(folder, files, handles, set())


def _safe_open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{file} cannot be read ({error}); truncated or no safetensors file, copy it again"
        ) from error
