"""A .gguf file of architecture llama → `Checkpoint`, without loss.

In: the file, through the optional package `gguf`. Out: every weight with the value that `gguf.dequantize` gives it.

    Q4_1   d·q + m        our form: scale = d, zero = m, G = 32
    Q4_0   d·(q − 8)      scale = d, zero = −8·d
    Q4_K   d·s·q − e·m    scale = d·s, zero = −e·m in fp32, since s and m add six bits to fp16; G = 32
    Q8_0   d·q            eight-bit codes q + 128, zero = −128·d, in the embedding and the head; elsewhere dense
    other                 dense: fp16 or bf16 as stored, else fp32 (fp16 where that is exact)

A row of the file is one output, [N, K]; ours run along K. The rows of q and k are stored in pairs (interleaved
rotation); they are put back as whole rows, so that codes are moved and never recomputed. One tensor is in work at a
time; what is dense already stays mapped from the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import FormatError, TinyLoopError, UnsupportedError
from ..weight import DenseWeight, LinearWeight, QuantWeight
from .gguf_config import model_config
from .gguf_tokenizer import read_tokenizer

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor

# type → bytes of a block of 32 weights, bytes before its codes.
_BLOCKS = {"Q4_0": (18, 2), "Q4_1": (20, 4), "Q8_0": (34, 2)}
_QUANTISED = {"linear": ("Q4_0", "Q4_1", "Q4_K"), "table": ("Q4_0", "Q4_1", "Q4_K", "Q8_0")}
_LINEARS = {  # ours → theirs, within a block
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_out": ("attn_output",),
    "mlp_gate": ("ffn_gate",),
    "mlp_up": ("ffn_up",),
    "mlp_down": ("ffn_down",),
}
_NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}


@dataclass(frozen=True)
class _Part:
    """One tensor of the file: its rows as stored. `rows` may be bytes (quantised types) or numbers."""

    name: str
    type: str
    rows: Array  # [N, bytes or K]


@dataclass(frozen=True)
class _File:
    """The tensors of the file that were not taken yet, and a count of what was dequantised; both change on the way."""

    path: Path
    tensors: dict[str, Any]  # name → gguf.ReaderTensor, those not yet taken
    expanded: Counter[str]  # type → tensors of it that were dequantised

    def take(self, name: str) -> _Part:
        if name not in self.tensors:
            raise FormatError(f"{self.path}: tensor {name} is missing; the file is incomplete")
        tensor = self.tensors.pop(name)
        return _Part(name, tensor.tensor_type.name, tensor.data)


def import_gguf(path: Path, progress: Callable[[int, int], None] | None = None) -> Checkpoint:
    """The model at `path`. Raises UnsupportedError without the package `gguf`, or where the file asks for what the
    runtime does not do; FormatError on a damaged file; each names the key or tensor.
    """
    fields, file = _open(path)
    rows = {name: int(t.shape[-1]) for name, t in file.tensors.items() if len(t.shape) == 2}
    divisors = _rope_divisors(file)
    config = model_config(fields, rows.get("token_embd.weight"), "output.weight" not in rows, divisors)
    tokenizer, notes = read_tokenizer(fields, config.vocab_size)
    weights: dict[str, LinearWeight] = {}
    names = _weight_names(config)
    for done, (ours, theirs) in enumerate(names.items(), 1):
        weights[ours] = _weight(file, config, theirs, notes)
        if progress:
            progress(done, len(names))
    norms = {ours: _vector(file, theirs) for ours, theirs in _norm_names(config).items()}
    _refuse_leftovers(file)
    notes += [f"{n} tensors of type {kind} were dequantised: the same values, in floating point."
              for kind, n in sorted(file.expanded.items())]  # fmt: skip
    source = {"format": "gguf", "file": path.name}
    source |= {key: str(fields[f"general.{key}"]) for key in ("name", "license") if f"general.{key}" in fields}
    return Checkpoint(config, weights, norms, tokenizer, source, tuple(notes))


def _open(path: Path) -> tuple[dict[str, Any], _File]:
    """Metadata as plain values, and the tensors. The reader's own metadata (one array an entry) is dropped here."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            f"{path} is a GGUF file; reading it needs a package: pip install tinyloop[gguf]"
        ) from error
    try:
        # Mapped copy-on-write, so that torch may share the memory; nothing is written.
        reader = gguf.GGUFReader(path, "c")
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise FormatError(f"{path} is truncated or damaged ({error}); copy it again") from error
    if reader.byte_order == "S":
        raise UnsupportedError(f"{path} is of the other byte order; write it again for this machine")
    if fields.get("split.count", 0) > 1:
        raise UnsupportedError(f"{path} is one of {fields['split.count']} parts; join them with gguf-split --merge")
    return fields, _File(path, {t.name: t for t in reader.tensors}, Counter())


