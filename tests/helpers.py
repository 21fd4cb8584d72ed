"""Small random models for the tests: a seed and a shape in, a `QuantWeight` or a complete `Checkpoint` out.

Weights have a standard deviation near 1/√K, so that activations stay near 1 through any number of loops. The
tokenizer is byte-level: id 16 + b is byte b, ids 0..15 are special, so a test can spell every id it expects.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyloop.checkpoint import Checkpoint
from tinyloop.config import ModelConfig, Rope, Segment
from tinyloop.tokenizer import TokenizerData
from tinyloop.weight import DenseWeight, LinearWeight, QuantWeight

PLAIN = (Segment("pre", 2),)
LOOPED = (Segment("pre", 1), Segment("loop", 1, 3), Segment("coda", 1))

BYTE_0 = 16  # id of byte 0
VOCAB = BYTE_0 + 256
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", *(f"<|reserved_{i}|>" for i in range(3, BYTE_0)))
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('role ' + m.role + ' is not user or assistant') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def random_quant_weight(
    K: int, N: int, G: int, *, seed: int, bits: int = 4, integer_zero: bool = False, bias: bool = False
) -> QuantWeight:
    """Codes uniform over their range; fp32 parameters unless fp16 happens to be exact for all of them."""
    g = torch.Generator().manual_seed(seed)
    levels, groups = 1 << bits, -(-K // G)
    q = torch.randint(0, levels, (K, N), generator=g, dtype=torch.uint8)
    scale = (0.5 + torch.rand(groups, N, generator=g)) * math.sqrt(12 / K) / levels
    if integer_zero:
        zero = -torch.randint(levels // 2 - 2, levels // 2 + 2, (groups, N), generator=g) * scale
    else:
        zero = -((levels - 1) / 2 + 4 * torch.rand(groups, N, generator=g) - 2) * scale
    b = 0.1 * torch.randn(N, generator=g) if bias else None
    return QuantWeight.from_codes(q, scale, zero, G, bits, b, integer_zero)


def random_dense_weight(
    K: int, N: int, *, seed: int, dtype: torch.dtype = torch.float32, bias: bool = False
) -> DenseWeight:
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(N, K, generator=g) / math.sqrt(K)).to(dtype)
    return DenseWeight(weight, 0.1 * torch.randn(N, generator=g) if bias else None)


def with_random_channel(w: LinearWeight, kind: str, *, seed: int = 0) -> QuantWeight:
    """`w` with random channel values of `kind`, 0 where another would leave the range of codes."""
    assert isinstance(w, QuantWeight)
    values = torch.randint(0, 16 if kind == "frac4" else 2, (w.K, w.N), generator=torch.Generator().manual_seed(seed))
    q = w.codes()
    inner = (q > 0) & (q < 15)
    return w.with_channel(kind, torch.where(inner, values, 0).to(torch.uint8))


def with_random_perm(w: LinearWeight, *, seed: int = 0) -> QuantWeight:
    """`w` with its rows read as those of inputs in a random order."""
    assert isinstance(w, QuantWeight)
    perm = torch.randperm(w.K, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return dataclasses.replace(w, perm=perm)


def tiny_config(
    *,
    segments: Iterable[Segment] = LOOPED,
    tied: bool = True,
    hidden: int = 64,
    intermediate: int = 96,
    heads: tuple[int, int] = (4, 2),  # query heads, key-value heads
    **others: Any,  # further fields of ModelConfig: qk_norm, sliding_window, head_dim, vocab_size …
) -> ModelConfig:
    head_dim = others.pop("head_dim", hidden // heads[0])
    inv_freq = tuple(10000.0 ** (-i / (head_dim // 2)) for i in range(head_dim // 2))
    values = {"architecture": "llama", "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}
    return ModelConfig(
        **values | others, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=head_dim, segments=tuple(segments), rope=Rope(inv_freq),
        tie_word_embeddings=tied,
    )  # fmt: skip


def tiny_checkpoint(
    *,
    quantized: bool = True,
    bias: bool = False,
    seed: int = 0,
    group: int = 32,
    dtype: torch.dtype = torch.float32,  # of dense weights
    **config: Any,  # arguments of tiny_config: segments, tied, qk_norm, hidden …
) -> Checkpoint:
    """A model of a few thousand weights with a tokenizer. `bias` puts one on every attn_qkv, as Qwen 2 does."""
    about = tiny_config(**config)

    def linear(i: int, name: str, K: int, N: int) -> LinearWeight:
        with_bias = bias and name.endswith("attn_qkv")
        if quantized:
            return random_quant_weight(K, N, min(group, K), seed=seed + i, bias=with_bias)
        return random_dense_weight(K, N, seed=seed + i, dtype=dtype, bias=with_bias)

    shapes = about.linear_shapes().items()
    weights = {name: linear(1000 * i, name, K, N) for i, (name, (K, N)) in enumerate(shapes)}
    g = torch.Generator().manual_seed(seed)
    norms = {name: 1 + 0.1 * torch.randn(n, generator=g) for name, n in about.norm_shapes().items()}
    return Checkpoint(about, weights, norms, tiny_tokenizer(), {"format": "random", "seed": str(seed)})


def tiny_tokenizer() -> TokenizerData:
    """Byte-level, no merges: the ids of a text are those of its UTF-8 bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(SPECIAL)} | _byte_tokens()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}
    return TokenizerData(text, bos=0, eos=(0,), add_bos=False, chat_template=CHAT_TEMPLATE, special=special)


def _byte_tokens() -> dict[str, int]:
    """Visible stand-in of each byte, as byte-level tokenizers spell it → id; invisible bytes take U+0100 onwards."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return {chr(b if b in visible else next(hidden)): BYTE_0 + b for b in range(256)}


def ids_of(text: str) -> list[int]:
    """What `tiny_tokenizer` makes of a text without special tokens."""
    return [BYTE_0 + b for b in text.encode()]


def tracked_files() -> list[str]:
    """What git tracks, as paths from the root; skips the test in an unpacked sdist, or where git is not installed."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: the list of files comes from git")
    # A checkout that belongs to another user, as in a container, is as good for listing names.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("git is not installed: the list of files comes from git")
    return [name for name in listed.split("\0")[:-1] if (root / name).is_file()]
