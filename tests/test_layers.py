"""What lies between the products: torch's form against float64 from the definition, the compiled form against torch's.

`reference` is written from the definition alone: one query, one head, one key at a time in float64. The compiled
module must be as near to it as torch is in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from tinyloop import layers
from tinyloop.dispatch import machine
from tinyloop.layers import Attention, Places

if machine().numba:
    from tinyloop.cpu import rows

Tensor = torch.Tensor
F32, BF16 = torch.float32, torch.bfloat16
compiled = pytest.mark.skipif(
    not machine().numba or not rows.available, reason="numba is missing, or this CPU has no bf16 dot product"
)


@dataclass(frozen=True)
class Case:
    """T new tokens per row after `starts`; the cache holds random keys and values before them."""

    T: int
    starts: tuple[int, ...] = (0,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    qk_norm: bool = False
    rotated: int | None = None  # elements of a head, all of them by default
    cached: bool = True

    def __str__(self) -> str:
        return "-".join(f"{k}{v}" for k, v in vars(self).items() if v is not None)


CASES = [
    Case(T=1), Case(T=1, starts=(100,)), Case(T=2, cached=False), Case(T=48), Case(T=49, cached=False), Case(T=64),
    Case(T=65), Case(T=150, cached=False), Case(T=7, starts=(63,)), Case(T=70, starts=(129,)),
    Case(T=5, starts=(0, 3)), Case(T=50, starts=(60, 0)), Case(T=1, starts=(0, 77)),
    Case(T=33, starts=(0, 0), cached=False),
    Case(T=70, heads=3, kv_heads=3), Case(T=70, heads=6, kv_heads=1), Case(T=70, head_dim=128),
    Case(T=20, starts=(50,), head_dim=128, kv_heads=4), Case(T=100, window=1), Case(T=100, window=17),
    Case(T=100, window=64), Case(T=100, window=100), Case(T=130, window=101, cached=False),
    Case(T=30, starts=(90,), window=40), Case(T=1, starts=(90,), window=40), Case(T=40, starts=(90, 5), window=65),
    Case(T=60, qk_norm=True), Case(T=9, starts=(70,), qk_norm=True, head_dim=128, window=33),
    Case(T=60, rotated=32), Case(T=60, rotated=2, starts=(11,)),
]  # fmt: skip
CASES_FP32 = [*CASES, Case(T=40, head_dim=16), Case(T=40, head_dim=96, starts=(3,)), Case(T=11, head_dim=6)]


def inputs(c: Case, dtype: torch.dtype) -> tuple[Tensor, Attention, tuple[Tensor, Tensor], Places, list[Tensor] | None]:
    g = torch.Generator().manual_seed(c.T)
    B, D = len(c.starts), c.head_dim
    qkv = torch.randn(B, c.T, (c.heads + 2 * c.kv_heads) * D, generator=g).to(dtype)
    norms = [1 + torch.randn(D, generator=g) / 4 if c.qk_norm else None for _ in range(2)]
    spec = Attention(c.heads, c.kv_heads, D, c.window, 1e-5, *norms)
    places = Places(c.starts, c.T)
    pairs = (c.rotated or D) // 2
    angle = places.positions[..., None] * 100.0 ** (-torch.arange(pairs) / pairs)
    capacity = max(c.starts) + c.T + 3
    slot = [torch.randn(B, c.kv_heads, capacity, D, generator=g).to(dtype) for _ in range(2)] if c.cached else None
    return qkv, spec, (angle.cos(), angle.sin()), places, slot


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / (x.square().mean() + eps).sqrt() * weight.double()


def rotated64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pair i is elements i and r + i, turned by its angle; what lies beyond 2r stays."""
    r = len(cos)
    turned = torch.complex(x[:r], x[r : 2 * r]) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag, x[2 * r :]))


