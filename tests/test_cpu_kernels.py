"""The compiled kernels from below: the panel's bytes, each vector function against float64, the team of threads."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import random_quant_weight, tiny_checkpoint
from tinyloop.dispatch import machine
from tinyloop.model import Model
from tinyloop.weight import QuantWeight

if not machine().numba:
    pytest.skip("numba is not installed", allow_module_level=True)

import numba

from tinyloop.cpu import decode, jit, kernels, panel, product, simd, team

TILE = panel.TILE
F32, BF16 = torch.float32, torch.bfloat16
HALF_ULP = 2**-8  # of bf16, relative


# ── panels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def expected_panel(w: QuantWeight) -> np.ndarray:
    """From the drawing in panel.py, byte by byte."""
    q, G = w.codes().numpy(), w.group_size
    tiles, rows = -(-w.N // TILE), (G + 1) // 2 if w.bits == 4 else G
    scale, zero = w.scale.numpy(), w.zero.numpy()
    record = rows * TILE + 2 * TILE * scale.itemsize
    data = np.zeros((tiles, w.groups, record), np.uint8)
    for n in range(w.N):
        for g in range(w.groups):
            place, column = data[n // TILE, g], n % TILE
            for k in range(g * G, min(g * G + G, w.K)):
                i, half = divmod(k - g * G, 2) if w.bits == 4 else (k - g * G, 0)
                place[i * TILE + column] |= q[k, n] << (4 * half)
            parameters = place[rows * TILE :].view(scale.dtype)
            parameters[column], parameters[TILE + column] = scale[g, n], zero[g, n]
    return data


@pytest.mark.parametrize("half", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("K", "N", "G"), [(1, 1, 1), (64, 32, 32), (64, 33, 32), (7, 40, 3), (100, 31, 64), (33, 5, 33), (128, 64, 128)]
)
def test_panel_is_as_drawn(K: int, N: int, G: int, bits: int, half: bool) -> None:
    w = random_quant_weight(K, N, G, seed=0, bits=bits, bias=True)
    if half:
        w = QuantWeight.from_codes(w.codes(), w.scale.half(), w.zero.half(), G, bits, w.bias)
    p = panel.build(w)
    assert np.array_equal(p.data, expected_panel(w))
    assert (p.K, p.N, p.group_size, p.bits, p.half) == (K, N, G, bits, half)
    assert (p.tiles, p.groups) == (-(-N // TILE), -(-K // G))
    assert np.array_equal(p.bias, w.bias.numpy())
    assert len(p.describe()) == len(kernels.Field)


@pytest.mark.parametrize(("K", "G", "cut"), [(512, 256, 128), (300, 300, 128), (600, 256, 128), (600, 200, 200)])
def test_large_groups_are_cut_where_they_can_be(K: int, G: int, cut: int) -> None:
    w = random_quant_weight(K, 33, G, seed=0)
    repeated = [k // G for k in range(0, K, cut)]
    same = QuantWeight.from_codes(w.codes(), w.scale[repeated], w.zero[repeated], cut)
    assert torch.equal(same.dequantize(), w.dequantize())
    assert np.array_equal(panel.build(w).data, expected_panel(same))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("K", "N", "G"), [(1, 1, 1), (33, 17, 7), (100, 64, 64), (64, 1000, 64)])
def test_compiled_dequantisation_is_bitwise_the_plain_one(
    K: int, N: int, G: int, dtype: torch.dtype, bits: int
) -> None:
    w = random_quant_weight(K, N, G, seed=0, bits=bits)
    assert torch.equal(decode.dequantize(w, dtype), w.dequantize(dtype))


# ── vector functions ───────────────────────────────────────────────────────────────────────────────────────────────


@jit.jit
def dot_tile(a, right, c):
    simd.dot_tile(a.ctypes.data, a.strides[0], right.ctypes.data, right.strides[0], right.shape[0], c.ctypes.data,
                  c.strides[0])  # fmt: skip


@jit.jit
def exp_row(x, top, out):
    return simd.exp_row(x.ctypes.data, x.shape[0] // simd.LANES, top, out.ctypes.data, out)


@jit.jit
def swiglu_row(gate, up):
    simd.swiglu_row(gate.ctypes.data, up.ctypes.data, gate.shape[0] // simd.LANES, gate)


@jit.jit
def dot_row(q, k):
    return simd.dot_row(q.ctypes.data, k.ctypes.data, q.shape[0] // simd.LANES, k)


@jit.jit
def weighted_rows(weights, rows, out):
    stride, count = rows.strides[0], rows.shape[0]
    if out.shape[0] == simd.LANES:
        simd.weighted_rows_1(weights.ctypes.data, rows.ctypes.data, count, stride, out.ctypes.data, rows)
    else:
        simd.weighted_rows_4(weights.ctypes.data, rows.ctypes.data, count, stride, out.ctypes.data, rows)


@jit.jit
def largest(x):
    return simd.largest(x.ctypes.data, x.shape[0] // simd.LANES, x)


@jit.jit
def widen(words, out):
    for i in range(words.shape[0]):
        out[i] = simd.bf16_to_f32(words[i])


@jit.jit
def narrow(values, out):
    for i in range(values.shape[0]):
        out[i] = simd.f32_to_bf16(values[i])


def words(t: torch.Tensor) -> np.ndarray:
    return t.to(BF16).view(torch.uint16).numpy()


def values(w: np.ndarray) -> np.ndarray:  # float64
    return torch.from_numpy(w).view(BF16).double().numpy()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Framed:
    """An array between canaries: `inner` is what a kernel may write, `intact` whether it kept to it."""

    def __init__(self, *shape: int, dtype: Any = np.float32, margin: int = 64):
        self.outer = np.full(math.prod(shape) + 2 * margin, 77, dtype)
        self.margin = margin
        self.inner = self.outer[margin:-margin].reshape(shape)

    @property
    def intact(self) -> bool:
        return bool((self.outer[: self.margin] == 77).all() and (self.outer[-self.margin :] == 77).all())


def test_every_bf16_survives_the_way_to_fp32_and_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    wide, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    widen(every, wide)
    exact = torch.from_numpy(every).view(BF16).float().numpy()
    assert np.array_equal(wide.view(np.uint32), exact.view(np.uint32))
    narrow(wide, back)
    finite = np.isfinite(wide) | np.isinf(wide)
    assert np.array_equal(back[finite], every[finite])


def test_fp32_rounds_to_the_nearest_even_bf16() -> None:
    """Random patterns, and each tie between two neighbours with one bit more and one less."""
    ties = (np.arange(0x7F7F, dtype=np.uint32) << 16) + 0x8000
    bits = np.concatenate([ties, ties + 1, ties - 1, ties | 0x80000000])
    bits = np.concatenate([bits, np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)])
    x = bits.view(np.float32)
    x = np.ascontiguousarray(x[np.isfinite(x)])
    out = np.empty(len(x), np.uint16)
    narrow(x, out)
    assert np.array_equal(out, torch.from_numpy(x).to(BF16).view(torch.uint16).numpy())


@pytest.mark.skipif(not simd.HAS_DPBF16, reason="this CPU has no bf16 dot product")
@pytest.mark.parametrize("pairs", [1, 2, 32, 333])
def test_dot_tile(pairs: int) -> None:
    a, right = normal(6, 2 * pairs), normal(2 * pairs, 64, seed=1)
    left, b = words(a), words(right)
    paired = (b[0::2].astype(np.uint32) | b[1::2].astype(np.uint32) << 16).copy()
    c = Framed(6, 64)
    dot_tile(left, paired, c.inner)
    exact = values(left) @ values(b)
    # Each step adds two products with up to three roundings; errors of all steps at worst.
    bound = 3 * pairs * 2**-24 * (np.abs(values(left)) @ np.abs(values(b)))
    assert (np.abs(c.inner - exact) <= bound).all()
    assert c.intact


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
def test_exp_row(dtype: Any) -> None:
    x = np.concatenate([-np.linspace(0, 100, 4096), [-3e38, -126.9, -88.0, -0.0] * 4]).astype(np.float32)
    out, top = Framed(len(x), dtype=dtype), np.float32(0.5)
    total = exp_row(x, top, out.inner)
    exact = np.exp((x - top).astype(np.float64))
    y = values(out.inner.copy()) if dtype == np.uint16 else out.inner.astype(np.float64)
    # t = x·log₂e is rounded once: |t|·2⁻²⁴·ln 2 at |t| ≤ 127; then the series as `_exp` states it.
    argument = np.minimum(np.abs(x.astype(np.float64) - top), 89) * 2**-23
    series = 3e-6 + HALF_ULP if dtype == np.uint16 else 2e-7
    assert (np.abs(y - exact) <= exact * (argument + series + 2**-22) + 2.0**-126).all()
    assert total == pytest.approx(exact.sum(), rel=2e-5 if dtype == np.uint16 else 2e-6)
    assert (y[-16::4] == 0).all()
    assert out.intact


def test_rounding_without_the_hardwares_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What older CPUs run, compiled afresh and uncached, against what this one runs."""
    monkeypatch.setattr(simd, "HAS_DPBF16", False)
    gate = words(torch.cat((normal(4096), torch.full((128,), 96.0))))
    up = words(torch.cat((normal(4096, seed=1), 1 + torch.arange(128) / 128)))  # 96·up: every second one is a tie
    portable, native = gate.copy(), gate.copy()
    numba.njit(swiglu_row.py_func)(portable, up)
    monkeypatch.undo()
    swiglu_row(native, up)
    assert np.array_equal(portable, native)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