def _weight_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {"embed": ("token_embd",)}
    for i in range(config.num_layers):
        names |= {f"layers.{i}.{ours}": tuple(f"blk.{i}.{t}" for t in theirs) for ours, theirs in _LINEARS.items()}
    return names if config.tie_word_embeddings else names | {"head": ("output",)}


def _norm_names(config: ModelConfig) -> dict[str, str]:
    names = {"final_norm": "output_norm.weight"}
    for i in range(config.num_layers):
        names |= {f"layers.{i}.{ours}": f"blk.{i}.{theirs}.weight" for ours, theirs in _NORMS.items()}
    return names


def _weight(file: _File, config: ModelConfig, names: tuple[str, ...], notes: list[str]) -> LinearWeight:
    """One weight from its tensors, stacked along N: as codes where all are of one quantised type, else dense."""
    parts = [_in_head_order(file.take(f"{name}.weight"), config) for name in names]
    for part in parts:
        _check_rows(file, config, part)
    bias = _bias(file, config, names)
    kinds = {part.type for part in parts}
    use = "linear" if names[0].startswith("blk.") else "table"
    try:
        if len(kinds) == 1 and parts[0].type in _QUANTISED[use]:
            rows = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
            return _affine(rows, parts[0].type, bias)
        if len(kinds) > 1:
            shown = ", ".join(f"{part.name} {part.type}" for part in parts)
            notes.append(f"{shown}: of different types, kept together in floating point.")
        for part in parts:
            if part.type not in ("F32", "F16", "BF16"):
                file.expanded[part.type] += 1
        dense = [_dense(part) for part in parts]
        return DenseWeight(dense[0] if len(dense) == 1 else torch.cat(dense), bias)
    except (TinyLoopError, NotImplementedError) as error:
        kind = UnsupportedError if isinstance(error, NotImplementedError) else type(error)
        raise kind(f"{file.path}: tensor {names[0]}.weight ({parts[0].type}): {error}") from error


def _in_head_order(part: _Part, config: ModelConfig) -> _Part:
    """Rows of q and k from pairs (h, i, half) to halves (h, half, i); every other tensor as it is.

    The file has them for a rotation of neighbours (2i, 2i+1); ours rotates (i, i + head_dim/2).
    """
    name = part.name.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if heads is None or len(part.rows) != heads * config.head_dim:
        return part
    rows = part.rows.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2)
    return _Part(part.name, part.type, rows.reshape(part.rows.shape))


def _check_rows(file: _File, config: ModelConfig, part: _Part) -> None:
    """q, k and v are checked one by one: a sum of rows would hide a wrong share. The rest is checked whole."""
    wanted = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads,
              "attn_v": config.num_key_value_heads}.get(part.name.split(".")[-2])  # fmt: skip
    if wanted is not None and len(part.rows) != wanted * config.head_dim:
        raise FormatError(
            f"{file.path}: tensor {part.name} has {len(part.rows)} rows; the configuration needs "
            f"{wanted * config.head_dim}"
        )


def _affine(rows: Array, kind: str, bias: Tensor | None) -> QuantWeight:  # uint8 [N, blocks · bytes]
    if kind == "Q4_K":
        return _two_levels(rows, bias)
    size, head = _BLOCKS[kind]
    blocks = rows.reshape(len(rows), -1, size)
    d = _halves(blocks[..., :2])
    codes = blocks[..., head:]
    if kind == "Q8_0":  # two's complement + 128 is a flip of the top bit
        return QuantWeight.from_codes(_along_k(codes ^ 0x80), d, d.float() * -128, 32, bits=8, bias=bias)
    q = _along_k(np.concatenate((codes & 15, codes >> 4), axis=2))  # low nibbles are weights 0..15 of the block
    if kind == "Q4_1":
        return QuantWeight.from_codes(q, d, _halves(blocks[..., 2:4]), 32, bias=bias)
    return QuantWeight.from_codes(q, d, d.float() * -8, 32, bias=bias, integer_zero=True)


