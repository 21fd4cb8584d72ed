"""Folders of onnxruntime-genai's model builder: config.json of the model it was made from, one .onnx file and its data.

In: the operators MatMulNBits of the graph, for their sizes, and the tensors they take, under the builder's names. Out:
the same tensors as `Shards`, under the names of the model; q, k and v, which may be one, as three.

    weight       uint8 [N, K/G, G/2]     byte j of block b: q[bG + 2j, n] in the low nibble, then q[bG + 2j + 1, n]
    scales       float [N, K/G]          negative ones too
    zero_points  uint8 [N, ⌈K/G/2⌉]      block 2b in the low nibble of byte b; absent: z = 8

W = (q − z)·scale. A graph of another exporter has lost the names of its tensors, and is refused for those missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError, UnsupportedError
from .hf_tokenizer import read_json
from .parts import Parameters, Part, Remarks, integer_parameters
from .shards import DTYPES, FLOATS, Entry, Shards

Tensor = torch.Tensor
CONTAINER = "onnx"
_TYPES = {1: "F32", 2: "U8", 10: "F16", 16: "BF16"}  # of TensorProto.DataType
_CACHES = ("cos_cache", "sin_cache")  # follow from the configuration
_NAMES = (  # pattern of the builder's name → the model's
    (r"\.attn\.", ".self_attn."),
    (r"\.([qk])_norm\.layernorm\.", r".\1_norm."),
    (r"\.Add\.bias$", ".bias"),
    (r"model\.layers\.\d+\.final_norm_layernorm\.", "model.norm."),
)


def open_onnx(folder: Path, files: Sequence[Path]) -> Shards:
    """Raises FormatError for a damaged file, UnsupportedError for a graph that asks for more than is read."""
    file, *others = files
    if others:
        raise UnsupportedError(
            f"{folder} has {len(files)} graphs, {file.name} and {others[0].name}; keep the model's only"
        )
    graph = _graph(file)
    if inside := next((t.name for t in graph.initializer if t.data_location != 1 and _is_weight(t)), None):
        raise UnsupportedError(
            f"{file}: tensor {inside} is stored in the graph itself; read are tensors in a file beside it, as "
            "onnx.save writes them with save_as_external_data=True"
        )
    stored = {t.name: entry for t in graph.initializer if (entry := _entry(folder, t)) and t.name not in _CACHES}
    tables = {name for node in graph.node if node.op_type == "GatherBlockQuantized" for name in node.input[2:3]}
    heads, entries = _heads(read_json(folder / "config.json")), dict[str, Entry]()
    for node in filter(lambda node: node.op_type == "MatMulNBits", graph.node):
        operands = _operands(node, stored)
        # An embedding that reads the head's codes is that head: one weight, tied.
        module = "model.embed_tokens" if node.input[2] in tables else node.input[1].partition(".MatMul")[0]
        for name, entry in operands.items():
            entries |= _placed(f"{module}.{name}", entry, heads)
    for name, entry in stored.items():
        if name.endswith(".MatMul.weight"):
            raise UnsupportedError(f"{file}: {name} is dense; read are graphs of which every linear is MatMulNBits")
        entries |= _placed(name, entry, heads)
    return Shards(folder, entries, {"container": CONTAINER})


def open_nbits(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised."""
    return lambda module: _part(module, shards) if f"{module}.scales" in shards else None


def _graph(file: Path) -> Any:
    if not file.is_file():
        raise FormatError(f"{file} is no file; give the folder that holds the graph itself")
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UnsupportedError(f"{file}: reading it needs a package: pip install tinyloop[onnx]") from error
    try:
        graph = onnx.load(file, load_external_data=False).graph
    except DecodeError as error:
        raise FormatError(f"{file} is truncated or no ONNX file ({error}); copy it again") from error
    if not graph.node:
        raise FormatError(f"{file} has {file.stat().st_size} bytes and no operator; it is truncated, copy it again")
    return graph


def _is_weight(t: Any) -> bool:
    """By its name: the builder's constants begin with a slash."""
    return t.data_type in _TYPES and bool(t.dims) and t.name.startswith(("model.", "lm_head."))


