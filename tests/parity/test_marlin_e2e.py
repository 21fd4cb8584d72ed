"""The last link: a whole looped model scored on a thousand tokens, tensor-core dispatch on and off.

The trained model is the one that ships in examples/, quantised here to the nearest; the large one has random weights
and the field's reference dimensions. Off means the native kernel: fp32 arithmetic on the same codes.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny_checkpoint
from tests.parity import chain

import tinyloop as tl
from tinyloop import dispatch, ops
from tinyloop.checkpoint import Checkpoint
from tinyloop.config import Segment
from tinyloop.cuda import run
from tinyloop.dispatch_cuda import INT4_KERNELS
from tinyloop.model import Model
from tinyloop.quantize import QuantSpec
from tinyloop.quantize.gptq import nearest

TRAINED = Path(__file__).parents[2] / "examples" / "looped-12m"
pytestmark = [pytest.mark.gpu, chain.needs(chain.gpu())]
TOKENS = 1024


@pytest.fixture(autouse=True)
def dispatch_as_before() -> Iterator[None]:
    yield
    dispatch.set_marlin_dispatch(None)


def scored(model: Model, tokens: list[int], on: bool) -> tuple[float, dict[str, int]]:
    dispatch.set_marlin_dispatch(on)
    ops.calls.clear()
    return model.score(tokens).perplexity, dict(ops.calls)


def drift(model: Model, tokens: list[int], capsys: pytest.CaptureFixture[str]) -> float:
    """Relative difference of perplexity; every product on the tensor-core path when it is on, none when it is off."""
    on, calls = scored(model, tokens, True)
    assert set(calls) <= set(INT4_KERNELS), "a product fell back"
    off, native = scored(model, tokens, False)
    assert not set(native) & set(INT4_KERNELS)
    dispatch.set_marlin_dispatch(True)
    report = tl.pack_model_for_marlin(model)
    with capsys.disabled():
        print(
            f"\n{report}\ncalls {calls}, off {native}\nperplexity {on:.6f} on, {off:.6f} off, drift {on / off - 1:+.4%}"
        )
    return abs(on / off - 1)


@pytest.mark.skipif(not TRAINED.exists(), reason=f"no trained model in {TRAINED.name}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trained_model(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drift of a trained model stays within 0.2 %, 1.0 % in bf16, whose activations have eight bits."""
    checkpoint = tl.import_model(TRAINED)
    spec = QuantSpec(group_size=128)
    weights = {name: nearest(w.dequantize(), spec, w.bias) for name, w in checkpoint.weights.items()}
    tl.save(dataclasses.replace(checkpoint, weights=weights), tmp_path / "model.tinyloop")
    model = tl.load(tmp_path / "model.tinyloop", device="cuda", dtype=dtype)
    text = (Path(tl.__file__).parent / "data" / "persuasion.txt").read_text(encoding="utf-8")
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(text[:8000])[:TOKENS]
    assert drift(model, tokens, capsys) <= (0.002 if dtype == torch.float16 else 0.01)


@pytest.fixture(scope="module")
def reference() -> Checkpoint:
    """D 2048, FFN 8192, pre 2, loop 1 × 8, V 50257: a head that is no multiple of anything. Random weights."""
    return tiny_checkpoint(
        segments=(Segment("pre", 2), Segment("loop", 1, 8)), hidden=2048, intermediate=8192, heads=(32, 32), group=128,
        vocab_size=50257, tied=False, max_position_embeddings=2048,
    )  # fmt: skip


def random_tokens() -> list[int]:
    return torch.randint(0, 50257, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def test_reference_dimensions(reference: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(reference, device="cuda")
    model.pack()
    assert drift(model, random_tokens(), capsys) <= 0.0067


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model with or without its loop blocks kept dense."""

    perplexity: float
    score_seconds: float  # for TOKENS tokens, the fastest of five
    tokens_per_second: float  # of 64 that are generated
    nbytes: int  # that the model and its layouts hold on the GPU
    body_cache: int

    def __str__(self) -> str:
        score = f"score of {TOKENS} tokens {1e3 * self.score_seconds:.1f} ms"
        speed = f"generate {self.tokens_per_second:.0f} tokens/s"
        return f"{score}, {speed}, {self.nbytes / 1e6:.0f} MB on the GPU, perplexity {self.perplexity:.3f}"


def measured(checkpoint: Checkpoint, fp16_body: bool) -> Measured:
    gc.collect()  # a model that is no longer used
    torch.ones(16, 16, device="cuda", dtype=torch.float16).mm(torch.ones(16, 16, device="cuda", dtype=torch.float16))
    # cuBLAS has its workspace of 32 MB now, and no model is blamed for it
    tokens, before = random_tokens(), torch.cuda.memory_allocated()
    model = Model(checkpoint, device="cuda", fp16_body=fp16_body)
    model.pack()
    perplexity, seconds = model.score(tokens).perplexity, list[float]()  # which warms up
    for _ in range(5):
        begin = time.perf_counter()
        model.score(tokens)  # ends in a number of the host's, so the GPU is done
        seconds.append(time.perf_counter() - begin)
    speed = [model.generate(tokens[:16], 64).finish().tokens_per_second for _ in range(2)][1]
    held = torch.cuda.memory_allocated() - before
    return Measured(perplexity, min(seconds), speed, held, model.body_cache)


def test_what_the_body_cache_gains(reference: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: time and memory with TINYLOOP_EXPERIMENTAL_FP16_BODY and without it."""
    without, cached = measured(reference, False), measured(reference, True)
    with capsys.disabled():
        print(f"\nbody cache off: {without}\nbody cache on:  {cached}")
    assert abs(cached.perplexity / without.perplexity - 1) < 0.005
    assert abs(cached.nbytes - without.nbytes - cached.body_cache) < 16 << 20


def test_body_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Loop weights, and they alone, are multiplied dense; the log says how much memory that takes."""
    checkpoint = tiny_checkpoint(hidden=128, intermediate=256, group=64)
    tokens = list(range(20, 180))
    plain = Model(checkpoint, device="cuda").score(tokens).perplexity
    with caplog.at_level(logging.INFO, logger="tinyloop"):
        model = Model(checkpoint, device="cuda", fp16_body=True)
    assert any("body cache: 5 loop weights" in r.message for r in caplog.records)
    assert model.body_cache == sum(2 * w.weight.K * w.weight.N for n, w in model.weights.items() if ".1." in n)
    ops.calls.clear()
    assert abs(model.score(tokens).perplexity / plain - 1) < 0.005
    assert ops.calls["fp16_cache"] == 15  # five weights, three iterations
    assert set(ops.calls) - {"fp16_cache"} <= set(INT4_KERNELS)


def test_first_dispatch_is_said_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run._said.clear()
    model = Model(tiny_checkpoint(hidden=128, intermediate=256, group=64), device="cuda")
    with caplog.at_level(logging.INFO, logger="tinyloop"):
        model.score(list(range(20, 60)))
    lines = [r.message for r in caplog.records if "first INT4" in r.message]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("M=", "N=", "K=", "gs="))


if __name__ == "__main__":
    chain.main(__file__)