def _two_levels(rows: Array, bias: Tensor | None) -> QuantWeight:  # uint8 [N, blocks · 144]
    """Q4_K: eight groups of 32 share a block. Bytes: d, e (fp16); twelve of 6-bit s and m; four chunks of 32 bytes, of
    which chunk c has group 2c in its low nibbles and 2c + 1 in the high ones.

        byte j of the twelve, j = 0 … 3        s[4+j] bits 5, 4 │ s[j]
        byte 4 + j                             m[4+j] bits 5, 4 │ m[j]
        byte 8 + j                             m[4+j] bits 3 … 0 │ s[4+j] bits 3 … 0
    """
    blocks = rows.reshape(len(rows), -1, 144)
    a, b, c = (blocks[..., i : i + 4] for i in (4, 8, 12))
    s = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=-1)
    m = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=-1)
    scale, offset = (
        torch.from_numpy(
            (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) * six).reshape(len(rows), -1)
        )
        for i, six in ((0, s), (2, m))
    )
    chunks = blocks[..., 16:].reshape(len(rows), -1, 4, 1, 32)
    q = _along_k(np.concatenate((chunks & 15, chunks >> 4), axis=3))
    return QuantWeight.from_codes(q, scale.t().contiguous(), -offset.t().contiguous(), 32, bias=bias)


def _halves(field: Array) -> Tensor:  # uint8 [N, blocks, 2] → fp16 [blocks, N]
    return torch.from_numpy(np.ascontiguousarray(field).view(np.float16)[..., 0]).t().contiguous()


def _along_k(codes: Array) -> Tensor:  # uint8 [N, blocks, …, 32] → uint8 [K, N]
    return torch.from_numpy(codes.reshape(len(codes), -1)).t().contiguous()


def _dense(part: _Part) -> Tensor:  # [N, K] or [N]
    if part.type == "F16":
        return torch.from_numpy(part.rows)
    if part.type == "BF16":
        return torch.from_numpy(part.rows.view(np.int16)).view(torch.bfloat16)
    if part.type == "F32":
        return _narrow(torch.from_numpy(part.rows))
    import gguf

    return _narrow(torch.from_numpy(gguf.dequantize(part.rows, gguf.GGMLQuantizationType[part.type])))


def _narrow(t: Tensor) -> Tensor:
    """fp16 where that is exact; looked at in slabs, so that most tensors are told by their first rows."""
    exact = all(torch.equal(t[i : i + 256].half().float(), t[i : i + 256]) for i in range(0, len(t), 256))
    return t.half() if exact else t


def _vector(file: _File, name: str) -> Tensor:  # [length]
    part = file.take(name)
    if part.type not in ("F32", "F16"):
        raise UnsupportedError(f"{file.path}: tensor {name} is {part.type}; norms and biases are F32 or F16")
    return torch.from_numpy(part.rows)


def _bias(file: _File, config: ModelConfig, names: tuple[str, ...]) -> Tensor | None:
    """The biases of all parts, or None where none has one."""
    present = [f"{name}.bias" for name in names if f"{name}.bias" in file.tensors]
    if not present:
        return None
    if len(present) < len(names):
        raise FormatError(f"{file.path}: {present[0]} is there, but not every one of {', '.join(names)} has a bias")
    parts = [_in_head_order(file.take(name), config) for name in present]
    return torch.cat([torch.from_numpy(part.rows) for part in parts])


def _rope_divisors(file: _File) -> Tensor | None:  # fp32 [head_dim/2]
    return _vector(file, "rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None


def _refuse_leftovers(file: _File) -> None:
    left = sorted(name for name in file.tensors if not name.endswith("attn_rot_embd.weight"))  # a saved constant
    if left:
        raise UnsupportedError(
            f"{file.path}: {len(left)} tensors have no place in architecture llama, the first is {left[0]}"
        )
