"""Saving and loading by `transformers` itself: `save_pretrained`, and `from_pretrained` behind `load_transformers`.

config.json says under `quantization_config` which modules are ours and of what kind, so that `from_pretrained` can make
them, empty, before it fills them from the safetensors files. What it fills are the canonical tensors, in the dtypes
that they were saved in.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from .errors import FormatError, InputError
from .linear import Canonical, QuantEmbedding, QuantLinear
from .weight import QuantWeight

METHOD = "tinyloop"


def attach(hf_model: Any) -> None:
    """Tell a model of `transformers` what it is made of, so that it saves itself. Another module is left alone."""
    if not hasattr(hf_model, "save_pretrained"):
        return
    Config, Quantizer = _interface()
    ours = {name: m for name, m in hf_model.named_modules() if isinstance(m, Canonical)}
    config = Config(modules={name: _kind(m) for name, m in ours.items()}, shared=_shared(ours))
    if config.shared:
        declare_shared(hf_model, config.shared)
    hf_model.hf_quantizer = Quantizer(config)
    hf_model.config.quantization_config = config
    hf_model.quantization_method = METHOD


def load_transformers(folder: str | os.PathLike[str], **how: Any) -> Any:
    """The model that `save_pretrained` wrote into `folder`; `how` goes to `from_pretrained` (dtype, device_map, …).

    Raises InputError for a folder without such a model, FormatError where a tensor is missing or has no place.
    """
    import transformers

    _interface()
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise InputError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    config = transformers.AutoConfig.from_pretrained(folder)
    found = getattr(config, "quantization_config", None) or {}
    if found.get("quant_method") != METHOD:
        raise InputError(
            f"{folder} holds no model of ours (quant_method {found.get('quant_method')!r}); load it with transformers, "
            "then give it to tinyloop.quantize_"
        )
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise InputError(f"{folder}: architectures={names} is no class of this transformers; use the release it is of")
    _check_settings(folder, found)
    # Else transformers names no tensor where sizes differ; here every difference is refused below.
    how = {**how, "ignore_mismatched_sizes": True, "output_loading_info": True}
    hf_model, found = model_class.from_pretrained(folder, **how)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else f"{key[0]}: {list(key[1])}" for key in found[what])
        if names:
            raise FormatError(
                f"{folder}: {len(names)} {what.replace('_', ' ')}, the first is {names[0]}; copy the folder again"
            )
    return hf_model


def _check_settings(folder: Any, found: dict[str, Any]) -> None:
    """Raises FormatError where quantization_config is not what `attach` makes."""
    modules, shared = found.get("modules"), found.get("shared")
    if not isinstance(modules, dict) or not isinstance(shared, dict):
        raise FormatError(
            f"{folder}: quantization_config has modules={modules!r}, shared={shared!r}; both must be objects: copy "
            "config.json again"
        )
    for name, kind in modules.items():
        kind = kind if isinstance(kind, dict) else {}
        wrong = [key for key, allowed in _KIND.items() if not allowed(kind.get(key, ...))]
        if wrong:
            raise FormatError(
                f"{folder}: quantization_config has {name} with {wrong[0]}={kind.get(wrong[0])!r}, which no layer of "
                "ours has; copy config.json again"
            )


def declare_shared(hf_model: Any, shared: dict[str, str]) -> None:
    """Names of tensors that are others, target → source, of which one copy is saved."""
    hf_model._tied_weights_keys = dict(shared)
    hf_model.all_tied_weights_keys = dict(shared)


def _shared(ours: dict[str, Canonical]) -> dict[str, str]:
    """Every tensor that is another's too: all of a head that is the embedding, the order of inputs of q, k and v."""
    first: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    for name, m in ours.items():
        for key, t in m.named_buffers(prefix=name, recurse=False, remove_duplicate=False):
            source = first.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype), key) if t.numel() else key
            if source != key:
                shared[key] = source
    return shared


def _kind(m: Canonical) -> dict[str, Any]:
    """What an empty module of the same kind is made from."""
    w = m.quant_weight
    return {
        "embedding": isinstance(m, QuantEmbedding), "group_size": w.group_size, "bits": w.bits,
        "integer_zero": w.integer_zero, "parameters": _name(w.scale), "bias": None if w.bias is None else _name(w.bias),
        "perm": w.perm is not None,
    }  # fmt: skip


