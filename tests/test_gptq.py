"""One weight: GPTQ equals a naive column-by-column twin in float64, beats rounding where inputs are correlated, equals
rounding where they are not, and gives way with a sentence where calibration is degenerate."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyloop as tl
from helpers import tiny_checkpoint
from tinyloop.errors import InputError
from tinyloop.quantize import gptq as subject
from tinyloop.quantize.gptq import QuantSpec, gptq, gptq_quantize, loss, nearest
from tinyloop.weight import QuantWeight

pytestmark = pytest.mark.usefixtures("one_thread")
Tensor = torch.Tensor
SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79)


def problem(K: int, N: int, seed: int, rows: int = 200) -> tuple[Tensor, Tensor]:
    """W [K, N] and the second moment of correlated inputs whose energies span two orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(K) + 0.7 * torch.randn(K, K, generator=g) / math.sqrt(K)
    x = torch.randn(rows, K, generator=g) @ mix * (0.1 + 2 * torch.rand(K, generator=g) ** 2)
    return torch.randn(K, N, generator=g) / math.sqrt(K), x.t() @ x


def reference(W: Tensor, H: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Codes and Ŵ by the definition: one input after another, the inverse of what is still open made anew each time."""
    W, H = W.double().clone(), H.double()
    K, G = W.shape[0], spec.group_size or W.shape[0]
    energy = H.diagonal().clone()
    damped = H + torch.diag(torch.where(energy > 0, spec.damp * energy[energy > 0].mean(), energy[energy > 0].mean()))
    groups = [list(range(k, min(k + G, K))) for k in range(0, K, G)]
    if spec.order:
        groups.sort(key=lambda ks: -sum(float(energy[k]) for k in ks) / len(ks))
        groups = [sorted(ks, key=lambda k: -float(energy[k])) for ks in groups]
    still = [k for ks in groups for k in ks]
    codes, value = torch.empty_like(W), torch.empty_like(W)
    for ks in groups:
        scale, zero = best_grid(W[ks], energy[ks], spec)
        for k in ks:
            inverse = torch.linalg.inv(damped[still][:, still])
            codes[k] = ((W[k] - zero) / scale).round().clamp(0, 15)
            value[k] = codes[k] * scale + zero
            W[still] -= inverse[:, :1] / inverse[0, 0] * (W[k] - value[k])
            still.remove(k)
    return codes, value


def best_grid(part: Tensor, energy: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Per column the shrunk range with the least weighted error, the widest of equals."""
    columns = []
    for column in part.t():
        low, high = float(column.min()), float(column.max())
        tried = []
        for shrink in SHRINKS if spec.clip else SHRINKS[:1]:
            rim = (high - low) * (1 - shrink) / 2
            scale, zero = grid(low + rim, high - rim, spec.integer_zero)
            code = ((column - zero) / scale).round().clamp(0, 15)
            tried.append((float((energy * (code * scale + zero - column) ** 2).sum()), len(tried), scale, zero))
        columns.append(min(tried)[2:])
    scale, zero = torch.tensor(columns, dtype=torch.float64).t()
    return scale, zero


def grid(low: float, high: float, integer_zero: bool) -> tuple[float, float]:
    def half(v: float) -> float:
        return float(torch.tensor(v).half())

    def narrow(v: float) -> float:
        return half(v) if v >= 2**-14 else v

    if low == high:
        return (abs(low) or 1.0, min(low, 0.0)) if integer_zero else (1.0, low)
    if integer_zero:
        scale = narrow((max(high, 0.0) - min(low, 0.0)) / 15)
        return scale, -max(0, min(15, round(-min(low, 0.0) / scale))) * scale
    scale = narrow((high - low) / 15)
    return scale, half(low) if abs(half(low) - low) <= scale / 16 else low


@pytest.mark.parametrize("block", [16, 128])
@given(
    K=st.integers(1, 70),
    G=st.sampled_from([1, 3, 16, 24, 32, 50, None]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 999),
)
def test_equals_the_naive_twin(block: int, K: int, G: int | None, flags: tuple[bool, bool, bool], seed: int) -> None:
    """Groups lie anywhere across the blocks of the lazy update, the short last one at any place in the order."""
    spec = QuantSpec(None if G is None or G > K else G, *flags)
    W, H = problem(K, 3, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "BLOCK", block)
        w = gptq_quantize(W, H, spec)
    codes, value = reference(W, H, spec)
    assert torch.equal(w.codes().double(), codes)
    torch.testing.assert_close(w.dequantize().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("K", "G", "order"), [(300, 96, True), (300, 200, True), (300, 200, False), (260, None, True)])
def test_equals_the_naive_twin_across_real_blocks(K: int, G: int | None, order: bool) -> None:
    W, H = problem(K, 2, seed=K, rows=600)
    w = gptq_quantize(W, H, QuantSpec(G, order=order))
    assert torch.equal(w.codes().double(), reference(W, H, QuantSpec(G, order=order))[0])


def test_short_last_group_may_come_first() -> None:
    W, H = problem(40, 4, seed=1)
    louder = torch.tensor([1.0] * 32 + [9.0] * 8)
    H = louder[:, None] * H * louder
    assert subject._visits(H.diagonal(), 16)[:8].sort().values.tolist() == list(range(32, 40))
    spec = QuantSpec(16)
    assert torch.equal(gptq_quantize(W, H, spec).codes().double(), reference(W, H, spec)[0])


def held(scale: torch.Tensor) -> list[bool]:
    """Whether fp16 and bf16 hold every scale."""
    return [torch.equal(scale.to(t).float(), scale) for t in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("integer_zero", [False, True])
def test_scales_are_as_fine_as_the_weight(integer_zero: bool) -> None:
    """A weight in bf16 gets scales that bf16 and fp16 hold, unless asked for others."""
    W, H = problem(256, 64, seed=3)
    for dtype, asked, want in (
        (torch.float32, None, [True, False]),
        (torch.float16, None, [True, False]),
        (torch.float16, "bfloat16", [True, True]),
        (torch.bfloat16, None, [True, True]),
        (torch.bfloat16, "float16", [True, False]),
    ):
        spec = QuantSpec(32, integer_zero, scales=asked)
        for w in (gptq(W.to(dtype), H, spec).weight, nearest(W.to(dtype), spec)):
            assert held(w.scale.float()) == want, (dtype, asked)
    with pytest.raises(InputError, match=r"scales='float8' is none of None, 'float16', 'bfloat16'"):
        QuantSpec(scales="float8")


@pytest.mark.parametrize("integer_zero", [False, True])
def test_scales_of_bf16_cost_nothing(integer_zero: bool) -> None:
    """Codes are chosen for the scale as it is: one weight's loss differs by 2 % either way, on average it does not."""
    ratios = []
    for seed in range(8):
        W, H = problem(256, 64, seed)
        fine, coarse = (QuantSpec(32, integer_zero, scales=scales) for scales in ("float16", "bfloat16"))
        ratios.append(gptq(W, H, coarse).loss / gptq(W, H, fine).loss)
    assert 0.97 < sum(ratios) / len(ratios) < 1.03


@given(st.integers(0, 999), st.sampled_from([16, 32, 64, None]), st.booleans(), st.booleans())
def test_loses_less_than_rounding(seed: int, G: int | None, integer_zero: bool, order: bool) -> None:
    W, H = problem(64, 32, seed)
    spec = QuantSpec(G, integer_zero, order=order)
    found = gptq(W, H, spec)
    assert found.note is None
    assert found.loss < 0.9 * loss(W, nearest(W, spec), H)
    error = (W - found.weight.dequantize()).double()
    assert found.loss == pytest.approx(float((error * (H.double() @ error)).sum()), rel=1e-4)


@given(st.integers(0, 999), st.sampled_from([7, 32, None]), st.booleans(), st.booleans())
def test_without_correlation_it_is_rounding(seed: int, G: int | None, integer_zero: bool, order: bool) -> None:
    W, H = problem(64, 8, seed)
    spec = QuantSpec(G, integer_zero, clip=False, order=order)
    same(gptq_quantize(W, torch.diag(H.diagonal()), spec), nearest(W, spec))


def same(a: QuantWeight, b: QuantWeight) -> None:
    for name in ("packed", "scale", "zero"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_same_call_same_bits() -> None:
    W, H = problem(96, 48, seed=3)
    same(gptq_quantize(W, H, QuantSpec(32)), gptq_quantize(W, H, QuantSpec(32)))


@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_integer_zeros_are_products_of_scale(method: str) -> None:
    W, H = problem(64, 32, seed=5)
    spec = QuantSpec(16, integer_zero=True)
    w = nearest(W, spec) if method == "nearest" else gptq_quantize(W, H, spec)
    z = (-w.zero.float() / w.scale.float()).round()
    assert w.integer_zero
    assert 0 <= z.min() < z.max() <= 15
    assert torch.equal(w.zero.float(), -(z * w.scale.float()))


def test_clip_never_raises_the_error() -> None:
    W, _ = problem(128, 64, seed=6)
    W[::16] *= 3
    for integer_zero in (False, True):
        errors = [
            float((W - nearest(W, QuantSpec(64, integer_zero, clip)).dequantize()).square().sum())
            for clip in (False, True)
        ]
        assert errors[1] < errors[0]


def test_bias_is_kept() -> None:
    W, H = problem(32, 8, seed=7)
    bias = torch.arange(8.0)
    assert gptq_quantize(W, H, QuantSpec(32), bias).bias is bias
    assert nearest(W, QuantSpec(32), bias).bias is bias


wild = (
    st.floats(-1e4, 1e4, width=32)
    | st.floats(-(2.0**-20), 2.0**-20, width=32)
    | st.sampled_from([0.0, -0.0, 1e-7, 1e-45])
)


@given(st.lists(wild, min_size=1, max_size=40), st.sampled_from([1, 5, 16, None]), st.booleans(), st.booleans())
def test_any_weight_stays_on_its_grid(values: list[float], G: int | None, integer_zero: bool, clip: bool) -> None:
    """Codes in 0..15 and no NaN for any finite weight; without clipping an error of at most half a step, and a little
    for the fp16 rounding of the step (and of the zero, or the snap to an integer one)."""
    W = torch.tensor(values)[:, None]
    G = None if G is None or G > len(values) else G
    w = nearest(W, QuantSpec(G, integer_zero, clip))
    assert w.codes().max() <= 15
    value = w.dequantize()
    assert torch.isfinite(value).all()
    if not clip:
        for i, part in enumerate(torch.split(W[:, 0], w.group_size)):
            error = (value[i * w.group_size :][: len(part), 0] - part).abs().max()
            assert error <= (1.01 if integer_zero else 0.6) * float(w.scale[i, 0]) + 1e-6 * part.abs().max()


@pytest.mark.parametrize("integer_zero", [False, True])
@pytest.mark.parametrize("constant", [0.0, 0.7123, -0.7123, 1e-7, -3e-5, 300.0])
def test_constant_groups_are_exact(constant: float, integer_zero: bool) -> None:
    W = torch.cat((torch.full((16, 4), constant), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))))
    spec = QuantSpec(16, integer_zero)
    for w in (nearest(W, spec), gptq_quantize(W, torch.eye(32), spec)):
        assert torch.equal(w.dequantize()[:16], W[:16])


def test_narrow_group_far_from_zero() -> None:
    """1.0 … 1.001: an fp16 zero would be off by several steps."""
    W = torch.linspace(1.0, 1.001, 16)[:, None]
    assert (nearest(W, QuantSpec(None)).dequantize() - W).abs().max() < 0.6 * 0.001 / 15


# Rows of the cases file.


@pytest.mark.parametrize("tiny", [1e-7, 1e-6, 3e-5])
@pytest.mark.parametrize("integer_zero", [False, True])
def test_NUM_10_groups_of_tiny_weights(tiny: float, integer_zero: bool, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    W = torch.randn(64, 64, generator=g)
    W[:32] = tiny * (2 * torch.rand(32, 64, generator=g) - 1)
    H = torch.eye(64) + 0.1
    for w in (nearest(W, QuantSpec(32, integer_zero)), gptq_quantize(W, H, QuantSpec(32, integer_zero, order=False))):
        assert w.codes().max() <= 15
        error = (w.dequantize()[:32] - W[:32]).abs().amax(0)
        assert (error <= W[:32].amax(0) - W[:32].amin(0)).all()
        x = torch.randn(5, 64, generator=g)
        for rows in (1, 5):
            y = tl.quant_gemm(x[:rows], tl.pack(w))
            torch.testing.assert_close(y, x[:rows] @ w.dequantize(), rtol=1e-4, atol=1e-4)
        checkpoint = tiny_checkpoint(hidden=64)
        weights = {**checkpoint.weights, "layers.0.attn_out": w}
        saved = tl.save(tl.Checkpoint(checkpoint.config, weights, checkpoint.norms), tmp_path / "t", overwrite=True)
        assert torch.isfinite(tl.load(saved).logits(torch.arange(8)[None])).all()


def test_GRP_09_one_group_per_column_survives_the_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(quantized=False, hidden=64)
    W = checkpoint.weights["layers.0.mlp_gate"].dequantize()
    w = nearest(W, QuantSpec(None))
    made = tl.Checkpoint(checkpoint.config, {**checkpoint.weights, "layers.0.mlp_gate": w}, checkpoint.norms)
    back = tl.load(tl.save(made, tmp_path / "m.tinyloop")).weights["layers.0.mlp_gate"].weight
    assert isinstance(back, QuantWeight)
    assert back.group_size == back.K == 64
    same(back, w)
    assert (back.dequantize() - W).abs().max() < 0.2


def test_GRP_11_zero_points_0_8_15_survive() -> None:
    steps = torch.arange(16.0)
    W = torch.stack((steps - 8, steps, steps - 15, steps - 8)).reshape(-1, 1) / 16
    w = nearest(W, QuantSpec(16, integer_zero=True))
    assert (-w.zero.float() / w.scale.float()).flatten().tolist() == [8, 0, 15, 8]
    assert torch.equal(w.dequantize(), W)


def test_GRP_13_every_code_over_every_zero_point() -> None:
    columns = [(torch.arange(16.0) - z) / 8 for z in range(16)]
    W = torch.stack(columns, dim=1)
    w = nearest(W, QuantSpec(16, integer_zero=True, clip=False))
    assert torch.equal(w.codes(), torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 16))
    assert torch.equal((-w.zero.float() / w.scale.float())[0], torch.arange(16.0))


def test_GRP_14_symmetric_weights_have_zero_point_8() -> None:
    """The one convention: z counts steps above code 0, and zero = −z·scale."""
    W = torch.linspace(-1, 1, 32)[:, None]
    w = nearest(W, QuantSpec(32, integer_zero=True, clip=False))
    assert float(w.zero) == -8 * float(w.scale)


@pytest.mark.parametrize("order", [False, True])
def test_SHP_09_short_last_group(order: bool) -> None:
    W, H = problem(100, 24, seed=9)
    spec = QuantSpec(64, order=order)
    for w in (gptq_quantize(W, H, spec), nearest(W, spec)):
        assert w.scale.shape == (2, 24)
        assert (w.dequantize() - W).abs().max() < 0.25 * (W.max() - W.min())
    alone = nearest(W[64:], QuantSpec(None))
    assert torch.equal(nearest(W, spec).dequantize()[64:], alone.dequantize())


def dead_inputs(H: Tensor) -> Tensor:
    H = H.clone()
    H[[0, 5, 6]], H[:, [0, 5, 6]] = 0, 0
    return H


SINGULAR = {
    "dead inputs": dead_inputs,
    "one sample": lambda H: H[:1].t() @ H[:1],
    "one diagonal of 1e8": lambda H: H + torch.diag(torch.tensor([1e8] + [0.0] * 31)),
    "all diagonals of 1e8": lambda H: H + 1e8 * torch.eye(32),
    "1e-30 in all": lambda H: 1e-30 * H,
    "not positive": lambda H: H - 0.05 * H.diagonal().mean() * torch.eye(32),
}


@pytest.mark.parametrize(("case", "order", "G"), list(itertools.product(SINGULAR, (False, True), (8, 20, None))))
def test_QNT_02_singular_moments(case: str, order: bool, G: int | None) -> None:
    W, H = problem(32, 16, seed=2)
    spec = QuantSpec(G, order=order)
    H = SINGULAR[case](H)
    found = gptq(W, H, spec)
    assert found.note is None
    assert math.isfinite(found.loss)
    assert torch.isfinite(found.weight.dequantize()).all()
    assert (found.weight.dequantize() - W).abs().max() < 1.5 * (W.max() - W.min())
    if case not in ("not positive", "1e-30 in all"):
        assert found.loss <= 1.001 * loss(W, nearest(W, spec), H)
    if case == "1e-30 in all":
        same(found.weight, gptq_quantize(W, 1e30 * H, spec))


def test_QNT_02_dead_inputs_are_rounded() -> None:
    W, H = problem(32, 16, seed=2)
    spec = QuantSpec(None, clip=False, order=False)
    w = gptq_quantize(W, dead_inputs(H), spec)
    assert torch.equal(w.dequantize()[[0, 5, 6]], nearest(W, spec).dequantize()[[0, 5, 6]])


@pytest.mark.parametrize(("K", "N"), [(1, 5), (1, 1), (40, 1)])
@pytest.mark.parametrize("integer_zero", [False, True])
def test_QNT_02_single_input_and_single_output(K: int, N: int, integer_zero: bool) -> None:
    W, H = problem(K, N, seed=4)
    w = gptq_quantize(W, H, QuantSpec(None, integer_zero))
    assert (w.dequantize() - W).abs().max() < (1e-6 if K == 1 else 0.2 * (W.max() - W.min()))


def test_QNT_02_heavier_damping_instead_of_failure() -> None:
    """An indefinite H that needs more than the damping asked for is damped more, and used."""
    _, H = problem(32, 16, seed=2)
    H = H - 0.05 * H.diagonal().mean() * torch.eye(32)
    assert torch.linalg.eigvalsh(H)[0] < -0.01 * H.diagonal().mean()
    assert isinstance(subject._inverse_factor(H, 0.01), Tensor)


@pytest.mark.parametrize(
    ("H", "note"),
    [
        (torch.full((32, 32), float("nan")), "H holds NaN or infinite values: rounded to nearest instead"),
        (torch.diag(torch.tensor([float("inf")] + [1.0] * 31)), "H holds NaN or infinite values"),
        (torch.zeros(32, 32), "no input ever fired: rounded to nearest instead"),
        (torch.eye(32) - 5, "no input ever fired"),
        (torch.eye(32) - 50 * (1 - torch.eye(32)), "H stays singular under damping"),
    ],
)
def test_QNT_03_useless_calibration_is_rounding_with_a_note(H: Tensor, note: str) -> None:
    W, _ = problem(32, 16, seed=2)
    found = gptq(W, H, QuantSpec(16))
    assert found.note is not None
    assert note in found.note
    same(found.weight, nearest(W, QuantSpec(16)))


def test_QNT_03_one_activation_of_6e4() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100, 32, generator=g)
    x[3, 7] = 6e4
    W = torch.randn(32, 16, generator=g)
    found = gptq(W, x.t() @ x, QuantSpec(16))
    assert found.note is None
    assert torch.isfinite(found.weight.dequantize()).all()
    assert found.loss < loss(W, nearest(W, QuantSpec(16)), x.t() @ x)


@pytest.mark.parametrize(
    ("W", "H", "message"),
    [
        (torch.ones(4, 4, dtype=torch.int32), torch.eye(4), r"W is torch.int32 \[4, 4\]; give floats \[K, N\]"),
        (torch.ones(4), torch.eye(4), r"W is torch.float32 \[4\]"),
        (torch.tensor([[float("nan")]]), torch.eye(1), "W holds NaN or infinite values; the source weight is damaged"),
        (torch.ones(4, 4), torch.eye(3), r"H has shape \[3, 3\]; K=4 needs \[4, 4\]"),
    ],
)
def test_refusals(W: Tensor, H: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gptq(W, H, QuantSpec(None))


def test_refused_settings() -> None:
    with pytest.raises(InputError, match=r"group_size=0 must be ≥ 1, or None for one group per column"):
        QuantSpec(0)
    with pytest.raises(InputError, match=r"damp=0 must be in \(0, 1\]"):
        QuantSpec(damp=0)
