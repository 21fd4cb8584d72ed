"""A Hugging Face folder (config.json, *.safetensors, tokenizer.json) → `Checkpoint`.

In: a folder of Llama, Mistral, Qwen2, Qwen3 or TinyLoop's own looped layout, in fp16, bf16 or fp32 or in a quantised
format of formats.py. Out: the same numbers under our names, dense or as codes. Weights are deferred: headers say what
they are, and each is read when it is asked for. The configuration says which tensors there must be; one that is
missing, and one that is too many, is an error with its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint import Checkpoint, Deferred
from ..config import ModelConfig
from ..errors import FormatError, UnsupportedError
from ..weight import DenseWeight, LinearWeight
from .formats import open_format
from .hf_config import biased, model_config
from .hf_tokenizer import read_json, read_tokenizer
from .onnx_folder import open_onnx
from .parts import Part, Remarks, stackable, stacked, stacked_codes
from .shards import FLOATS, Shards, open_shards

Tensor = torch.Tensor

# Prefix of the decoder and of the head; multimodal wrappers put theirs before or between.
_PREFIXES = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
# Buffers that old releases saved; all follow from the configuration.
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias", "attn.masked_bias")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LINEARS = {  # ours → theirs, within a layer
    "attn_qkv": _QKV,
    "attn_out": ("self_attn.o_proj",),
    "mlp_gate": ("mlp.gate_proj",),
    "mlp_up": ("mlp.up_proj",),
    "mlp_down": ("mlp.down_proj",),
}
NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class _Source:
    """A folder that is being read: its tensors, its format and what the configuration says of biases and shapes."""

    shards: Shards
    reader: Callable[[str], Part | None]  # module → its codes, None where it has none
    codes: str | None  # the tensor of a module that has them
    biases: set[str]  # last part of the names of linears that must have a bias
    shapes: Mapping[str, list[int]]  # last part of a name → [N, K]
    remarks: Remarks


def import_huggingface(folder: Path, progress: Callable[[int, int], None] | None = None) -> Checkpoint:
    """The checkpoint in `folder`. Raises FormatError or UnsupportedError naming file, tensor or key."""
    values = read_json(folder / "config.json")
    config, notes = model_config(values)
    graphs = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.onnx"))
    shards = open_onnx(folder, graphs) if graphs else open_shards(folder)
    remarks = Remarks()
    found = open_format(folder, values, shards, remarks)
    reader, codes = (found[1], found[0].codes) if found else (lambda module: None, None)
    source = _Source(shards, reader, codes, biased(values), _part_shapes(config), remarks)
    decoder, head = _prefixes(source)
    if config.tie_word_embeddings and not _tied(source, decoder, head):
        notes.append(
            "config.json ties the head to the embedding, but the file has another head: kept apart, as stored."
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    weights = _weights(source, _modules(config, decoder, head), progress)
    norms = {ours: _floats(shards, theirs) for ours, theirs in _norm_names(config, decoder).items()}
    _refuse_leftovers(shards)
    tokenizer, more = read_tokenizer(folder, values)
    about = {"format": "huggingface", "file": folder.resolve().name, "model_type": str(values["model_type"])}
    about |= {"quantisation": found[0].name} if found else {}
    return Checkpoint(config, weights, norms, tokenizer, about, (*notes, *remarks.lines(), *more))


def _modules(config: ModelConfig, decoder: str, head: str) -> dict[str, tuple[str, ...]]:
    """Our weight → the modules that it is made of."""
    names: dict[str, tuple[str, ...]] = {"embed": (f"{decoder}embed_tokens",)}
    for i in range(config.num_layers):
        names |= {
            f"layers.{i}.{ours}": tuple(f"{decoder}layers.{i}.{name}" for name in theirs)
            for ours, theirs in LINEARS.items()
        }
    return names if config.tie_word_embeddings else names | {"head": (head.removesuffix("."),)}


def _weights(
    source: _Source, modules: Mapping[str, tuple[str, ...]], progress: Callable[[int, int], None] | None
) -> Deferred:
    outlines: dict[str, LinearWeight] = {}
    makers: dict[str, Callable[[], LinearWeight]] = {}
    for done, (ours, theirs) in enumerate(modules.items(), 1):
        outlines[ours], makers[ours] = _linear(source, theirs)
        if progress:
            progress(done, len(modules))
    return Deferred(outlines, lambda name: makers[name]())


def _linear(source: _Source, modules: tuple[str, ...]) -> tuple[LinearWeight, Callable[[], LinearWeight]]:
    """One weight from its modules, stacked along N: its outline, and what reads it. Modules of which not all have
    codes, or whose inputs have different orders, become one dense weight of the same values."""
    parts = [source.reader(module) for module in modules]
    shapes = [_shape(source, module, part) for module, part in zip(modules, parts, strict=True)]
    bias = _bias(source, modules, parts, shapes)
    quantised = [part for part in parts if part is not None]
    if not quantised:
        return _dense(source.shards, modules, bias)
    parameters = [part.parameters() for part in quantised]
    if len(quantised) < len(parts) or not stackable(quantised, parameters):
        why = "Not all have codes" if len(quantised) < len(parts) else "Their inputs have different orders"
        source.remarks.add(f"{why}, so these became one dense weight of the same values", ", ".join(modules))
        return _mixed(source.shards, modules, parts, shapes, bias)

    def make() -> LinearWeight:
        p = [part.parameters() for part in quantised]
        return stacked(quantised, p, stacked_codes(quantised, p[0].perm), bias)

    K, N = quantised[0].K, sum(part.N for part in quantised)
    unread = torch.empty(-(-K // 2), N, dtype=torch.uint8, device="meta")
    return stacked(quantised, parameters, unread, bias).to("meta"), make


def _shape(source: _Source, module: str, part: Part | None) -> list[int]:
    """[N, K] of a module, which has codes or numbers, not both and not neither, and the shape that the configuration
    says."""
    dense, shards = f"{module}.weight", source.shards
    if source.codes != "weight":  # MLX and ONNX have their codes under that name
        if part is None and source.codes and dense not in shards:
            raise FormatError(
                f"{shards.folder}: {module} has no {source.codes}, and no weight either; the checkpoint is incomplete"
            )
        if part is not None and dense in shards:
            raise FormatError(
                f"{shards.where(dense)} stands beside {module}.{source.codes}; remove the one that is out of date"
            )
    shape = list(shards.floats(dense).shape) if part is None else [part.N, part.K]
    want = source.shapes.get(module.rpartition(".")[2])
    if want is not None and shape != want:
        name = dense if part is None else f"{module}.{source.codes}"
        raise FormatError(f"tensor {name} has shape {shape}; the configuration needs {want}")
    return shape


def _dense(
    shards: Shards, modules: tuple[str, ...], bias: Tensor | None
) -> tuple[DenseWeight, Callable[[], DenseWeight]]:
    names = [f"{module}.weight" for module in modules]

    def joined(tensors: list[Tensor], bias: Tensor | None) -> DenseWeight:
        return DenseWeight(tensors[0] if len(tensors) == 1 else torch.cat(tensors), bias)

    outline = joined([shards.floats(name) for name in names], None if bias is None else bias.to("meta"))
    return outline, lambda: joined([shards.get(name) for name in names], bias)


def _mixed(
    shards: Shards, modules: tuple[str, ...], parts: list[Part | None], shapes: list[list[int]], bias: Tensor | None
) -> tuple[DenseWeight, Callable[[], DenseWeight]]:
    """fp32, which holds q·scale + zero as `QuantWeight` has it."""

    def values(module: str, part: Part | None) -> Tensor:  # [N, K]
        if part is None:
            return shards.get(f"{module}.weight").float()
        p = part.parameters()
        return stacked([part], [p], stacked_codes([part], p.perm), None).dequantize().t()

    def make() -> DenseWeight:
        return DenseWeight(torch.cat([values(m, p) for m, p in zip(modules, parts, strict=True)]), bias)

    unread = torch.empty(sum(N for N, _ in shapes), shapes[0][1], device="meta")
    return DenseWeight(unread, None if bias is None else bias.to("meta")), make


def _bias(
    source: _Source, modules: tuple[str, ...], parts: list[Part | None], shapes: list[list[int]]
) -> Tensor | None:
    """Of all modules; zeros for one that has none beside others that have."""
    found = [_own_bias(source, *own) for own in zip(modules, parts, shapes, strict=True)]
    if all(bias is None for bias in found):
        return None
    return torch.cat(
        [
            torch.zeros(N, dtype=torch.float32) if bias is None else bias
            for bias, (N, _) in zip(found, shapes, strict=True)
        ]
    )


def _own_bias(source: _Source, module: str, part: Part | None, shape: list[int]) -> Tensor | None:
    """A bias that the configuration asks for, or that a quantised module has beyond it. Some writers give every linear
    one of zeros, which is left out."""
    name, shards = f"{module}.bias", source.shards
    asked = module.rpartition(".")[2] in source.biases
    if not asked and (part is None or name not in shards):
        return None
    shards.expect(name, FLOATS, shape[:1], "its module")
    bias = shards.get(name).clone()
    return bias if asked or bool(bias.any()) else None


def _floats(shards: Shards, name: str) -> Tensor:
    shards.floats(name)
    return shards.get(name)


def _part_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """[N, K] of the parts that are stacked, where a sum of rows would hide a wrong share. The rest is checked whole."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {"q_proj": [q, config.hidden_size]} | {name: [kv, config.hidden_size] for name in ("k_proj", "v_proj")}


