"""Finished layers on disk: a run that was killed goes on after the last of them.

A folder holds `run.json`, the digest of everything the result depends on; `NAME.pt` for each finished unit, written
beside its place and renamed, so that it is there complete or not at all; and `log.jsonl`, one line per weight.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..errors import InputError
from ..weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor
Made = Mapping[str, LinearWeight]


@dataclass(frozen=True)
class LayerReport:
    """One quantised weight: its name, GPTQ's loss relative to the output's energy tr(WᵀHW) (None where calibration was
    not finite), and a note where the method had to give way, or None."""

    name: str
    relative_loss: float | None
    note: str | None


class Store:
    """`folder` None keeps nothing. Raises InputError where the folder belongs to a run with another digest."""

    def __init__(self, folder: Path | None, digest: str):
        self.folder = folder
        if folder is None:
            return
        mark = folder / "run.json"
        if mark.exists() and json.loads(mark.read_text("utf-8"))["digest"] != digest:
            raise InputError(
                f"{folder} holds layers of a run with other settings, weights or calibration text; "
                "give another folder (--work), or delete this one"
            )
        if mark.exists():
            return
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no run; give another folder (--work)")
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.strftime("%Y-%m-%d %H:%M:%S")
        _write(mark, json.dumps({"digest": digest, "begun": begun}).encode())

    def save(self, unit: str, reports: list[LayerReport], made: Made) -> Made:
        """Keep a finished unit; returns its weights, now mapped from the folder where there is one."""
        if self.folder is None:
            return made
        buffer = io.BytesIO()  # torch's own writer ends the process on a full disk
        torch.save([(dataclasses.asdict(r), vars(made[r.name])) for r in reports], buffer)
        _write(self.folder / f"{unit}.pt", buffer.getbuffer())
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.writelines(json.dumps({"time": now, **dataclasses.asdict(r)}) + "\n" for r in reports)
        saved = self.load(unit)
        assert saved is not None
        return {report.name: w for report, w in saved}

    def load(self, unit: str) -> list[tuple[LayerReport, LinearWeight]] | None:
        """A finished unit, its tensors mapped; None where it was not finished."""
        if self.folder is None or not (path := self.folder / f"{unit}.pt").exists():
            return None
        try:
            rows: list[tuple[dict[str, Any], dict[str, Any]]] = torch.load(path, mmap=True, weights_only=True)
            return [(LayerReport(**report), QuantWeight(**w)) for report, w in rows]
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise InputError(f"{path} is damaged ({error}); delete it, and the layer is made again") from error


def digest(checkpoint: Checkpoint, tokens: Tensor, settings: Any) -> str:
    """sha256 of everything the result depends on: settings, calibration tokens, every weight, bias and norm."""
    h = hashlib.sha256(json.dumps([checkpoint.config.to_dict(), dataclasses.asdict(settings)]).encode())
    for name, t in (("tokens", tokens), *_tensors(checkpoint)):
        h.update(f"{name} {list(t.shape)} {t.dtype}".encode())
        h.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    for name, w in sorted(checkpoint.weights.items()):
        parts = (w.weight,) if isinstance(w, DenseWeight) else (w.packed, w.scale, w.zero, w.perm)
        yield from ((name, t) for t in parts if t is not None)
        if w.bias is not None:
            yield f"{name}.bias", w.bias
    yield from sorted(checkpoint.norms.items())


def _write(target: Path, data: bytes | memoryview) -> None:
    partial = target.with_suffix(".partial")
    try:
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"{target} could not be written: {error.strerror}; make room and run the same command again: it goes on "
            "after the last finished layer"
        ) from error
