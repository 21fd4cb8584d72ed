"""The device format: golden words, the definition element by element, inverses, padding, memory, refusals."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyloop as tl
from helpers import random_dense_weight, random_quant_weight, tiny_checkpoint
from tinyloop import marlin
from tinyloop.errors import InputError
from tinyloop.marlin import MarlinWeight
from tinyloop.model import Model
from tinyloop.pack import PackedWeight
from tinyloop.reference import dequantize64

Tensor = torch.Tensor

# q[k, n] = ((40503k + 30011n + 97kn) >> 7) mod 16, s[g, n] = (1 + (5g + 3n) mod 61) / 1024: bytes of B and S, hashed.
GOLDEN = [
    (128, 256, 128,
     "dbb12a5d1277d8b9d069364ba4b391043f0fff08cd9b034270932a9d4a069fc3",
     "2981d1db2b7c4b678c7facc92b87676190a17f2a8e9105ede8af33de423de919"),
    (128, 256, -1,
     "dbb12a5d1277d8b9d069364ba4b391043f0fff08cd9b034270932a9d4a069fc3",
     "2981d1db2b7c4b678c7facc92b87676190a17f2a8e9105ede8af33de423de919"),
    (256, 256, 128,
     "c867c7ebad2bcce87f4c3f4cfabc427be499b05b3f65eee85a8c781b3b8e5555",
     "89d5146e837bdd8f0c019651999a8dae818740e5b732e860c829797500ca3585"),
    (512, 768, 128,
     "f5999cb013d6bb949e9d6c5733fe4bf994597e018812f5ee700e045387da595c",
     "62ac34b79dab9ab329d846b782971e28dfc7802532c6eb7447a32485592407b1"),
    (512, 768, -1,
     "f5999cb013d6bb949e9d6c5733fe4bf994597e018812f5ee700e045387da595c",
     "48f01cb51ac702f91be2e47e157e738c5720ce64bac008d3021f4534205ce564"),
]  # fmt: skip
FIRST_WORDS = ["a6fc7330", "e94f0bb7", "3d83824e", "70d609c6"]  # of (512, 768, 128)
LAST_WORDS = ["c139f4b1", "e35a5a27", "148cbf8c", "36ad24e2"]
FIRST_SCALES = [0.0009765625, 0.0244140625, 0.0478515625, 0.01171875, 0.03515625, 0.05859375]

GROUPS = (32, 64, 96, 128, 256, -1)


def golden_inputs(K: int, N: int, G: int) -> tuple[Tensor, Tensor]:
    k, n = torch.arange(K)[:, None], torch.arange(N)
    groups = torch.arange(1 if G == -1 else K // G)[:, None]
    q = ((40503 * k + 30011 * n + 97 * k * n) >> 7) % 16
    return q.to(torch.uint8), ((1 + (5 * groups + 3 * n) % 61) / 1024).half()


def codes(K: int, N: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (K, N), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def parameters(rows: int, N: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scales that fp16 holds exactly, zeros that it does not."""
    g = torch.Generator().manual_seed(seed)
    scale = (0.01 + 0.02 * torch.rand(rows, N, generator=g)).half()
    return scale, -15 * scale.float() * torch.rand(rows, N, generator=g)


