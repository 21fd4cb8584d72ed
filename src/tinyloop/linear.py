"""4-bit weights as torch modules: `QuantLinear` and `QuantEmbedding`, drop-in for `nn.Linear` and `nn.Embedding`.

The state is the canonical weight and nothing else, under the names of docs/format.md: `q`, `scale`, `zero`, `bias`,
`perm`, and as extra state the numbers that the shapes do not tell. Layouts for a device are derived at the first call
and belong to no state (torch_op.py).

    .to(device), copy, pickle    move or copy the canonical tensors; layouts are derived anew
    .half(), .bfloat16()         change `weight.dtype` and nothing else: scale, zero and bias keep every bit, since the
                                 product takes its dtype from x
    .weight                      W as `nn.Linear` has it, [N, K], dequantised when it is read, never written

Both are subclasses of what they replace, so that code that looks for linear layers by type finds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from . import torch_op
from .checkpoint import Checkpoint
from .errors import FormatError, InputError
from .quantize.gptq import QuantSpec, nearest
from .weight import DenseWeight, LinearWeight, QuantWeight

Tensor = torch.Tensor
_TENSORS = ("q", "scale", "zero", "bias", "perm")  # the state: buffers, the last two None where a weight has none
_META = ("K", "N", "group_size", "bits", "integer_zero")  # the extra state: int64 [5], in this order
_EXTRA = "_extra_state"


class DenseView(torch.Tensor):
    """A weight that looks dense. dtype, shape and device cost nothing; its values are dequantised where they are used.

    Writing to it raises InputError: what was written would be lost.
    """

    layer: Canonical
    _is_hf_initialized = True  # what transformers asks of a weight before it fills it with random numbers
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: Canonical) -> DenseView:
        shape, dtype = (layer.N, layer.K), layer.like.dtype
        view = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=layer.q.device)
        assert isinstance(view, DenseView)
        view.layer = layer
        return view

    def __init__(self, layer: Canonical):
        """The tensor is made by `__new__`, whose argument Python hands on to here."""

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise InputError(_READ_ONLY)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for a in func._schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write and isinstance(given.get(a.name), cls):
                raise InputError(_READ_ONLY)
        args, kwargs = tree_map_only(cls, lambda view: view.layer.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise InputError(_READ_ONLY)  # an index gives a copy, in which the value would be lost

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DenseView({list(self.shape)}, {self.dtype}, {self.device}, of {self.layer})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.layer.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.__reduce_ex__(self.layer.dense(), protocol)  # type: ignore[no-untyped-call]


_READ_ONLY = (
    "the weight of a quantised layer is read-only: what is written to its dense view would be lost; change a dense "
    "layer and quantise it again (adapters cannot be merged into 4 bits, keep them beside the layer)"
)


class Canonical(nn.Module):
    """What both modules share: canonical tensors as buffers, and every way in and out of them."""

    q: Tensor  # uint8 [⌈K/2⌉, N]
    scale: Tensor  # fp16 | fp32 [⌈K/G⌉, N]
    zero: Tensor
    like: Tensor  # [0], of the dtype that the module is said to have: what casts a model casts it

    def _set(self, w: QuantWeight, dtype: torch.dtype) -> None:
        if not isinstance(w, QuantWeight):
            raise InputError(
                f"{type(self).__name__} takes a QuantWeight, not {type(w).__name__}; from_linear and from_embedding "
                "round a layer, from_checkpoint takes an entry by name"
            )
        self.K, self.N, self.group_size, self.bits = w.K, w.N, w.group_size, w.bits
        self.integer_zero = w.integer_zero
        self._numbers = w.K, w.group_size, w.bits, w.N
        for name, t in zip(_TENSORS, (w.packed, w.scale, w.zero, w.bias, w.perm), strict=True):
            self.register_buffer(name, t)
        self.like = torch.empty(0, dtype=dtype, device="cpu")

    @property
    def quant_weight(self) -> QuantWeight:
        """The canonical weight, sharing memory with the module."""
        return QuantWeight(
            self.q, self.scale, self.zero, self.K, self.group_size, self.bits, self.integer_zero,
            self._buffers["bias"], perm=self._buffers["perm"],
        )  # fmt: skip

    @property
    def weight(self) -> DenseView:
        return DenseView(self)

    def dense(self) -> Tensor:  # [N, K]
        """W in the module's dtype, a copy."""
        return self.quant_weight.dequantize(self.like.dtype).t()

    def get_extra_state(self) -> Tensor:
        """A tensor, so that a safetensors file can hold it."""
        return torch.tensor([int(getattr(self, name)) for name in _META])

    def set_extra_state(self, state: Tensor) -> None:
        """Only compared, since it says what the tensors mean. Raises FormatError where the layer is of another kind."""
        own, theirs = self.get_extra_state().tolist(), _numbers(state)
        if own != theirs:
            raise FormatError(
                f"the state is of {_named(theirs)}, the layer of {_named(own)}; make the layer from the state "
                "(from_state)"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if (found := state_dict.get(prefix + _EXTRA)) is not None:
            self.set_extra_state(found)  # before anything is written
        if (given := state_dict.get(prefix + "q")) is not None and given.dtype != torch.uint8:
            raise FormatError(f"{prefix}q is {given.dtype}; codes are uint8, and a cast would change them")
        if (given := state_dict.get(prefix + "perm")) is not None and self._buffers["perm"] is not None:
            dataclasses.replace(self.quant_weight, perm=given).check_perm()
        changed: dict[str, Any] = {}  # as stored, where copying into what is there would round
        for name in ("scale", "zero", "bias"):
            given, held = state_dict.get(prefix + name), self._buffers[name]
            if given is not None and held is not None and given.dtype != held.dtype:
                changed[name] = torch.empty_like(given, device=held.device)
        if changed:
            try:
                dataclasses.replace(self.quant_weight, **changed)
            except FormatError as e:
                raise FormatError(f"the state under {prefix!r} does not fit the layer: {e}") from e
            self._buffers.update(changed)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        torch_op.forget(self.q)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.like = fn(self.like)

        def keeping_dtype(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(keeping_dtype, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        zero = "integer" if self.integer_zero else "float"
        return (
            f"{self.K}, {self.N}, bits={self.bits}, group_size={self.group_size}, {zero} zero, "
            f"bias={self._buffers['bias'] is not None}"
        )


class QuantLinear(Canonical, nn.Linear):  # type: ignore[misc]  # weight is a property
    """`y = x @ W + bias` on a 4-bit weight. x is fp32, bf16 or fp16 on the layer's device; y has its dtype.

    Gradients flow to x; the weight has none. `dtype` is what `weight.dtype` says, None for fp32. A channel for
    cross-iteration rounding is left out, since one layer knows no iterations.
    """

    def __init__(self, weight: QuantWeight, dtype: torch.dtype | None = None):
        nn.Module.__init__(self)
        self._set(weight, dtype or torch.float32)
        self.in_features, self.out_features = self.K, self.N

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: QuantSpec | None = None) -> QuantLinear:
        """A dense layer rounded to nearest, on its device. Raises InputError for what is none, or has no values."""
        if not isinstance(linear, nn.Linear) or linear.weight.is_meta:
            what = "a Linear on the meta device" if isinstance(linear, nn.Linear) else type(linear).__name__
            raise InputError(f"{what} cannot be rounded; give an nn.Linear whose weight is loaded")
        return cls(_rounded(linear.weight, spec, linear.bias), linear.weight.dtype).to(linear.weight.device)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, name: str, dtype: torch.dtype | None = None) -> QuantLinear:
        """One weight of a checkpoint, such as `layers.0.mlp_down`."""
        return cls(_quantised(checkpoint, name), dtype)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], prefix: str = "", dtype: torch.dtype | None = None) -> QuantLinear:
        """The layer that `state_dict` wrote under `prefix`. Raises FormatError for a state that is no such layer's."""
        return cls(weight_of_state(state, prefix), dtype)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] → [..., N]
        b = self._buffers
        if (perm := b["perm"]) is not None:
            x = self._expected(x).index_select(-1, perm)  # which would take the first K of more
        if not is_dynamo_compiling():
            done = torch_op.at_once(x, b["q"], b["scale"], b["zero"], b["bias"], self._numbers)  # type: ignore[arg-type]
            if done is not None:
                return done
            if not isinstance(x, Tensor):
                self._expected(x)
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise InputError("x has a forward-mode derivative, which would be lost; take the reverse mode (backward)")
        learns = x.requires_grad or (b["bias"] is not None and b["bias"].requires_grad)
        op = torch_op.product if learns else torch_op.product_without_gradient
        y: Tensor = op(x, b["q"], b["scale"], b["zero"], b["bias"], self.K, self.group_size, self.bits)
        return y

    def _expected(self, x: Tensor) -> Tensor:
        """x [..., K]. Raises InputError for anything else."""
        if not isinstance(x, Tensor):
            raise InputError(f"x is {type(x).__name__}; activations are a torch tensor")
        if x.dim() == 0 or x.shape[-1] != self.K:
            raise InputError(f"x has shape {list(x.shape)}; its last dimension must be K={self.K}")
        return x


