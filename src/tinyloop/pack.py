"""`QuantWeight` → `PackedWeight`: the same weight with the layouts that kernels read, each derived at first use.

A layout is never stored in a file and never the only copy. What exists is a matter of what the plans asked for, so a
model that only scores holds dense copies, and one that only decodes holds panels; `layouts` says what and how large.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch

from . import channel, devices
from .dispatch import chip, machine
from .errors import InputError
from .marlin import MarlinWeight, refusal
from .weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor


class PackedWeight:
    """A linear weight and its derived layouts, on `device`. `keep_dense` allows a dense copy to be kept (memory for
    speed), and `keep_roundings` those of as many loop iterations. `iteration` is set in what `at` returns, and nowhere
    else.
    """

    def __init__(self, weight: LinearWeight, keep_dense: bool = False, device: torch.device | str = "cpu"):
        self.device = _indexed(torch.device(device))
        self.weight = weight  # where it came from: on a GPU only what kernels read is kept
        self.keep_dense = keep_dense or isinstance(weight, DenseWeight)
        self.keep_roundings = 0
        self.iteration: int | None = None
        self._panel: Any = None
        self._int4: tuple[Tensor, Tensor] | None = None
        self._dense: dict[tuple[torch.dtype, int | None], Tensor] = {}
        self._bias: dict[torch.dtype, Tensor] = {}
        self._marlin: MarlinWeight | None = None
        self.ready: dict[tuple[int, torch.dtype, str], Any] = {}  # launches of cuda/run.py, by rows, dtype and kernel
        there = weight_device(weight) == self.device and (self.device.type == "cpu" or _is_contiguous(weight))
        self._canonical: LinearWeight | None = weight if there else None

    def prepare(self) -> PackedWeight:
        """Make now what products on a GPU read, which else the first one makes; returns this weight. A dense copy is
        left to the first product, which says of what dtype."""
        if self.device.type != "cpu":
            _ = self.perm
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                self.bias(dtype)
            self.marlin() if self.unpackable is None else self.canonical()
        return self

    @functools.cached_property
    def unpackable(self) -> str | None:
        """Why the weight has no device format, or None."""
        _check_no_capture(self.device)
        return refusal(self.weight)

    def marlin(self) -> MarlinWeight:
        """The device format, on this weight's device."""
        if self._marlin is None:
            assert isinstance(self.weight, QuantWeight)
            _check_no_capture(self.device)
            self._marlin = MarlinWeight.of(self.weight, self.device)
        return self._marlin

    @property
    def coarse(self) -> bool:
        """Whether bf16 holds every scale, as the device format knows; False where there is none."""
        return self._marlin is not None and self._marlin.coarse

    @property
    def scale32(self) -> bool:
        """Whether the device format has scales in fp32; False where there is none."""
        return self._marlin is not None and self._marlin.S.dtype == torch.float32

    def canonical(self) -> LinearWeight:
        """The weight itself on this weight's device; on a GPU, contiguous as its kernels read it."""
        if self._canonical is None:
            _check_no_capture(self.device)
            made = _contiguous(self.weight.to(self.device))
            devices.settle(self.device)
            self._canonical = made
        return self._canonical

    @property
    def channel(self) -> str | None:
        """The weight's channel for cross-iteration rounding: "frac4", "sign_bit" or None."""
        return self.weight.channel if isinstance(self.weight, QuantWeight) else None

    @functools.cached_property
    def perm(self) -> Tensor | None:  # int32 [K]
        """The order in which the weight's rows are stored; every layout is in stored order. None: their own."""
        perm = self.weight.perm if isinstance(self.weight, QuantWeight) else None
        if perm is None or perm.device == self.device:
            return perm
        _check_no_capture(self.device)
        perm = perm.to(self.device)
        devices.settle(self.device)
        return perm

    def at(self, iteration: int) -> PackedWeight:
        """This weight as loop iteration `iteration` rounds it, sharing all layouts; itself without a channel."""
        if self.channel is None:
            return self
        if self.device.type != "cpu":  # made before the view, which else would make its own
            self.canonical()
            _ = self.unpackable
        view = copy.copy(self)
        view.iteration = channel.distinct(self.channel, iteration)
        return view

    @property
    def layouts(self) -> dict[str, int]:
        """Derived layouts that exist now, in bytes; dense copies of all iterations together."""
        sizes: dict[str, int] = {}
        for dtype, _ in self._dense:
            name = f"dense {str(dtype).removeprefix('torch.')}"
            sizes[name] = sizes.get(name, 0) + self.weight.K * self.weight.N * dtype.itemsize
        if self._panel is not None:
            sizes["panel"] = self._panel.data.nbytes
        if self._marlin is not None:
            sizes["device format"] = self._marlin.nbytes
        if self._int4 is not None:
            sizes["int4pack"] = sum(t.nbytes for t in self._int4)
        return sizes

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self.weight.bias
        if bias is None or dtype in self._bias:
            return self._bias.get(dtype)
        if (bias.device, bias.dtype) != (self.device, dtype) or not bias.is_contiguous():
            _check_no_capture(self.device)
            bias = bias.to(self.device, dtype).contiguous()
            devices.settle(self.device)
        self._bias[dtype] = bias
        return bias

    def panel(self) -> Any:
        """The layout of the CPU kernels, see cpu/panel.py."""
        if self._panel is None:
            from .cpu import panel

            assert isinstance(self.weight, QuantWeight)
            self._panel = panel.build(self.weight)
        return self._panel

    def int4(self) -> tuple[Tensor, Tensor]:
        """(codes, parameters bf16 [K/G, N, 2]) in the order of torch's op, whose formula is (q − 8)·scale + δ."""
        if self._int4 is None:
            w = self.weight
            assert isinstance(w, QuantWeight)
            codes = w.codes().t().to(torch.int32).contiguous()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            scale, zero = w.scale.float(), w.zero.float()
            params = torch.stack((scale, zero + 8 * scale), dim=-1).to(torch.bfloat16)
            self._int4 = packed, params.repeat_interleave(self.int4_group_repeat, 0).contiguous()
        return self._int4

    @property
    def int4_group(self) -> int:
        """Group size handed to torch's op; one group over K is repeated in groups of 32."""
        w = self.weight
        assert isinstance(w, QuantWeight)
        return w.group_size if w.group_size in (32, 64, 128, 256) else 32

    @property
    def int4_group_repeat(self) -> int:
        w = self.weight
        assert isinstance(w, QuantWeight)
        return 1 if w.group_size in (32, 64, 128, 256) else w.K // 32

    def dense(self, dtype: torch.dtype, keep: bool) -> Tensor:
        """W in stored order, or its rounding in this iteration, as `dense_product` takes it: reordered for oneDNN when
        kept on a CPU, [N, K] otherwise."""
        key = dtype, self.iteration
        if key in self._dense:
            return self._dense[key]
        if not keep:
            return self._rows(dtype)
        _check_no_capture(self.device)
        W = self._rows(dtype)
        W = _reorder(W) if self.device.type == "cpu" else W
        devices.settle(self.device)
        self._dense[key] = W
        return W

    def _rows(self, dtype: torch.dtype) -> Tensor:  # [N, K]
        if self.device.type == "cuda" and self.iteration is None and not chip(self.device).refusal:
            from .cuda.run import dense

            return dense(self, dtype)
        w = self.rounding()
        if isinstance(w, DenseWeight):
            return w.weight.to(dtype)
        return (_dequantize(w.stored, dtype) if self.device.type == "cpu" else w.stored.dequantize(dtype)).t()

    def rounding(self) -> LinearWeight:
        """The weight as this iteration has it."""
        w = self.canonical()
        return w if self.iteration is None or isinstance(w, DenseWeight) else w.rounding(self.iteration)

    def drop_dense(self) -> None:
        """Give dense copies back to the system."""
        self._dense.clear()


