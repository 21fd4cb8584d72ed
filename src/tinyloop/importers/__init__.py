"""Checkpoints of other formats → `Checkpoint`.

In: a path. Out: the whole model with its tokenizer, every decision in `notes`. The format is told by content, one row
per format below; a row's importer is loaded only when it is needed, so that optional packages stay optional.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import Checkpoint
from ..errors import FormatError, InputError

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)


def import_model(path: str | os.PathLike[str], progress: Progress | None = None) -> Checkpoint:
    """The model at `path`, a file or a folder of a format that is read.

    Raises InputError where nothing is at `path`, FormatError where it is of no known format or damaged,
    UnsupportedError where it is sound but asks for what the runtime does not do.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} is not there; give a model file or folder")
    for recognises, read, _ in _FORMATS:
        if recognises(path):
            return read(path, progress)
    known = "; ".join(what for _, _, what in _FORMATS)
    raise FormatError(f"{path} is no model that can be imported{_hint(path)}; what is read: {known}")


def _hint(path: Path) -> str:
    if path.is_dir():
        others = sorted(file.name for kind in ("*.gguf", "*.onnx") for file in path.glob(kind))
        return f": the folder has no config.json, but {others[0]}" if others else ""
    return ": give the folder that holds it" if path.suffix in (".safetensors", ".json", ".bin") else ""


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as f:
        return f.read(4) == b"GGUF"


def _is_huggingface(path: Path) -> bool:
    return (path / "config.json").is_file()


def _read_gguf(path: Path, progress: Progress | None) -> Checkpoint:
    from .gguf import import_gguf

    return import_gguf(path, progress)


def _read_huggingface(path: Path, progress: Progress | None) -> Checkpoint:
    from .huggingface import import_huggingface

    return import_huggingface(path, progress)


# recognises by content, imports, and what a refusal says is read.
_FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Progress | None], Checkpoint], str], ...] = (
    (_is_gguf, _read_gguf, "a .gguf file of architecture llama"),
    (
        _is_huggingface,
        _read_huggingface,
        "a folder with config.json (llama, mistral, qwen2, qwen3, tinyloop) and *.safetensors in fp16, bf16, fp32, "
        "GPTQ, AWQ, compressed-tensors or MLX of 4 bits, or with the .onnx file that onnxruntime-genai made of it",
    ),
)
