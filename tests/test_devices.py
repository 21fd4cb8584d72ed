"""A model on a device: names, dtypes and memory; no tensor left on the host, no wait within a pass; GPU against CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tinyloop as tl
from helpers import PLAIN, random_quant_weight, tiny_checkpoint, with_random_channel
from tinyloop import devices, dispatch
from tinyloop.cuda.config import Chip
from tinyloop.errors import InputError
from tinyloop.model import Model
from tinyloop.pack import PackedWeight

Tensor = torch.Tensor
CPU, GPU, META = torch.device("cpu"), torch.device("cuda:0"), torch.device("meta")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cuda 0"])
def test_a_name_that_is_no_device(name: str) -> None:
    with pytest.raises(InputError, match=f"device='{name}' is no device; give cpu, cuda, or cuda:1"):
        devices.resolve(name)


def test_a_device_that_does_not_run_models() -> None:
    with pytest.raises(InputError, match="device='mps': a model runs on cpu or cuda"):
        devices.resolve("mps")
    assert devices.resolve("cpu") == devices.resolve(CPU) == CPU


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None, count: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, None, 0)
    with pytest.raises(InputError, match=r"device='cuda': this torch, 2\..*, is built without CUDA; .* or use cpu"):
        devices.resolve("cuda")
    with pytest.raises(InputError, match="built without CUDA"):
        tl.load(tmp_path / "never read", device="cuda")
    pretend(monkeypatch, "12.8", 0)
    with pytest.raises(InputError, match="device='cuda:0': no GPU or no driver is visible"):
        devices.resolve("cuda:0")
    pretend(monkeypatch, "12.8", 1)
    with pytest.raises(InputError, match="device='cuda:7': this machine has 1; give cuda:0 to cuda:0"):
        devices.resolve("cuda:7")


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "12.8", 3)
    assert devices.resolve("cuda") == torch.device("cuda:2")
    assert devices.resolve("cuda:1") == torch.device("cuda:1")


def test_dtypes_of_each_device() -> None:
    assert devices.dtype_on(GPU, None) == torch.float16
    assert devices.dtype_on(GPU, torch.float32) == torch.float32
    assert devices.dtype_on(CPU, torch.bfloat16) == torch.bfloat16
    with pytest.raises(InputError, match=r"float64: on a GPU a model runs in float16, bfloat16 or float32"):
        devices.dtype_on(GPU, torch.float64)
    with pytest.raises(InputError, match=r"float16: on a CPU a model runs in float32 or bfloat16"):
        devices.dtype_on(CPU, torch.float16)


def test_memory_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds unused counts as free: the next tensor gets it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000_000_000, 9_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2_500_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500_000_000)
    assert devices.memory(GPU) == 5_000_000_000
    devices.check_room(GPU, 5_000_000_000, "they", "go")
    with pytest.raises(InputError, match=r"the weights need 5\.1 GB; cuda:0 has 5\.0 GB free: take less"):
        devices.check_room(GPU, 5_100_000_000, "the weights", "take less")


def empty_product(x: Tensor, w: PackedWeight) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.weight.N)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` plays the GPU: its tensors hold no numbers, so that whatever waits for one fails, as does whatever meets
    a tensor of the host."""
    monkeypatch.setattr(devices, "resolve", torch.device)


