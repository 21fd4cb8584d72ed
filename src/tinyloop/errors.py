"""What a user can do wrong, as exceptions that say what to do next.

Every message names the argument, its value, the rule and the way out. The command line prints these without a
traceback; anything else that escapes is a fault of the software and keeps its traceback.
"""


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
