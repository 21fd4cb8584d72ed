"""The `.tinyloop` file: a safetensors container that says what it is. docs/format.md is the normative description.

`write` is atomic: the file appears under its name complete or not at all. `read` maps the tensors, so that loading
costs no copy, after comparing every checksum against the bytes on disk.

The writer is our own, twenty lines: the library's orders metadata at random and, in older releases, copies the whole
model first. Ours gives the same bytes for the same model, which makes files comparable by their hash. It knows every
tensor's place from dtypes and shapes, writes one weight at a time wherever it belongs, and the header last.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from .channel import PER_BYTE
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import FormatError, InputError
from .safefile import header_bytes, octets, places
from .tokenizer import TokenizerData
from .weight import DenseWeight, LinearWeight, QuantWeight

FORMAT = "tinyloop"
FORMAT_VERSION = 1
TOKENIZER_TENSOR = "tokenizer.json"
_DTYPES = {
    "U8": torch.uint8, "I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FIELDS = ("checksums", "model", "source", "tokenizer", "weights")  # metadata that is JSON
_SPEC_KEYS = {
    "affine": {"kind", "bits", "K", "N", "group_size", "integer_zero", "channel"},
    "dense": {"kind", "K", "N"},
}
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


def write(
    checkpoint: Checkpoint, path: str | os.PathLike[str], overwrite: bool = False, progress: Progress | None = None
) -> Path:
    """Store `checkpoint` at `path`; returns the path. A deferred weight is made while the one before it is written, so
    two are held.

    Raises InputError where the path exists and `overwrite` is False, where its folder is missing, or where the disk
    is full or read-only. In each case nothing is left behind under `path`.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists; give another name, or allow overwriting (--force)")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is not a folder; make it first")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _save(partial, checkpoint, progress)
        os.replace(partial, target)
    except OSError as error:
        raise InputError(f"{target} could not be written: {error}; nothing was left behind") from error
    finally:
        if partial.exists():  # unlink alone would fail on a read-only disk, where there is nothing to remove
            partial.unlink()
    return target


def describe(path: str | os.PathLike[str]) -> Description:
    """The metadata of the file at `path`. Raises FormatError as `read` does, but does not read tensor bytes."""
    path = Path(path)
    header, base = _header(path)
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    try:
        fields = {key: json.loads(metadata[key]) for key in _FIELDS}
        about = Description(
            config=ModelConfig.from_dict(fields["model"]), weights=fields["weights"], tokenizer=fields["tokenizer"],
            source=fields["source"], checksums=fields["checksums"], tensors=_table(header, base),
            file_bytes=path.stat().st_size,
        )  # fmt: skip
        _check_names(about)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: the description is damaged ({error!r}); copy the file again") from error
    return about


