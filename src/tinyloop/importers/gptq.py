"""GPTQ linears, as AutoGPTQ and GPTQModel store them, at 4 bits.

    qweight  int32 [K/8, N]       word (r, n), bits 4j … 4j+3 = q[8r + j, n]
    qzeros   int32 [⌈K/G⌉, N/8]   word (g, c), bits 4j … 4j+3 = z[g, 8c + j], or z − 1 where the format is "gptq" (v1)
    scales   float [⌈K/G⌉, N]
    g_idx    int   [K]            group of each input; absent, or k // G, where they lie in order

W = (q − z)·scale of the input's group. What a configuration says of zeros is compared with the zeros: they tell v1 and
v2 apart where they are all alike, and show whether `sym` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FormatError, UnsupportedError
from .parts import (
    Parameters,
    Part,
    Remarks,
    codes_along_columns,
    fits_start,
    flag,
    group_of,
    integer_parameters,
    lanes,
    setting,
    stated,
)  # fmt: skip
from .shards import FLOATS, Shards

Tensor = torch.Tensor
_ONES = 0x11111111  # one in every lane
_ENOUGH = 64  # zeros that an asymmetric quantiser would not make all alike


@dataclass(frozen=True)
class _Settings:
    """What the configuration says; `writer` is "gptqmodel", "auto_gptq" or unknown."""

    group_size: Any
    symmetric: bool
    v2: bool
    desc_act: bool | None  # None where it is not said
    writer: str
    dynamic: Mapping[str, Any]


def open_gptq(values: Mapping[str, Any], shards: Shards, remarks: Remarks) -> Callable[[str], Part | None]:
    """Module → its linear, None where it is not quantised. Raises UnsupportedError for settings that are not read."""
    settings = _settings(values, shards)

    def part(module: str) -> Part | None:
        if f"{module}.qweight" not in shards:
            return None
        return _part(module, settings, shards, remarks)

    return part


def _settings(values: Mapping[str, Any], shards: Shards) -> _Settings:
    kind = stated(values, "checkpoint_format", "format", default="gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"checkpoint_format={kind!r} is not read; of GPTQ, read are gptq and gptq_v2")
    bits = values.get("bits", values.get("w_bit", values.get("wbits")))
    _four(bits, "bits")
    if values.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise UnsupportedError(f"pack_dtype={values['pack_dtype']!r} is not read; codes are packed in int32 words")
    for key in ("rotation", "adapter", "lora"):
        if values.get(key):
            raise UnsupportedError(f"quantisation key {key}={values[key]!r} is not read; only plain GPTQ weights are")
    desc_act = None if values.get("desc_act") is None else flag(values, "desc_act", False)
    return _Settings(
        values.get("group_size", values.get("q_group_size", -1)), flag(values, "sym", True), kind == "gptq_v2",
        desc_act, _writer(values, shards), setting(values, "dynamic", dict),
    )  # fmt: skip


def _writer(values: Mapping[str, Any], shards: Shards) -> str:
    """Of meta.quantizer, a text or a list of texts such as "gptqmodel:7.7.0"; or of the files' metadata."""
    named = setting(values, "meta", dict).get("quantizer")
    for name in named if isinstance(named, list) else [named]:
        if (writer := str(name).partition(":")[0].lower()) in ("gptqmodel", "auto_gptq"):
            return writer
    return "auto_gptq" if "auto_gptq_version" in shards.metadata else ""


def _four(bits: Any, key: str) -> None:
    if bits != 4:
        raise UnsupportedError(f"{key}={bits!r} is not read; codes have 4 bits")


