"""What a user can do wrong, as exceptions that say what to do next.

Every message names the argument, its value, the rule and the way out. The command line prints these without a
traceback; anything else that escapes is a fault of the software and keeps its traceback.
"""

from __future__ import annotations

import operator
from typing import Any


class TinyLoopError(ValueError):
    """Base of all errors that the caller can mend."""


class FormatError(TinyLoopError):
    """A file is truncated, damaged, of another version, or not of the kind its name says."""


class UnsupportedError(TinyLoopError):
    """The input is sound, but asks for something that the runtime does not do."""


class InputError(TinyLoopError):
    """An argument or a text breaks a rule."""


class NumericalError(TinyLoopError):
    """A result is NaN: reported instead of a number or a token."""


def whole(name: str, value: Any, least: int | None = None, way_out: str = "") -> int:
    """An argument that must be a whole number, from `least` on; true and false are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name}={value!r} must be a whole number{way_out}") from None
    if least is not None and number < least:
        raise InputError(f"{name}={value!r} must be ≥ {least}{way_out}")
    return number
