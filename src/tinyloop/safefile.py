"""A safetensors file, written tensor by tensor in any order: places follow from dtypes and shapes alone.

The library's writer wants all tensors at once. `places` lays them out, `header_bytes` makes the header, `octets` are a
tensor's bytes; `write` is all three for tensors that come one at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

NAMES = {
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32",
}  # fmt: skip


def places(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], int]:
    """Header entries and the bytes of all tensors, which may be on the meta device. Large elements first, then by
    name, so that every tensor lies at a multiple of its element size without gaps."""
    entries: dict[str, Any] = {}
    begin = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        t = tensors[name]
        end = begin + t.nbytes
        entries[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
        begin = end
    return entries, begin


def header_bytes(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def octets(t: torch.Tensor) -> memoryview:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(
    path: Path,
    metadata: Mapping[str, str],
    outline: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """The file at `path`, with every tensor of `outline`; the same names, dtypes and shapes come in `tensors`."""
    entries, _ = places(outline)
    header = header_bytes(metadata, entries)
    with open(path, "wb") as f:
        f.write(header)
        for name, t in tensors:
            place = entries.pop(name)
            assert (NAMES[t.dtype], list(t.shape)) == (place["dtype"], place["shape"]), name
            f.seek(len(header) + place["data_offsets"][0])
            f.write(octets(t))
            del t  # before the next one comes
        assert not entries, f"{min(entries)} did not come"
        f.flush()
        os.fsync(f.fileno())
