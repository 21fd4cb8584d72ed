"""Cross-iteration rounding: means over iterations, storage, the model against one unrolled by hand, and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import tinyloop as tl
from helpers import LOOPED, PLAIN, random_quant_weight, tiny_checkpoint, with_random_channel
from tinyloop import channel, container, dispatch, ops
from tinyloop.channel import FRAC4, SIGN_BIT, STEPS
from tinyloop.checkpoint import Checkpoint
from tinyloop.config import Segment
from tinyloop.errors import FormatError, InputError
from tinyloop.explain import explain
from tinyloop.model import Model
from tinyloop.pack import PackedWeight, pack
from tinyloop.quantize import rounding
from tinyloop.quantize.gptq import QuantSpec, gptq, nearest
from tinyloop.quantize.pipeline import Settings, quantize_weights
from tinyloop.weight import DenseWeight, QuantWeight

Tensor = torch.Tensor
F32, BF16 = torch.float32, torch.bfloat16
KINDS = (FRAC4, SIGN_BIT)
TOKENS = torch.randint(0, 272, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.CROSS_ITER_ROUND, raising=False)


def weight(kind: str, K: int = 70, N: int = 24, G: int = 32, seed: int = 0, **others: Any) -> QuantWeight:
    return with_random_channel(random_quant_weight(K, N, G, seed=seed, **others), kind, seed=seed)


def codes(w: QuantWeight, iterations: int) -> Tensor:  # int64 [iterations, K, N]
    return torch.stack([w.rounding(i).codes() for i in range(iterations)]).long()


def mean_codes(w: QuantWeight) -> Tensor:
    """What `mean` makes with scale 1 and zero 0, which leaves the codes bare."""
    one = torch.ones_like(w.scale)
    return dataclasses.replace(w, scale=one, zero=torch.zeros_like(one)).mean()


# ── codes over iterations ──────────────────────────────────────────────────────────────────────────────────────────


def test_golden_sequence_keeps_its_bounds() -> None:
    """All 16 values on 40,000 places: the bounds that docs/format.md states for the sum of n codes."""
    q = torch.full((256, 160), 7, dtype=torch.uint8)
    f = torch.arange(16, dtype=torch.uint8).repeat(16)[:, None].expand(256, 160).contiguous()
    one, zero = torch.ones(1, 160), torch.zeros(1, 160)
    w = QuantWeight.from_codes(q, one, zero, 256).with_channel(FRAC4, f)
    off = codes(w, 64).cumsum(0) - torch.arange(1, 65)[:, None, None] * mean_codes(w)
    worst = off.abs().amax((1, 2))
    assert worst[[0, 7, 15]].max() <= 1
    assert worst[[1, 3]].max() <= 1.5
    assert worst.max() <= 2.5
    assert off[:, f == 0].abs().max() == 0


def test_sign_bit_pairs_have_the_mean_exactly() -> None:
    w = weight(SIGN_BIT)
    got = codes(w, 6)
    for i in (0, 2, 4):
        assert torch.equal((got[i] + got[i + 1]) / 2, mean_codes(w))
        assert torch.equal(got[i], w.codes().long())
    up = (got[1] > got[0]).float().mean() / (got[1] != got[0]).float().mean()
    assert 0.4 < up < 0.6


def test_steps_of_neighbours_are_unlike() -> None:
    """At one iteration about f/16 of the weights take the step, in every row and column."""
    q, f = (torch.full((256, 256), v, dtype=torch.uint8) for v in (7, 4))
    w = QuantWeight.from_codes(q, torch.ones(1, 256), torch.zeros(1, 256), 256).with_channel(FRAC4, f)
    for i in range(4):
        step = (w.rounding(i).codes() - q).float()
        for dim in (0, 1):
            assert (step.mean(dim) - 0.25).abs().max() < 6 * (0.25 * 0.75 / 256) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_codes_alone_are_the_best_single_rounding(kind: str) -> None:
    """Off: the nearest code to the mean (frac4), or the code of every even iteration (sign_bit)."""
    w = weight(kind)
    off = (w.codes() - mean_codes(w)).abs()
    assert off.max() == 0.5
    if kind == FRAC4:
        assert torch.equal(w.codes().float(), torch.floor(mean_codes(w) + 0.5))
    else:
        assert torch.equal(w.codes(), w.rounding(4).codes())
    assert torch.equal(w.dequantize(), dataclasses.replace(w, frac4=None, sign_bit=None).dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_every_rounding_is_an_ordinary_weight(kind: str) -> None:
    w = weight(kind, bias=True)
    for i in (0, 1, 7, 1000):
        r = w.rounding(i)
        assert r.channel is None
        assert r.nbytes < w.nbytes
        assert (r.codes().int() - w.codes().int()).abs().max() == (0 if kind == SIGN_BIT and i % 2 == 0 else 1)
        assert torch.equal(w.rounding(i).packed, r.packed)
    plain = random_quant_weight(8, 8, 8, seed=0)
    assert plain.rounding(3) is plain


def test_slabs_do_not_show() -> None:
    """A weight of several slabs against the same rows one by one."""
    w = weight(FRAC4, K=4099, N=600, G=4099)
    assert len(list(w._slabs())) > 1
    r = w.rounding(5).codes()
    for k in (0, 1739, 1740, 1744, 4098):
        value = w._channel(k // 8 * 8, k // 8 * 8 + 8)[k % 8 : k % 8 + 1]
        assert torch.equal(r[k].int(), w.codes()[k].int() + channel.steps(FRAC4, value, k, 5)[0])


# ── storage ────────────────────────────────────────────────────────────────────────────────────────────────────────


@hypothesis.given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(KINDS), st.integers(0, 2**31))
def test_channels_survive_packing(K: int, N: int, kind: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16 if kind == FRAC4 else 2, (K, N), generator=g, dtype=torch.uint8)
    q = torch.randint(1, 15, (K, N), generator=g, dtype=torch.uint8)
    w = QuantWeight.from_codes(q, torch.ones(1, N), torch.zeros(1, N), K).with_channel(kind, values)
    assert torch.equal(w._channel(0, K), values)
    stored = getattr(w, kind)
    assert stored.shape == (-(-K // channel.PER_BYTE[kind]), N)
    assert w.nbytes == dataclasses.replace(w, frac4=None, sign_bit=None).nbytes + stored.nbytes
    assert w.channel == kind


@hypothesis.given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(KINDS), st.integers(0, 2**31))
def test_every_mean_is_stored_exactly(K: int, N: int, kind: str, seed: int) -> None:
    n = STEPS[kind]
    u = torch.randint(0, 15 * n + 1, (K, N), generator=torch.Generator().manual_seed(seed)) / n
    q, values = rounding.split(u, kind)
    assert values is not None
    w = QuantWeight.from_codes(q, torch.ones(1, N), torch.zeros(1, N), K).with_channel(kind, values)
    assert torch.equal(mean_codes(w), u)
    assert torch.equal(w.mean(), u)


def with_channels(checkpoint: Checkpoint, kind: str) -> Checkpoint:
    made = {n: with_random_channel(w, kind) for n, w in checkpoint.weights.items() if checkpoint.config.in_loop(n)}
    assert made
    return dataclasses.replace(checkpoint, weights={**checkpoint.weights, **made})


@pytest.mark.parametrize("kind", KINDS)
def test_file_round_trip(tmp_path: Path, kind: str) -> None:
    checkpoint = with_channels(tiny_checkpoint(hidden=36, intermediate=51), kind)
    path = tl.save(checkpoint, tmp_path / "m.tinyloop")
    about, again = tl.inspect(path), container.read(path)
    for name, w in checkpoint.weights.items():
        assert isinstance(w, QuantWeight)
        assert about.weights[name]["channel"] == w.channel == (kind if checkpoint.config.in_loop(name) else None)
        if w.channel:
            assert torch.equal(getattr(again.weights[name], kind), getattr(w, kind))
    model = tl.load(path, dtype=F32, cross_iter_round=True)
    assert torch.equal(model.logits(TOKENS), Model(checkpoint, F32, cross_iter_round=True).logits(TOKENS))


# ── the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

SEGMENTS = {
    "loop alone": (Segment("loop", 2, 3),),
    "pre, loop, coda": LOOPED,
    "two layers each": (Segment("pre", 2), Segment("loop", 2, 2), Segment("coda", 2)),
}


def unrolled(checkpoint: Checkpoint, loops: int | None = None) -> Checkpoint:
    """An ordinary model, every application a layer; those of the loop hold their iteration's weight, dequantised."""
    looped = checkpoint.config.with_loops(loops)
    order = list(looped.applications())
    config = dataclasses.replace(looped, segments=(Segment("pre", len(order)),))
    weights: dict[str, Any] = {"embed": checkpoint.weights["embed"]}
    norms = {"final_norm": checkpoint.norms["final_norm"]}
    for a, (layer, i) in enumerate(order):
        for name, w in checkpoint.weights.items():
            if name.startswith(f"layers.{layer}."):
                new = name.replace(f"layers.{layer}.", f"layers.{a}.")
                channelled = isinstance(w, QuantWeight) and w.channel
                weights[new] = DenseWeight(w.rounding(i).dequantize().t().contiguous(), w.bias) if channelled else w
        for name, t in checkpoint.norms.items():
            if name.startswith(f"layers.{layer}."):
                norms[name.replace(f"layers.{layer}.", f"layers.{a}.")] = t
    return dataclasses.replace(checkpoint, config=config, weights=weights, norms=norms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_model_equals_the_unrolled_one_exactly(segments: str, kind: str) -> None:
    """fp32; prefill and two steps on a cache, at the file's loop count and at another."""
    checkpoint = with_channels(tiny_checkpoint(segments=SEGMENTS[segments], bias=True), kind)
    model = Model(checkpoint, F32, cross_iter_round=True)
    assert not torch.equal(model.logits(TOKENS), Model(checkpoint, F32, cross_iter_round=False).logits(TOKENS))
    plain = Model(unrolled(checkpoint), F32)
    assert torch.equal(model.logits(TOKENS), plain.logits(TOKENS))
    caches = model.new_cache(2, 22), plain.new_cache(2, 22)
    assert torch.equal(*(m.hidden(TOKENS, c) for m, c in zip((model, plain), caches, strict=True)))
    for t in range(2):
        a, b = (m.head(m.hidden(TOKENS[:, t : t + 1], c)) for m, c in zip((model, plain), caches, strict=True))
        assert torch.equal(a, b)
    more = Model(unrolled(checkpoint, 5), F32).logits(TOKENS)
    assert torch.allclose(model.logits(TOKENS, loops=5), more, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_without_room_for_copies(kind: str, dtype: torch.dtype) -> None:
    """The same products on copies made for each call: fp32 sums may differ in their order, bf16 in its last bit."""
    checkpoint = with_channels(tiny_checkpoint(), kind)
    kept, bare = (Model(checkpoint, dtype, cross_iter_round=True, budget=b) for b in (None, 0))
    want, got = kept.logits(TOKENS), bare.logits(TOKENS)
    assert (got - want).norm() <= (1e-5 if dtype == F32 else 2e-2) * want.norm()
    copies = kept.weights["layers.1.mlp_up"].layouts[f"dense {str(dtype).removeprefix('torch.')}"]
    assert copies == (2 if kind == SIGN_BIT else 3) * 64 * 96 * dtype.itemsize
    assert not any(name.startswith("dense") for name in bare.weights["layers.1.mlp_up"].layouts)


@pytest.mark.parametrize("kind", KINDS)
def test_off_ignores_the_channel(kind: str) -> None:
    plain = tiny_checkpoint()
    want = Model(plain, F32).logits(TOKENS)
    assert torch.equal(Model(with_channels(plain, kind), F32).logits(TOKENS), want)
    assert torch.equal(Model(plain, F32, cross_iter_round=True).logits(TOKENS), want)  # on, but there is none


@pytest.mark.parametrize("kind", KINDS)
def test_one_loop_uses_the_codes(kind: str) -> None:
    checkpoint = with_channels(tiny_checkpoint(), kind)
    on, off = (Model(checkpoint, F32, cross_iter_round=flag, budget=0) for flag in (True, False))
    assert torch.equal(on.logits(TOKENS, loops=1), off.logits(TOKENS, loops=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_one_product(dtype: torch.dtype, exact: bool, kind: str) -> None:
    w, x = weight(kind, bias=True), torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = pack(w)
    ops.calls.clear()
    y = tl.quant_gemm(x, packed.at(3), exact_int4=exact)
    assert dict(ops.calls) == {"cross_iter": 1}
    assert (y.dtype, y.shape) == (dtype, (3, 5, 24))
    r = w.rounding(3)
    assert r.bias is not None
    want = x.double() @ r.dequantize(torch.float64) + r.bias.double()
    plain = (x.double() @ r.dequantize(torch.float64).to(dtype).double()).to(dtype)
    allowed = 2 * (plain.double() - want + r.bias.double()).norm() + 1e-6 * want.norm()
    assert (y.double() - want).norm() <= allowed
    tl.quant_gemm(x, packed)
    assert ops.calls["cross_iter"] == 1


# ── switches ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_environment_is_read_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = with_channels(tiny_checkpoint(), FRAC4)
    assert not Model(checkpoint, F32).cross_iter_round
    monkeypatch.setenv(dispatch.CROSS_ITER_ROUND, "1")
    on = Model(checkpoint, F32)
    assert on.cross_iter_round
    assert not Model(checkpoint, F32, cross_iter_round=False).cross_iter_round
    monkeypatch.setenv(dispatch.CROSS_ITER_ROUND, "0")
    assert not Model(checkpoint, F32).cross_iter_round
    assert torch.equal(on.logits(TOKENS), Model(checkpoint, F32, cross_iter_round=True).logits(TOKENS))


@pytest.mark.parametrize("value", ["", "2", "yes", "true", " 1"])
def test_environment_refusals(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(dispatch.CROSS_ITER_ROUND, value)
    with pytest.raises(InputError, match=rf"TINYLOOP_CROSS_ITER_ROUND='{value}' is neither '0' nor '1'; set one"):
        Model(tiny_checkpoint(), F32)


def test_fused_step_refuses_and_explain_says_so() -> None:
    checkpoint = with_channels(tiny_checkpoint(), FRAC4)
    on, off = (Model(checkpoint, F32, cross_iter_round=flag) for flag in (True, False))
    if off.fused_refusal() is None:
        assert on.fused_refusal() == "cross-iteration rounding is on"
    looped = [w for w in explain(on).weights if w.channel == FRAC4]
    assert sum(w.count for w in looped) == 5
    assert {p.kernel for w in looped for p in w.plans} == {"cross_iter"}
    assert "4 + frac4" in str(explain(on))
    assert "TINYLOOP_CROSS_ITER_ROUND is not 1" in " ".join(str(explain(off)).split())
    assert all(p.kernel != "cross_iter" for w in explain(off).weights for p in w.plans)


def test_decoding_continues_the_prefill() -> None:
    checkpoint = with_channels(tiny_checkpoint(), SIGN_BIT)
    model = Model(checkpoint, F32, cross_iter_round=True)
    cache = model.new_cache(2, 20)
    model.hidden(TOKENS[:, :19], cache)
    want = model.logits(TOKENS)[:, -1]
    assert (model.step(TOKENS[:, 19], cache) - want).norm() <= 1e-5 * want.norm()


# ── quantisers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def calibrated(K: int, N: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(400, K, generator=g) @ torch.randn(K, K, generator=g) / K**0.5
    return torch.randn(K, N, generator=g) / K**0.5, x, x.t() @ x


@pytest.mark.parametrize("kind", KINDS)
def test_nearest_rounds_to_the_nearest_mean(kind: str) -> None:
    W, _, _ = calibrated(70, 24)
    w = nearest(W, QuantSpec(group_size=32, channel=kind, clip=False))
    scale = w.scale.float()[torch.arange(70) // 32]
    assert ((w.mean() - W).abs() <= scale / (2 * STEPS[kind]) + scale / 8).all()  # the rim: zero and scale are fp16
    if kind == FRAC4:
        plain = nearest(W, QuantSpec(group_size=32, clip=False))
        assert (w.codes() != plain.codes()).float().mean() < 0.05  # 15/32 and the like, rounded twice


@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_means_come_closer_with_each_channel(method: str) -> None:
    """The finer the mean, the smaller its error in the outputs; and eight iterations come near to it."""
    W, x, H = calibrated(128, 48)
    errors, over_eight = [], []
    for kind in (None, SIGN_BIT, FRAC4):
        spec = QuantSpec(group_size=64, channel=kind)
        w = nearest(W, spec) if method == "nearest" else gptq(W, H, spec).weight
        assert w.channel == kind
        errors.append(float((x @ (w.mean() - W)).norm()))
        over_eight.append(float((x @ (sum(w.rounding(i).dequantize() for i in range(8)) / 8 - W)).norm()))
    assert errors[1] < 0.65 * errors[0]
    assert errors[2] < 0.25 * errors[0]
    assert over_eight[1] == pytest.approx(errors[1], rel=1e-4)
    assert over_eight[2] < 0.35 * errors[0]


def test_gptq_hands_on_the_error_of_the_mean() -> None:
    W, x, H = calibrated(128, 48)
    for kind in KINDS:
        spec = QuantSpec(group_size=64, channel=kind)
        assert (x @ (gptq(W, H, spec).weight.mean() - W)).norm() < (x @ (nearest(W, spec).mean() - W)).norm()


def test_loss_is_that_of_the_mean() -> None:
    W, x, H = calibrated(128, 48)
    for kind in KINDS:
        done = gptq(W, H, QuantSpec(group_size=64, channel=kind))
        assert done.loss == pytest.approx(float((x @ (done.weight.mean() - W)).square().sum()), rel=1e-3)


def test_only_the_loop_gets_a_channel() -> None:
    dense = tiny_checkpoint(quantized=False)
    for method in ("nearest", "gptq"):
        made, _ = quantize_weights(dense, TOKENS, Settings(QuantSpec(group_size=32, channel=FRAC4), method))
        for name, w in made.weights.items():
            kind = w.channel if isinstance(w, QuantWeight) else None
            assert kind == (FRAC4 if made.config.in_loop(name) else None), name


@pytest.mark.parametrize("segments", [PLAIN, (Segment("pre", 1), Segment("loop", 1, 1))], ids=str)
def test_models_that_do_not_loop_are_refused(segments: tuple[Segment, ...]) -> None:
    dense = tiny_checkpoint(quantized=False, segments=segments)
    with pytest.raises(InputError, match=r"channel='frac4', but this model applies every weight once; leave the chan"):
        quantize_weights(dense, None, Settings(QuantSpec(group_size=32, channel=FRAC4), "nearest"))


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────

Q = torch.full((9, 4), 7, dtype=torch.uint8)
BASE = QuantWeight.from_codes(Q, torch.ones(1, 4), torch.zeros(1, 4), 9)
LOW, HIGH = (QuantWeight.from_codes(torch.full_like(Q, v), BASE.scale, BASE.zero, 9) for v in (0, 15))
EIGHT = QuantWeight.from_codes(Q, BASE.scale, BASE.zero, 9, bits=8)
ONE = torch.ones_like(Q)

REFUSED = {
    "another name": (lambda: BASE.with_channel("frac8", Q), r"channel='frac8' is none of 'frac4', 'sign_bit'"),
    "f of 16": (lambda: BASE.with_channel(FRAC4, Q + 9), r"frac4 is .* up to 16; K=9, N=4 needs uint8 \[9, 4\] in 0"),
    "b of 2": (lambda: BASE.with_channel(SIGN_BIT, ONE * 2), r"sign_bit is .* up to 2; .* in 0\.\.1"),
    "shape": (lambda: BASE.with_channel(FRAC4, Q[:8]), r"frac4 is torch\.uint8 \[8, 4\] .* needs uint8 \[9, 4\]"),
    "dtype": (lambda: BASE.with_channel(FRAC4, Q.int()), r"frac4 is torch\.int32 \[9, 4\]"),
    "8 bits": (lambda: EIGHT.with_channel(FRAC4, Q), r"frac4 beside 8-bit codes; a channel goes with 4-bit codes"),
    "both": (
        lambda: dataclasses.replace(BASE.with_channel(FRAC4, Q), sign_bit=channel.pack_bits(ONE)),
        r"frac4 and sign_bit are both given; a weight has one channel or none",
    ),
    "packed shape": (
        lambda: dataclasses.replace(BASE, sign_bit=channel.pack_bits(ONE)[:1]),
        r"sign_bit is torch\.uint8 \[1, 4\]; K=9, N=4 needs uint8 \[2, 4\]",
    ),
    "below 0": (lambda: LOW.with_channel(FRAC4, Q + 1), r"frac4 leads from 36 codes in rows 0 to 8 out of 0\.\.15"),
    "above 15": (lambda: HIGH.with_channel(FRAC4, Q), r"frac4 leads from 36 codes in rows 0 to 8 out of 0\.\.15"),
    "pair below 0": (lambda: LOW.with_channel(SIGN_BIT, ONE), r"sign_bit leads from \d+ codes in rows 0 to 8 out of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_refused(case: str) -> None:
    build, text = REFUSED[case]
    with pytest.raises(FormatError, match=text):
        build()


def test_channels_outside_of_the_loop_are_refused() -> None:
    checkpoint = tiny_checkpoint()
    for name in ("layers.0.mlp_up", "layers.2.mlp_up", "embed"):
        weights = {**checkpoint.weights, name: with_random_channel(checkpoint.weights[name], FRAC4)}
        with pytest.raises(FormatError, match=rf"{name} has the channel frac4, but is not in a loop; drop it"):
            dataclasses.replace(checkpoint, weights=weights)


def test_files_with_wrong_channels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = with_channels(tiny_checkpoint(), FRAC4)
    name = "layers.1.mlp_up"
    w = checkpoint.weights[name]
    assert isinstance(w, QuantWeight)
    bad = dataclasses.replace(w, packed=torch.zeros_like(w.packed))
    damaged = dataclasses.replace(checkpoint, weights={**checkpoint.weights, name: bad})
    with pytest.raises(FormatError, match=rf"{name}: frac4 leads from \d+ codes in rows 0 to 63 out of 0\.\.15"):
        tl.save(damaged, tmp_path / "m.tinyloop")
    with monkeypatch.context() as m:
        m.setattr(container, "_check_values", lambda name, w: None)
        path = tl.save(damaged, tmp_path / "m.tinyloop")
    with pytest.raises(FormatError, match=rf"{name}: frac4 leads from"):
        container.read(path)
    assert isinstance(container.read(path, verify=False), Checkpoint)


def test_specs_refused() -> None:
    with pytest.raises(InputError, match=r"channel='frac8' is none of None, 'sign_bit', 'frac4'"):
        QuantSpec(channel="frac8")


def test_a_view_of_an_iteration_shares_everything() -> None:
    packed = pack(weight(FRAC4))
    packed.keep_roundings = 2
    assert packed.at(1).dense(F32, keep=True) is packed.at(1).dense(F32, keep=True)
    assert packed.at(0).iteration == 0
    assert packed.iteration is None
    assert pack(weight(SIGN_BIT)).at(7).iteration == 1
    plain = PackedWeight(random_quant_weight(8, 8, 8, seed=0))
    assert plain.at(3) is plain
