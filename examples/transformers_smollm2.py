"""SmolLM2 in `transformers`, on the 4-bit weights of a file: perplexity beside the native runtime, and tokens a second
beside the same model in bf16.

    python examples/transformers_smollm2.py [--tokens 64] [--rounds 5]

The file is that of `tinyloop demo --smollm2`, downloaded once. The dense model holds the same weights, dequantised; the
two take turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
import transformers

import tinyloop as tl
from tinyloop import demo_smollm2


def smollm2(config: tl.ModelConfig) -> transformers.LlamaForCausalLM:
    """The architecture of the file, with random weights."""
    made = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=config.rope.source,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(made).eval()


def dequantised(model: transformers.LlamaForCausalLM) -> transformers.LlamaForCausalLM:
    """The same values in ordinary layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, tl.QuantLinear | tl.QuantEmbedding):
                N, K = child.weight.shape
                embedding = isinstance(child, tl.QuantEmbedding)
                dense = torch.nn.Embedding(N, K) if embedding else torch.nn.Linear(K, N, bias=False)
                dense.weight = torch.nn.Parameter(child.weight + 0)
                setattr(parent, name, dense)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@torch.inference_mode()
def perplexity(model: transformers.LlamaForCausalLM, ids: torch.Tensor) -> float:
    logits = model(ids).logits[0, :-1].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def speed(model: transformers.LlamaForCausalLM, prompt: torch.Tensor, tokens: int) -> float:
    """Greedy tokens a second, prompt included."""
    start = time.perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    path, _ = demo_smollm2.converted(demo_smollm2.obtain(demo_smollm2.writable(None)))
    native = tl.load(path)
    ids = torch.tensor([[0, *native.tokenizer.encode(demo_smollm2.text())][:1025]])
    found = {"dtype": str(native.dtype), "threads": torch.get_num_threads()}
    losses = native.losses(native.hidden(ids)[0, :-1], ids[0, 1:])
    found["perplexity, native"] = math.exp(float(losses.mean()))

    model = smollm2(native.config).to(native.dtype)
    tl.load_into(model, path)
    found["perplexity, transformers on 4 bits"] = perplexity(model, ids)
    dense = smollm2(native.config).to(native.dtype)
    tl.load_into(dense, path)
    dense = dequantised(dense)
    found["perplexity, transformers dense"] = perplexity(dense, ids)

    prompt = ids[:, :16]
    for m in (model, dense):
        speed(m, prompt, 4)
    rounds = [(speed(model, prompt, given.tokens), speed(dense, prompt, given.tokens)) for _ in range(given.rounds)]
    found["tokens/s on 4 bits"], found["tokens/s dense"] = (statistics.median(r) for r in zip(*rounds, strict=True))
    found["ratio, median of rounds"] = statistics.median(a / b for a, b in rounds)
    for name, value in found.items():
        print(f"{name:36} {value if isinstance(value, str | int) else format(value, '.4f')}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
