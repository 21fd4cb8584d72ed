"""The *.safetensors files of a folder, one or many with an index, as one table of tensors.

In: a folder. Out: dtype and shape of every tensor at once, from the headers; numbers when they are asked for, mapped
for as long as the tensor lives. The index is compared with what each shard holds, both ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import FormatError, UnsupportedError
from .hf_tokenizer import read_json

Tensor = torch.Tensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64,
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Entry:
    """Where a tensor is and what it is, from the header of its file."""

    file: str
    dtype: str
    shape: list[int]
    begin: int  # in the file


@dataclass(frozen=True)
class Shards:
    """The tensors of a folder. `used` are those that were asked for; `metadata` is that of the files."""

    folder: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    used: set[str] = field(default_factory=set)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def outline(self, name: str) -> Tensor:
        """The tensor without its numbers, on the meta device. Raises FormatError where there is none."""
        if name not in self.entries:
            raise FormatError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        self.used.add(name)
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise UnsupportedError(f"{self.where(name)} is {entry.dtype}, which is not read")
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    def get(self, name: str) -> Tensor:
        """The tensor, mapped privately: nothing that is done to it reaches the file."""
        outline, entry = self.outline(name), self.entries[name]
        if outline.numel() == 0:
            return torch.empty(entry.shape, dtype=outline.dtype)
        octets = np.memmap(self.folder / entry.file, np.uint8, "c", entry.begin, (outline.nbytes,))
        return torch.from_numpy(octets).view(outline.dtype).view(entry.shape)

    def floats(self, name: str) -> Tensor:
        """The outline of a tensor that must be of floats."""
        t = self.outline(name)
        if t.dtype not in FLOATS:
            raise UnsupportedError(f"{self.where(name)} is {t.dtype}; read are fp16, bf16 and fp32")
        return t

    def expect(self, name: str, dtypes: tuple[torch.dtype, ...], shape: list[int] | None, why: str) -> Tensor:
        """The outline of a tensor of one of `dtypes` and, unless None, of `shape`; FormatError says `why`."""
        t = self.outline(name)
        if t.dtype not in dtypes or (shape is not None and list(t.shape) != shape):
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            needs = f"{kinds} {'[…, …]' if shape is None else shape}"
            raise FormatError(f"{self.where(name)} is {t.dtype} {list(t.shape)}; {why} needs {needs}")
        return t

    def where(self, name: str) -> str:
        return f"{self.folder / self.entries[name].file}: tensor {name}"


def open_shards(folder: Path) -> Shards:
    """Raises FormatError for a file that is missing, damaged or at odds with the index, UnsupportedError for
    pickles."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file() and single.is_file():
        raise FormatError(f"{folder} has both {INDEX} and {SINGLE}; remove the one that is out of date")
    if index.is_file():
        return _many(folder, _weight_map(index))
    if file := single if single.is_file() else _own_name(folder):
        return Shards(folder, *_header(file))
    pickles = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in sorted(folder.glob(pattern))]
    if pickles:
        raise UnsupportedError(f"{folder} has its weights in {pickles[0]}: pickles can run code and are not read; "
                               "save the model as safetensors")  # fmt: skip
    raise FormatError(f"{folder} has neither {SINGLE} nor {INDEX}; the folder is incomplete")


def _own_name(folder: Path) -> Path | None:
    """The only .safetensors file, whatever its name: AutoGPTQ names it after its settings."""
    files = sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 and "-of-" not in files[0].name else None


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FormatError(f"{index} has no weight_map; the file is damaged")
    for tensor, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise FormatError(f"{index} puts tensor {tensor} in {file!r}; a shard is a file of the same folder")
    return files


def _many(folder: Path, files: dict[str, str]) -> Shards:
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in sorted(set(files.values())):
        listed = {tensor for tensor, where in files.items() if where == file}
        if not (folder / file).is_file():
            raise FormatError(f"{folder / file} is missing; {INDEX} puts {len(listed)} tensors there, such as "
                              f"{min(listed)}; copy the shard again")  # fmt: skip
        held, about = _header(folder / file)
        if listed - held.keys():
            raise FormatError(f"{folder / file} does not hold tensor {min(listed - held.keys())}, which {INDEX} puts "
                              "there; the index or the shard is out of date")  # fmt: skip
        if held.keys() - listed:
            raise FormatError(f"{folder / file} holds tensor {min(held.keys() - listed)}, which {INDEX} does not put "
                              "there; the index or the shard is out of date")  # fmt: skip
        entries |= held
        metadata |= about
    return Shards(folder, entries, metadata)


def _header(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The library checks the file; the places, which it does not tell, are read beside it."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header: dict[str, Any] = json.loads(f.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(
            f"{file} cannot be read ({error}); truncated or no safetensors file, copy it again"
        ) from error
    metadata = header.pop("__metadata__", None) or {}
    return {
        name: Entry(file.name, t["dtype"], t["shape"], 8 + length + t["data_offsets"][0]) for name, t in header.items()
    }, metadata
