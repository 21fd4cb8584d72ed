"""From a path to a runnable model, from a foreign checkpoint to ours, and from ours to a foreign one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from . import container, devices
from .checkpoint import Checkpoint
from .model import Model


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
    cross_iter_round: bool | None = None,
    fp16_body: bool | None = None,
) -> Model:
    """The model in a `.tinyloop` file, ready to score and generate.

    On a CPU tensors are mapped, so memory grows as they are used, and `dtype` is float32 or bfloat16; None takes
    bfloat16 where the CPU multiplies it in hardware. With device "cuda" (or "cuda:1") weights are moved and packed for
    the GPU's kernels at once, and `dtype` is float16 (None), bfloat16 or float32. `verify` compares every tensor with
    its checksum first. `progress(done, total)` counts bytes: once while verifying, and again while packing.

    `cross_iter_round` turns cross-iteration rounding on or off; None asks TINYLOOP_CROSS_ITER_ROUND (1 is on).
    `fp16_body` keeps loop blocks dequantised on a GPU, memory for speed at many rows; None asks
    TINYLOOP_EXPERIMENTAL_FP16_BODY (1 is on).

    Raises FormatError for a damaged or foreign file, InputError for a device or dtype that does not run here, a model
    that the device has no room for, or one whose 4-bit weights cannot take a GPU's tensor-core path where
    `set_marlin_dispatch("require")` asks for it.
    """
    where = devices.resolve(device)
    devices.dtype_on(where, dtype)  # refused before the file is read
    checkpoint = container.read(path, verify=verify, progress=progress)
    model = Model(checkpoint, dtype=dtype, cross_iter_round=cross_iter_round, device=where, fp16_body=fp16_body)
    if where.type != "cpu":
        model.pack(progress)
    return model


def import_model(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Checkpoint:
    """A GGUF file or a Hugging Face folder, dense or of a quantised format that is read, as a `Checkpoint`, nothing
    lost; `save` writes it as `.tinyloop`."""
    from .importers import import_model as read

    return read(path, progress=progress)


def export(
    source: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    format: str = "gptq_v2",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """A model, or the path of one, as a Hugging Face folder that other software reads; see `tinyloop.exporters`."""
    from .exporters import export as write

    return write(source, folder, format, overwrite, progress)
