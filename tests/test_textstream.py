"""Tokenising in pieces gives the ids of the whole, whatever the text; what is no UTF-8 text is refused by byte."""

from __future__ import annotations

import io
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from helpers import tiny_tokenizer
from tinyloop.errors import InputError
from tinyloop.textstream import encode_stream, read_text
from tinyloop.tokenizer import Tokenizer, TokenizerData

CORPUS = [
    "the cat's hat, the 1234 hats  of the\n\n hatter; don't the there  \t\nThe “other” 字符，符号。 naïve ... 12.5%"
] * 9


def trained(kind: str) -> Tokenizer:
    """A BPE with merges, cut into words as the families do it: gpt2, llama3 (Split) or sentencepiece (no words)."""
    t = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    special = ["<unk>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "sentencepiece" else []
    if kind == "gpt2":
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "llama3":
        pattern = tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(pattern, "isolated")
        t.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return Tokenizer(TokenizerData(t.to_str()))


TOKENIZERS = {kind: trained(kind) for kind in ("gpt2", "llama3", "sentencepiece")} | {
    "bytes": Tokenizer(tiny_tokenizer())
}
SPACES = (" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t")
SIGNS = ("，", "。", "e\u0301", "...", "—", "🙂", "'s", "ﬁ", "(", ")", "<|endoftext|>")
# The digits are longer than the context and are grouped by three from their beginning.
WORDS = st.sampled_from(("the", "hat", "don't", "12", "3.5", "naïve", "字", "é", "1234567890" * 4, *SPACES, *SIGNS))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(words=st.lists(WORDS, min_size=100, max_size=300), piece=st.integers(1, 200), chunk=st.integers(1, 500))
def test_pieces_give_the_ids_of_the_whole(kind: str, words: list[str], piece: int, chunk: int) -> None:
    text, tokenizer = "".join(words), TOKENIZERS[kind]
    chunks = (text[i : i + chunk] for i in range(0, len(text), chunk))
    ids: list[int] = []
    end = 0
    for some, ends in encode_stream(tokenizer, chunks, piece=piece):
        assert len(some) == len(ends)
        assert (ends[1:] >= ends[:-1]).all()
        ids, end = ids + some, int(ends[-1]) if len(ends) else end
    assert ids == tokenizer.encode(text, bos=False)
    assert end == len(text.encode())


def test_a_long_text_comes_in_many_pieces() -> None:
    text = "the hat of the hatter " * 2000
    pieces = list(encode_stream(TOKENIZERS["gpt2"], iter([text]), piece=1000))
    assert len(pieces) > 30
    assert max(len(ids) for ids, _ in pieces) < 1100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good \xff", r"t\.txt is not UTF-8: byte 5 \(0xff\)"),
        (b"x" * 65535 + b"\xc3(", r"byte 65535 \(0xc3\)"),
        (b"x" * 65535 + b"\xc3", r"byte 65535 \(0xc3\)"),
        (b"x" * 70000 + b"\0", r"t\.txt is binary: byte 70000 is 0"),
    ],
)
def test_bad_bytes_are_named(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_text(io.BytesIO(data), "t.txt"))


def test_a_character_may_lie_across_chunks() -> None:
    text = "x" * 65535 + "é字🙂"
    assert "".join(read_text(io.BytesIO(text.encode()), "t")) == text


def test_json_is_what_the_file_stores() -> None:
    assert json.loads(TOKENIZERS["gpt2"].data.json)["model"]["type"] == "BPE"
