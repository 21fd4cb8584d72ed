"""The `.tinyloop` file: a safetensors container that says what it is. docs/format.md is the normative description.

`write` is atomic: the file appears under its name complete or not at all. `read` maps the tensors, so that loading
costs no copy, after comparing every checksum against the bytes on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import FormatError, InputError
from .tokenizer import TokenizerData
from .weight import DenseWeight, LinearWeight, QuantWeight

FORMAT = "tinyloop"
FORMAT_VERSION = 1
TOKENIZER_TENSOR = "tokenizer.json"
_DTYPES = {"U8": torch.uint8, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_CHUNK = 1 << 22

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Description:
    """A file's metadata, read without touching its tensors."""

    config: ModelConfig
    weights: dict[str, dict[str, Any]]  # name → spec, as in docs/format.md
    tokenizer: dict[str, Any] | None
    source: dict[str, str]
    checksums: dict[str, str]  # tensor → sha256
    tensors: dict[str, tuple[str, list[int], int, int]]  # tensor → dtype, shape, begin, end (file offsets)
    file_bytes: int


def write(checkpoint: Checkpoint, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Store `checkpoint` at `path`; returns the path.

    Raises InputError where the path exists and `overwrite` is False, where its folder is missing, or where the disk
    is full or read-only. In each case nothing is left behind under `path`.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists; give another name, or allow overwriting (--force)")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is not a folder; make it first")
    tensors = dict(_tensors(checkpoint))
    metadata = _metadata(checkpoint, tensors)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        with open(partial, "rb") as f:
            os.fsync(f.fileno())
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{target} could not be written: {error}; nothing was left behind") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def describe(path: str | os.PathLike[str]) -> Description:
    """The metadata of the file at `path`. Raises FormatError as `read` does, but does not check tensor bytes."""
    path = Path(path)
    header, base = _header(path)
    metadata = header.pop("__metadata__", None) or {}
    if metadata.get("format") != FORMAT:
        raise FormatError(f"{path} is a safetensors file, but not a .tinyloop file; convert it with: tinyloop import")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise FormatError(
            f"{path} has format version {metadata.get('format_version')}; this release reads version {FORMAT_VERSION}; "
            "import the model again, or use the release that wrote it"
        )
    if metadata.get("metadata_sha256") != _metadata_digest(metadata):
        raise FormatError(f"{path}: the metadata does not match its checksum; the file is damaged, copy it again")
    fields = {k: json.loads(metadata[k]) for k in ("model", "weights", "tokenizer", "source", "checksums")}
    tensors = {n: (t["dtype"], t["shape"], base + t["data_offsets"][0], base + t["data_offsets"][1])
               for n, t in header.items()}  # fmt: skip
    return Description(
        config=ModelConfig.from_dict(fields["model"]), weights=fields["weights"], tokenizer=fields["tokenizer"],
        source=fields["source"], checksums=fields["checksums"], tensors=tensors, file_bytes=path.stat().st_size,
    )  # fmt: skip


def read(path: str | os.PathLike[str], verify: bool = True, progress: Progress | None = None) -> Checkpoint:
    """The model at `path`, its tensors mapped from the file.

    `verify` compares every tensor with its checksum first. Raises FormatError on a file that is missing parts,
    damaged, of another version or of another kind, naming the file and the tensor.
    """
    path = Path(path)
    about = describe(path)
    if verify:
        _verify(path, about, progress)
    with safe_open(path, framework="pt") as f:

        def get(name: str) -> torch.Tensor:
            if name not in about.tensors:
                raise FormatError(f"{path}: tensor {name} is missing; the file is incomplete")
            tensor: torch.Tensor = f.get_tensor(name)
            return tensor

        weights = {name: _weight(name, spec, get, about) for name, spec in about.weights.items()}
        norms = {name: get(name) for name in about.config.norm_shapes()}
        tokenizer = None
        if about.tokenizer is not None:
            text = get(TOKENIZER_TENSOR).numpy().tobytes().decode("utf-8")
            tokenizer = TokenizerData.from_settings(text, about.tokenizer)
    return Checkpoint(about.config, weights, norms, tokenizer, about.source)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, w in checkpoint.weights.items():
        if isinstance(w, QuantWeight):
            yield f"{name}.q", w.packed.contiguous()
            yield f"{name}.scale", w.scale.contiguous()
            yield f"{name}.zero", w.zero.contiguous()
        else:
            yield f"{name}.weight", w.weight.contiguous()
        if w.bias is not None:
            yield f"{name}.bias", w.bias.contiguous()
    yield from ((name, t.contiguous()) for name, t in checkpoint.norms.items())
    if checkpoint.tokenizer is not None:
        yield TOKENIZER_TENSOR, torch.frombuffer(bytearray(checkpoint.tokenizer.json, "utf-8"), dtype=torch.uint8)


