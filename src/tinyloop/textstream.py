"""A text of any length → token ids, in flat memory, the same ids as if the whole text had been encoded at once.

Bytes are decoded strictly, and the text is encoded in pieces of some 64,000 characters. A piece ends only where no
pre-tokeniser lets a token cross: between a letter or digit and a space that another letter follows (or, in scripts
without spaces, between a letter and punctuation). Each piece is encoded together with a few characters on either side,
whose tokens are dropped again, so that neither its beginning nor its end is mistaken for that of the text; where a
token crosses the end all the same, an earlier one is tried. A text without any such place is encoded as one piece.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypeAlias

import numpy as np

from .errors import InputError
from .tokenizer import Tokenizer

PIECE = 1 << 16  # characters
MARGIN = 64  # characters after a cut that are encoded with the piece before it
CONTEXT = 16  # characters before a cut that are encoded with the piece after it
TRIES = 32  # cuts looked at before the piece is made longer

TokenPiece: TypeAlias = tuple[list[int], np.ndarray]  # ids, and the byte of the text at which each token ends


def read_text(stream: BinaryIO, name: str) -> Iterator[str]:
    """The stream's text in chunks. Raises InputError naming the byte where it is binary or not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0  # bytes before `chunk`
    while True:
        chunk = stream.read(PIECE)
        if (at := chunk.find(b"\0")) >= 0:
            raise InputError(f"{name} is binary: byte {done + at} is 0; give a UTF-8 text file")
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8: byte {done - pending + error.start} ({error.object[error.start]:#04x}) cannot "
                "be decoded; convert it first, as with: iconv -f LATIN1 -t UTF-8"
            ) from error
        if text:
            yield text
        if not chunk:
            return
        done += len(chunk)


def encode_stream(tokenizer: Tokenizer, chunks: Iterable[str], piece: int = PIECE) -> Iterator[TokenPiece]:
    """Token ids of the concatenated chunks, piece by piece. No token is added at the beginning."""
    source = iter(chunks)
    buffer, start = "", 0  # start: where the next piece begins in buffer, after its context
    origin = 0  # byte of the text at buffer[start]
    want, ended = piece, False
    while not ended or start < len(buffer):
        while not ended and len(buffer) - start < want + MARGIN:
            chunk = next(source, None)
            ended, buffer = chunk is None, buffer + (chunk or "")
        text = buffer[: start + want + MARGIN]
        ids, begins, ends = tokenizer.spans(text)
        last = ended and len(text) == len(buffer)
        cut = len(text) if last else _cut(text, start, begins, ends)
        if cut is None:
            want *= 2
            continue
        kept = slice(int(np.searchsorted(begins, start)), int(np.searchsorted(begins, cut)))
        sizes = _byte_offsets(buffer[start:cut])
        after = np.append(begins[kept][1:], cut)[: len(ids[kept])]  # a token ends where the next begins
        yield ids[kept], origin + sizes[after - start]
        origin += int(sizes[-1])
        buffer, start = buffer[max(0, cut - CONTEXT) :], min(cut, CONTEXT)
        want = piece


def _cut(text: str, start: int, begins: np.ndarray, ends: np.ndarray) -> int | None:
    """The last place at which a piece may end, well before the end of `text`; None where none was found."""
    tries = 0
    for i in range(len(text) - MARGIN, start + CONTEXT, -1):
        if _separates(text, i):
            before = int(np.searchsorted(begins, i))
            if before < len(begins) and begins[before] == i and (ends[:before] <= i).all():
                return i
            tries += 1
            if tries == TRIES:
                return None
    return None


def _separates(text: str, i: int) -> bool:
    """Whether text[:i] and text[i:] never share a token: “word| word”, or “字|。” where there are no spaces."""
    left, right = text[i - 1], text[i]
    if not left.isalnum():
        return False
    if right == " ":
        return text[i + 1].isalpha()
    return ord(left) > 0x2E80 and left.isalpha() and ord(right) > 0x2E80 and unicodedata.category(right) == "Po"


def _byte_offsets(text: str) -> np.ndarray:
    """Offset in UTF-8 of each character, and of the end: int64 [len + 1]."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate(([0], np.cumsum(sizes)))
