"""The decoder: transformers' logits on four families, loops as unrolled layers, cached decoding as uncached."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyloop as tl
from helpers import LOOPED, PLAIN, VOCAB, tiny_checkpoint, with_random_perm
from tinyloop import dispatch, layers, ops
from tinyloop.checkpoint import Checkpoint
from tinyloop.config import Segment
from tinyloop.dispatch import Machine, machine
from tinyloop.errors import InputError
from tinyloop.model import Model, between
from tinyloop.ops import quant_gemm
from tinyloop.weight import DenseWeight, QuantWeight

Tensor = torch.Tensor
F32, BF16 = torch.float32, torch.bfloat16
needs_numba = pytest.mark.skipif(not machine().numba, reason="numba is not installed")


def tokens_of(B: int, T: int, seed: int = 0, vocabulary: int = VOCAB) -> Tensor:
    return torch.randint(0, vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


def error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact.double()).norm() / exact.double().norm())


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 1e4}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all heads": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, yarn rope": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Import, save, load, compare. Both sum in fp32 in orders of their own: twice theirs against float64."""
    transformers = pytest.importorskip("transformers")
    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | extra))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in theirs.named_parameters():
        spread = 0.1 if "norm" in name or "bias" in name else 2 / parameter.shape[-1] ** 0.5
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=spread)
    theirs.save_pretrained(tmp_path / "hf")
    tl.save(tl.import_model(tmp_path / "hf"), tmp_path / "m.tinyloop")
    ours = tl.load(tmp_path / "m.tinyloop", dtype=F32)
    tokens = tokens_of(2, 41, vocabulary=99)
    with torch.no_grad():
        plain, exact = theirs(tokens).logits, theirs.double()(tokens).logits
    assert error(ours.logits(tokens), exact) <= 2 * error(plain, exact)


# ── loops ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def unrolled(checkpoint: Checkpoint, loops: int | None = None) -> Checkpoint:
    """The ordinary model whose layers repeat the looped model's weights in order of application."""
    looped = checkpoint.config.with_loops(loops)
    order = [layer for layer, _ in looped.applications()]
    window = tuple(looped.sliding_window[i] for i in order) if looped.sliding_window else ()
    config = dataclasses.replace(looped, segments=(Segment("pre", len(order)),), sliding_window=window)

    def spread(tensors: Any) -> dict[str, Any]:
        named = {n: t for n, t in tensors.items() if not n.startswith("layers.")}
        for a, layer in enumerate(order):
            prefix = f"layers.{layer}."
            named |= {f"layers.{a}.{n.removeprefix(prefix)}": t for n, t in tensors.items() if n.startswith(prefix)}
        return named

    return dataclasses.replace(
        checkpoint, config=config, weights=spread(checkpoint.weights), norms=spread(checkpoint.norms)
    )


SEGMENTS = {
    "loop alone": (Segment("loop", 2, 3),),
    "pre, loop, coda": LOOPED,
    "two layers each": (Segment("pre", 2), Segment("loop", 2, 2), Segment("coda", 2)),
    "loop once": (Segment("pre", 1), Segment("loop", 1, 1)),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_loops_equal_the_unrolled_model_exactly(segments: str, dtype: torch.dtype) -> None:
    """Prefill, and three steps on a cache: a wrong count or a shared KV slot would still write fluent text."""
    checkpoint = tiny_checkpoint(segments=SEGMENTS[segments], qk_norm=True)
    looped, plain = Model(checkpoint, dtype), Model(unrolled(checkpoint), dtype)
    tokens = tokens_of(2, 20)
    assert torch.equal(looped.logits(tokens), plain.logits(tokens))
    caches = looped.new_cache(2, 24), plain.new_cache(2, 24)
    assert torch.equal(*(m.hidden(tokens, c) for m, c in zip((looped, plain), caches, strict=True)))
    for step in tokens_of(3, 2, seed=1):
        a, b = (m.step(step, c).clone() for m, c in zip((looped, plain), caches, strict=True))
        assert torch.equal(a, b)
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_loop_count_of_a_call(loops: int) -> None:
    checkpoint = tiny_checkpoint()
    model, plain = Model(checkpoint, F32), Model(unrolled(checkpoint, loops), F32)
    tokens = tokens_of(1, 9)
    assert torch.equal(model.logits(tokens, loops=loops), plain.logits(tokens))
    cache = model.new_cache(1, 12, loops=loops)
    assert cache.k.shape[0] == 2 + loops
    assert torch.equal(model.head(model.hidden(tokens, cache)), plain.logits(tokens))
    want = plain.logits(torch.cat((tokens, tokens[:, :1]), 1))[:, -1]
    assert error(model.step(tokens[:, 0], cache), want) <= 1e-5
    assert model.config.loops == 3
    assert not torch.equal(model.logits(tokens), model.logits(tokens, loops=loops))


# ── cached decoding ────────────────────────────────────────────────────────────────────────────────────────────────

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"segments": PLAIN},
    "looped": {},
    "untied": {"tied": False},
    "one KV head": {"heads": (4, 1)},
    "all KV heads": {"heads": (4, 4)},
    "window": {"segments": PLAIN, "sliding_window": (5, None)},
    "window of one": {"segments": PLAIN, "sliding_window": (1, 1)},
    "qk-norm": {"qk_norm": True},
    "biases": {"bias": True},
    "ragged": {"hidden": 80, "intermediate": 100, "heads": (5, 1), "group": 48, "vocab_size": 275},
    "per column": {"group": 1 << 20, "head_dim": 80},
}