def _spec(w: LinearWeight) -> dict[str, Any]:
    if isinstance(w, DenseWeight):
        return {"kind": "dense", "K": w.K, "N": w.N}
    return {"kind": "affine", "bits": w.bits, "K": w.K, "N": w.N, "group_size": w.group_size,
            "integer_zero": w.integer_zero}  # fmt: skip


def _weight(name: str, spec: dict[str, Any], get: Callable[[str], torch.Tensor], about: Description) -> LinearWeight:
    bias = get(f"{name}.bias") if f"{name}.bias" in about.tensors else None
    try:
        if spec["kind"] == "dense":
            w: LinearWeight = DenseWeight(get(f"{name}.weight"), bias)
        elif spec["kind"] == "affine":
            w = QuantWeight(
                get(f"{name}.q"), get(f"{name}.scale"), get(f"{name}.zero"), spec["K"], spec["group_size"],
                spec["bits"], spec["integer_zero"], bias,
            )  # fmt: skip
        else:
            raise FormatError(f"weights of kind {spec['kind']!r} are not known; use a newer release")
    except KeyError as error:
        raise FormatError(f"{name}: the weight's description lacks {error}") from error
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    if isinstance(w, QuantWeight) and not (torch.isfinite(w.scale).all() and torch.isfinite(w.zero).all()):
        raise FormatError(f"{name}: scale or zero is NaN or infinite; the source weight is damaged, convert it again")
    return w


def _metadata(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    tokenizer = None if checkpoint.tokenizer is None else checkpoint.tokenizer.settings()
    names = {dtype: name for name, dtype in _DTYPES.items()}
    fields = {
        "model": checkpoint.config.to_dict(),
        "weights": {name: _spec(w) for name, w in checkpoint.weights.items()},
        "tokenizer": tokenizer,
        "source": dict(checkpoint.source),
        "checksums": {
            name: _digest(names[t.dtype], list(t.shape), [t.reshape(-1).view(torch.uint8).numpy().data])
            for name, t in tensors.items()
        },
    }
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    metadata |= {key: json.dumps(value, ensure_ascii=False, sort_keys=True) for key, value in fields.items()}
    return metadata | {"metadata_sha256": _metadata_digest(metadata)}


def _metadata_digest(metadata: dict[str, str]) -> str:
    lines = (f"{key}={value}\n" for key, value in sorted(metadata.items()) if key != "metadata_sha256")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(dtype: str, shape: list[int], parts: Any) -> str:
    """sha256 over "DTYPE [shape]\\n" and the bytes, so that a relabelled tensor is found too."""
    h = hashlib.sha256(f"{dtype} {json.dumps(shape)}\n".encode())
    for part in parts:
        h.update(part)
    return h.hexdigest()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Parsed safetensors header and the offset of the first tensor byte; rejects what is no such file, by its kind."""
    if not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'not there'}; give a .tinyloop file")
    size = path.stat().st_size
    with open(path, "rb") as f:
        start = f.read(8)
        if kind := _foreign(start):
            raise FormatError(f"{path} is {kind}, not a .tinyloop file; convert it with: tinyloop import")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise FormatError(f"{path} ({size} bytes) is truncated or not a .tinyloop file; copy it again")
        try:
            header = json.loads(f.read(length))
            end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path}: the header is damaged ({error}); copy the file again") from error
    if 8 + length + end != size:
        raise FormatError(f"{path} has {size} bytes, its header says {8 + length + end}; truncated, copy it again")
    return header, 8 + length


def _foreign(start: bytes) -> str | None:
    kinds = {b"GGUF": "a GGUF file", b"PK\x03\x04": "a zip archive or PyTorch pickle", b"\x80\x02": "a pickle"}
    return next((kind for magic, kind in kinds.items() if start.startswith(magic)), None)


def _verify(path: Path, about: Description, progress: Progress | None) -> None:
    if about.tensors.keys() != about.checksums.keys():
        odd = sorted(about.tensors.keys() ^ about.checksums.keys())
        raise FormatError(f"{path}: tensor {odd[0]} is missing or has no checksum; the file is incomplete")
    done, total = 0, sum(end - begin for _, _, begin, end in about.tensors.values())
    with open(path, "rb") as f:
        for name, (dtype, shape, begin, end) in about.tensors.items():
            if _digest(dtype, shape, _chunks(f, begin, end)) != about.checksums[name]:
                raise FormatError(f"{path}: tensor {name} does not match its checksum; damaged, copy the file again")
            done += end - begin
            if progress:
                progress(done, total)


def _chunks(f: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    f.seek(begin)
    while begin < end and (part := f.read(min(_CHUNK, end - begin))):
        begin += len(part)
        yield part