def _norm_names(config: ModelConfig, decoder: str) -> dict[str, str]:
    names = {"final_norm": f"{decoder}norm.weight"}
    for ours in config.norm_shapes():
        if ours != "final_norm":
            layer, _, name = ours.rpartition(".")
            names[ours] = f"{decoder}{layer}.{NORMS[name]}.weight"
    return names


def _prefixes(source: _Source) -> tuple[str, str]:
    shards = source.shards
    found = [p for p in _PREFIXES if f"{p[0]}embed_tokens.weight" in shards]
    if len(found) != 1:
        wanted = ", ".join(f"{p[0]}embed_tokens.weight" for p in _PREFIXES)
        raise FormatError(f"{shards.folder} has {len(found)} of the tensors {wanted}; it must have one")
    return found[0]


def _tied(source: _Source, decoder: str, head: str) -> bool:
    """Whether the head is the embedding: absent, or stored again with the same values."""
    shards, module, embed = source.shards, head.removesuffix("."), f"{decoder}embed_tokens"
    if source.reader(module) is not None:
        return False
    if f"{module}.weight" not in shards:
        return True
    if source.reader(embed) is not None:
        return False
    return torch.equal(_floats(shards, f"{module}.weight"), _floats(shards, f"{embed}.weight"))


def _refuse_leftovers(shards: Shards) -> None:
    left = sorted(name for name in shards.entries.keys() - shards.used if not name.endswith(_BUFFERS))
    if left:
        raise UnsupportedError(
            f"{shards.folder}: {len(left)} tensors have no place in this architecture, the first is {left[0]} in "
            f"{shards.entries[left[0]].file}; the model is more than config.json says"
        )