class QuantEmbedding(Canonical, nn.Embedding):  # type: ignore[misc]  # weight is a property
    """Rows of W, looked up: token t is column t of the canonical weight, `embed` in a file."""

    def __init__(self, weight: QuantWeight, dtype: torch.dtype | None = None, padding_idx: int | None = None):
        nn.Module.__init__(self)
        self._set(weight, dtype or torch.float32)
        self.num_embeddings, self.embedding_dim, self.padding_idx = self.N, self.K, padding_idx

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, spec: QuantSpec | None = None) -> QuantEmbedding:
        """A dense table rounded to nearest. Raises InputError for one that rescales its rows (max_norm)."""
        if embedding.max_norm is not None:
            raise InputError(f"max_norm={embedding.max_norm}: the table rescales its rows; keep it dense")
        table = cls(_rounded(embedding.weight, spec, None), embedding.weight.dtype, embedding.padding_idx)
        return table.to(embedding.weight.device)

    def forward(self, tokens: Tensor) -> Tensor:  # int [...] → [..., K]
        n = tokens.reshape(-1)
        codes = self.q.index_select(1, n)  # which refuses token −1, as nn.Embedding does
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).flatten(0, 1)[: self.K]
        group = torch.arange(self.K, device=n.device) // self.group_size
        scale, zero = (t.index_select(1, n).float()[group] for t in (self.scale, self.zero))
        rows = codes.float() * scale + zero  # [K, tokens]
        if (perm := self._buffers["perm"]) is not None:
            rows = torch.empty_like(rows).index_copy_(0, perm.long(), rows)
        return rows.t().to(self.like.dtype).reshape(*tokens.shape, self.K)