def torch_step(model: Model, tokens: Tensor, cache: tl.KVCache) -> Tensor:
    return model.head(model.hidden(tokens[:, None], cache))[:, 0]


def fused_step(model: Model, tokens: Tensor, cache: tl.KVCache) -> Tensor:
    assert model.fused_refusal() is None
    return model.step(tokens, cache).clone()


def exact_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """The same model with every product in float64, from the same stored weights."""

    def linear(x: Tensor, w: tl.PackedWeight) -> Tensor:
        y = x.double() @ w.weight.dequantize(torch.float64)
        return (y if w.weight.bias is None else y + w.weight.bias.double()).float()

    return Model(checkpoint, F32, linear=linear).logits(tokens)


@pytest.mark.parametrize("step", [torch_step, pytest.param(fused_step, marks=needs_numba)], ids=["torch", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_equals_uncached(name: str, step: Any) -> None:
    """fp32: as far from exact products as the uncached pass is, give or take the sums of attention (1e-6)."""
    checkpoint = tiny_checkpoint(**MODELS[name])
    model, tokens = Model(checkpoint, F32), tokens_of(2, 20)
    exact, plain = exact_logits(checkpoint, tokens), model.logits(tokens)
    cache = model.new_cache(2, 20)
    rows = [model.head(model.hidden(tokens[:, :9], cache))]
    rows += [step(model, tokens[:, t], cache)[:, None] for t in range(9, 20)]
    assert cache.lengths.tolist() == [20, 20]
    assert error(torch.cat(rows, 1), exact) <= 2 * error(plain, exact) + 1e-6


@needs_numba
@pytest.mark.parametrize("name", MODELS)
def test_fused_step_in_bf16(name: str) -> None:
    """bf16 cache and prefill; the step itself is fp32, so it may only be nearer to exact products than torch's."""
    checkpoint = tiny_checkpoint(**MODELS[name])
    model, tokens = Model(checkpoint, BF16), tokens_of(2, 20)
    exact, plain = exact_logits(checkpoint, tokens), model.logits(tokens)
    cache = model.new_cache(2, 20)
    model.hidden(tokens[:, :9], cache)
    rows = [fused_step(model, tokens[:, t], cache)[:, None] for t in range(9, 20)]
    assert error(torch.cat(rows, 1), exact[:, 9:]) <= 2 * error(plain[:, 9:], exact[:, 9:])


@pytest.mark.parametrize("cuts", [(1, 19), (5, 10, 5), (19, 1), (7, 7, 6)], ids=str)
def test_prefill_in_chunks(cuts: tuple[int, ...]) -> None:
    checkpoint = tiny_checkpoint(segments=PLAIN, sliding_window=(6, None))
    model, tokens = Model(checkpoint, F32), tokens_of(2, 20)
    exact, plain = exact_logits(checkpoint, tokens), model.logits(tokens)
    cache = model.new_cache(2, 20)
    rows = torch.cat([model.hidden(chunk, cache) for chunk in torch.split(tokens, cuts, dim=1)], 1)
    assert error(model.head(rows), exact) <= 2 * error(plain, exact) + 1e-6


def prefilled_rows(model: Model, lengths: list[int], room: int) -> tuple[tl.KVCache, list[tl.KVCache]]:
    """One cache with a text of its own length in each row, and the same texts each in a cache of their own."""
    together = model.new_cache(len(lengths), room)
    alone = [model.new_cache(1, room) for _ in lengths]
    for b, length in enumerate(lengths):
        text = tokens_of(1, length, seed=b)
        for cache in (together.row(b), alone[b]):
            model.hidden(text, cache)
    return together, alone


@needs_numba
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["looped", "window", "ragged"])
def test_unequal_rows_equal_one_by_one_bitwise(name: str, dtype: torch.dtype) -> None:
    model = Model(tiny_checkpoint(**MODELS[name]), dtype)
    together, alone = prefilled_rows(model, [3, 17, 1, 8, 30], 40)
    for tokens in tokens_of(6, 5, seed=9):
        batch = fused_step(model, tokens, together)
        single = torch.cat([fused_step(model, tokens[b : b + 1], alone[b]) for b in range(5)])
        assert torch.equal(batch, single)
    assert together.lengths.tolist() == [9, 23, 7, 14, 36]


def test_unequal_rows_in_torch() -> None:
    checkpoint = tiny_checkpoint(segments=PLAIN, sliding_window=(6, None))
    model = Model(checkpoint, F32)
    together, alone = prefilled_rows(model, [3, 17, 1], 40)
    for tokens in tokens_of(4, 3, seed=9):
        single = torch.cat([torch_step(model, tokens[b : b + 1], alone[b]) for b in range(3)])
        assert error(torch_step(model, tokens, together), single) <= 1e-5


@needs_numba
def test_other_threads_give_the_same_tokens() -> None:
    """Products do not depend on the number of threads; attention sums in as many parts as there are."""
    model = Model(tiny_checkpoint(), F32)
    before, results = torch.get_num_threads(), []
    for T in (1, 2, 3):
        torch.set_num_threads(T)
        (cache, _) = prefilled_rows(model, [9], 20)
        results.append(torch.cat([fused_step(model, t, cache) for t in tokens_of(5, 1, seed=2)]))
        torch.set_num_threads(T % 3 + 1)  # in the middle of a text: the decoder makes its buffers again
        results[-1] = torch.cat((results[-1], fused_step(model, tokens_of(1, 1)[0], cache)))
    torch.set_num_threads(before)
    assert max(error(r, results[0]) for r in results) <= 1e-6


@needs_numba
def test_only_the_next_position_of_a_cache_is_written() -> None:
    model = Model(tiny_checkpoint(), BF16)
    cache, _ = prefilled_rows(model, [3, 7], 12)
    cache.k[:, :, :, 8:], cache.v[:, :, :, 8:] = 77.0, 77.0
    before = cache.k.clone(), cache.v.clone()
    fused_step(model, tokens_of(1, 2)[0], cache)
    for old, new in zip(before, (cache.k, cache.v), strict=True):
        changed = (old != new).any(-1).any(2).any(0)  # [batch, position]
        assert changed.nonzero().tolist() == [[0, 3], [1, 7]]


@needs_numba
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 8, 9])
def test_nan_in_the_cache_reaches_the_logits(position: int, threads: int) -> None:
    """One position's key or value; whichever thread meets it must not leave it out."""
    model, before = Model(tiny_checkpoint(), F32), torch.get_num_threads()
    torch.set_num_threads(threads)
    for poisoned in ("k", "v"):
        cache, _ = prefilled_rows(model, [10], 20)
        getattr(cache, poisoned)[0, 0, :, position] = float("nan")
        assert torch.isnan(fused_step(model, tokens_of(1, 1)[0], cache)).all()
    torch.set_num_threads(before)