def read(path: str | os.PathLike[str], verify: bool = True, progress: Progress | None = None) -> Checkpoint:
    """The model at `path`, its tensors mapped from the file.

    `verify` compares every tensor with its checksum and refuses NaN; without it no weight is read from the disk, and
    only sizes and names are checked. Raises FormatError on a file that is missing parts, damaged, of another version
    or of another kind, naming the file and the tensor.
    """
    path = Path(path)
    about = describe(path)
    if verify:
        _verify(path, about, progress)
    try:
        with safe_open(path, framework="pt") as f:
            weights = {name: _weight(name, spec, f.get_tensor, about) for name, spec in about.weights.items()}
            norms = {name: f.get_tensor(name) for name in about.config.norm_shapes()}
            tokenizer = None
            if about.tokenizer is not None:
                text = f.get_tensor(TOKENIZER_TENSOR).numpy().tobytes().decode("utf-8")
                tokenizer = TokenizerData.from_settings(text, about.tokenizer)
        if verify:
            for name, w in weights.items():
                _check_values(name, w)
            _check_norms(norms)
        _check_perms(weights)
        return Checkpoint(about.config, weights, norms, tokenizer, about.source)
    except (FormatError, SafetensorError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: {error}") from error


def _tensors(name: str, w: LinearWeight) -> Iterator[tuple[str, torch.Tensor]]:
    parts = {"bias": w.bias}
    if isinstance(w, QuantWeight):
        parts |= {"q": w.packed, "scale": w.scale, "zero": w.zero, "perm": w.perm, "frac4": w.frac4,
                  "sign_bit": w.sign_bit}  # fmt: skip
    else:
        parts["weight"] = w.weight
    yield from ((f"{name}.{part}", t) for part, t in parts.items() if t is not None)


def _others(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """What is stored beside the weights."""
    tensors = dict(checkpoint.norms)
    if checkpoint.tokenizer is not None:
        text = bytearray(checkpoint.tokenizer.json, "utf-8")
        tensors[TOKENIZER_TENSOR] = torch.frombuffer(text, dtype=torch.uint8)
    return tensors


def _spec(w: LinearWeight) -> dict[str, Any]:
    if isinstance(w, DenseWeight):
        return {"kind": "dense", "K": w.K, "N": w.N}
    return {"kind": "affine", "bits": w.bits, "K": w.K, "N": w.N, "group_size": w.group_size,
            "integer_zero": w.integer_zero, "channel": w.channel}  # fmt: skip


def _weight(name: str, spec: dict[str, Any], get: Callable[[str], torch.Tensor], about: Description) -> LinearWeight:
    bias, frac4, sign_bit, perm = (
        get(f"{name}.{part}") if f"{name}.{part}" in about.tensors else None
        for part in ("bias", "frac4", "sign_bit", "perm")
    )
    try:
        if spec["kind"] == "dense":
            w: LinearWeight = DenseWeight(get(f"{name}.weight"), bias)
        else:
            w = QuantWeight(
                get(f"{name}.q"), get(f"{name}.scale"), get(f"{name}.zero"), spec["K"], spec["group_size"],
                spec["bits"], spec["integer_zero"], bias, frac4, sign_bit, perm,
            )  # fmt: skip
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    if w.K != spec["K"] or w.N != spec["N"]:
        raise FormatError(f"{name} is K={w.K}, N={w.N}; its description says K={spec['K']}, N={spec['N']}")
    return w


def _check_values(name: str, w: LinearWeight) -> None:
    """Finite parameters and biases, channels in range."""
    if w.bias is not None:
        _check_finite(f"{name}: bias", w.bias)
    if isinstance(w, DenseWeight):
        return
    try:
        w.check_channel()
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    for parameter in (w.scale, w.zero):
        _check_finite(f"{name}: scale or zero", parameter)


def _check_norms(norms: Mapping[str, torch.Tensor]) -> None:
    for name, t in norms.items():
        _check_finite(name, t)


def _check_finite(what: str, t: torch.Tensor) -> None:
    """By extremes, since `isfinite` needs memory of the tensor's own size."""
    low, high = t.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise FormatError(f"{what} is NaN or infinite; the source is damaged, convert it again")


def _check_perms(weights: Mapping[str, LinearWeight]) -> None:
    """Always, since they are small, and an index beyond K would read foreign memory."""
    for name, w in weights.items():
        try:
            if isinstance(w, QuantWeight):
                w.check_perm()
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error


def _metadata(checkpoint: Checkpoint, checksums: Mapping[str, str]) -> dict[str, str]:
    fields = {
        "model": checkpoint.config.to_dict(),
        "weights": {name: _spec(w) for name, w in checkpoint.outlines.items()},
        "tokenizer": None if checkpoint.tokenizer is None else checkpoint.tokenizer.settings(),
        "source": dict(checkpoint.source),
        "checksums": dict(checksums),
    }
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    metadata |= {key: json.dumps(fields[key], ensure_ascii=False, sort_keys=True) for key in _FIELDS}
    return metadata | {"metadata_sha256": _metadata_digest(metadata)}


def _save(path: Path, checkpoint: Checkpoint, progress: Progress | None) -> None:
    others = _others(checkpoint)
    outline = others | dict(t for name, w in checkpoint.outlines.items() for t in _tensors(name, w))
    for name, t in outline.items():
        _dtype_name(name, t)
    entries, size = places(outline)
    checksums = dict.fromkeys(outline, "0" * 64)
    # A checksum is as long as its stand-in, so the header's length is known before the first tensor is.
    base = len(header_bytes(_metadata(checkpoint, checksums), entries))
    done = 0
    with open(path, "wb") as f:
        for name, t in _stream(checkpoint, others):
            place, dtype = entries[name], _dtype_name(name, t)
            if (dtype, list(t.shape)) != (place["dtype"], place["shape"]):
                raise FormatError(f"{name} is {dtype} {list(t.shape)}, announced was {place['dtype']} {place['shape']}")
            data = octets(t)
            checksums[name] = _digest(dtype, place["shape"], [data])
            f.seek(base + place["data_offsets"][0])
            f.write(data)
            done += t.nbytes
            del t, data  # and with them a deferred weight, before the next one comes
            if progress:
                progress(done, size)
        f.seek(0)
        f.write(header_bytes(_metadata(checkpoint, checksums), entries))
        f.flush()
        os.fsync(f.fileno())


def _stream(checkpoint: Checkpoint, others: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, those of one weight after those of another. A second thread makes the next weight while the caller
    hashes and writes one; both let go of the interpreter (log, 2026-11-30)."""

    def make(name: str) -> LinearWeight:
        w = checkpoint.weights[name]
        _check_values(name, w)
        return w

    names = list(checkpoint.weights)
    with ThreadPoolExecutor(1) as second:
        coming = second.submit(make, names[0])
        for name, after in zip(names, [*names[1:], None], strict=True):
            w = coming.result()
            if after is not None:
                coming = second.submit(make, after)
            yield from _tensors(name, w)
    _check_norms(checkpoint.norms)
    yield from others.items()


def _dtype_name(name: str, t: torch.Tensor) -> str:
    if t.dtype not in _DTYPE_NAMES:
        raise FormatError(
            f"{name} is {t.dtype}; a file holds uint8, int32, float16, bfloat16 and float32, cast it first"
        )
    return _DTYPE_NAMES[t.dtype]


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
        start = f.read(9)
        # The first eight bytes are a length, which may spell any magic; only a safetensors file goes on with a brace.
        if start[8:] != b"{" and (kind := _foreign(start)):
            raise FormatError(f"{path} is {kind}, not a .tinyloop file; convert it with: tinyloop import")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or length > size - 8:
            raise FormatError(f"{path} ({size} bytes) is truncated or not a .tinyloop file; copy it again")
        f.seek(8)
        text = f.read(length)
    try:
        header = json.loads(text)
        end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        total = 8 + length + end
        if not isinstance(header.get("__metadata__", {}), dict):
            raise ValueError("its metadata is no object")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: the header is damaged ({error}); copy the file again") from error
    if total != size:
        raise FormatError(f"{path} has {size} bytes, its header says {total}; truncated or damaged, copy it again")
    return header, 8 + length


def _table(header: dict[str, Any], base: int) -> dict[str, tuple[str, list[int], int, int]]:
    """The header's tensors in file order; refuses gaps, overlaps and sizes that do not fit dtype and shape."""
    table, offset = {}, 0
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = t["dtype"], t["shape"], t["data_offsets"]
        if dtype not in _DTYPES or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise FormatError(f"tensor {name} is {dtype} {shape}; a file holds {', '.join(_DTYPES)} of whole sizes")
        if begin != offset or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise FormatError(f"tensor {name}, {dtype} {shape}, cannot lie at bytes {begin} to {end}; copy it again")
        table[name] = (dtype, list(shape), base + begin, base + end)
        offset = end
    return table


def _foreign(start: bytes) -> str | None:
    kinds = {b"GGUF": "a GGUF file", b"PK\x03\x04": "a zip archive or PyTorch pickle"}
    kinds |= {bytes((0x80, protocol)): "a pickle" for protocol in range(2, 6)}
    return next((kind for magic, kind in kinds.items() if start.startswith(magic)), None)


def _check_metadata(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise FormatError(f"{path} is a safetensors file, but not a .tinyloop file; convert it with: tinyloop import")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise FormatError(
            f"{path} has format version {metadata.get('format_version')}; this release reads version {FORMAT_VERSION}; "
            "import the model again, or use the release that wrote it"
        )
    if metadata.get("metadata_sha256") != _metadata_digest(metadata):
        raise FormatError(f"{path}: the metadata does not match its checksum; the file is damaged, copy it again")
    if odd := sorted(metadata.keys() ^ {"format", "format_version", "metadata_sha256", *_FIELDS}):
        raise FormatError(f"{path}: metadata key {odd[0]} is missing or not of version {FORMAT_VERSION}")


def _check_names(about: Description) -> None:
    """Every tensor has a checksum and a place in the description, and the other way round."""
    wanted = set(about.config.norm_shapes())
    if about.tokenizer is not None:
        wanted.add(TOKENIZER_TENSOR)
    if not isinstance(about.source, dict):
        raise FormatError(f"source is {about.source!r}; it must be an object")
    for name, spec in about.weights.items():
        if spec["kind"] not in _SPEC_KEYS:
            raise FormatError(f"{name}: weights of kind {spec['kind']!r} are not known; use a newer release")
        if odd := sorted(spec.keys() ^ _SPEC_KEYS[spec["kind"]]):
            raise FormatError(f"{name}: {odd[0]} is missing in the weight's description or not of this version")
        if odd := [key for key in ("K", "N", "bits", "group_size") if type(spec.get(key, 0)) is not int]:
            raise FormatError(f"{name}: {odd[0]}={spec[odd[0]]!r} must be a whole number")
        parts = ["weight"] if spec["kind"] == "dense" else ["q", "scale", "zero"]
        if (channel := spec.get("channel")) is not None:
            if channel not in PER_BYTE:
                raise FormatError(f"{name}: channel {channel!r} is none of {', '.join(PER_BYTE)}; use a newer release")
            parts.append(channel)
        free = {f"{name}.bias"} | ({f"{name}.perm"} if spec["kind"] == "affine" else set())
        wanted |= {f"{name}.{part}" for part in parts} | free & about.tensors.keys()
    if missing := sorted((wanted | about.checksums.keys()) - about.tensors.keys()):
        raise FormatError(f"tensor {missing[0]} is missing; the file is incomplete")
    if extra := sorted(about.tensors.keys() - (wanted & about.checksums.keys())):
        raise FormatError(f"tensor {extra[0]} has no checksum or no place in the description; convert the model again")


def _verify(path: Path, about: Description, progress: Progress | None) -> None:
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
