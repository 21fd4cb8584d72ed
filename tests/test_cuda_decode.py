"""The device format and the kernels' way of reading it, against each other, without a GPU.

The few lines of the `.cu` files that turn a word into weights, and say where a column's parameters stand, are taken
from the files and evaluated here: what changes on one side alone is found on any machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tinyloop as tl
from helpers import random_quant_weight
from tinyloop.cuda import build
from tinyloop.marlin import MarlinWeight
from tinyloop.reference import dequantize64

KERNELS = Path(build.__file__).parent / "kernels"
Array = Any  # numpy's, of whatever dtype
Pair = tuple[Array, Array]  # the low and the high half of a register


# ---- C to Python: as much of it as the kernels' decoding is written in -----------------------------------------------


@cache
def preprocessed(file: str, **macros: bool) -> str:
    """A file's lines that a compiler sees where the macros that are not given are 0."""
    kept, taken = list[str](), list[bool]()
    for line in (KERNELS / file).read_text("utf-8").splitlines():
        words = re.sub(r"//.*", "", line).split()
        if words[:1] in (["#if"], ["#ifndef"]):
            condition = re.sub(r"\w+", lambda m: str(macros.get(m[0], False)), " ".join(words[1:]))
            condition = condition.replace("&&", "and").replace("!", "not ")
            taken.append(words[0] == "#ifndef" or bool(eval(condition)))
        elif words[:1] == ["#else"]:
            taken[-1] = not taken[-1]
        elif words[:1] == ["#endif"]:
            taken.pop()
        elif all(taken):
            kept.append(line)
    return "\n".join(kept) + "\n"


def body(file: str, head: str, bf16: bool, **macros: bool) -> str:
    """What stands between the braces of the function that begins with `head`, for one 16-bit type."""
    text = preprocessed(file, BF16=bf16, **macros)
    assert text.count(head) == 1, f"{file} has {text.count(head)} functions that begin with {head!r}"
    inside = text[text.index(head) + len(head) :]
    inside = re.split(r"^}|(?<=;) }\n", inside[inside.index("{") + 1 :], maxsplit=1, flags=re.M)[0]
    return re.sub(r"//.*", "", inside)


def python(c: str) -> list[str]:
    """Statements of C as statements of Python."""
    c = re.sub(r"\b(\w+)<([^<>()]+)>\(", r"\1(\2, ", c)  # template arguments come first
    c = re.sub(r"\b(\d+\.\d*)f\b", r"\1", c)
    c = re.sub(r"\bColumn\{(.*)\};", r"Column(\1);", c)
    c = re.sub(r"\b(const )?(u32|float|int) (?=\w+ =)", "", c)
    c = re.sub(r",\s+(?=\w+ = )", ";", c)  # of one declaration
    return [statement.strip() for statement in c.split(";") if statement.strip()]


def evaluate(c: str, names: dict[str, Any]) -> Any:
    """Run statements; what they return, or the names they leave."""
    for statement in python(c):
        if condition := re.match(r"if \((\w+)\) (.*)", statement, flags=re.S):
            if not names[condition[1]]:
                continue
            statement = condition[2]
        if statement.startswith("return "):
            return eval(statement.removeprefix("return ").strip(), names)
        exec(statement, names)
    return names


class Column:
    """A column's parameters: two numbers for arithmetic in fp32, four pairs for that in 16 bits."""

    def __init__(self, *given: Any):
        self.given = given
        names = ("step", "base") if len(given) == 2 else ("scale", "rest", "minus", "fine")
        vars(self).update(zip(names, given, strict=True))
        self.minus_high = given[-1]  # what fp16 has in place of `fine`

    def of_columns(self, i: int) -> Column:
        """Of column i of each lane, shaped as the words are."""
        pairs = len(self.given) == 4
        return Column(*((v[0][..., i], v[1][..., i]) if pairs else v[..., i] for v in self.given))