# What each of these may be.
_KIND: dict[str, Callable[[Any], bool]] = {
    "embedding": lambda v: type(v) is bool,
    "group_size": lambda v: type(v) is int and v > 0,
    "bits": lambda v: v in (4, 8),
    "integer_zero": lambda v: type(v) is bool,
    "parameters": lambda v: v in ("float16", "float32"),
    "bias": lambda v: v in (None, "float16", "bfloat16", "float32", "float64"),
    "perm": lambda v: type(v) is bool,
}


def _name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def empty(old: nn.Module, kind: dict[str, Any]) -> nn.Module:
    """A module on meta in the place of `old`, to be filled."""
    if not (isinstance(old, nn.Embedding if kind["embedding"] else nn.Linear) or is_transposed(old)):
        raise FormatError(
            f"quantization_config makes a {type(old).__name__} quantised, which is no layer of that kind; copy "
            "config.json again"
        )
    dense: torch.Tensor = old.weight  # type: ignore[assignment]
    N, K = reversed(dense.shape) if is_transposed(old) else dense.shape
    G, bits = kind["group_size"], kind["bits"]

    def made(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    scale, zero = (made((-(-K // G), N), kind["parameters"]) for _ in range(2))
    w = QuantWeight(
        made(((K + 1) // 2 if bits == 4 else K, N), "uint8"), scale, zero, K, G, bits, kind["integer_zero"],
        None if kind["bias"] is None else made((N,), kind["bias"]), perm=made((K,), "int32") if kind["perm"] else None,
    )  # fmt: skip
    if kind["embedding"]:
        return QuantEmbedding(w, dense.dtype, getattr(old, "padding_idx", None))
    return QuantLinear(w, dense.dtype)


def _held(files: Sequence[str]) -> set[str]:
    """Names of the tensors in safetensors files."""
    held: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as f:
            held |= set(f.keys())
    return held


def is_transposed(m: nn.Module) -> bool:
    """Whether `m` is a `Conv1D` of `transformers`, a linear layer whose weight is [K, N]; it makes no import, since
    who holds such a layer has made it."""
    made = sys.modules.get("transformers.pytorch_utils")
    return made is not None and isinstance(m, made.Conv1D)


@functools.cache
def _interface() -> tuple[Any, Any]:
    """Our two classes of `transformers`' interface, registered; made here because its modules are imported here."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class TinyLoopConfig(QuantizationConfigMixin):
        def __init__(self, modules: dict[str, Any], shared: dict[str, str], **_: Any):
            self.quant_method: Any = METHOD
            self.modules, self.shared = modules, shared

    @register_quantizer(METHOD)
    class TinyLoopQuantizer(HfQuantizer):
        requires_calibration = True  # by quantize_, never inside from_pretrained
        is_trainable = True  # adapters beside the layers

        def is_serializable(self) -> bool:
            return True

        @property
        def _config(self) -> Any:
            return self.quantization_config

        def _process_model_before_weight_loading(
            self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
        ) -> None:
            from .hf import replace

            known = dict(model.named_modules())
            for name, kind in self._config.modules.items():
                if name not in known:
                    raise FormatError(
                        f"quantization_config names {name}, which the model has not; copy config.json again"
                    )
                made = empty(model.get_submodule(name), kind)
                made._is_hf_initialized = True  # type: ignore[assignment]  # no random numbers, please
                replace(model, name, made)
            held = _held(checkpoint_files or ())  # a model that was moved has copies of what it shared
            self._config.shared = {t: source for t, source in self._config.shared.items() if t not in held}
            for target in self._config.shared:  # no file holds it, so nothing may look for it
                module, _, t = target.rpartition(".")
                model.get_submodule(module)._non_persistent_buffers_set.add(t)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            for module in model.modules():  # Trainer does not even evaluate what says that it is quantised
                if hasattr(module, "is_quantized"):
                    module.is_quantized = False
            for target, source in self._config.shared.items():
                module, _, t = target.rpartition(".")
                model.get_submodule(module)._non_persistent_buffers_set.discard(t)
                setattr(model.get_submodule(module), t, model.get_buffer(source))
            if self._config.shared:
                declare_shared(model, self._config.shared)
            return model

    return TinyLoopConfig, TinyLoopQuantizer