def weight_of_state(state: Mapping[str, Tensor], prefix: str) -> QuantWeight:
    """The canonical weight that a module wrote under `prefix`."""
    missing = [name for name in ("q", "scale", "zero", _EXTRA) if prefix + name not in state]
    if missing:
        raise FormatError(f"{prefix}{missing[0]} is missing; the state is none of a quantised layer, or incomplete")
    K, N, group_size, bits, integer_zero = _numbers(state[prefix + _EXTRA])
    try:
        w = QuantWeight(
            state[prefix + "q"], state[prefix + "scale"], state[prefix + "zero"], K, group_size, bits,
            bool(integer_zero), state.get(prefix + "bias"), perm=state.get(prefix + "perm"),
        )  # fmt: skip
        w.check_perm()
    except FormatError as error:
        raise FormatError(f"{prefix}: {error}") from error
    if w.N != N:
        raise FormatError(f"{prefix}: the codes have N={w.N}, the extra state says {N}; the file is damaged")
    return w


def _numbers(extra: Any) -> list[int]:
    if not isinstance(extra, Tensor) or extra.dtype != torch.int64 or list(extra.shape) != [len(_META)]:
        raise FormatError(f"the extra state {extra!r} is not int64 [{len(_META)}] of {', '.join(_META)}")
    return [int(value) for value in extra]


def _named(meta: list[int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(_META, meta, strict=False))


def _rounded(weight: Tensor, spec: QuantSpec | None, bias: Tensor | None) -> QuantWeight:
    spec = spec or QuantSpec()
    if spec.channel is not None:
        raise InputError(f"channel={spec.channel!r}: one layer knows no loop iterations; leave the channel out")
    return nearest(weight.detach().t().cpu(), spec, None if bias is None else bias.detach().to("cpu", copy=True))


def _quantised(checkpoint: Checkpoint, name: str) -> QuantWeight:
    w: LinearWeight | None = checkpoint.weights.get(name)
    if w is None:
        known = sorted(checkpoint.weights)
        raise InputError(f"{name!r} is no weight of this checkpoint; its names are like {known[0]}, {known[-1]}")
    if isinstance(w, DenseWeight):
        raise InputError(f"{name} is dense in this checkpoint; quantise it first, or use nn.Linear")
    return w