def test_swiglu_row(dtype: Any) -> None:
    gate, up = 10 * normal(512), normal(512, seed=1)
    gate[:4] = torch.tensor([-300.0, -89.0, 0.0, 300.0])
    frame = Framed(512, dtype=dtype)
    frame.inner[:] = words(gate) if dtype == np.uint16 else gate.numpy()
    right = words(up) if dtype == np.uint16 else up.numpy()
    g, u = (values(t.copy()) if dtype == np.uint16 else t.astype(np.float64) for t in (frame.inner, right))
    exact = g / (1 + np.exp(-g)) * u
    swiglu_row(frame.inner, right)
    y = values(frame.inner.copy()) if dtype == np.uint16 else frame.inner.astype(np.float64)
    last = HALF_ULP if dtype == np.uint16 else 2**-24
    relative = last + 2e-7 + 4 * 2**-24 + np.minimum(np.abs(g), 89) * 2**-23
    # Below −88 the exponential stops at 2¹²⁷, where the result is already below 2⁻¹²⁰.
    assert (np.abs(y - exact) <= np.abs(exact) * relative + 2.0**-118).all()
    assert frame.intact


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [16, 64, 80, 256])
def test_dot_row(n: int, dtype: Any) -> None:
    q, k = normal(n).numpy(), normal(n, seed=1)
    key = words(k) if dtype == np.uint16 else k.numpy()
    exact = values(key.copy()) if dtype == np.uint16 else key.astype(np.float64)
    bound = (n / 16 + 4) * 2**-24 * (np.abs(q) @ np.abs(exact))  # a chain per lane, then four levels of lanes
    assert abs(dot_row(q, key) - q.astype(np.float64) @ exact) <= bound


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_weighted_rows(count: int, width: int, dtype: Any) -> None:
    weights, rows, out = normal(count).abs().numpy(), normal(count, width + 8, seed=1), Framed(width)
    stored = words(rows) if dtype == np.uint16 else rows.numpy()
    exact = (values(stored.copy()) if dtype == np.uint16 else stored.astype(np.float64))[:, :width]
    weighted_rows(weights, stored[:, :width], out.inner)
    bound = count * 2**-24 * (weights @ np.abs(exact))
    assert (np.abs(out.inner - weights.astype(np.float64) @ exact) <= bound + 1e-12).all()
    assert out.intact


