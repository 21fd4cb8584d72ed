"""Text ↔ token ids. The tokenizer itself is Hugging Face's `tokenizers`; this adds what a model file must also know:
which ids begin and end a text, and the chat template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .errors import FormatError, InputError


@dataclass(frozen=True)
class TokenizerData:
    """What a file stores. `json` is the content of a tokenizer.json.

    `bos` starts every text when `add_bos` is set; any id of `eos` ends a generation. `special` maps the names that
    chat templates use (bos_token, eos_token …) to their text.
    """

    json: str
    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    special: dict[str, str] = dataclasses.field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Everything but `json`, JSON-ready."""
        values = dataclasses.asdict(self)
        del values["json"]
        return values

    @staticmethod
    def from_settings(json: str, values: dict[str, Any]) -> TokenizerData:
        if odd := sorted({f.name for f in dataclasses.fields(TokenizerData)} - {"json"} ^ values.keys()):
            raise FormatError(f"tokenizer key {odd[0]} is missing or unknown to this version; import the model again")
        return TokenizerData(json=json, **{**values, "eos": tuple(values["eos"])})


def token_ids(given: Iterable[Any]) -> list[int]:
    """Token ids as they came. Raises InputError for anything but whole numbers: a float would lose its fraction, and
    bytes would pass for ids."""
    if not isinstance(given, bytes | bytearray | memoryview):
        with contextlib.suppress(TypeError):
            return [operator.index(i) for i in given]
    raise InputError(f"{type(given).__name__} is no list of token ids; give text (str) or whole numbers")


class Tokenizer:
    """Encode, decode and apply the chat template. Cheap to create: the vocabulary is parsed at first use."""

    def __init__(self, data: TokenizerData):
        self.data = data

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_str(self.data.json)
        except Exception as error:  # tokenizers raises bare Exception; noqa: BLE001
            raise FormatError(f"the tokenizer in this file cannot be read: {error}") from error

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Token ids of `text`. `bos` None follows the file's `add_bos`; special tokens spelt in text count."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if self.data.add_bos if bos is None else bos:
            if self.data.bos is None:
                raise InputError("bos=True: this tokenizer names no token that begins a text; leave bos out")
            ids.insert(0, self.data.bos)
        return ids

    def spans(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Ids of `text`, and the characters where each token begins and ends: int64 [tokens]. Nothing is added."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return list(encoding.ids), offsets[:, 0], offsets[:, 1]

    def id_of(self, token: str) -> int | None:
        """The id of one token by its exact spelling, None where the vocabulary has no such token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: Iterable[dict[str, str]]) -> str:
        """The prompt that asks for the next assistant turn; messages are {"role": …, "content": …}.

        Raises InputError where the file has no chat template or the template refuses the messages.
        """
        if self.data.chat_template is None:
            raise InputError("this file has no chat template: it is not a chat model; generate without chat")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self.data.chat_template)
            return template.render(
                messages=list(messages), add_generation_prompt=True, raise_exception=refuse, **self.data.special
            )
        except TemplateError as error:
            raise InputError(f"the chat template does not take these messages: {error}") from error

    def stream(self) -> TokenStream:
        return TokenStream(self)


class TokenStream:
    """Token ids in, text out, piece by piece: a piece is held back while it ends inside a UTF-8 character.

    Only the tokens since the last clean break are decoded again, so a long text costs linear time.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters of decode(self._ids) that were already returned

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        sure = len(text) - text.endswith("�")  # only the last character can still change
        piece, self._shown = text[self._shown : sure], sure
        if len(self._ids) > 32:  # keep the tokens of one character; decoders treat the first of a text differently
            self._ids = self._ids[-4:]
            text = self._tokenizer.decode(self._ids)
            self._shown = len(text) - text.endswith("�")
        return piece

    def flush(self) -> str:
        """What was held back, at the end of a text."""
        piece = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._shown = [], 0
        return piece