SHAPES: dict[str, dict[str, object]] = {
    "looped": {},
    "plain, own head, bias": {"segments": PLAIN, "tied": False, "bias": True},
    "windows, QK norm": {"segments": PLAIN, "sliding_window": (5, None), "qk_norm": True},
    "dense": {"quantized": False, "heads": (4, 4)},
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pass_stays_on_its_device_and_never_waits(shape: str) -> None:
    model = Model(tiny_checkpoint(**SHAPES[shape]), linear=empty_product, device="meta")  # type: ignore[arg-type]
    assert (model.device, model.dtype) == (META, torch.float16)
    tokens, V = torch.randint(0, 200, (2, 9)), model.config.vocab_size
    hidden = model.hidden(tokens)
    assert (hidden.device, hidden.dtype, list(hidden.shape)) == (META, torch.float16, [2, 9, 64])
    losses = model.losses(hidden[0], tokens[0])
    assert (losses.device, losses.dtype, list(losses.shape)) == (META, torch.float32, [9])
    cache = model.new_cache(2, 30)
    assert cache.k.device == cache.v.device == META
    model.hidden(tokens[:1, :3], cache.row(0))
    model.hidden(tokens[1:, :7], cache.row(1))
    model.hidden(tokens[1:, :2], cache.row(1))
    logits = model.step(tokens[:, 0], cache)  # rows of 3 and 9 tokens: masks, and keys stored row by row
    assert (logits.device, logits.dtype, list(logits.shape)) == (META, torch.float32, [2, V])
    assert cache.lengths.tolist() == [4, 10]
    assert model.hidden(tokens[:, :0]).device == META


@pytest.mark.usefixtures("elsewhere")
def test_devices_do_not_mix() -> None:
    here, there = (Model(tiny_checkpoint(), torch.float32, empty_product, device=d) for d in ("cpu", "meta"))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="tokens are on meta, the model on cpu; give the host's"):
        here.hidden(tokens.to("meta"))
    with pytest.raises(InputError, match="the cache is on cpu, the model on meta; use its own new_cache"):
        there.hidden(tokens, here.new_cache(1, 5))
    assert here.fused_refusal() is not None
    assert "the model is on meta" in (there.fused_refusal() or "")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("chip", "packs"), [(Chip("new", (8, 0), 100, 163 << 10, 1 << 34), True),
                                            (Chip("old", (7, 5), 40, 64 << 10, 1 << 33), False)])  # fmt: skip
def test_a_model_elsewhere_holds_what_its_kernels_read(
    monkeypatch: pytest.MonkeyPatch, chip: Chip, packs: bool
) -> None:
    """The device format where tensor cores take it, the canonical weight where they do not; never both."""
    monkeypatch.setattr(dispatch, "chip", lambda device: chip)
    model = Model(tiny_checkpoint(tied=False), linear=empty_product, device="meta")
    calls: list[tuple[int, int]] = []
    model.pack(lambda done, total: calls.append((done, total)))
    there = [sum(w.layouts.values()) + (w._canonical.nbytes if w._canonical else 0) for w in model.weights.values()]
    assert calls[-1] == (sum(there), sum(there))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    model.prepare(1024)  # a matter of CPUs: derives nothing
    for name, w in model.weights.items():
        assert not w.keep_dense
        assert list(w.layouts) == (["device format"] if packs and name != "embed" else [])
        assert (w._canonical is None) == (packs and name != "embed")


@pytest.mark.usefixtures("elsewhere")
def test_roundings_of_all_iterations_share_one_weight() -> None:
    w = PackedWeight(with_random_channel(random_quant_weight(64, 32, 32, seed=0), "frac4"), device="meta")
    first, second = w.at(0), w.at(1)
    assert first.canonical() is second.canonical()
    assert first.canonical().to("meta") is first.canonical()
    assert "unpackable" in vars(first)


@pytest.mark.usefixtures("elsewhere")
def test_room_is_asked_for_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "chip", lambda device: Chip("new", (8, 0), 100, 163 << 10, 1 << 34))
    model = Model(tiny_checkpoint(), linear=empty_product, device="meta")
    monkeypatch.setattr(devices, "memory", lambda device: 10_000)
    with pytest.raises(InputError, match=r"the weights need .* MB; this machine has 0\.01 MB: take another GPU"):
        model.pack()
    assert not any(w.layouts or w._canonical for w in model.weights.values())
    with pytest.raises(InputError, match=r"20 tokens in 5 KV slots need 0\.0128 MB; .*: take fewer tokens, rows or"):
        model.new_cache(2, 10)