def test_largest() -> None:
    x = normal(64).numpy()
    for i in (0, 17, 63):
        peak = x.copy()
        peak[i] = 50
        assert largest(peak) == 50
    assert largest(x - 1000) == (x - 1000).max()
    assert largest(words(torch.from_numpy(x))) == values(words(torch.from_numpy(x))).max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("K", "G"), [(7, 3), (100, 64), (512, 512)])
def test_prepared_activations(K: int, G: int, bits: int) -> None:
    """Pairs (x₀ − x₁/16, x₁/16), padded with zeros; sums rounded once, however many they add."""
    p = panel.build(random_quant_weight(K, 1, G, seed=0, bits=bits))
    x = (1 + normal(K)).numpy()
    pairs, sums = decode._prepared(1, 1, p)
    kernels.prepare(np.array(p.describe(), np.int64), x, pairs[0, 0], sums[0, 0])
    for g in range(p.groups):
        group = x[g * p.group_size : (g + 1) * p.group_size]
        assert sums[0, 0, g] == np.float32(group.astype(np.float64).sum())
        size = p.rows * (2 if bits == 4 else 1)
        padded = np.zeros(size, np.float32)
        padded[: len(group)] = group
        if bits == 4:
            padded[1::2] /= 16
            padded[0::2] -= padded[1::2]
        assert np.array_equal(pairs[0, 0, g * size : (g + 1) * size], padded)


# ── canaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize(("K", "N", "G"), [(33, 1, 32), (100, 33, 64), (7, 70, 7)])
def test_a_product_stays_in_its_tiles(M: int, K: int, N: int, G: int) -> None:
    """y is whole tiles and rows as given; padding columns are 0, and beyond them nothing is touched."""
    p = panel.build(random_quant_weight(K, N, G, seed=0, bias=True))
    width = p.tiles * TILE
    y, pairs, sums = Framed(M, width), Framed(1, M, p.groups * p.rows * 2), Framed(1, M, p.groups)
    description = np.array(p.describe(), np.int64)
    for m, x in enumerate(normal(M, K).numpy()):
        kernels.prepare(description, x, pairs.inner[0, m], sums.inner[0, m])
    kernels.matvec(description, pairs.inner[0], sums.inner[0], y.inner, 0, p.tiles)
    assert y.intact
    assert pairs.intact
    assert sums.intact
    assert (y.inner[:, N:] == 0).all()
    assert np.array_equal(y.inner[:, :N], product.product(normal(M, K), p).numpy())


def framing(frames: list[Framed]) -> Any:
    """numpy for `decode`, whose fresh arrays lie between canaries."""

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def zeros(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
            frame = Framed(*((shape,) if isinstance(shape, int) else shape), dtype=dtype)
            frames.append(frame)
            frame.inner[...] = 0
            return frame.inner

    return Numpy()


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["even", "ragged"])
def test_a_decode_step_stays_in_its_buffers(monkeypatch: pytest.MonkeyPatch, name: str, batch: int) -> None:
    """To the last position of the cache, with more threads and fewer in the middle of a text."""
    ragged = {"hidden": 80, "intermediate": 100, "heads": (5, 1), "group": 48, "vocab_size": 275}
    model = Model(tiny_checkpoint(**(ragged if name == "ragged" else {})), F32)
    frames: list[Framed] = []
    monkeypatch.setattr(decode, "np", framing(frames))
    cache, before = model.new_cache(batch, 18), torch.get_num_threads()
    for position in range(18):
        torch.set_num_threads(1 + position // 3 % 3)
        model.step(torch.full((batch,), position), cache)
    torch.set_num_threads(before)
    assert len(frames) >= 6 * 14
    assert all(frame.intact for frame in frames)


# ── the team ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=[1, 2, 3])
def members(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["openmp", "plain"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The runtime that torch brought, and the fallback where it cannot be entered."""
    if request.param == "plain":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    elif team._openmp() is None:
        pytest.skip("torch's OpenMP runtime cannot be entered here")
    return str(request.param)


@jit.jit
def meet(t, T, seen, sums, counter):
    """Everyone leaves a mark; after the barrier everyone sees all of them."""
    seen[t] = t + 1
    kernels.sync(counter, T)
    for i in range(T):
        sums[t] += seen[i]


def test_all_threads_are_called_and_meet(pool: str, members: int) -> None:
    for _ in range(20):
        seen, sums = np.zeros(members, np.int64), np.zeros(members, np.int64)
        team.run(meet, seen, sums)
        assert seen.tolist() == list(range(1, members + 1))
        assert sums.tolist() == [members * (members + 1) // 2] * members


def test_results_do_not_depend_on_the_pool(pool: str, members: int) -> None:
    p = panel.build(random_quant_weight(1024, 1025, 128, seed=0))
    x = normal(3, 1024)
    alone = np.empty((4, p.tiles * TILE), np.float32)
    pairs, sums = (scratch[0] for scratch in decode._prepared(1, 3, p))
    for m, row in enumerate(x.numpy()):
        kernels.prepare(p.description, row, pairs[m], sums[m])
    kernels.matvec(p.description, pairs, sums, alone, 0, p.tiles)
    assert np.array_equal(product.product(x, p).numpy(), alone[:3, : p.N])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_a_product_stays_in_its_scratch(members: int, M: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Exactly the room that was reckoned lies between canaries."""
    monkeypatch.setattr(panel, "TEAM", 1)
    frames: list[Framed] = []

    def room(space: Any, floats: int) -> None:
        frames.append(Framed(floats))
        space.scratch, space.size, space.at = frames[-1].inner, floats, frames[-1].inner.ctypes.data

    monkeypatch.setattr(product._Space, "room", room)
    monkeypatch.setattr(product, "_space", product._Space())
    product._space.size = 0
    p = panel.build(random_quant_weight(100, 321, 32, seed=0, bias=True))
    x = normal(M, 100).to(dtype)
    y = product.product(x, p)
    assert frames
    assert all(frame.intact for frame in frames)
    monkeypatch.undo()
    torch.set_num_threads(1)
    assert torch.equal(product.product(x, p), y)


def test_errors_reach_the_caller(members: int) -> None:
    """Of the compiler, say: every thread meets them, and none is left at a barrier."""

    def broken(t: int, T: int, counter: int) -> None:
        raise TypeError("no such signature")

    with pytest.raises(TypeError, match="no such signature"):
        team.run(broken)
    seen, sums = np.zeros(members, np.int64), np.zeros(members, np.int64)
    team.run(meet, seen, sums)
    assert sums.any()


def interrupt(t: int, T: int, done: list[str], counter: int) -> None:
    if t == 0:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # the interpreter runs here, and could deliver it
        done.append("finished")


def test_an_interrupt_waits_for_the_end_of_the_call(pool: str, members: int) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        team.run(interrupt, done)
    assert done == ["finished"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_reaches_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        team.run(interrupt, [])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        team.run(interrupt, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT]


KILLED = """
import os, signal
from tinyloop.cpu import team
signal.signal(signal.SIGINT, signal.SIG_DFL)
def interrupt(t, T, counter):
    if t == 0:
        os.kill(os.getpid(), signal.SIGINT)
        print("finished", flush=True)
team.run(interrupt)
print("still here", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="the system's own action on a signal")
def test_an_interrupt_ends_a_process_that_left_it_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert done.stdout == "finished\n", done.stderr
    assert done.returncode == -signal.SIGINT


def test_other_threads_than_the_main_one_may_call() -> None:
    sums: list[np.ndarray] = []

    def call() -> None:
        T = team.threads()
        seen, total = np.zeros(T, np.int64), np.zeros(T, np.int64)
        team.run(meet, seen, total)
        sums.append(total)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert (sums[0] == len(sums[0]) * (len(sums[0]) + 1) // 2).all()


@pytest.mark.parametrize("library", [OSError, AttributeError, TypeError, "empty"])
def test_a_runtime_that_cannot_be_entered_is_none(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load(name: Any) -> Any:
        if library == "empty":
            return object()
        raise library("no such library")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert team._openmp.__wrapped__() is None


# ── the cache of compiled code ─────────────────────────────────────────────────────────────────────────────────────


DIGEST = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jit", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module._DIGEST)
"""


def test_compiled_code_is_keyed_by_every_source(tmp_path: Path) -> None:
    """numba looks at one file's date; here functions inline others, so the content of each file counts."""
    assert kernels.matvec._cache._index_key((), _Codegen())[-1] == jit._DIGEST
    for source in Path(kernels.__file__).parent.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())

    def digest() -> str:
        command = [sys.executable, "-c", DIGEST, str(tmp_path / "jit.py")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    first = digest()
    with (tmp_path / "simd.py").open("a") as file:
        file.write("# one more line\n")
    assert len(first) == 65
    assert digest() != first


class _Codegen:
    def magic_tuple(self) -> tuple[str, ...]:
        return ("machine",)


def test_without_a_writable_folder_functions_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[..., Any]) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit, "_Cache", refuse)

    @jit.jit
    def double(x):
        return 2 * x

    assert double(21) == 42
