"""The quantised formats of Hugging Face folders that are read: one row each.

In: the quantisation settings, from config.json or from a file beside it. Out: a function from a module's name to its
linear, or None where the module is not quantised. What no row recognises is refused with the list of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, UnsupportedError
from .awq import open_awq
from .compressed_tensors import open_compressed
from .gptq import open_gptq
from .hf_tokenizer import read_json
from .marlin_folder import open_marlin
from .mlx import open_mlx
from .onnx_folder import CONTAINER, open_nbits
from .parts import Part, Remarks, flag
from .shards import Shards

KEYS = ("quantization", "quantization_config", "compression_config")  # of config.json; MLX writes the first two
_FILES = ("quantize_config.json", "quant_config.json")
Reader = Callable[[str], Part | None]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """`codes` is the tensor that holds a module's codes; `methods` are the values of quant_method."""

    name: str
    about: str
    methods: tuple[str, ...]
    codes: str
    open: Callable[[Values, Shards, Remarks], Reader]


FORMATS = (
    Format("gptq", "GPTQ of 4 bits (formats gptq and gptq_v2)", ("gptq",), "qweight", open_gptq),
    Format("awq", "AWQ of 4 bits (version gemm)", ("awq",), "qweight", open_awq),
    Format(
        "compressed-tensors", "compressed-tensors pack-quantized of 4 bits", ("compressed-tensors",), "weight_packed",
        open_compressed,
    ),
    Format("marlin", "GPTQ of 4 bits in Marlin's order", ("marlin",), "B", open_marlin),
    Format("mlx", "MLX affine of 4 bits", ("mlx",), "weight", open_mlx),
    Format("onnx", "ONNX MatMulNBits of 4 bits, as onnxruntime-genai names it", (CONTAINER,), "weight", open_nbits),
)  # fmt: skip

# Tensors by which a checkpoint shows its method where the settings are lost.
_TRACES = {".absmax": "bitsandbytes", ".W_q": "HQQ", "._weight_qdata": "torchao", ".B": "Marlin",
           ".qweight": "GPTQ or AWQ", ".weight_packed": "compressed-tensors", ".biases": "MLX"}  # fmt: skip


def read_list() -> str:
    return "; ".join(f.about for f in FORMATS)


def open_format(folder: Path, config: Values, shards: Shards, remarks: Remarks) -> tuple[Format, Reader] | None:
    """The format of the folder's quantised modules and their reader; None where nothing is quantised.

    Raises UnsupportedError for a method that is not read, FormatError where codes lie in a folder without settings.
    """
    values, place = _settings(folder, config, shards)
    if not values:
        _refuse_traces(folder, shards)
        return None
    found = _recognised(values, place)
    _refuse_conflict(found, place, shards)
    return found, found.open(values, shards, remarks)


def _settings(folder: Path, config: Values, shards: Shards) -> tuple[Values, str]:
    if shards.metadata.get("container") == CONTAINER:  # the configuration is that of the model it was made from
        return {"quant_method": CONTAINER}, CONTAINER
    for key in KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return config[key], f"config.json: {key}"
        if config.get(key):
            raise FormatError(f"config.json has {key}={config[key]!r}; it must be an object")
    for file in _FILES:
        if values := read_json(folder / file):
            return values, file
    return {}, ""


def _recognised(values: Values, place: str) -> Format:
    method = values.get("quant_method", values.get("method"))
    if method is None:
        # Before transformers asked for it, nobody wrote the method: AutoAWQ told itself by zero_point, MLX by place.
        bits = values.get("bits", values.get("w_bit", values.get("wbits")))
        mlx = place.endswith(": quantization") or "mode" in values
        method = "mlx" if mlx else "awq" if "zero_point" in values else "gptq" if bits is not None else None
    if method == "gptq" and (
        flag(values, "is_marlin_format", False) or "marlin" in (values.get("checkpoint_format"), values.get("format"))
    ):
        method = "marlin"
    for row in FORMATS:
        if isinstance(method, str) and method.lower() in row.methods:
            return row
    raise UnsupportedError(f"{place} has quant_method={method!r}, which is not read; read are {read_list()}; or give "
                           "the fp16, bf16 or fp32 checkpoint it was made from")  # fmt: skip


def _refuse_conflict(row: Format, place: str, shards: Shards) -> None:
    """Where the folder has codes, but none under the name that the settings' format gives them."""
    held = {
        f.codes: name
        for name, entry in shards.entries.items()
        for f in FORMATS
        if name.endswith(f".{f.codes}") and f.name != CONTAINER and (f.codes != "weight" or entry.dtype == "U32")
    }
    if held and row.codes not in held and row.name != CONTAINER:
        codes, name = next(iter(held.items()))
        others = " or ".join(f.name for f in FORMATS if f.codes == codes and f.name != CONTAINER)
        raise FormatError(
            f"{place} says {row.name}, whose codes are named {row.codes}, but the folder has {name}, as {others} "
            "writes it; correct quant_method or checkpoint_format there, or copy the right files"
        )


def _refuse_traces(folder: Path, shards: Shards) -> None:
    for suffix, method in _TRACES.items():
        if name := next((n for n in shards.entries if n.endswith(suffix)), None):
            raise FormatError(
                f"{folder} has tensor {name}, as {method} writes it, but no quantization_config in config.json and no "
                f"{' or '.join(_FILES)}; give its settings. Read are {read_list()}"
            )
