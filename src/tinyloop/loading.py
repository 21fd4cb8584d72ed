"""From a path to a runnable model, and from a foreign checkpoint to ours: the two ways in."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from . import container
from .checkpoint import Checkpoint
from .errors import InputError
from .model import Model


def load(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
    cross_iter_round: bool | None = None,
) -> Model:
    """The model in a `.tinyloop` file, ready to score and generate.

    Tensors are mapped, so memory grows as they are used. `dtype` is float32 or bfloat16; None takes bfloat16 where the
    CPU multiplies it in hardware. `verify` compares every tensor with its checksum first.

    `cross_iter_round` turns cross-iteration rounding on or off; None asks TINYLOOP_CROSS_ITER_ROUND (1 is on).

    Raises FormatError for a damaged or foreign file, InputError for a device or dtype that this release does not run.
    """
    if torch.device(device).type != "cpu":
        raise InputError(f"device={device!r}: this release runs on the CPU; use device='cpu'")
    checkpoint = container.read(path, verify=verify, progress=progress)
    return Model(checkpoint, dtype=dtype, cross_iter_round=cross_iter_round)


def import_model(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Checkpoint:
    """A GGUF file or a Hugging Face folder, dense or of a quantised format that is read, as a `Checkpoint`, nothing
    lost; `save` writes it as `.tinyloop`."""
    from .importers import import_model as read

    return read(path, progress=progress)
