"""The score equals sums over `Model.logits`, under every protocol; what has no score is refused."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tinyloop as tl
from helpers import BYTE_0, ids_of, tiny_checkpoint
from tinyloop import score as scoring
from tinyloop.errors import InputError, NumericalError
from tinyloop.score import Protocol, ScoreInterrupted, score

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "A truth universally acknowledged — a single man in want."


@pytest.fixture(scope="module")
def model() -> tl.Model:
    return tl.Model(tiny_checkpoint(), dtype=torch.float32)


def expected(model: tl.Model, ids: list[int], window: int, stride: int, bos: int | None) -> list[float]:
    """Every token by a pass of its own over exactly what its window shows it."""
    losses, width = [], window - 1
    for i in range(0 if bos is not None else 1, len(ids)):
        p = i - (0 if bos is not None else 1)
        begin = 0 if p < width else width + (p - width) // stride * stride + min(stride, width) - width
        begin += 0 if bos is not None else 1
        head = bos if bos is not None else ids[begin - 1]
        logits = model.logits(torch.tensor([[head, *ids[begin:i]]]))[0, -1].double()
        losses.append(float(-torch.log_softmax(logits, -1)[ids[i]]))
    return losses


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 5), (16, 15), (200, None), (2, 1)])
@pytest.mark.parametrize("bos", [None, False, 7])
def test_losses_are_those_of_the_protocol(model: tl.Model, window: int, stride: int | None, bos: int | None) -> None:
    got = model.score(TEXT, window=window, stride=stride, bos=bos, keep_losses=True)
    used = {None: 0, False: None}.get(bos, bos)
    want = expected(model, ids_of(TEXT), window, min(stride or window, window - 1), used)
    assert got.bos == used
    assert got.tokens == len(want) == len(ids_of(TEXT)) - (used is None)
    assert got.losses is not None
    np.testing.assert_allclose(got.losses.numpy(), want, rtol=2e-5, atol=2e-5)
    assert got.nll == pytest.approx(sum(want), rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(got.nll / got.tokens))
    assert got.bytes == len(TEXT.encode()) - (used is None)
    assert got.bits_per_byte == pytest.approx(got.nll / math.log(2) / got.bytes)


def test_text_file_stream_and_tokens_agree(model: tl.Model, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(TEXT.encode())
    ids = ids_of(TEXT)
    scores = [model.score(s, window=32) for s in (TEXT, path, io.BytesIO(TEXT.encode()), ids, torch.tensor(ids))]
    assert len({s.nll for s in scores}) == 1
    assert [s.bytes for s in scores] == [len(TEXT.encode())] * 3 + [None] * 2
    assert scores[-1].bits_per_byte is None


def test_chunks_of_rows_do_not_matter(model: tl.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.score(TEXT, window=64)
    monkeypatch.setattr("tinyloop.model.LOSS_ROWS", 5)
    assert model.score(TEXT, window=64).nll == pytest.approx(whole.nll, rel=1e-6)


def test_loops_change_the_score_and_are_told(model: tl.Model) -> None:
    assert model.score(TEXT).loops == 3
    assert model.score(TEXT, loops=1).loops == 1
    assert model.score(TEXT, loops=1).nll != model.score(TEXT).nll


def test_long_files_keep_few_tokens(model: tl.Model) -> None:
    run = scoring._Run(model, scoring._resolved(model, Protocol(window=32, stride=20)), text=True, keep_losses=False)
    for _ in range(8):
        run.add(ids_of(TEXT), np.arange(len(ids_of(TEXT))))
        while run.ready():
            run.step()
    assert len(run.ids) < 64


def test_progress_sees_the_score_so_far(model: tl.Model) -> None:
    seen: list[tuple[int, float | None]] = []
    score(model, TEXT, Protocol(window=16), progress=lambda s, part: seen.append((s.tokens, part)))
    assert [tokens for tokens, _ in seen] == [15, 30, 45]
    assert all(part is not None and 0 < part <= 1 for _, part in seen)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("", {}, "the text is empty"),
        ([], {}, "the text is empty"),
        ("a", {}, "1 tokens; a score needs at least 2"),
        ("a\0b", {}, "binary: character 1 is 0"),
        ([BYTE_0, 99999], {}, r"token 99999 is not in the vocabulary; ids are 0\.\.271"),
        (TEXT, {"window": 1}, "window=1 must be 2 to 256, the model's context"),
        (TEXT, {"window": 257}, "window=257 must be 2 to 256"),
        (TEXT, {"window": 8, "stride": 9}, "stride=9 must be 1 to window=8"),
        (TEXT, {"stride": 0}, "stride=0 must be 1 to window=256"),
        (TEXT, {"bos": 272}, r"bos=272 is no token; ids are 0\.\.271"),
        (TEXT, {"loops": 0}, "loops=0 must be ≥ 1"),
        (Path("missing.txt"), {}, "missing.txt is not there; give a text file"),
        (Path("."), {}, "is a folder; give a text file"),
    ],
)
def test_refusals(model: tl.Model, source: object, settings: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.score(source, **settings)  # type: ignore[arg-type]


def test_no_tokenizer_no_text() -> None:
    import dataclasses

    model = tl.Model(dataclasses.replace(tiny_checkpoint(), tokenizer=None))
    with pytest.raises(InputError, match="no tokenizer, so it cannot score text; give token ids"):
        model.score(TEXT)
    assert model.score(ids_of(TEXT)).bos is None


def test_nan_is_an_error_that_names_the_window(model: tl.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, calls = model.losses, []

    def broken(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return losses(hidden, targets) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(model, "losses", broken)
    with pytest.raises(NumericalError, match=r"window 1, tokens 15 to 29: a loss is NaN or infinite"):
        model.score(TEXT, window=16)


def test_interrupt_carries_the_partial_score(model: tl.Model) -> None:
    def stop(_: object, __: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ScoreInterrupted) as caught:
        score(model, TEXT, Protocol(window=32), progress=stop)
    assert caught.value.partial.partial
    assert caught.value.partial.tokens == caught.value.partial.bytes == 31
