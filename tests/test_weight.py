"""The canonical weight: codes survive packing, dequantisation is exact, and every refusal says why."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from helpers import random_dense_weight, random_quant_weight, with_random_channel, with_random_perm
from tinyloop.errors import FormatError
from tinyloop.reference import dequantize64, matmul64
from tinyloop.weight import DenseWeight, LinearWeight, QuantWeight, pack_nibbles


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(K, N, G) with ragged K, N and last group; G = K is one group per column."""
    K = draw(st.integers(1, 150))
    return K, draw(st.integers(1, 40)), draw(st.one_of(st.integers(1, K), st.just(K)))


def exact_dequantize(w: QuantWeight) -> torch.Tensor:
    """Product and sum rounded to fp32 one after the other; float64 holds either exactly or rounds it harmlessly."""
    group = torch.arange(w.K) // w.group_size
    product = (w.codes().double() * w.scale.double()[group]).float()
    return (product.double() + w.zero.double()[group]).float()


def parameters(K: int, N: int, G: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (-(-K // G), N)
    return torch.full(shape, 0.5), torch.full(shape, -4.0)


@hypothesis.given(shapes(), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_codes_survive_packing(shape: tuple[int, int, int], bits: int, seed: int) -> None:
    K, N, G = shape
    q = torch.randint(0, 1 << bits, (K, N), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    w = QuantWeight.from_codes(q, *parameters(K, N, G), G, bits)
    assert torch.equal(w.codes(), q)
    assert (w.K, w.N, w.groups, w.packed.dtype) == (K, N, -(-K // G), torch.uint8)
    assert w.packed.shape == ((K if bits == 8 else (K + 1) // 2), N)


def test_word_is_as_drawn() -> None:
    q = torch.tensor([[1, 2], [15, 0], [7, 8]], dtype=torch.uint8)
    assert pack_nibbles(q).tolist() == [[0xF1, 0x02], [0x07, 0x08]]


@hypothesis.given(shapes(), st.sampled_from([4, 8]), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_dequantize_is_exact(shape: tuple[int, int, int], bits: int, integer: bool, halves: bool, seed: int) -> None:
    w = random_quant_weight(*shape, seed=seed, bits=bits, integer_zero=integer)
    if halves:
        w = QuantWeight.from_codes(w.codes(), w.scale.half(), w.zero.half(), w.group_size, bits)
        assert w.scale.dtype == w.zero.dtype == torch.float16
    assert torch.equal(w.dequantize(), exact_dequantize(w))
    assert torch.allclose(w.dequantize().double(), dequantize64(w), rtol=0, atol=2**-22)
    assert torch.equal(w.dequantize(torch.bfloat16), exact_dequantize(w).bfloat16())


@hypothesis.given(shapes(), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_columns_are_columns(shape: tuple[int, int, int], bits: int, seed: int) -> None:
    w = random_quant_weight(*shape, seed=seed, bits=bits, bias=True)
    W = w.dequantize()
    for n in (torch.randint(0, w.N, (2, 3)), torch.tensor(w.N - 1), torch.empty(0, dtype=torch.long)):
        assert torch.equal(w.columns(n), W.t()[n])


def test_large_weights_are_exact_across_slabs() -> None:
    """Odd slabs: with N above 2²¹ / 4 rows the slab boundary falls between the two codes of a byte."""
    for K, N, G in ((13, 700_000, 5), (7, 2_200_000, 7)):
        w = random_quant_weight(K, N, G, seed=1)
        assert torch.equal(w.dequantize(), exact_dequantize(w))


def test_rows_in_another_order_are_the_same_weight() -> None:
    """Stored rows are those of inputs perm[i]: W is put in order, codes and rows are not; 100 = 3 · 32 + 4."""
    W = random_quant_weight(100, 24, 32, seed=3)
    w = with_random_perm(W)
    assert w.perm is not None
    order = w.perm.argsort()
    assert torch.equal(w.dequantize(), W.dequantize()[order])
    assert torch.equal(dequantize64(w), dequantize64(W)[order])
    assert torch.equal(w.mean(), w.dequantize())
    assert torch.equal(w.columns(torch.tensor([5, 0])), w.dequantize()[:, [5, 0]].t())
    assert torch.equal(w.rows(30, 70), W.rows(30, 70))
    assert torch.equal(w.codes(), W.codes())
    assert torch.equal(w.stored.dequantize(), W.dequantize())
    assert w.nbytes == W.nbytes + 400


def test_dense_weight_answers_alike() -> None:
    w = random_dense_weight(5, 3, seed=0, bias=True)
    assert (w.K, w.N) == (5, 3)
    assert torch.equal(w.dequantize(), w.weight.t())
    assert torch.equal(w.columns(torch.tensor([2, 0])), w.weight[[2, 0]])
    assert w.nbytes == 4 * (15 + 3)


def test_nbytes_counts_codes_parameters_and_bias() -> None:
    w = random_quant_weight(65, 8, 32, seed=0, bias=True)
    assert w.nbytes == 33 * 8 + 2 * 4 * 3 * 8 + 4 * 8


def test_halves_only_where_exact() -> None:
    q = torch.zeros(4, 2, dtype=torch.uint8)
    exact, inexact = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.5, 0.1]])
    assert QuantWeight.from_codes(q, exact, exact, 4).scale.dtype == torch.float16
    for scale, zero in ((exact, inexact), (inexact, exact)):
        w = QuantWeight.from_codes(q, scale, zero, 4)
        assert w.scale.dtype == w.zero.dtype == torch.float32
        assert torch.equal(w.scale, scale)
        assert torch.equal(w.zero, zero)
    wide = torch.tensor([[1e6, 1e-9]])  # beyond the range of fp16 on either side
    assert torch.equal(QuantWeight.from_codes(q, wide, wide, 4).scale, wide)
    brain = torch.tensor([[0.5, 2.0**-30]], dtype=torch.bfloat16)
    assert torch.equal(QuantWeight.from_codes(q, brain, brain, 4).scale, brain.float())


@pytest.mark.parametrize("size", [1e-7, 1e-6, 3e-5])
def test_tiny_groups_keep_their_values(size: float) -> None:
    """NUM-10: a group of near-zero weights beside a normal one; fp16 would store its scale as 0 or a subnormal."""
    scale = torch.tensor([[2 * size / 15], [0.01]])
    zero = torch.tensor([[-size], [-0.08]])
    q = torch.arange(32, dtype=torch.uint8).reshape(32, 1) % 16
    w = QuantWeight.from_codes(q, scale, zero, 16)
    W = w.dequantize()
    assert torch.equal(W, exact_dequantize(w))
    assert W[:16].abs().max() <= size * (1 + 1e-6)
    assert W[:16].unique().numel() == 16


def test_every_code_with_every_integer_zero() -> None:
    """GRP-11 and GRP-13: zero points 0, 8 and 15 beside each other, all 16 codes under each."""
    q = torch.arange(16, dtype=torch.uint8).repeat(16)[:, None]
    z = torch.arange(16.0)[:, None]
    scale = torch.rand(16, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    w = QuantWeight.from_codes(q, scale, -z * scale, 16, integer_zero=True)
    assert torch.equal((-w.zero / w.scale).round(), z)
    exact = (q.double() - z.double().repeat_interleave(16, 0)) * scale.double().repeat_interleave(16, 0)
    assert torch.allclose(w.dequantize().double(), exact, rtol=0, atol=2**-20)
    assert torch.equal(w.codes(), q)


def test_one_group_per_column_is_the_same_weight() -> None:
    """GRP-08: G = K against the same parameters repeated for two groups."""
    one = random_quant_weight(256, 8, 256, seed=3)
    two = QuantWeight.from_codes(one.codes(), one.scale.repeat(2, 1), one.zero.repeat(2, 1), 128)
    assert one.groups == 1
    assert torch.equal(one.dequantize(), two.dequantize())


@pytest.mark.parametrize(
    ("K", "N", "G"), [(256, 8, 32), (256, 48, 32), (256, 1000, 128), (256, 32001, 128), (768, 8, 128), (100, 4, 64)]
)
def test_odd_shapes_stay_themselves(K: int, N: int, G: int) -> None:
    """SHP-06 to SHP-09: no padding shows, and the short last group has its own parameters."""
    w = random_quant_weight(K, N, G, seed=0)
    assert w.dequantize().shape == (K, N)
    assert torch.equal(w.dequantize(), exact_dequantize(w))
    x = torch.randn(2, K, generator=torch.Generator().manual_seed(0))
    y = matmul64(x, w)
    assert y.shape == (2, N)
    assert torch.allclose(y, x.double() @ w.dequantize().double(), atol=1e-4)


Q = torch.zeros(64, 8, dtype=torch.uint8)
S, Z = parameters(64, 8, 32)
NAN = torch.full_like(Z, float("nan"))

REFUSED = {
    "code 16": ({"q": Q + 16}, r"q spans 16\.\.16; 4-bit codes lie in 0\.\.15"),
    "code -1": ({"q": Q.to(torch.int8) - 1}, r"q spans -1\.\.-1; 4-bit codes lie in 0\.\.15"),
    "code 256": ({"q": Q.to(torch.int32) + 256, "bits": 8}, r"q spans 256\.\.256; 8-bit codes lie in 0\.\.255"),
    "float codes": ({"q": Q.float()}, r"q is torch\.float32 \[64, 8\]; codes are integers \[K, N\]"),
    "codes in one row": ({"q": Q.flatten()}, r"q is torch\.uint8 \[512\]; codes are integers \[K, N\]"),
    "NaN zero": ({"zero": NAN}, r"zero has 16 values that are NaN or infinite"),
    "infinite scale": ({"scale": S / 0}, r"scale has 16 values that are NaN or infinite"),
    "beyond fp32": ({"scale": S.double() * 1e300}, r"scale has 16 values that are NaN or infinite"),
    "uint8 zeros": ({"zero": Z.to(torch.uint8)}, r"zero is torch\.uint8; give floats \(zero = −z·scale"),
    "packed int32 zeros": ({"zero": torch.zeros(2, 1, dtype=torch.int32)}, r"zero is torch\.int32; give floats"),
    "zeros [K/G, N/8]": ({"zero": Z[:, :1]}, r"zero is torch\.float16 \[2, 1\]; .* needs float16 or float32 \[2, 8\]"),
    "zeros [N, K/G]": ({"zero": Z.t()}, r"zero is torch\.float16 \[8, 2\]; .* needs float16 or float32 \[2, 8\]"),
    "scales of another group": ({"group_size": 16}, r"scale is .* \[2, 8\]; K=64, N=8, group 16 needs .* \[4, 8\]"),
    "group over K": ({"group_size": 128}, r"group_size=128 must be in 1\.\.K=64 \(K itself: one group per column\)"),
    "group 0": ({"group_size": 0}, r"group_size=0 must be in 1\.\.K=64"),
    "group -1": ({"group_size": -1}, r"group_size=-1 must be in 1\.\.K=64 \(K itself: one group per column\)"),
    "3 bits": ({"bits": 3}, r"bits=3 is not supported"),
    "no rows": ({"q": Q[:0]}, r"must be in 1\.\.K=0"),
    "short bias": ({"bias": torch.zeros(7)}, r"bias is torch\.float32 \[7\]; N=8 needs floats \[8\]"),
    "integer bias": ({"bias": torch.zeros(8, dtype=torch.int32)}, r"bias is torch\.int32 \[8\]; N=8 needs floats"),
    "permutation of int64": ({"perm": torch.arange(64)}, r"perm is torch\.int64 \[64\]; K=64 needs int32 \[64\]"),
    "short permutation": ({"perm": torch.arange(63).int()}, r"perm is torch\.int32 \[63\]; K=64 needs int32 \[64\]"),
    "an input twice": ({"perm": torch.zeros(64).int()}, r"perm is no permutation of 0\.\.63"),
    "an input too far": ({"perm": torch.arange(1, 65).int()}, r"perm is no permutation of 0\.\.63"),
    "half an integer zero": ({"zero": Z - 0.25, "integer_zero": True}, r"16 zeros are not −z·scale for a z in 0\.\.15"),
    "integer zero 16": ({"zero": -16 * S, "integer_zero": True}, r"16 zeros are not −z·scale for a z in 0\.\.15"),
    "integer zero -1": ({"zero": S, "integer_zero": True}, r"16 zeros are not −z·scale for a z in 0\.\.15"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    change, text = REFUSED[case]
    arguments = {"q": Q, "scale": S, "zero": Z, "group_size": 32}
    QuantWeight.from_codes(**arguments)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=text):
        QuantWeight.from_codes(**arguments | change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packed": Q}, r"packed codes are torch\.uint8 \[64, 8\]; K=64 at 4 bits needs uint8 \[32, N\]"),
        ({"packed": Q[:32].to(torch.int32)}, r"packed codes are torch\.int32 \[32, 8\]"),
        ({"scale": S.bfloat16()}, r"scale is torch\.bfloat16"),
        ({"zero": Z.half()}, r"scale is torch\.float32 but zero is torch\.float16; store both alike"),
    ],
)
def test_packed_refusals(change: dict[str, torch.Tensor], text: str) -> None:
    w = QuantWeight(Q[:32], S, Z, K=64, group_size=32)
    with pytest.raises(FormatError, match=text):
        dataclasses.replace(w, **change)  # type: ignore[arg-type]


def test_dense_refusals() -> None:
    with pytest.raises(FormatError, match=r"weight is torch\.int32 \[2, 2\]; dense weights are fp16, bf16 or fp32"):
        DenseWeight(torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(FormatError, match=r"bias is torch\.float32 \[3\]; N=2 needs floats \[2\]"):
        DenseWeight(torch.zeros(2, 4), torch.zeros(3))


def every_kind() -> list[LinearWeight]:
    w = random_quant_weight(70, 24, 32, seed=0, bias=True)
    channels = [with_random_channel(w, kind) for kind in ("frac4", "sign_bit")]
    dense = random_dense_weight(70, 24, seed=0, bias=True)
    return [w, with_random_perm(w), *channels, random_quant_weight(70, 24, 32, seed=0, bits=8), dense]


@pytest.mark.parametrize("w", every_kind(), ids=lambda w: type(w).__name__)
def test_a_weight_moves_whole(w: LinearWeight) -> None:
    """`meta` stands for another device: whatever is made of a moved weight's tensors must be made beside them."""
    assert w.to("cpu") is w
    moved = w.to("meta")
    for f in dataclasses.fields(w):
        before, after = getattr(w, f.name), getattr(moved, f.name)
        if isinstance(before, torch.Tensor):
            assert after.device.type == "meta", f.name
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
        else:
            assert after == before
    assert moved.dequantize().device.type == "meta"
    assert moved.columns(torch.zeros(3, dtype=torch.int64, device="meta")).shape == (3, 70)


@pytest.mark.gpu
@pytest.mark.parametrize("w", every_kind(), ids=lambda w: type(w).__name__)
def test_a_weight_on_a_gpu_is_the_same(w: LinearWeight) -> None:
    moved = w.to("cuda")
    n = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(moved.dequantize().cpu(), w.dequantize())
    assert torch.equal(moved.columns(n.cuda()).cpu(), w.columns(n))
    if isinstance(w, QuantWeight) and isinstance(moved, QuantWeight):
        assert torch.equal(moved.mean().cpu(), w.mean())
        assert torch.equal(moved.rounding(3).packed.cpu(), w.rounding(3).packed)
        assert torch.equal(moved.to("cpu").packed, w.packed)
