"""A model → a Hugging Face folder in a format that other software reads.

In: a `Checkpoint`, or the path of anything that can be loaded or imported. Out: a folder with config.json, one
safetensors file and the tokenizer. Formats with codes hold them to the bit or refuse by name; fp16 and bf16 hold
rounded values of every weight. What cannot be written is found before the first byte is. A weight is read when it is
written, so memory stays near that of the largest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import container, safefile
from ..checkpoint import Checkpoint
from ..errors import InputError
from ..weight import DenseWeight, LinearWeight, QuantWeight
from . import compressed_tensors, gptq
from .columns import columns, narrowest, zero_points
from .hf_layout import FILES, biased, config_json, kind_of, modules, norm_name, write_json, write_tokenizer

Tensor = torch.Tensor
Progress = Callable[[int, int], None]  # (weights done, weights in all)


@dataclass(frozen=True)
class _Format:
    """`check` refuses a linear, `tensors` writes it; None: every weight becomes dense in `dtype`."""

    about: str
    dtype: torch.dtype | None = None
    check: Callable[[str, QuantWeight], None] | None = None
    tensors: Callable[[str, QuantWeight, bool], Iterator[tuple[str, Tensor]]] | None = None
    settings: Callable[[Mapping[str, LinearWeight], Mapping[str, bool]], dict[str, Any]] | None = None


FORMATS = {
    "gptq_v2": _Format("GPTQ, lossless", None, gptq.check, gptq.tensors, gptq.settings),
    "compressed-tensors": _Format(
        "pack-quantized, lossless", None, compressed_tensors.check, compressed_tensors.tensors,
        compressed_tensors.settings,
    ),
    "fp16": _Format("dequantised, rounded to fp16", torch.float16),
    "bf16": _Format("dequantised, rounded to bf16", torch.bfloat16),
}  # fmt: skip


def export(
    source: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    format: str = "gptq_v2",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model into `folder`, which must not exist unless `overwrite`; returns it.

    `format` is "gptq_v2" or "compressed-tensors" (4-bit codes with integer zero points, kept to the bit; dense weights
    stay as they are, 8-bit ones become dense of the same values), "fp16" or "bf16" (every weight dequantised and
    rounded). Raises InputError, before anything is written, for a weight that the format cannot hold, and for a folder
    that exists; UnsupportedError for a model that config.json has no words for.
    """
    if format not in FORMATS:
        raise InputError(f"format={format!r} is none of {', '.join(FORMATS)}")
    target = Path(os.path.abspath(folder))  # "." has no name to put another beside
    _check_target(target, overwrite)
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is not a folder; make it first")
    checkpoint = source if isinstance(source, Checkpoint) else _open(Path(source))
    _Export(checkpoint, FORMATS[format], progress).write(target)
    return Path(folder)


def _check_target(target: Path, overwrite: bool) -> None:
    """Only a folder of files that an export writes may be overwritten: a mistyped name must not cost anything else."""
    if not target.exists():
        return
    if not overwrite:
        raise InputError(f"{target} exists; give another name, or allow overwriting (--force)")
    if not target.is_dir():
        raise InputError(f"{target} is a file; give the name of a folder")
    if others := sorted(f.name for f in target.iterdir() if f.name not in FILES):
        raise InputError(f"{target} also holds {others[0]}, which no export wrote; give another name")


def _open(path: Path) -> Checkpoint:
    from ..importers import import_model

    if path.is_file() and path.suffix == ".tinyloop":
        return container.read(path)
    return import_model(path)


