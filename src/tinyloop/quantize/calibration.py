"""Calibration text → token windows spread over it, and a piece held back for the final check.

    text  [ window ]····[ window ]····  …  ····[ window ]····[ held back: the last eighth, at most 8 windows ]

Neighbouring windows say the same thing twice: with 16 of them GPTQ lowers every layer's error and hardly the model's
perplexity, so they are spread over the whole text. Each begins with the token that begins a scored window.
"""

from __future__ import annotations

import importlib.resources
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import InputError
from ..model import Model
from ..score import WINDOW, default_bos
from ..textstream import encode_stream, read_text

Tensor = torch.Tensor
BUNDLED = "calibration.txt.xz"
HELD_WINDOWS, HELD_SHARE = 8, 8  # at most so many windows, and at most 1/8 of the text


@dataclass(frozen=True)
class Calibration:
    """What to calibrate on. `source` is a text (str), a UTF-8 file (path), or None for the bundled sample of English
    books; `texts` windows of `length` tokens are taken from it, None for 1024 or the context, if that is shorter.
    """

    source: str | os.PathLike[str] | None = None
    texts: int = 40
    length: int | None = None

    @property
    def name(self) -> str:
        """How messages and files call the source."""
        if self.source is None:
            return "the bundled sample"
        return "the given text" if isinstance(self.source, str) else Path(self.source).name

    def text(self) -> str:
        """All of it. Raises InputError for a path that is not there or not text."""
        if self.source is None or isinstance(self.source, str):
            return bundled() if self.source is None else self.source
        with _opened(self.source) as stream:
            return "".join(read_text(stream, str(self.source)))


@dataclass(frozen=True)
class Samples:
    """`windows` int64 [texts, length] calibrate; `held` are the tokens kept back, in windows of `length`."""

    windows: Tensor
    held: list[int]
    length: int


def sample(model: Model, calibration: Calibration) -> Samples:
    """Tokens of `calibration` for `model`. Raises InputError for a text that is binary or too short, for settings out
    of range, and for a model without tokenizer."""
    context = model.config.max_position_embeddings
    length = min(WINDOW, context) if calibration.length is None else calibration.length
    if not 2 <= length <= context:
        raise InputError(f"length={length} must be 2 to {context}, the model's context")
    if calibration.texts < 1:
        raise InputError(f"texts={calibration.texts} must be ≥ 1")
    bos = default_bos(model)
    begin = [] if bos is None else [bos]
    ids, new = _encode(model, calibration), length - len(begin)
    held = min(HELD_WINDOWS * new, len(ids) // HELD_SHARE)
    room, need = len(ids) - held, calibration.texts * new
    if room < need or held < 2:
        raise InputError(
            f"{calibration.name} has {len(ids)} tokens, of which {held} are held back for the final check; "
            f"{calibration.texts} windows of {length} need {need}: give a longer text, or lower --texts or --length"
        )
    return Samples(spread(ids[:room], begin, calibration.texts, new), ids[room:], length)


def spread(ids: list[int], begin: list[int], texts: int, new: int) -> Tensor:  # int64 [texts, len(begin) + new]
    """Windows of `new` tokens spread over `ids`, from the first to the last of them."""
    starts = [i * (len(ids) - new) // max(1, texts - 1) for i in range(texts)]
    return torch.tensor([begin + ids[start : start + new] for start in starts])


def bundled() -> str:
    """The bundled sample: see the note beside it."""
    import lzma

    return lzma.decompress((importlib.resources.files("tinyloop") / "data" / BUNDLED).read_bytes()).decode()


def _encode(model: Model, calibration: Calibration) -> list[int]:
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer, so no text can calibrate it; add tokenizer.json to the source")
    source = calibration.source
    if source is None or isinstance(source, str):
        data = (bundled() if source is None else source).encode()
        return _ids(model, io.BytesIO(data), calibration.name)
    with _opened(source) as stream:
        return _ids(model, stream, str(source))


def _opened(source: str | os.PathLike[str]) -> BinaryIO:
    path = Path(source)
    if not path.is_file():
        raise InputError(f"calibration {path} is {'a folder' if path.is_dir() else 'not there'}; give a text file")
    return path.open("rb")


def _ids(model: Model, stream: BinaryIO, name: str) -> list[int]:
    assert model.tokenizer is not None
    return [i for ids, _ in encode_stream(model.tokenizer, read_text(stream, name)) for i in ids]