def _part(module: str, settings: _Settings, shards: Shards, remarks: Remarks) -> Part:
    own = _override(settings, module, remarks)
    words = shards.expect(f"{module}.qweight", (torch.int32,), None, "a linear of 4-bit codes")
    if words.dim() != 2:
        raise FormatError(f"{shards.where(f'{module}.qweight')} has shape {list(words.shape)}; it must have two sizes")
    K, N = 8 * words.shape[0], words.shape[1]
    G = group_of(module, own.get("group_size", settings.group_size), K)
    groups, why = -(-K // G), f"K={K}, N={N}, group {G}"
    if N % 8:
        raise UnsupportedError(f"{module} has N={N} columns: eight zeros share a word, so N must be a multiple of 8")
    shards.expect(f"{module}.scales", FLOATS, [groups, N], why)
    shards.expect(f"{module}.qzeros", (torch.int32,), [groups, N // 8], why)
    has_order = f"{module}.g_idx" in shards
    if has_order:
        shards.expect(f"{module}.g_idx", (torch.int32, torch.int64), [K], why)
    elif settings.desc_act and groups > 1:
        raise FormatError(f"{module} has no g_idx, but desc_act is true: which group an input is of is lost")
    elif settings.desc_act is None and groups > 1:
        remarks.add("Neither g_idx nor desc_act says which group an input is of: read as groups in order", module)
    symmetric = flag(own, "sym", settings.symmetric)

    def parameters() -> Parameters:
        z = _zeros(shards.get(f"{module}.qzeros"), symmetric, settings, module, remarks)
        perm = group_order(shards.get(f"{module}.g_idx"), G, module) if has_order else None
        return integer_parameters(module, shards.get(f"{module}.scales"), z, perm)

    return Part(module, K, N, G, parameters, lambda: codes_along_columns(shards.get(f"{module}.qweight")))


def _override(settings: _Settings, module: str, remarks: Remarks) -> Mapping[str, Any]:
    """GPTQModel's per-module settings: the first pattern that fits the start of the name decides; "-:" is not to be
    quantised."""
    for pattern in settings.dynamic:
        if fits_start(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, module):
            if pattern.startswith("-:"):
                remarks.add("dynamic says not quantised, the file has codes: read as codes", module)
                return {}
            values = setting(settings.dynamic, pattern, dict)
            _four(values.get("bits", 4), f"{module}: dynamic bits")
            return values
    return {}


def _zeros(words: Tensor, symmetric: bool, settings: _Settings, module: str, remarks: Remarks) -> Tensor:
    """z [⌈K/G⌉, N] of int32 [⌈K/G⌉, N/8]."""
    stored, v2 = lanes(words), settings.v2
    if stored.numel() >= _ENOUGH or symmetric:  # all alike, so symmetric, whose z is 8 in either version
        if not v2 and bool((stored == 8).all()):
            remarks.add("Labelled gptq (v1), but every zero is stored as 8, as v2 does: read as v2", module)
            v2 = True
        elif v2 and bool((stored == 7).all()):
            remarks.add("Labelled gptq_v2, but every zero is stored as 7, as v1 does: read as v1", module)
            v2 = False
    z = stored if v2 else _first_version(words, stored, settings.writer, module, remarks)
    if symmetric and bool((z != 8).any()):
        remarks.add("Labelled symmetric, but has zeros other than 8: read with its zeros", module)
    return z


def _first_version(words: Tensor, stored: Tensor, writer: str, module: str, remarks: Remarks) -> Tensor:
    """z from z − 1. GPTQModel subtracts within the word, so that z = 0 borrows from the lane above; AutoGPTQ's −1 is
    all ones and covers the lanes above. Where no lane is 15 both read alike."""
    by_word = lanes((words.long() + _ONES).to(torch.int32))
    by_lane = stored + 1 & 15
    if not (odd := int((by_word != by_lane).sum())):
        return by_lane
    if writer == "gptqmodel":
        return by_word
    lane = stored.view(*words.shape, 8) == 15
    covered = bool((lane[..., 1:] | ~lane[..., :-1]).all())  # above a 15 there are 15s only
    if writer == "auto_gptq" or covered:
        remarks.add(
            "Zero points 0 in format v1: AutoGPTQ's word loses the zero points beside them, which read 0", module
        )
        return by_lane
    raise FormatError(
        f"{module}: {odd} zero points have two readings in format v1, and the file does not say who wrote it; put "
        '"meta": {"quantizer": "gptqmodel"} (or "auto_gptq") into its quantisation config'
    )


def group_order(g_idx: Tensor, G: int, module: str) -> Tensor | None:  # int [K] → int32 [K], None where trivial
    """Inputs sorted by group, stable. Raises FormatError where groups are not of G inputs each."""
    K, groups = len(g_idx), -(-len(g_idx) // G)
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise FormatError(f"{module}: g_idx spans {low}..{high}; K={K}, group {G} has groups 0..{groups - 1}")
    inputs = torch.arange(K)
    if torch.equal(g_idx.long(), inputs // G):
        return None
    sizes = torch.bincount(g_idx.long(), minlength=groups)
    if not torch.equal(sizes, torch.bincount(inputs // G, minlength=groups)):
        odd = int((sizes != G).nonzero()[0])
        raise FormatError(
            f"{module}: g_idx gives group {odd} {int(sizes[odd])} inputs; every group has {G} (only the last fewer), "
            "and readers disagree on what another g_idx means"
        )
    return g_idx.long().sort(stable=True).indices.to(torch.int32)