def rows_of(K: int, G: int) -> int:
    return 1 if G == -1 else -(-K // G)


def sha(t: Tensor) -> str:
    return hashlib.sha256(t.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("K", "N", "G", "B_sha", "S_sha"), GOLDEN)
def test_golden_values(K: int, N: int, G: int, B_sha: str, S_sha: str) -> None:
    q, scale = golden_inputs(K, N, G)
    B, S = tl.marlin_pack_symmetric(q, scale, G)
    assert (B.dtype, list(B.shape)) == (torch.int32, [K // 16, 2 * N])
    assert (S.dtype, list(S.shape)) == (torch.float16, list(scale.shape))
    assert (sha(B), sha(S)) == (B_sha, S_sha)
    back, scale_back = tl.marlin_unpack_symmetric(B, S, G)
    assert torch.equal(back, q)
    assert torch.equal(scale_back, scale)


def test_golden_words_are_readable() -> None:
    """Words of the fourth case, so that a wrong packer shows more than a wrong hash."""
    B, S = tl.marlin_pack_symmetric(*golden_inputs(512, 768, 128), 128)
    assert [f"{w & 0xFFFFFFFF:08x}" for w in B[0, :4].tolist()] == FIRST_WORDS
    assert [f"{w & 0xFFFFFFFF:08x}" for w in B[-1, -16:-12].tolist()] == LAST_WORDS
    assert S[0, :6].tolist() == FIRST_SCALES


def test_every_nibble_is_where_the_definition_has_it() -> None:
    """Lane 4r + t, word j, nibble i holds element [0, 2, 4, 6, 1, 3, 5, 7][i] of (n = r, then r + 8) × (k = 2t, …)."""
    K, N = 144, 128
    q = codes(K, N)
    B, _ = tl.marlin_pack_symmetric(q, torch.ones(1, N).half())
    place = torch.randint(0, K * N, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for k, n in ((p // N, p % N) for p in place):
        lane = [(r, t) for r in range(8) for t in range(4) if n % 8 == r and k % 8 in (2 * t, 2 * t + 1)]
        ((r, t),) = lane
        elements = [(2 * t + dk, r + dn) for dn in (0, 8) for dk in (0, 1, 8, 9)]
        nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(elements.index((k % 16, n % 16)))
        word = int(B[k // 16, 128 * (n // 64) + 4 * (4 * r + t) + n % 64 // 16])
        assert word >> 4 * nibble & 15 == int(q[k, n])


@pytest.mark.parametrize("K", [128, 256, 300])
def test_one_group_over_k_is_the_sentinel(K: int) -> None:
    """group_size == K, −1 and one row of scales are one thing, and a grouped order is another."""
    N = 128
    w = random_quant_weight(K, N, K, seed=0)
    assert MarlinWeight.of(w).group_size == -1
    q, scale = codes(K, N), parameters(1, N)[0]
    by_size, by_sentinel, derived = (tl.marlin_pack_symmetric(q, scale, G) for G in (K, -1, None))
    for B, S in (by_sentinel, derived):
        assert torch.equal(B, by_size[0])
        assert torch.equal(S, by_size[1])
    grouped = tl.marlin_pack_symmetric(q, scale.expand(-(-K // 64), N), 64)[1]
    assert not torch.equal(grouped[0], by_size[1][0])
    assert marlin.marlin_group_size(K, K) == marlin.marlin_group_size(-1, K) == -1
    assert marlin.marlin_group_size(32, K) == 32


@given(
    K=st.integers(1, 400), N=st.integers(1, 200), G=st.sampled_from((*GROUPS, 0)), seed=st.integers(0, 9),
)  # fmt: skip
def test_round_trip(K: int, N: int, G: int, seed: int) -> None:
    G = -1 if G > K else G or K
    rows = rows_of(K, G)
    q, (scale, zero) = codes(K, N, seed), parameters(rows, N, seed)
    B, S, delta = tl.marlin_pack_asymmetric(q, scale, zero, G)
    Kp, Np = -(-K // 128) * 128, -(-N // 64) * 64
    assert list(B.shape) == [Kp // 16, 2 * Np]
    assert list(S.shape) == list(delta.shape) == [1 if rows == 1 and G in (-1, K) else -(-Kp // G), Np]
    got = tl.marlin_unpack_asymmetric(B, S, delta, G, K, N)
    assert torch.equal(got[0], q)
    assert torch.equal(got[1], scale)
    exact = zero.double()
    rounding = 2.0**-24 * ((exact + 8 * scale.double()).abs() + exact.abs())  # delta's, and the subtraction's
    assert bool(((got[2].double() - exact).abs() <= rounding * (1 + 2**-20)).all())


@pytest.mark.parametrize("G", GROUPS)
def test_padding_is_nothing(G: int) -> None:
    """Padded rows and columns have code 8, scale 0 and delta 0, in every place that a kernel may read."""
    K, N = 301, 70
    scale, zero = parameters(rows_of(K, G), N)
    B, S, delta = tl.marlin_pack_asymmetric(codes(K, N), scale, zero, G)
    K_whole = 384 if G == -1 else None
    q, scales, zeros = tl.marlin_unpack_asymmetric(B, S, delta, G, K_whole)
    assert bool((q[K:] == 8).all())
    assert bool((q[:, N:] == 8).all())
    rows = rows_of(K, G)
    for t in (scales, zeros):
        assert not t[rows:].any()
        assert not t[:, N:].any()


@pytest.mark.parametrize(("K", "G"), [(256, 64), (300, 96), (129, 129), (96, 32)])
def test_marlin_weight_from_packed_nibbles(K: int, G: int) -> None:
    """Nothing passes through codes [K, N], yet the words are those of the public packer."""
    N = 72
    w = random_quant_weight(K, N, G, seed=3)
    m = MarlinWeight.of(w)
    assert (m.K, m.N, m.Kp, m.Np, m.groups) == (K, N, -(-K // 128) * 128, 128, w.groups)
    assert m.S.dtype == torch.float32  # random scales are not fp16's
    assert torch.equal(m.B, tl.marlin_pack_symmetric(w.codes(), w.scale, m.group_size)[0])
    assert m.nbytes == m.B.nbytes + m.S.nbytes + m.delta.nbytes
    assert m.overhead == m.nbytes - w.packed.nbytes - w.scale.nbytes - w.zero.nbytes
    q, scale, zero = m.unpack()
    again = dequantize64(tl.QuantWeight.from_codes(q, scale, zero, G))
    assert torch.equal(q, w.codes())
    assert torch.equal(scale, w.scale)
    assert float((again - dequantize64(w)).abs().max()) <= 2.0**-23 * float(m.delta.abs().max() + w.zero.abs().max())


@pytest.mark.parametrize("zeros", ["fp16", "whole", "any"])
def test_delta_in_two_parts(zeros: str) -> None:
    """Of groups of 32 and 96 with scales in fp16: no bit is lost of zeros that fp16 holds or that are whole scales, and
    of others 2⁻¹² of a scale at most; none where the scale is 0."""
    g = torch.Generator().manual_seed(0)
    for G in (32, 96):
        groups = 384 // G
        scale = ((0.5 + torch.rand(groups, 72, generator=g)) * 0.01).half().float()
        z = 15 * torch.rand(groups, 72, generator=g)
        zero = -(z.round() if zeros == "whole" else z) * scale
        zero = zero.half().float() if zeros == "fp16" else zero
        scale[0, 0], zero[0, 0] = 0, 0.25
        w = tl.QuantWeight.from_codes(codes(384, 72), scale, zero, G)
        m = MarlinWeight.of(w)
        assert m.in_parts
        assert m.nbytes == marlin.packed_bytes(w)
        q, s, again = m.unpack()
        assert torch.equal(q, w.codes())
        assert torch.equal(s.float(), scale)
        lost = (again.double() - zero.double()).abs()
        assert bool((lost <= 1.01 * 2.0**-12 * scale).all())  # half a unit of the last of eleven bits of scale / 2
        assert bool((lost > 0).any()) == (zeros == "any")


def test_small_scales_lose_no_more_of_delta() -> None:
    """Below 2⁻¹³ fp16 is short of places for the second part, so that scales are fp32 there, unless it is 0."""
    g = torch.Generator().manual_seed(0)
    z = 15 * torch.rand(4, 64, generator=g)
    for exponent, whole, parts in ((-12, False, True), (-16, False, False), (-20, False, False), (-20, True, True)):
        scale = torch.full((4, 64), 2.0**exponent)
        zero = -(z.round() if whole else z) * scale
        m = MarlinWeight.of(tl.QuantWeight.from_codes(codes(128, 64), scale, zero, 32))
        assert m.in_parts == parts, exponent
        assert bool(((m.unpack()[2] - zero).abs() <= 1.01 * 2.0**-12 * scale).all()), exponent


def test_delta_is_whole_where_two_parts_would_lose_it() -> None:
    """Groups of 64; scales that fp16 does not hold; a group of scale 0 whose zero it does not."""
    scale, zero = torch.full((4, 64), 2.0**-6), torch.full((4, 64), -0.1)
    assert MarlinWeight.of(tl.QuantWeight.from_codes(codes(128, 64), scale, zero, 32)).in_parts
    assert not MarlinWeight.of(tl.QuantWeight.from_codes(codes(256, 64), scale, zero, 64)).in_parts
    for place, value in ((scale, 0.3), (zero, 0.3), (zero, 1e9), (zero, 1e-9)):
        changed = place.clone()
        changed[0, 0] = value
        s, z = (changed, zero) if place is scale else (scale.clone(), changed)
        s[0, 0] = s[0, 0] if place is scale else 0
        m = MarlinWeight.of(tl.QuantWeight.from_codes(codes(128, 64), s, z, 32))
        assert m.S.dtype == torch.float32
        assert not m.in_parts
        lost = (m.unpack()[2] - z)[0, 0].abs()
        assert float(lost) <= 2.0**-23 * float(8 * s[0, 0] + z[0, 0].abs())


def test_scales_are_halves_only_where_that_is_exact() -> None:
    q, (scale, _) = codes(128, 64), parameters(2, 64)
    for tiny in (0.0, 2.0**-24, 2.0**-15):  # fp16 holds these, two of them as subnormal numbers
        halves = scale.clone()
        halves[0, 0] = tiny
        w = tl.QuantWeight.from_codes(q, halves.float(), -7 * halves.float(), 64)
        assert MarlinWeight.of(w).S.dtype == torch.float16
        assert torch.equal(tl.marlin_pack_symmetric(q, halves)[1].sort().values, halves.sort().values)
    odd = scale.float()
    odd[1, 5] = 1e-7
    m = MarlinWeight.of(tl.QuantWeight.from_codes(q, odd, -7 * odd, 64))
    assert m.S.dtype == torch.float32
    assert torch.equal(m.unpack()[1], odd)


def test_all_codes_with_all_integer_zeros_survive() -> None:
    """GRP-13: no code and no zero point collapses; −z·scale comes back to the bit."""
    q = torch.arange(16, dtype=torch.uint8).repeat_interleave(8)[:, None].expand(128, 64).contiguous()
    scale = torch.full((4, 64), 0.0123).half()
    zero = -(torch.arange(64) % 16) * scale.float()
    B, S, delta = tl.marlin_pack_asymmetric(q, scale, zero, 32)
    for got, want in zip(tl.marlin_unpack_asymmetric(B, S, delta, 32), (q, scale, zero), strict=True):
        assert torch.equal(got, want)


def test_strided_codes_pack_as_they_read() -> None:
    q, scale = codes(128, 192), parameters(4, 192)[0]
    strided = q.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(tl.marlin_pack_symmetric(strided, scale)[0], tl.marlin_pack_symmetric(q, scale)[0])


BAD = {
    "code 16": ({"q": codes(256, 64).index_fill(0, torch.tensor([7]), 16)}, "q goes up to 16; codes lie in 0..15"),
    "code −1": ({"q": codes(256, 64).to(torch.int8) - 1}, r"q is torch.int8 \[256, 64\]; codes are uint8"),
    "codes of int32": ({"q": codes(256, 64).int()}, "q is torch.int32 .* codes are uint8"),
    "one dimension": ({"q": codes(256, 64)[0]}, r"q is torch.uint8 \[64\]"),
    "nothing": ({"q": codes(256, 0)}, r"\[256, 0\]; .* K and N ≥ 1"),
    "transposed": (
        {"q": codes(64, 256), "group_size": 32},
        r"scale .* \[8, 64\]; q \[64, 256\] .* \[2, 256\]",
    ),
    "packed zeros": ({"zero": torch.zeros(8, 8, dtype=torch.int32)}, r"zero is torch.int32 \[8, 8\]; .* \[8, 64\]"),
    "integer zeros": ({"zero": torch.zeros(8, 64, dtype=torch.uint8)}, "zero is torch.uint8 .* zero = −z·scale"),
    "zeros [N, groups]": ({"zero": torch.zeros(64, 8)}, r"zero is torch.float32 \[64, 8\]; .* \[8, 64\]"),
    "NaN zero": ({"zero": torch.full((8, 64), torch.nan)}, "zero has 512 values that are NaN"),
    "infinite scale": ({"scale": torch.full((8, 64), torch.inf)}, "scale has 512 values that are NaN or infinite"),
    "large scale": ({"scale": torch.full((8, 64), 7e4)}, r"scale has 512 values .* worst is 7e\+04; MarlinWeight.of"),
    "small scale": ({"scale": torch.full((8, 64), 1.1e-6)}, "worst is 1.1e-06"),
    "vanishing scale": ({"scale": torch.full((8, 64), 1e-9)}, "worst is 1e-09"),
    "overflow": ({"zero": torch.full((8, 64), 1e39, dtype=torch.float64)}, "zero has 512 values .* infinite in fp32"),
    "group 48": ({"group_size": 48}, "group_size=48 is neither a multiple of 32 below K=256, nor K or −1"),
    "group 0": ({"group_size": 0}, "group_size=0 is neither"),
    "group 512": ({"group_size": 512}, "group_size=512 is neither a multiple of 32 below K=256"),
    "another group": (
        {"group_size": 128},
        r"scale is torch.float32 \[8, 64\]; .*group_size=128 needs floats \[2, 64\]",
    ),
    "no group": ({"scale": torch.ones(7, 64)}, r"no group size follows from K=256 and scale \[7, 64\]"),
    "scale of one dimension": ({"scale": torch.ones(64)}, r"no group size follows from K=256 and scale \[64\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    given = {"q": codes(256, 64), "scale": torch.full((8, 64), 0.01), "zero": torch.zeros(8, 64), "group_size": None}
    changed, message = BAD[case]
    tl.marlin_pack_asymmetric(**given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        tl.marlin_pack_asymmetric(**given | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": torch.zeros(8, 64, dtype=torch.int32)}, r"B is torch.int32 \[8, 64\]; packed codes are int32"),
        ({"B": torch.zeros(8, 128)}, "B is torch.float32"),
        ({"K": 100, "group_size": 64}, "K=100, N=64 do not pad to B"),
        ({"K": 257}, "K=257, N=64 do not pad to B"),
        ({"N": 0}, "K=256, N=0 do not pad to B"),
        ({"S": torch.zeros(4, 64)}, r"S is torch.float32 \[4, 64\] on cpu; .*group_size=32 goes with floats \[8, 64\]"),
        ({"delta": torch.zeros(8, 64).half()}, "delta is torch.float16; it is float32"),
        ({"delta": torch.zeros(8, 128)}, r"delta is torch.float32 \[8, 128\]"),
        ({"group_size": 40}, "group_size=40 is neither"),
    ],
)
def test_bad_packed_input(change: dict[str, object], message: str) -> None:
    B, S, delta = tl.marlin_pack_asymmetric(codes(256, 64), torch.full((8, 64), 0.01), torch.zeros(8, 64))
    given: dict[str, object] = {"B": B, "S": S, "delta": delta, "group_size": 32}
    tl.marlin_unpack_asymmetric(**given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        tl.marlin_unpack_asymmetric(**given | change)  # type: ignore[arg-type]


def test_refusals() -> None:
    refused = {
        "codes have 8 bits; the device format holds 4-bit codes": random_quant_weight(64, 64, 32, seed=0, bits=8),
        "group_size=48 is neither a multiple of 32 below K=96": random_quant_weight(96, 64, 48, seed=0),
        "the weight is dense": random_dense_weight(64, 64, seed=0),
        "NaN or infinite": tl.QuantWeight(
            torch.zeros(32, 64, dtype=torch.uint8), torch.full((2, 64), 3e38), torch.full((2, 64), -3e38), 64, 32
        ),
    }
    for reason, w in refused.items():
        assert reason in (marlin.refusal(w) or "")
    with pytest.raises(InputError, match="cannot be packed in device order: codes have 8 bits"):
        MarlinWeight.of(random_quant_weight(64, 64, 32, seed=0, bits=8))
    for w in (random_quant_weight(96, 64, 96, seed=0), random_quant_weight(100, 1, 32, seed=0)):
        assert marlin.refusal(w) is None


@pytest.mark.parametrize(("K", "N", "G"), [(256, 128, 64), (300, 70, 32), (129, 64, 129), (130, 1, 128)])
def test_bytes_are_foreseen(K: int, N: int, G: int) -> None:
    exact = random_quant_weight(K, N, G, seed=0)
    halves = tl.QuantWeight.from_codes(exact.codes(), exact.scale.half(), exact.zero.half(), G)
    for w in (exact, halves):
        assert marlin.packed_bytes(w) == MarlinWeight.of(w).nbytes


def test_report_of_a_model_on_a_cpu() -> None:
    """It foresees what a GPU would hold, and makes nothing. At group 64, K = 96 is a group and a half."""
    model = Model(tiny_checkpoint(tied=False, group=64), torch.float32)
    eight = random_quant_weight(64, 128, 32, seed=0, bits=8)
    odd = random_quant_weight(64, 96, 48, seed=0)
    model.weights |= {"layers.0.attn_qkv": PackedWeight(eight), "layers.1.mlp_up": PackedWeight(odd)}
    model.weights["layers.2.mlp_up"] = PackedWeight(odd)
    report = tl.pack_model_for_marlin(model)
    assert report.device is None
    assert report.packed.keys() | report.refused.keys() == model.weights.keys()
    made = {name: MarlinWeight.of(model.weights[name].weight) for name in report.packed}  # type: ignore[arg-type]
    assert report.packed == {name: m.nbytes for name, m in made.items()}
    assert report.overhead == sum(m.overhead for m in made.values())
    assert not any(w.layouts for w in model.weights.values())
    printed = str(report).splitlines()
    assert printed[0].startswith(f"{len(made)} weights would be packed on a GPU: 0.1 MB, +0.1 MB beside the canonical")
    assert printed[1:] == [
        "embed not packed: its rows are looked up, never multiplied",
        "layers.0.attn_qkv not packed: codes have 8 bits; the device format holds 4-bit codes",
        f"layers.1.mlp_up and 1 more not packed: {marlin.refusal(odd)}",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_report_of_a_model_on_a_gpu(dtype: torch.dtype) -> None:
    model = Model(tiny_checkpoint(), dtype, device="cuda")
    report = tl.pack_model_for_marlin(model)
    assert report.device == str(model.device)
    if dtype == torch.float32:
        assert not report.packed
        assert all("activations are float32" in reason for reason in report.refused.values())
        return
    assert not report.refused
    assert report.packed == {name: w.layouts["device format"] for name, w in model.weights.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "N", "G"), [(256, 128, 64), (4100, 3000, 128), (300, 70, 300)])
def test_packing_on_a_gpu_is_the_same(K: int, N: int, G: int) -> None:
    w = random_quant_weight(K, N, G, seed=0)
    here = MarlinWeight.of(w)
    for there in (MarlinWeight.of(w, "cuda"), MarlinWeight.of(w.to("cuda"))):
        for a, b in zip((here.B, here.S, here.delta), (there.B, there.S, there.delta), strict=True):
            assert b.is_cuda
            assert torch.equal(a, b.cpu())
        assert torch.equal(there.unpack()[0].cpu(), w.codes())


MEMORY = """
import resource, sys, torch
import tinyloop as tl
from tinyloop.marlin import MarlinWeight

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(2)
K, N, G = 8192, 8192, 32
q = torch.full((K, N), 7, dtype=torch.uint8)
scale = torch.full((K // G, N), 0.5).half()
zero = torch.full((K // G, N), 0.1)
small = tl.marlin_pack_asymmetric(q[:128], scale[:4], zero[:4])  # whatever loads at the first call
w = tl.QuantWeight.from_codes(q[:, :64].contiguous(), scale[:, :64], zero[:, :64], G)
MarlinWeight.of(w)
if sys.argv[1] == "of":
    w = tl.QuantWeight(torch.zeros(K // 2, N, dtype=torch.uint8).fill_(7), scale.float(), zero, K, G)
before = peak()
if sys.argv[1] == "of":
    m = MarlinWeight.of(w)
    result = m.nbytes
else:
    result = sum(t.nbytes for t in tl.marlin_pack_asymmetric(q, scale, zero))
print((peak() - before - result) / q.nbytes)
"""


@pytest.mark.parametrize("what", ["of", "pack"])
def test_memory(what: str) -> None:
    """Beyond its inputs and its result, packing takes less than a fifth of the uint8 codes [K, N]: with the codes
    themselves, 1.2 weights. Measured as the growth of the process's peak, at the smallest group."""
    done = subprocess.run([sys.executable, "-c", MEMORY, what], capture_output=True, text=True, check=True, timeout=280)
    assert float(done.stdout) < 0.2