@pytest.mark.usefixtures("elsewhere")
def test_dsp04_strict_mode_is_asked_at_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the name of the first weight that cannot follow it, before anything moves; on a CPU it asks nothing."""
    monkeypatch.setenv(dispatch.USE_MARLIN, "require")
    old = Chip("old", (7, 5), 40, 64 << 10, 1 << 33)
    monkeypatch.setattr(dispatch, "chip", lambda device: old)
    path = tl.save(tiny_checkpoint(), tmp_path / "m.tinyloop")
    tl.load(path)
    with pytest.raises(InputError, match=r"^embed: M=1 K=64 N=272 on meta would take .*: old has compute capability 7"):
        tl.load(path, device="meta")
    monkeypatch.setattr(dispatch, "chip", lambda device: Chip("new", (8, 0), 100, 163 << 10, 1 << 34))
    model = tl.load(path, device="meta")
    assert all("device format" in w.layouts for w in model.weights.values())


def test_cli_names_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from tinyloop.cli import app

    pretend(monkeypatch, None, 0)
    path, text = tmp_path / "m.tinyloop", tmp_path / "t.txt"
    tl.save(tiny_checkpoint(), path)
    text.write_text("some text")
    for command in (["score", str(path), str(text)], ["generate", str(path), "x"], ["explain", str(path)]):
        done = CliRunner().invoke(app, [*command, "--device", "cuda"])
        assert done.exit_code == 1
        assert "device='cuda': this torch" in done.output


def test_float16_runs_through_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, through torch's layers as on a GPU, with exact products: three bits more than bfloat16 are four times
    as near at least, over 15 applications."""
    monkeypatch.setattr(devices, "CPU_DTYPES", devices.CUDA_DTYPES)
    plain = dispatch.Machine(numba=False, int4pack=False, bf16=False, memory=1 << 32)
    monkeypatch.setattr(dispatch, "machine", lambda: plain)
    tokens, checkpoint = tokens_of(60), tiny_checkpoint(qk_norm=True, sliding_window=(16, None, 16))
    logits = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = Model(checkpoint, dtype, lambda x, w: dense_product(x.float(), w).to(x.dtype))
        cache = model.new_cache(1, 60)
        parts = [model.hidden(tokens[:, part], cache) for part in (slice(0, 40), slice(40, 41), slice(41, 60))]
        assert {h.dtype for h in parts} == {dtype}
        logits[dtype] = model.head(torch.cat(parts, 1)).double()
    error = {dtype: float((y - logits[torch.float32]).norm()) for dtype, y in logits.items()}
    assert 0 < 4 * error[torch.float16] < error[torch.bfloat16]


# On a GPU, against the same model on the CPU in fp32.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tl.save(tiny_checkpoint(hidden=128, intermediate=256), tmp_path / "m.tinyloop")


def dense_product(x: Tensor, w: PackedWeight) -> Tensor:
    """The yardstick: the dequantised weight in x's dtype, through torch."""
    weight = w.canonical()
    y = x @ weight.dequantize(x.dtype)
    return y if weight.bias is None else y + weight.bias.to(x.dtype)


def tokens_of(n: int) -> Tensor:
    return torch.randint(16, 272, (1, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gpu_logits_are_as_near_as_torchs(path: Path, dtype: torch.dtype) -> None:
    """Against fp32 on the CPU, at most 1.2 times the error of the same model with dense products in its dtype."""
    tokens = tokens_of(100)
    want = tl.load(path, dtype=torch.float32).logits(tokens).double()
    model = tl.load(path, device="cuda", dtype=dtype)
    got = model.logits(tokens)
    assert got.device == model.device
    model._linear = dense_product
    plain = model.logits(tokens)
    error = [float((y.cpu().double() - want).norm()) for y in (got, plain)]
    assert error[0] <= 1.2 * error[1] + 1e-6 * float(want.norm())


@pytest.mark.gpu
def test_gpu_scores_and_writes_what_the_cpu_does(path: Path) -> None:
    here, there = tl.load(path, dtype=torch.float32), tl.load(path, device="cuda", dtype=torch.float32)
    text = "what is measured on one device holds on another " * 8
    a, b = (m.score(text, window=64, stride=40) for m in (here, there))
    assert a.tokens == b.tokens
    assert b.nll == pytest.approx(a.nll, rel=1e-5)
    prompts = ["one", "another prompt", "x"]
    want = [here.generate(p, 20).finish().tokens for p in prompts]
    assert [there.generate(p, 20).finish().tokens for p in prompts] == want
    assert [g.tokens for g in tl.generate_batch(there, prompts, tl.Options(20))] == want


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_pass_does_not_wait(path: Path, request: pytest.FixtureRequest) -> None:
    model = tl.load(path, device="cuda")
    cache, tokens = model.new_cache(2, 40), tokens_of(9).expand(2, 9)
    model.hidden(tokens, cache)  # whatever is made at the first call
    cache.lengths[:] = np.array([3, 9])
    request.getfixturevalue("no_waiting")
    model.step(tokens[:, 0], cache)
    model.losses(model.hidden(tokens)[0], tokens[0])


@pytest.mark.gpu
def test_gpu_refuses_what_it_has_no_room_for(path: Path) -> None:
    model = tl.load(path, device="cuda")
    with pytest.raises(InputError, match=rf"KV slots need .* GB; {model.device} has .* GB free: take fewer"):
        model.new_cache(10**9, 200)