def _entry(folder: Path, t: Any) -> Entry | None:
    """Where a tensor's numbers are; None where they stand in the graph itself, as the builder's constants do."""
    if t.data_location != 1 or t.data_type not in _TYPES:
        return None
    place = {e.key: e.value for e in t.external_data}
    file, begin = place.get("location", ""), place.get("offset", "0")
    if Path(file).name != file or not (folder / file).is_file():
        raise FormatError(f"{folder}: tensor {t.name} is in {file!r}, which is no file of this folder; copy it too")
    entry = Entry(file, _TYPES[t.data_type], list(t.dims), int(begin) if begin.isdecimal() else -1)
    if place.get("length", str(_bytes(entry))) != str(_bytes(entry)):
        raise FormatError(
            f"{folder / file}: tensor {t.name} has length {place['length']!r}; {entry.dtype} {entry.shape} is "
            f"{_bytes(entry)} bytes: the graph is damaged, copy it again"
        )
    if min([entry.begin, *t.dims]) < 0 or entry.begin + _bytes(entry) > (folder / file).stat().st_size:
        raise FormatError(f"{folder / file} does not hold tensor {t.name}; it is truncated, copy it again")
    return entry


def _operands(node: Any, stored: dict[str, Entry]) -> dict[str, Entry]:
    """Codes, scales and zero points of an operator, taken out of `stored`, in the shapes that its sizes say."""
    owners = sorted({name.partition(".MatMul")[0] for name in node.input[1:4] if ".MatMul" in name})
    if len(owners) > 1:
        raise FormatError(
            f"{node.name} takes codes, scales and zero points of {' and '.join(owners)}; those of one module belong "
            "together, and the graph is damaged: copy it again"
        )
    a = {attribute.name: attribute.i for attribute in node.attribute}
    K, N, bits, G = (a.get(name, 0) for name in ("K", "N", "bits", "block_size"))
    more = [name for name in node.input[4:] if name]
    if bits != 4 or a.get("weight_prepacked") or more or G < 2 or K < 1 or K % G:
        raise UnsupportedError(
            f"{node.name}: bits={bits}, K={K}, block_size={G}, weight_prepacked={a.get('weight_prepacked', 0)}, more "
            f"inputs {more}; read are 4 bits, whole blocks, not prepacked, without g_idx and bias"
        )
    shapes = {"weight": [N, K // G, G // 2], "scales": [N, K // G], "zero_points": [N, -(-K // G // 2)]}
    found: dict[str, Entry] = {}
    given = [*node.input[1:4], ""]  # the last may be left out
    for (name, shape), theirs in zip(shapes.items(), given, strict=False):
        entry = stored.pop(theirs, None)
        if entry and math.prod(entry.shape) == math.prod(shape):
            found[name] = Entry(entry.file, entry.dtype, shape, entry.begin)
        elif entry or theirs or name != "zero_points":
            raise FormatError(f"{node.name}: {name} {theirs!r} is {entry and entry.shape}; K={K}, N={N} need {shape}")
    return found


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    heads = config.get("num_attention_heads", 1)
    return {"q_proj": heads} | dict.fromkeys(("k_proj", "v_proj"), config.get("num_key_value_heads") or heads)


def _placed(name: str, entry: Entry, heads: Mapping[str, int]) -> dict[str, Entry]:
    """A tensor under the model's name; one of q, k and v together by its rows, which come in heads."""
    for pattern, theirs in _NAMES:
        name = re.sub(pattern, theirs, name)
    if "qkv_proj" not in name:
        return {name: entry}
    rows, odd = divmod(entry.shape[0], sum(heads.values()))
    if odd:
        raise FormatError(f"tensor {name} has {entry.shape[0]} rows; the configuration has {dict(heads)} heads")
    placed, begin = {}, entry.begin
    for part, count in heads.items():
        cut = Entry(entry.file, entry.dtype, [count * rows, *entry.shape[1:]], begin)
        placed[name.replace("qkv_proj", part)] = cut
        begin += _bytes(cut)
    return placed


def _bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def _part(module: str, shards: Shards) -> Part:
    words = shards.expect(f"{module}.weight", (torch.uint8,), None, "a linear of 4-bit codes")
    if words.dim() != 3:
        raise FormatError(f"{shards.where(f'{module}.weight')} has shape {list(words.shape)}; it must have three sizes")
    N, blocks, half = words.shape
    shards.expect(f"{module}.scales", FLOATS, [N, blocks], f"N={N}")
    if has_zeros := f"{module}.zero_points" in shards:
        shards.expect(f"{module}.zero_points", (torch.uint8,), [N, -(-blocks // 2)], f"N={N}")

    def parameters() -> Parameters:
        z = torch.full((N, blocks), 8, dtype=torch.uint8)
        if has_zeros:
            pairs = shards.get(f"{module}.zero_points")
            z = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :blocks]
        return integer_parameters(module, shards.get(f"{module}.scales").t().contiguous(), z.t().contiguous())

    def codes() -> Tensor:  # bytes are pairs of inputs, as ours
        return shards.get(f"{module}.weight").view(N, -1).t().contiguous()

    return Part(module, 2 * half * blocks, N, 2 * half, parameters, codes)
