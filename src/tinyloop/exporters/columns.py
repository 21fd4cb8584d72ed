"""A weight cut along N, and what exporters ask of its codes and parameters."""

from __future__ import annotations

import dataclasses

import torch

from ..errors import InputError
from ..importers.parts import reordered
from ..weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor


def columns(w: LinearWeight, n: int, end: int) -> LinearWeight:
    """Outputs n … end − 1."""
    bias = None if w.bias is None else w.bias[n:end]
    if isinstance(w, DenseWeight):
        return DenseWeight(w.weight[n:end], bias)
    names = ("packed", "scale", "zero", "frac4", "sign_bit")
    cut = {name: t[:, n:end] for name in names if (t := getattr(w, name)) is not None}
    return dataclasses.replace(w, **cut, bias=bias)


def zero_points(name: str, w: QuantWeight) -> Tensor:  # uint8 [groups, N]
    """z of `zero = −z·scale`. Raises InputError where there is none in 0..15 for every zero."""
    scale, zero = w.scale.float(), w.zero.float()
    z = torch.where(scale == 0, 0, -zero / scale).round().clamp(0, 15)
    if bad := int((zero != -(z * scale)).sum()):
        raise InputError(
            f"{name} has {bad} zeros that are no whole number of steps, as the format needs them; quantise with "
            "--zero integer, or export as fp16 or bf16"
        )
    return z.to(torch.uint8)


def codes_in_order(w: QuantWeight) -> Tensor:  # uint8 [⌈K/2⌉, N], rows in the order of the inputs
    return w.packed if w.perm is None else reordered(w.packed, w.perm.argsort().to(torch.int32))


def group_index(w: QuantWeight) -> Tensor:  # int32 [K]
    """The group of each input."""
    groups = torch.arange(w.K, dtype=torch.int32) // w.group_size
    return groups if w.perm is None else groups[w.perm.argsort()]


def words(lanes: Tensor) -> Tensor:  # uint8 [R, 8·C] → int32 [R, C], lane j of word c = element 8c + j
    pairs = lanes[:, 0::2] | lanes[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def narrowest(t: Tensor) -> Tensor:
    """The values in fp16 or bf16 where that loses nothing, else as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(t.to(dtype).to(t.dtype), t):
            return t.to(dtype)
    return t