class _Export:
    """One model on its way into one format. The first pass over its weights finds what cannot be written and how large
    everything is; the second writes."""

    def __init__(self, checkpoint: Checkpoint, format: _Format, progress: Progress | None):
        self.checkpoint, self.format, self.progress = checkpoint, format, progress
        self.layout = dict(modules(checkpoint.config))
        self.biases = biased(kind_of(checkpoint.config), checkpoint.outlines)
        self.symmetric: dict[str, bool] = {}  # module with codes → whether every zero point is 8
        self.linears: dict[str, LinearWeight] = {}  # module → what it becomes, without numbers
        self.outline = {norm_name(ours): self._cast(t).to("meta") for ours, t in checkpoint.norms.items()}
        for module, w in self._all():
            self._check(module, w)
            self.linears[module] = w.to("meta")
            self.outline |= {name: t.to("meta") for name, t in self._tensors(module, w)}

    def write(self, target: Path) -> None:
        partial, old = (target.with_name(f".{target.name}.{os.getpid()}.{part}") for part in ("partial", "old"))
        try:
            partial.mkdir()
            self._fill(partial)
            if target.exists():
                os.replace(target, old)  # aside, until the new one is in its place
            os.replace(partial, target)
        except OSError as error:
            if old.exists() and not target.exists():
                os.replace(old, target)
            raise InputError(f"{target} could not be written: {error}; nothing was left behind") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)

    def _fill(self, folder: Path) -> None:
        dtype = str(self.format.dtype or torch.float16).removeprefix("torch.")
        values = config_json(self.checkpoint, self.biases, dtype)
        if self.format.settings and self.symmetric:
            values["quantization_config"] = self.format.settings(self.linears, self.symmetric)
        write_json(folder / "config.json", values)
        if self.checkpoint.tokenizer is not None:
            write_tokenizer(folder, self.checkpoint.tokenizer)
        safefile.write(folder / "model.safetensors", {"format": "pt"}, self.outline, self._stream())

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        for done, (module, w) in enumerate(self._all(), 1):
            yield from self._tensors(module, w)
            del w
            if self.progress:
                self.progress(done, len(self.linears))
        for ours, t in self.checkpoint.norms.items():
            yield norm_name(ours), self._cast(t)

    def _all(self) -> Iterator[tuple[str, LinearWeight]]:
        """Every module: with codes where it has them and the format takes them, else dense."""
        for ours, cuts in self.layout.items():
            w = self.checkpoint.weights[ours]
            for module, n, end in cuts:
                part = columns(w, n, end)
                # No format has 8-bit codes, or codes in the embedding.
                if isinstance(part, QuantWeight) and (not self.format.tensors or part.bits == 8 or ours == "embed"):
                    part = DenseWeight(self._dense(part), part.bias)
                yield module, part
            del w, part

    def _dense(self, w: QuantWeight) -> Tensor:  # [N, K]
        W = narrowest(w.dequantize()) if self.format.dtype is None else w.dequantize(self.format.dtype)
        return W.t().contiguous()

    def _check(self, module: str, w: LinearWeight) -> None:
        if isinstance(w, DenseWeight):
            if self.format.dtype == torch.float16 and not _finite(self._cast(w.weight)):
                raise InputError(f"{module} has values that fp16 does not hold; export as bf16")
            return
        assert self.format.check
        if w.channel:
            raise InputError(f"{module} has the channel {w.channel}, which no other format holds; export as fp16 or "
                             "bf16, which take the codes alone")  # fmt: skip
        self.format.check(module, w)
        self.symmetric[module] = bool((zero_points(module, w) == 8).all())

    def _tensors(self, module: str, w: LinearWeight) -> Iterator[tuple[str, Tensor]]:
        if isinstance(w, DenseWeight):
            yield f"{module}.weight", self._cast(w.weight)
        else:
            assert self.format.tensors
            yield from self.format.tensors(module, w, self.symmetric[module])
        if w.bias is not None:
            yield f"{module}.bias", self._cast(w.bias)
        elif module.rpartition(".")[2] in self.biases:  # config.json gives one to all of its kind
            yield f"{module}.bias", torch.zeros(w.N, dtype=self.format.dtype or torch.float16)

    def _cast(self, t: Tensor) -> Tensor:
        return t if self.format.dtype is None else t.to(self.format.dtype)


def _finite(t: Tensor) -> bool:
    low, high = t.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))
