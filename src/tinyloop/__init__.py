"""TinyLoop: 4-bit asymmetric language models, looped and ordinary, from file to perplexity and text.

import tinyloop as tl

    model = tl.load("model.tinyloop")
    model.score("Some text.").perplexity
    for piece in model.generate("Once upon a time", max_tokens=50): print(piece, end="")
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .config import ModelConfig, Rope, Segment
from .container import Description
from .container import describe as inspect
from .container import write as save
from .cuda.config import Chip
from .dispatch import Machine, Plan, Problem, marlin_available, plan, set_marlin_dispatch
from .errors import FormatError, InputError, NumericalError, TinyLoopError, UnsupportedError
from .explain import Explanation, explain
from .generate import Chat, Generation, Options, generate_batch
from .hf import load_into
from .hf_quantize import calibration_tokens, quantize_
from .hf_saving import load_transformers
from .linear import QuantEmbedding, QuantLinear
from .loading import export, import_model, load
from .marlin import (
    MarlinWeight,
    PackReport,
    marlin_pack_asymmetric,
    marlin_pack_symmetric,
    marlin_unpack_asymmetric,
    marlin_unpack_symmetric,
    pack_model_for_marlin,
)
from .model import KVCache, Model
from .ops import quant_gemm, quant_swiglu
from .pack import PackedWeight, pack
from .quantize import QuantSpec, gptq_quantize, quantize
from .sampling import Sampling
from .score import Protocol, Score, ScoreInterrupted
from .weight import DenseWeight, QuantWeight

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Checkpoint",
    "Chip",
    "DenseWeight",
    "Description",
    "Explanation",
    "FormatError",
    "Generation",
    "InputError",
    "KVCache",
    "Machine",
    "MarlinWeight",
    "Model",
    "ModelConfig",
    "NumericalError",
    "Options",
    "PackReport",
    "PackedWeight",
    "Plan",
    "Problem",
    "Protocol",
    "QuantEmbedding",
    "QuantLinear",
    "QuantSpec",
    "QuantWeight",
    "Rope",
    "Sampling",
    "Score",
    "ScoreInterrupted",
    "Segment",
    "TinyLoopError",
    "UnsupportedError",
    "calibration_tokens",
    "explain",
    "export",
    "generate_batch",
    "gptq_quantize",
    "import_model",
    "inspect",
    "load",
    "load_into",
    "load_transformers",
    "marlin_available",
    "marlin_pack_asymmetric",
    "marlin_pack_symmetric",
    "marlin_unpack_asymmetric",
    "marlin_unpack_symmetric",
    "pack",
    "pack_model_for_marlin",
    "plan",
    "quant_gemm",
    "quant_swiglu",
    "quantize",
    "quantize_",
    "save",
    "set_marlin_dispatch",
]