def reference(c: Case, dtype: torch.dtype) -> Tensor:  # float64 [B, T, heads·head_dim]
    qkv, spec, (cos, sin), _, slot = inputs(c, dtype)
    D, out = c.head_dim, torch.zeros(len(c.starts), c.T, c.heads, c.head_dim, dtype=torch.float64)
    for b, start in enumerate(c.starts):
        new = qkv[b].double().view(c.T, -1, D)
        turn = [(cos[b, t].double(), sin[b, t].double()) for t in range(c.T)]
        for g in range(c.kv_heads):
            k = [rotated64(norm64(new[t, c.heads + g], spec.k_norm, spec.eps), *turn[t]) for t in range(c.T)]
            v = [new[t, c.heads + c.kv_heads + g] for t in range(c.T)]
            old = [s[b, g, :start].double() for s in slot] if slot else [torch.zeros(0, D, dtype=torch.float64)] * 2
            keys, values = torch.cat((old[0], torch.stack(k))), torch.cat((old[1], torch.stack(v)))
            for t in range(c.T):
                end = start + t + 1
                first = max(0, end - c.window) if c.window else 0
                for h in range(g * c.heads // c.kv_heads, (g + 1) * c.heads // c.kv_heads):
                    q = rotated64(norm64(new[t, h], spec.q_norm, spec.eps), *turn[t])
                    scores = keys[first:end] @ q / math.sqrt(D)
                    out[b, t, h] = scores.softmax(0) @ values[first:end]
    return out.flatten(2)


REFERENCES: dict[tuple[Case, torch.dtype], Tensor] = {}


def exact(c: Case, dtype: torch.dtype) -> Tensor:
    if (c, dtype) not in REFERENCES:
        REFERENCES[c, dtype] = reference(c, dtype)
    return REFERENCES[c, dtype]


def error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("c", CASES_FP32, ids=str)
def test_attention_is_its_definition(c: Case) -> None:
    """fp32: some ten roundings of scores near 10, which the exponential passes on: 2⁻²⁴ · 10 · √10."""
    qkv, *others = inputs(c, F32)
    assert error(layers.attention(qkv, *others), exact(c, F32)) <= 2**-24 * 10 * math.sqrt(10)


@pytest.mark.parametrize("c", [c for c in CASES if c.heads != c.kv_heads], ids=str)
def test_attention_with_a_key_for_every_head_is_the_same(c: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that masks and fp32 take on a GPU."""
    monkeypatch.setattr(layers, "_wants_equal_heads", lambda q, mask: True)
    qkv, *others = inputs(c, F32)
    assert error(layers.attention(qkv, *others), exact(c, F32)) <= 2**-24 * 10 * math.sqrt(10)


@pytest.mark.parametrize("c", [c for c in CASES if c.cached], ids=str)
@pytest.mark.parametrize("module", ["layers", pytest.param("rows", marks=compiled)])
def test_only_new_positions_of_the_slot_are_written(module: str, c: Case) -> None:
    attention = layers.attention if module == "layers" else rows.attention
    qkv, spec, rope, places, slot = inputs(c, BF16)
    before = [s.clone() for s in slot]
    attention(qkv.clone(), spec, rope, places, slot)
    v = qkv.view(*qkv.shape[:2], -1, c.head_dim)[:, :, -c.kv_heads :].transpose(1, 2)
    for b, start in enumerate(c.starts):
        for s, old in zip(slot, before, strict=True):
            assert torch.equal(s[b, :, :start], old[b, :, :start])
            assert torch.equal(s[b, :, start + c.T :], old[b, :, start + c.T :])
            assert not torch.equal(s[b, :, start : start + c.T], old[b, :, start : start + c.T])
        assert torch.equal(slot[1][b, :, start : start + c.T], v[b])


@compiled
@pytest.mark.parametrize("c", CASES, ids=str)
def test_compiled_attention_is_as_good_as_torchs(c: Case) -> None:
    qkv, *others = inputs(c, BF16)
    plain = error(layers.attention(qkv.clone(), *others), exact(c, BF16))
    *others, slot = inputs(c, BF16)[1:]
    assert error(rows.attention(qkv.clone(), *others, slot), exact(c, BF16)) <= 2 * plain
    if slot:  # both kept the same keys, up to a rounding that may fall either way
        ours, theirs = slot[0].double(), layers_keys(c).double()
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


def layers_keys(c: Case) -> Tensor:
    qkv, *others, slot = inputs(c, BF16)
    layers.attention(qkv, *others, slot)
    return slot[0]


@compiled
@pytest.mark.parametrize("c", [Case(T=70, starts=(5, 60)), Case(T=100, window=17, cached=False)], ids=str)
def test_compiled_attention_repeats_bitwise_on_any_number_of_threads(c: Case) -> None:
    before = torch.get_num_threads()
    results = []
    for T in (1, 2, 3, 2):
        torch.set_num_threads(T)
        qkv, *others = inputs(c, BF16)
        results.append(rows.attention(qkv, *others))
    torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results[1:])


@compiled
@pytest.mark.parametrize("cut", [1, 47, 48, 64, 99])
def test_compiled_attention_continues_where_it_stopped(cut: int) -> None:
    """Two calls on a slot give what one call gives: bitwise, since rows know nothing of their block."""
    whole = Case(T=100, window=70)
    qkv, spec, rope, places, slot = inputs(whole, BF16)
    wanted = rows.attention(qkv.clone(), spec, rope, places, [s.clone() for s in slot])
    parts = [slice(0, cut), slice(cut, 100)]
    got = [
        rows.attention(qkv[:, p].clone(), spec, tuple(r[:, p] for r in rope), Places([p.start], p.stop - p.start), slot)
        for p in parts
    ]
    assert error(torch.cat(got, 1), exact(whole, BF16)) <= 2 * error(wanted, exact(whole, BF16))


@compiled
def test_outputs_of_compiled_attention_lie_between_canaries() -> None:
    """A slot inside a larger buffer: what lies beside its rows and beyond its capacity stays."""
    c = Case(T=50, starts=(7, 30))
    qkv, spec, rope, places, slot = inputs(c, BF16)
    framed = []
    for s in slot:
        B, H, P, D = s.shape
        buffer = torch.full((B, H, P + 8, D), 77.0, dtype=BF16)
        buffer[:, :, 4 : P + 4] = s
        framed.append(buffer)
    inner = [buffer[:, :, 4:-4] for buffer in framed]
    y = rows.attention(qkv.clone(), spec, rope, places, inner)
    assert torch.equal(y, rows.attention(qkv.clone(), spec, rope, places, slot))
    for buffer, s in zip(framed, slot, strict=True):
        assert (buffer[:, :, :4] == 77).all()
        assert (buffer[:, :, -4:] == 77).all()
        assert torch.equal(buffer[:, :, 4:-4], s)


@compiled
def test_sizes_beyond_the_compiled_attention_take_torchs() -> None:
    for c, dtype in ((Case(T=5, head_dim=32), BF16), (Case(T=5), F32)):
        qkv, *others = inputs(c, dtype)
        assert torch.equal(rows.attention(qkv.clone(), *others), layers.attention(qkv.clone(), *others))


# ── norms, SwiGLU, losses ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 64), (1, 50, 100), (3, 1, 576)], ids=str)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("module", ["layers", pytest.param("rows", marks=compiled)])
def test_add_norm(module: str, shape: tuple[int, ...], adds: bool) -> None:
    add_norm = layers.add_norm if module == "layers" else rows.add_norm
    g = torch.Generator().manual_seed(0)
    x, y, weight = (
        3 * torch.randn(shape, generator=g),
        torch.randn(shape, generator=g).bfloat16(),
        torch.randn(shape[-1:]),
    )
    want = x + y.float() if adds else x.clone()
    h = add_norm(x, y if adds else None, weight, 1e-5, BF16)
    assert torch.equal(x, want)
    normed = want.double() / (want.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    # One rounding to bf16, and fp32 roundings that may carry it over a tie.
    assert ((h.double() - normed).abs() <= normed.abs() * 2**-8 * (1 + 2**-10)).all()


@pytest.mark.parametrize("numel", [16, 48, 1000, 4112])
@pytest.mark.parametrize("module", ["layers", pytest.param("rows", marks=compiled)])
def test_swiglu(module: str, numel: int) -> None:
    swiglu = layers.swiglu if module == "layers" else rows.swiglu
    g = torch.Generator().manual_seed(0)
    gate, up = 8 * torch.randn(1, numel, generator=g).bfloat16(), torch.randn(1, numel, generator=g).bfloat16()
    gate[0, :4] = torch.tensor([-90.0, -200.0, 0.0, 300.0])
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    y = swiglu(gate, up)
    assert y.data_ptr() == gate.data_ptr()
    # torch rounds silu to bf16 before it multiplies: two roundings; below 2⁻¹²⁰ the compiled exponential saturates.
    assert ((y.double() - exact).abs() <= exact.abs() * (2 * 2**-8 + 2**-15) + 2.0**-115).all()


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 33, 1000])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("module", ["layers", pytest.param("rows", marks=compiled)])
def test_losses(module: str, dtype: torch.dtype, vocabulary: int) -> None:
    losses = layers.losses if module == "layers" else rows.losses
    g = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(9, vocabulary, generator=g)).to(dtype)
    targets = torch.randint(0, vocabulary, (9,), generator=g)
    want = logits.double().logsumexp(1) - logits.double()[torch.arange(9), targets]
    # The exponential's 2e-7, and roundings of logits up to 40 in the difference.
    assert (losses(logits, targets).double() - want).abs().max() <= 40 * 2**-23
    logits[3, 0] = float("nan")
    assert torch.isnan(losses(logits, targets)).tolist() == [i == 3 for i in range(9)]


def test_mask_is_left_out_where_causal_says_the_same() -> None:
    places = Places([0], 5)
    assert places.mask(5, None) is None
    assert places.mask(5, 5) is None
    assert Places([4], 1).mask(5, None) is None
    mask = places.mask(5, 2)
    assert mask is places.mask(5, 2)
    assert mask is not None
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    unequal = Places([3, 1], 1).mask(4, None)
    assert unequal is not None
    assert unequal[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
