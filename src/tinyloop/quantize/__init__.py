"""Dense weights → 4-bit ones: one weight (gptq), a model block by block (pipeline), a file to a file (convert)."""

from __future__ import annotations

from .calibration import Calibration
from .convert import Output, Report, Result, quantize
from .gptq import QuantSpec, gptq_quantize, nearest
from .pipeline import Settings

__all__ = [
    "Calibration",
    "Output",
    "QuantSpec",
    "Report",
    "Result",
    "Settings",
    "gptq_quantize",
    "nearest",
    "quantize",
]
