"""A real model against another implementation: SmolLM2 as transformers reads it from the same .gguf file.

Runs where an earlier `tinyloop demo --smollm2` has left the file in the user's cache.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyloop as tl
from tinyloop import demo_smollm2

TOKENS = 512


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = demo_smollm2.writable(None) / Path(demo_smollm2.MEMBER).name
    if not path.exists():
        pytest.skip("SmolLM2 is not in the cache: run tinyloop demo --smollm2 once")
    return path


@pytest.fixture(scope="module")
def checkpoint(gguf: Path) -> tl.Checkpoint:
    return tl.import_model(gguf)


@pytest.fixture(scope="module")
def tokens(checkpoint: tl.Checkpoint) -> torch.Tensor:
    model = tl.Model(checkpoint)
    assert model.tokenizer is not None
    return torch.tensor([[0, *model.tokenizer.encode(demo_smollm2.text())][: TOKENS + 1]])


def reference(gguf: Path) -> Any:
    """transformers' Llama with the file's weights as the gguf package dequantises them."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"}
    names |= {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    state = {}
    for t in GGUFReader(gguf).tensors:
        w = torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
        layer, part = t.name.split(".")[1:3] if t.name.startswith("blk.") else ("", "")
        if part in ("attn_q", "attn_k"):  # rows lie pairwise, for the other layout of RoPE
            heads = w.shape[0] // 64
            w = w.reshape(heads, 32, 2, 576).transpose(1, 2).reshape(heads * 64, 576)
        whole = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}.get(t.name)
        state[f"model.{whole or f'layers.{layer}.{names[part]}'}.weight"] = w
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def theirs(gguf: Path, tokens: torch.Tensor) -> torch.Tensor:  # losses fp32 [TOKENS]
    with torch.no_grad():
        logits = reference(gguf)(tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:], reduction="none")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.0005), (torch.bfloat16, 0.005)])
def test_perplexity_is_that_of_transformers(
    checkpoint: tl.Checkpoint, tokens: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, limit: float
) -> None:
    """0.05 % where only the order of sums differs, 0.5 % with bf16 products."""
    model = tl.Model(checkpoint, dtype=dtype)
    ours = model.losses(model.hidden(tokens)[0, :-1], tokens[0, 1:])
    assert math.exp(float(ours.mean())) == pytest.approx(math.exp(float(theirs.mean())), rel=limit)