@needs_numba
def test_two_threads_decode_with_two_caches() -> None:
    model = Model(tiny_checkpoint(), F32)
    texts = tokens_of(2, 60)

    def decode(text: Tensor) -> Tensor:
        cache = model.new_cache(1, 60)
        return torch.cat([fused_step(model, token[None], cache) for token in text])

    wanted, got = [decode(text) for text in texts], [None, None]

    def work(i: int) -> None:
        got[i] = decode(texts[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(g is not None and torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


class Contended(Model):
    """Whatever decoder is put in place, another thread's is there at the next look."""

    others: Any = None
    _decoder = property(lambda self: self.others, lambda self, value: None)  # type: ignore[assignment]


@needs_numba
def test_a_step_keeps_to_its_own_cache() -> None:
    from tinyloop.cpu.decode import FusedDecoder

    model = Contended(tiny_checkpoint(), F32)
    ours, theirs = model.new_cache(1, 9), model.new_cache(1, 9)
    model.others = theirs, FusedDecoder(model, theirs)
    fused_step(model, torch.tensor([7]), ours)
    assert (ours.lengths.tolist(), theirs.lengths.tolist()) == ([1], [0])
    assert not theirs.k.any()


def test_loops_beyond_memory_are_refused_before_allocating() -> None:
    model = Model(tiny_checkpoint(segments=(Segment("loop", 1, 2),)), F32)
    with pytest.raises(
        InputError, match=r"16 tokens in 1000000000000 KV slots need .* GB; this machine has .* fewer loops"
    ):
        model.new_cache(1, 16, loops=10**12)


def test_gen01_calls_are_independent() -> None:
    model, tokens = Model(tiny_checkpoint(), F32), tokens_of(1, 12)
    want = model.logits(tokens)
    for batch, room in ((1, 20), (3, 9), (2, 40)):
        cache = model.new_cache(batch, room)
        model.hidden(tokens_of(batch, 5), cache)
        model.step(tokens_of(1, batch)[0], cache)
        assert torch.equal(model.logits(tokens), want)


# ── edges ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_embedding_is_looked_up_exactly(quantized: bool, dtype: torch.dtype) -> None:
    checkpoint = tiny_checkpoint(quantized=quantized)
    x = Model(checkpoint, dtype).embed(tokens_of(2, 7))
    assert x.dtype == F32
    assert torch.equal(x, checkpoint.weights["embed"].dequantize().t()[tokens_of(2, 7)])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_shp01_no_tokens(dtype: torch.dtype) -> None:
    model = Model(tiny_checkpoint(), dtype)
    cache = model.new_cache(2, 5)
    assert model.logits(torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0, VOCAB)
    assert model.hidden(torch.empty(2, 0, dtype=torch.int64), cache).shape == (2, 0, 64)
    assert cache.lengths.tolist() == [0, 0]


BAD = {
    "beyond the vocabulary": (torch.tensor([[3, VOCAB]]), rf"tokens span 3\.\.{VOCAB}; ids are 0\.\.{VOCAB - 1}"),
    "negative": (torch.tensor([[-1, 3]]), r"tokens span -1\.\.3; ids are"),
    "int32": (torch.zeros(1, 2, dtype=torch.int32), r"tokens are torch\.int32 \[1, 2\]; give int64 \[batch, length\]"),
    "one dimension": (torch.zeros(2, dtype=torch.int64), r"tokens are torch\.int64 \[2\]; give int64"),
    "long": (torch.zeros(1, 257, dtype=torch.int64), r"257 tokens exceed the model's context of 256; shorten the text"),
}


@pytest.mark.parametrize("case", BAD)
def test_tokens_refused(case: str) -> None:
    tokens, text = BAD[case]
    with pytest.raises(InputError, match=text):
        Model(tiny_checkpoint(), F32).logits(tokens)


def test_cache_refusals() -> None:
    model = Model(tiny_checkpoint(), F32)
    cache = model.new_cache(2, 6)
    model.hidden(tokens_of(2, 5), cache)
    with pytest.raises(InputError, match=r"7 tokens exceed the cache's capacity of 6; shorten the text"):
        model.hidden(tokens_of(2, 2), cache)
    with pytest.raises(InputError, match=r"tokens have 3 rows, the cache 2; they must agree"):
        model.hidden(tokens_of(3, 1), cache)
    with pytest.raises(InputError, match=rf"ids are 0\.\.{VOCAB - 1}"):
        model.step(torch.tensor([0, VOCAB]), cache)
    assert cache.lengths.tolist() == [5, 5]
    model.step(tokens_of(1, 2)[0], cache)
    with pytest.raises(InputError, match=r"7 tokens exceed the cache's capacity of 6"):
        model.step(tokens_of(1, 2)[0], cache)
    assert cache.lengths.tolist() == [6, 6]
    for capacity in (0, 257):
        with pytest.raises(InputError, match=rf"{capacity} tokens exceed the context of 256"):
            model.new_cache(1, capacity)


def test_loop_refusals() -> None:
    plain, looped = Model(tiny_checkpoint(segments=PLAIN), F32), Model(tiny_checkpoint(), F32)
    with pytest.raises(InputError, match=r"loops=2: this model has no loop segment, leave the loop count out"):
        plain.logits(tokens_of(1, 2), loops=2)
    with pytest.raises(InputError, match=r"loops=0 must be ≥ 1"):
        looped.new_cache(1, 5, loops=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtype_refusals(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"dtype={dtype}: on a CPU a model runs in float32 or bfloat16"):
        Model(tiny_checkpoint(), dtype)


# ── choices ────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_numba
def test_fused_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Model(tiny_checkpoint(), F32).fused_refusal() is None
    assert Model(tiny_checkpoint(quantized=False), F32).fused_refusal() == "layers.0.attn_qkv is dense"
    narrow = Model(tiny_checkpoint(head_dim=24), F32)
    assert narrow.fused_refusal() == "head_dim=24 is not a multiple of 16"
    replaced = Model(tiny_checkpoint(), F32, linear=lambda x, w: quant_gemm(x, w))
    assert replaced.fused_refusal() == "the linear operation was replaced"
    for model in (narrow, replaced):
        cache = model.new_cache(1, 4)
        assert error(model.step(torch.tensor([5]), cache), model.logits(torch.tensor([[5]]))[:, 0]) <= 1e-5
    monkeypatch.setattr(dispatch, "machine", lambda: Machine(False, False, False, 1 << 30))
    assert Model(tiny_checkpoint(), F32).fused_refusal() == "numba is not installed: pip install 'tinyloop[cpu]'"


@needs_numba
def test_dense_heads_are_refused_by_name() -> None:
    quantized, dense = tiny_checkpoint(tied=False), tiny_checkpoint(tied=False, quantized=False)
    mixed = dataclasses.replace(quantized, weights=dict(quantized.weights) | {"head": dense.weights["head"]})
    assert Model(mixed, F32).fused_refusal() == "head is dense"
    mixed = dataclasses.replace(quantized, weights=dict(quantized.weights) | {"embed": dense.weights["embed"]})
    assert Model(mixed, F32).fused_refusal() is None  # an untied embedding is only looked up
    tied = tiny_checkpoint()
    mixed = dataclasses.replace(
        tied, weights=dict(tied.weights) | {"embed": tiny_checkpoint(quantized=False).weights["embed"]}
    )
    assert Model(mixed, F32).fused_refusal() == "the head is dense"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_imp02_rows_in_another_order(dtype: torch.dtype) -> None:
    """Against the same weights kept dense in the order of their inputs; decoding leaves the fused step, and says so."""
    plain = tiny_checkpoint(segments=LOOPED)
    shuffled = {n: w if n == "embed" else with_random_perm(w, seed=i) for i, (n, w) in enumerate(plain.weights.items())}
    dense = {n: DenseWeight(w.dequantize().t().contiguous()) for n, w in shuffled.items()}
    model = Model(dataclasses.replace(plain, weights=shuffled), dtype)
    want = Model(dataclasses.replace(plain, weights=dense), dtype)
    tokens = tokens_of(2, 9)
    assert error(model.logits(tokens), want.logits(tokens)) <= (1e-5 if dtype == F32 else 2e-2)
    if machine().numba:
        refusal = "layers.0.attn_qkv has its inputs in an order of its own (act-order)"
        assert model.fused_refusal() == refusal
        assert refusal in str(tl.explain(model))
    cache = model.new_cache(2, 16)
    model.hidden(tokens[:, :8], cache)
    assert error(model.step(tokens[:, 8], cache), want.logits(tokens)[:, -1]) <= (1e-5 if dtype == F32 else 2e-2)


def test_the_linear_operation_is_the_callers() -> None:
    seen: list[tuple[int, int]] = []

    def linear(x: Tensor, w: tl.PackedWeight) -> Tensor:
        seen.append((w.weight.K, w.weight.N))
        return quant_gemm(x, w, exact_int4=True)

    checkpoint = tiny_checkpoint()
    y = Model(checkpoint, F32, linear=linear).logits(tokens_of(1, 5))
    assert len(seen) == 5 * 5 + 1
    assert torch.equal(y, Model(checkpoint, F32).logits(tokens_of(1, 5)))


def test_between_is_compiled_only_for_bf16_with_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    assert between(F32) is layers
    if machine().numba:
        from tinyloop.cpu import rows

        assert between(BF16) is (rows if rows.available else layers)
    monkeypatch.setattr(dispatch, "machine", lambda: Machine(False, True, True, 1 << 30))
    assert between(BF16) is layers


def kept(model: Model) -> set[str]:
    return {name for name, w in model.weights.items() if w.keep_dense}


def test_memory_for_dense_copies_goes_to_the_loop_first() -> None:
    checkpoint = tiny_checkpoint(tied=False)
    size = {n: 4 * w.K * w.N for n, w in checkpoint.weights.items()}
    loop = {n for n in size if n.startswith("layers.1.")}
    assert kept(Model(checkpoint, F32, budget=0)) == set()
    assert kept(Model(checkpoint, F32, budget=sum(size[n] for n in loop))) == loop
    partly = kept(Model(checkpoint, F32, budget=sum(size[n] for n in loop) + size["head"]))
    assert loop < partly
    assert sum(size[n] for n in partly) <= sum(size[n] for n in loop) + size["head"]
    assert kept(Model(checkpoint, F32, budget=1 << 40)) == size.keys() - {"embed"}
    assert "embed" in kept(Model(tiny_checkpoint(), F32, budget=1 << 40))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_without_memory_copies_are_transient_and_logits_the_same(dtype: torch.dtype) -> None:
    checkpoint, tokens = tiny_checkpoint(), tokens_of(2, 40)
    rich, poor = Model(checkpoint, dtype, budget=1 << 40), Model(checkpoint, dtype, budget=0)
    ops.calls.clear()
    theirs = rich.logits(tokens)
    assert set(ops.calls) == {"dense_cache"}
    ops.calls.clear()
    ours = poor.logits(tokens)
    assert set(ops.calls) == {"native" if dtype == F32 or not machine().bf16 else "dense"}
    exact = exact_logits(checkpoint, tokens)
    assert error(ours, exact) <= 2 * error(theirs, exact)
    assert not any(w.layouts for w in poor.weights.values())
    assert all(len(w.layouts) == 1 for w in rich.weights.values())


@needs_numba
def test_fused_step_takes_fp32_parameters_and_eight_bits() -> None:
    """As a tied Q8_0 embedding makes them."""
    checkpoint = tiny_checkpoint()
    assert checkpoint.weights["embed"].scale.dtype == F32
    w = checkpoint.weights["embed"]
    assert isinstance(w, QuantWeight)
    eight = QuantWeight.from_codes(w.codes() * 17, w.scale / 17, w.zero, w.group_size, bits=8)
    halves = {
        n: QuantWeight.from_codes(q.codes(), q.scale.half(), q.zero.half(), q.group_size)
        for n, q in checkpoint.weights.items()
        if isinstance(q, QuantWeight)
    }
    for weights in (halves, halves | {"embed": eight}):
        model = Model(dataclasses.replace(checkpoint, weights=weights), F32)
        cache, tokens = model.new_cache(1, 8), tokens_of(1, 8)
        rows = torch.cat([fused_step(model, t, cache) for t in tokens.t()])
        assert error(rows, model.logits(tokens)[0]) <= 1e-5


def test_the_source_is_not_written_to() -> None:
    """Norms and codes may be a mapped file."""
    checkpoint = tiny_checkpoint()
    before = {n: t.clone() for n, t in checkpoint.norms.items()}
    codes = {n: w.packed.clone() for n, w in checkpoint.weights.items() if isinstance(w, QuantWeight)}
    model = Model(checkpoint, BF16)
    cache = model.new_cache(1, 9)
    model.hidden(tokens_of(1, 5), cache)
    model.step(tokens_of(1, 1)[0], cache)
    assert all(torch.equal(t, before[n]) for n, t in checkpoint.norms.items())
    assert all(torch.equal(checkpoint.weights[n].packed, c) for n, c in codes.items())
    assert isinstance(cache.lengths, np.ndarray)
