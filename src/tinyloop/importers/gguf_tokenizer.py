"""The tokenizer inside a .gguf file → `TokenizerData`.

In: the fields as plain values. Out: the content of a tokenizer.json, of one of two kinds (tokenizer.ggml.model).

gpt2    byte-level BPE. How text is cut before merging is named by tokenizer.ggml.pre; a name that is not in the table
        is refused, because a wrong cut still encodes, into ids that the model never saw.
llama   SentencePiece BPE: no cut, spaces are ▁, and what has no piece falls back to bytes. The file gives scores
        instead of merges: of two neighbours that form a piece, the pair with the best score merges first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..errors import FormatError, UnsupportedError
from ..tokenizer import TokenizerData

Fields = Mapping[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
# Control tokens that end a text or a turn, whatever the file names as its eos.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_tokenizer(fields: Fields, vocab_size: int) -> tuple[TokenizerData | None, list[str]]:
    """Tokenizer (None where the file has none) and notes. Raises UnsupportedError naming model or pre-tokenizer."""
    model = _get(fields, "model")
    if model is None:
        return None, ["The file has no tokenizer: text cannot be encoded, only token ids."]
    if model not in _BUILD:
        raise UnsupportedError(f"tokenizer.ggml.model={model!r} is not supported; known are {', '.join(_BUILD)}")
    tokens, kinds = _get(fields, "tokens", []), _get(fields, "token_type", [])
    if not tokens or len(tokens) > vocab_size or (kinds and len(kinds) != len(tokens)):
        raise FormatError(
            f"tokenizer has {len(tokens)} tokens of {len(kinds)} types for an embedding of {vocab_size} rows"
        )
    tokenizer = _BUILD[model](fields)
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    user = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in user])
    special = {
        f"{ours}_token": tokens[i]
        for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (i := _token_id(fields, theirs, len(tokens))) is not None
    }
    ids = {token: i for i, token in enumerate(tokens)}
    named = [_token_id(fields, name, len(tokens)) for name in ("eos", "eot", "eom")]
    eos = dict.fromkeys([i for i in named if i is not None] + [ids[t] for t in _ENDS if t in set(control)])
    bos = _token_id(fields, "bos", len(tokens))
    add_bos = bool(_get(fields, "add_bos_token", model == "llama"))
    data = TokenizerData(tokenizer.to_str(), bos, tuple(eos), add_bos, fields.get("tokenizer.chat_template"), special)
    return data, _notes(fields, data, control)


def _notes(fields: Fields, data: TokenizerData, control: list[str]) -> list[str]:
    notes = []
    if _get(fields, "pre") == "default":
        notes.append("tokenizer.ggml.pre=default does not say how text is cut before merging: cut as GPT-2 does.")
    separator = "<|endoftext|>"
    if not data.add_bos and separator in control and data.special.get("bos_token") != separator:
        notes.append(f"Texts in training begin after {separator}, not after the file's bos; score text with it first.")
    return notes


def _byte_level(fields: Fields) -> tokenizers.Tokenizer:
    pre = _get(fields, "pre")
    if pre not in _PRE:
        known = ", ".join(_PRE)
        raise UnsupportedError(f"tokenizer.ggml.pre={pre!r} is not supported; known are {known}; convert the file anew")
    cut, whole_words, normalizer = _PRE[pre]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in _get(fields, "merges", []))]
    tokenizer = _bpe(fields, pairs, ignore_merges=whole_words)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Fields) -> tokenizers.Tokenizer:
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if _get(fields, key):
            raise UnsupportedError(
                f"tokenizer.ggml.{key} is set: text would be rewritten first, which is not supported"
            )
    tokens, scores, kinds = (_get(fields, key, []) for key in ("tokens", "scores", "token_type"))
    if not len(tokens) == len(scores) == len(kinds):
        raise FormatError(
            f"tokenizer has {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types; all needed"
        )
    pieces = {t: i for i, t in enumerate(tokens) if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    splits = [
        (-scores[i], pieces[piece[:cut]], pieces[piece[cut:]])
        for piece, i in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    pairs = [(tokens[left], tokens[right]) for _, left, right in sorted(splits)]
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = _bpe(fields, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds)
    prefix = bool(_get(fields, "add_space_prefix", True))
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _bpe(fields: Fields, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    tokens = _get(fields, "tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise FormatError(
            f"tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} tokens twice; the file is damaged"
        )
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # tokenizers raises bare Exception; noqa: BLE001
        raise FormatError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error


def _get(fields: Fields, key: str, missing: Any = None) -> Any:
    return fields.get(f"tokenizer.ggml.{key}", missing)


def _token_id(fields: Fields, name: str, size: int) -> int | None:
    value = _get(fields, f"{name}_token_id")
    if value is not None and not 0 <= value < size:
        raise FormatError(f"tokenizer.ggml.{name}_token_id={value} is not in 0..{size - 1}")
    return None if value is None else int(value)


def _gpt2(*before: Any) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([*before, level]) if before else level


def _regex(digits: str) -> Any:
    """The cut of Llama 3 and its kin, which differ in how many digits stay together."""
    split = pre_tokenizers.Split(tokenizers.Regex(_WORDS + digits + _REST), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_DIGITS = _gpt2(pre_tokenizers.Digits(individual_digits=True))
_LLAMA3 = _regex(r"\p{N}{1,3}")
# tokenizer.ggml.pre → cut, whether a word that is a token skips the merges, normaliser.
_PRE: dict[str, tuple[Any, bool, Any]] = {
    "gpt-2": (_gpt2(), False, None),
    "default": (_gpt2(), False, None),
    "smollm": (_DIGITS, False, None),
    "starcoder": (_DIGITS, False, None),
    "llama-bpe": (_LLAMA3, True, None),
    "llama3": (_LLAMA3, True, None),
    "llama-v3": (_LLAMA3, True, None),
    "qwen2": (_regex(r"\p{N}"), False, normalizers.NFC()),
}

_BUILD = {"gpt2": _byte_level, "llama": _sentencepiece}  # tokenizer.ggml.model → builder