def byte_perm(x: Array, y: Array | int, selector: int) -> Array:
    """Four bytes chosen among those of x (0 to 3) and of y (4 to 7), the lowest first."""
    source = [v >> 8 * i & 255 for v in (x, y + np.zeros_like(x)) for i in range(4)]
    chosen = [source[selector >> 4 * i & 7] << 8 * i for i in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


def number_of_halves(bf16: bool) -> Callable[[Array], Pair]:
    """Both halves of a register as the numbers they stand for."""

    def read(word: Array) -> Pair:
        halves = [(np.asarray(word, np.uint32) >> s & 0xFFFF).astype(np.uint16) for s in (0, 16)]
        if bf16:
            low, high = ((h.astype(np.uint32) << 16).view(np.float32) for h in halves)
        else:
            low, high = (h.view(np.float16).astype(np.float32) for h in halves)
        return low, high

    return read


def intrinsics(bf16: bool, **macros: bool) -> dict[str, Any]:
    read = number_of_halves(bf16)

    def halves(register: Array | Pair) -> Pair:  # a word, or what an intrinsic made
        return register if isinstance(register, tuple) else read(register)

    def round16(v: Array) -> Array:
        return torch.from_numpy(v).to(torch.bfloat16 if bf16 else torch.float16).float().numpy()

    def fma2(a: Array, b: int, c: int) -> Pair:
        low, high = (x * y + z for x, y, z in zip(halves(a), halves(b), halves(c), strict=True))
        return round16(low), round16(high)

    def weights2(*arguments: Any) -> Pair:
        i, j, bytes_, c = arguments
        inside = body("weight.cuh", "DEVICE u32 weights2(u32 bytes, Column c)", bf16, **macros)
        return evaluate(inside, names | {"I": i, "J": j, "bytes": bytes_, "c": c})  # type: ignore[no-any-return]

    def called(head: str, *parameters: str) -> Callable[..., Any]:
        return lambda *given: evaluate(
            body("weight.cuh", head, bf16, **macros), names | dict(zip(parameters, given, strict=True))
        )

    def reciprocal(v: Array) -> Array:
        with np.errstate(divide="ignore"):
            return (1 / v * np.float32(1 + 2**-22)).astype(np.float32)  # approximate, as the chip's

    names = {
        "add2": lambda a, b: tuple(round16(x + y) for x, y in zip(halves(a), halves(b), strict=True)),
        "fminf": np.fmin,
        "fmaxf": np.fmax,
        "reciprocal": reciprocal,
        "low_half": lambda v: halves(v)[0],
        "low_twice": lambda v: (halves(v)[0],) * 2,
        "high_twice": lambda v: (halves(v)[1],) * 2,
        "low_f16": lambda w: number_of_halves(False)(w)[0],
        "high_f16": lambda w: number_of_halves(False)(w)[1],
        "scale_of": lambda w: w.view(np.float32) if macros.get("SCALE32") else number_of_halves(False)(w)[0],
        "delta_of": called("DEVICE float delta_of(float scale, u32 stored)", "scale", "stored"),
        "make_uint2": lambda x, y: SimpleNamespace(x=x, y=y),
        "ready_column": called("DEVICE uint2 ready_column(u32 scale, u32 delta)", "scale", "delta"),
        "column": called("DEVICE Column column(uint2 v)", "v"),
        "scaled": called("DEVICE u32 scaled(u32 whole, Column c)", "whole", "c"),
        "Column": Column,
        "and_or": lambda mask, magic, w: w & np.uint32(mask) | np.uint32(magic),
        "fma2": fma2,
        "fmaf": lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
        "pack2": lambda low, high: (round16(low), round16(high)),
        "weights2": weights2,
        "__byte_perm": byte_perm,
        "__uint_as_float": lambda w: w.view(np.float32),
        "__float_as_uint": np.float32,
    }
    return names


# ---- the kernels' view of a weight -------------------------------------------------------------------------------


def words(m: MarlinWeight) -> Array:  # uint32 [K/16, N/64, lane, j]
    """The fragments in memory: `B + (step · blocks64 + block) · 32 + lane`, sixteen bytes each."""
    return m.B.numpy().view(np.uint32).reshape(m.Kp // 16, m.Np // 64, 32, 4)


def matrix(fragments: list[Pair]) -> Array:
    """W [K, N] from the fragments a[0..3] of Wᵀ of every lane, as `mma` defines them (ptx.cuh): a[i] is column
    r + 8·(i & 1) of the word's sixteen, its halves k = 2t + 8·(i >> 1) and the one after."""
    steps, blocks, _, _ = fragments[0][0].shape
    W = np.full((steps, 16, blocks, 4, 16), np.nan, np.float32)  # [step, k, block, j, column]
    for lane in range(32):
        r, t = lane >> 2, lane & 3
        for i, (low, high) in enumerate(fragments):
            k, column = 2 * t + 8 * (i >> 1), r + 8 * (i & 1)
            W[:, k, :, :, column], W[:, k + 1, :, :, column] = low[:, :, lane], high[:, :, lane]
    return W.reshape(16 * steps, 64 * blocks)


def parameter_places(column_order: bool, size: int) -> Array:  # [r, i]
    """Where parameter of column 8i + r stands among the 64 of its run."""
    inside = body("weight.cuh", "DEVICE u32 param_offset(int r, int i)", False)
    names = {"COLUMN": column_order, "SIZE": size}
    return np.array([[evaluate(inside, names | {"r": r, "i": i}) // size for i in range(8)] for r in range(8)])


def parameters(m: MarlinWeight, t: torch.Tensor) -> Array:  # uint32 [groups, N/64, lane, i]
    """What a lane has of S or delta as they are stored: i ↔ column 8i + r."""
    stored = t.numpy().view(np.uint16 if t.element_size() == 2 else np.uint32).astype(np.uint32)
    runs = stored.reshape(t.shape[0], m.Np // 64, 64)
    places = parameter_places(m.group_size == -1, t.element_size())
    return runs[:, :, places[np.arange(32) >> 2]]


CASES = [(128, 64, 32), (256, 128, 64), (256, 192, 128), (384, 64, 384), (200, 100, 64), (256, 64, 96), (7, 3, 7)]


@pytest.fixture(params=CASES, ids=lambda case: "×".join(map(str, case)))
def packed(request: pytest.FixtureRequest) -> tuple[Any, MarlinWeight]:
    K, N, G = request.param
    weight = random_quant_weight(K, N, G, seed=1)
    return weight, MarlinWeight.of(weight)


@pytest.mark.parametrize("symmetric", [False, True], ids=["", "symmetric"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
def test_integers_are_exact(packed: tuple[Any, MarlinWeight], bf16: bool, symmetric: bool) -> None:
    """`fold`: the codes less the number that it takes them to be less; without δ that is 8, which padding has."""
    weight, m = packed
    text = preprocessed("tensor_core.cu", BF16=bf16, SYMMETRIC=symmetric)
    (middle,) = (int(n) for n in re.findall(r"constexpr int MIDDLE = (-?\d+);", text))
    assert middle == 8 or not symmetric
    inside = body("tensor_core.cu", "DEVICE void integers(u32 (&a)[4], u32 w)", bf16, SYMMETRIC=symmetric)
    a: list[Any] = [None] * 4
    evaluate(inside, intrinsics(bf16) | {"a": a, "w": words(m)})
    a = [number_of_halves(bf16)(v) if not isinstance(v, tuple) else v for v in a]
    got = matrix(a)
    assert (got[: m.K, : m.N] == weight.codes().numpy().astype(np.float32) - middle).all()
    got[: m.K, : m.N] = 8 - middle
    assert (got == 8 - middle).all()


def decoded(m: MarlinWeight, bf16: bool, **macros: bool) -> Array:  # fp32 [Kp, Np]
    """W as the kernels decode it."""
    macros |= {"SCALE32": m.S.dtype == torch.float32, "IN_PARTS": m.in_parts}
    names = intrinsics(bf16, **macros)
    group = np.arange(m.Kp // 16) * 16 // (m.Kp if m.group_size == -1 else m.group_size)
    scale, delta = parameters(m, m.S)[group], parameters(m, m.delta)[group]
    columns = names["column"](names["ready_column"](scale, delta))
    inside = body("weight.cuh", "DEVICE void weights(u32 (&a)[4], u32 w, Column low, Column high)", bf16, **macros)
    a: list[Any] = [(np.empty(words(m).shape, np.float32), np.empty(words(m).shape, np.float32)) for _ in range(4)]
    for j in range(4):
        of_word: list[Any] = [None] * 4
        low, high = columns.of_columns(2 * j), columns.of_columns(2 * j + 1)
        evaluate(inside, names | {"a": of_word, "w": words(m)[..., j], "low": low, "high": high})
        for i, half in ((i, half) for i in range(4) for half in (0, 1)):
            a[i][half][..., j] = of_word[i][half]
    return matrix(a)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
def test_weights_are_the_weights(packed: tuple[Any, MarlinWeight], bf16: bool) -> None:
    """What fp32 arithmetic gives, rounded once to 16 bits; two roundings may differ by a unit of the last."""
    weight, m = packed
    got = torch.from_numpy(decoded(m, bf16)[: m.K, : m.N]).double()
    W = dequantize64(weight)
    largest = W.abs().max()
    assert (got - W).abs().max() <= largest * 2.0 ** (-8 if bf16 else -11) * 1.01
    assert ((got - W).abs() <= W.abs() * 2.0 ** (-8 if bf16 else -11) + largest * 2.0**-19).all()


@pytest.mark.parametrize("G", [128, 32])
@pytest.mark.parametrize("zeros", ["anywhere", "integer", "far"])
@pytest.mark.parametrize(
    ("bf16", "coarse"), [(False, False), (True, False), (True, True)], ids=["fp16", "bf16", "coarse"]
)
def test_centred_weights_err_no_more_than_rounded_ones(bf16: bool, coarse: bool, zeros: str, G: int) -> None:
    """Sixteen-bit arithmetic with the whole number next to the zero point: against W rounded once, the error of a
    product is the same within some percent, for activations of mean 0 and of mean 1. Scale 0 leaves the zero. Groups of
    32 have δ in two parts."""
    K, N = 512, 128
    generator = np.random.default_rng(0)
    scale = ((0.5 + generator.random((K // G, N))) * 0.01).astype(np.float16).astype(np.float32)
    scale = torch.from_numpy(scale).bfloat16().float().numpy() if coarse else scale
    z = {"anywhere": 15, "integer": 15, "far": 90}[zeros] * generator.random((K // G, N))
    zero = (-(np.rint(z) if zeros == "integer" else z) * scale).astype(np.float32)
    scale[0, 0], zero[0, 0] = 0, 0.25
    codes = torch.from_numpy(generator.integers(0, 16, (K, N), dtype=np.uint8))
    weight = tl.QuantWeight.from_codes(codes, torch.from_numpy(scale), torch.from_numpy(zero), G)
    m = MarlinWeight.of(weight)
    assert m.S.dtype == torch.float16
    assert m.coarse == coarse
    assert m.in_parts == (G == 32)
    got, W = torch.from_numpy(decoded(m, bf16, COARSE=coarse)).double(), dequantize64(weight)
    assert (got[:G, 0] == 0.25).all()
    rounded = W.to(torch.bfloat16 if bf16 else torch.float16).double()
    for mean in (0.0, 1.0):
        x = torch.randn(64, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + mean
        assert (x @ (got - W)).norm() <= 1.1 * (x @ (rounded - W)).norm()


@pytest.mark.parametrize("G", [32, 64])
def test_kernels_read_delta_as_it_is_packed(G: int) -> None:
    """For folding: zero + 8·scale, in two parts to half a unit of the eleven bits of half a scale, whole to fp32's."""
    weight = random_quant_weight(256, 128, G, seed=1)
    scale = weight.scale.half().float()
    m = MarlinWeight.of(dataclasses.replace(weight, scale=scale))
    assert m.in_parts == (G == 32)
    names = intrinsics(False, IN_PARTS=m.in_parts)
    read = names["delta_of"](names["scale_of"](parameters(m, m.S)), parameters(m, m.delta))  # [groups, N/64, lane, i]
    by_column = read.reshape(-1, 2, 8, 4, 8)[:, :, :, 0].transpose(0, 1, 3, 2).reshape(-1, 128)  # column 8i + r
    want = weight.zero.double() + 8 * scale.double()
    bound = 2.0**-12 * scale.double() if m.in_parts else 2.0**-24 * want.abs()
    assert ((torch.from_numpy(by_column.copy()).double() - want).abs() <= bound * 1.001).all()


def test_one_row_is_read_as_any_of_eight() -> None:
    """Row j of a fragment for unit v is row j ^ v of the stage, each sixteen bytes of it where they are swapped to."""
    inside = body("tensor_core.cu", "DEVICE u32 row(u32 at, int u) const", False, ONE_ROW=True, HALVES=True)
    offset = body("tensor_core.cu", "DEVICE u32 x_offset(int row, int unit)", False)
    for first, u, j, unit in itertools.product((0, 2, 4, 6), (0, 1), range(8), range(8)):
        at, there = (evaluate(offset, {"row": row, "unit": unit}) for row in (j, j ^ (first + u)))
        assert evaluate(inside, {"at": at, "unit": first, "u": u}) == there


def test_weights_far_from_zero_keep_their_scales_in_fp32() -> None:
    """Where W crosses zero beyond a hundred scales of the middle, 16-bit arithmetic would not be exact."""
    codes, scale = torch.zeros(128, 64, dtype=torch.uint8), torch.full((1, 64), 2.0**-6)
    for steps, dtype in ((90, torch.float16), (110, torch.float32)):
        weight = tl.QuantWeight.from_codes(codes, scale, torch.full((1, 64), -steps * 2.0**-6), 128)
        assert MarlinWeight.of(weight).S.dtype == dtype


@pytest.mark.parametrize("column_order", [False, True])
@pytest.mark.parametrize(
    ("file", "head"), [("correction.cu", "DEVICE int permuted(int n)"), ("unpack.cu", "DEVICE int place(int n)")]
)
def test_all_kernels_agree_where_parameters_stand(column_order: bool, file: str, head: str) -> None:
    """And no two columns stand in one place."""
    places = parameter_places(column_order, 4)
    assert sorted(places.flat) == list(range(64))
    assert (places == parameter_places(column_order, 2)).all()
    inside = re.sub(r"return COLUMN \? (.*?) : (.*?);", r"if (COLUMN) return \1; return \2;", body(file, head, False))
    for n in range(64):
        assert evaluate(inside, {"COLUMN": column_order, "n": n}) == places[n & 7, n >> 3]