def pack(weight: LinearWeight, keep_dense: bool = False, device: torch.device | str | None = None) -> PackedWeight:
    """Allow layouts to be derived from `weight` and kept, on `device` (default: where it is): what `quant_gemm` wants
    for repeated products. Raises InputError for what is no weight, and for a device that is not here."""
    if not isinstance(weight, QuantWeight | DenseWeight):
        raise InputError(f"{type(weight).__name__} is no weight; give a QuantWeight or a DenseWeight")
    where = weight_device(weight) if device is None else devices.resolve(device)
    return PackedWeight(weight, keep_dense, where)


def weight_device(weight: LinearWeight) -> torch.device:
    """Where a weight lies."""
    return weight.weight.device if isinstance(weight, DenseWeight) else weight.packed.device


def _contiguous(weight: LinearWeight) -> LinearWeight:
    if _is_contiguous(weight):
        return weight
    tensors: dict[str, Any] = {name: t.contiguous() for name, t in vars(weight).items() if isinstance(t, Tensor)}
    return dataclasses.replace(weight, **tensors)


def _is_contiguous(weight: LinearWeight) -> bool:
    """As the GPU's kernels read it; dense weights are torch's, and may have any strides."""
    tensors = (t for t in vars(weight).values() if isinstance(t, Tensor))
    return isinstance(weight, DenseWeight) or all(t.is_contiguous() for t in tensors)


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_no_capture(device: torch.device) -> None:
    if _capturing(device):
        raise InputError(
            "a weight is not on the GPU yet in the form that products read, and none is made while a CUDA graph is "
            "captured: warm up first, by one product before the capture or by pack(weight).prepare()"
        )


def _indexed(device: torch.device) -> torch.device:
    """A CUDA device with its index, so that devices compare."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _dequantize(w: QuantWeight, dtype: torch.dtype) -> Tensor:  # [K, N]
    if not machine().numba:
        return w.dequantize(dtype)
    from .cpu import decode

    return decode.dequantize(w, dtype)


def _reorder(W: Tensor) -> Tensor:
    """oneDNN's blocked order, where this torch offers it: saves a reordering in every product (17 % at M = 128)."""
    if not _has_reorder(W.dtype):
        return W.contiguous()
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(W, None)
    return reordered


def _has_reorder(dtype: torch.dtype) -> bool:
    offered = all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise"))
    return offered and (dtype == torch.float32 or (dtype == torch.bfloat16 and machine().bf16))


def dense_product(x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:  # x [M, K], W from PackedWeight.dense → [M, N]
    """`x @ Wᵀ + bias` with either form of W."""
    if W.is_mkldnn:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, W, bias, "none", [], "")
        return y
    return torch.nn.functional.linear(x, W, bias)
