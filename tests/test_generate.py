"""Generation: the tokens that repeated `Model.logits` would choose, alone or in a batch; stops; refusals."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyloop as tl
from helpers import BYTE_0, PLAIN, ids_of, tiny_checkpoint
from tinyloop.errors import InputError, NumericalError
from tinyloop.generate import Chat, Options, generate, generate_batch
from tinyloop.interrupt import uninterrupted
from tinyloop.ops import quant_gemm
from tinyloop.sampling import Sampling, pick

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def fused() -> tl.Model:
    return tl.Model(tiny_checkpoint(), dtype=torch.float32)


def plain() -> tl.Model:
    """The same model without the fused step: another linear operation refuses it."""
    return tl.Model(tiny_checkpoint(), dtype=torch.float32, linear=lambda x, w: quant_gemm(x, w))


MODELS = {"fused": fused(), "plain": plain()}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tl.Model:
    if request.param == "fused" and (why := MODELS["fused"].fused_refusal()):
        pytest.skip(why)
    return MODELS[request.param]


def greedy(model: tl.Model, ids: list[int], count: int, loops: int | None = None) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.logits(torch.tensor([ids]), loops=loops)[0, -1].argmax()))
        if ids[-1] == 0:
            return ids[-count:-1]
    return ids[-count:]


@pytest.mark.parametrize("loops", [None, 1])
def test_greedy_is_the_argmax_of_the_logits(model: tl.Model, loops: int | None) -> None:
    ids = ids_of("Once upon")
    got = generate(model, ids, Options(8, loops=loops)).finish()
    want = greedy(model, ids, 8, loops)
    assert list(got.tokens) == want[: len(got.tokens)]
    assert len(got.tokens) == 8
    assert got.finish == "length"


def test_calls_are_independent(model: tl.Model) -> None:
    alone = {p: list(generate(model, p, Options(6)).finish().tokens) for p in ("abc", "a longer prompt", "x")}
    model.logits(torch.tensor([ids_of("something else")]))
    for prompt in ("x", "abc", "a longer prompt", "abc"):
        assert list(generate(model, prompt, Options(6)).finish().tokens) == alone[prompt]
    first, second = generate(model, "abc", Options(6)), generate(model, "x", Options(6))
    for _ in zip(first, second, strict=False):  # two streams at once
        pass
    assert list(first.finish().tokens) == alone["abc"]
    assert list(second.finish().tokens) == alone["x"]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_p=0.95, seed=3)])
def test_a_batch_equals_one_by_one(model: tl.Model, sampling: Sampling) -> None:
    prompts = ["a", "the second prompt is longer", "third", "4th", "and a fifth one"]
    together = generate_batch(model, prompts, Options(12, sampling, stop=("e", "\x16")))
    for b, (prompt, got) in enumerate(zip(prompts, together, strict=True)):
        own = dataclasses.replace(sampling, stream=b)
        alone = generate(model, prompt, Options(12, own, stop=("e", "\x16"))).finish()
        assert (got.tokens, got.text, got.finish) == (alone.tokens, alone.text, alone.finish)


def test_rows_that_end_early_do_not_disturb(model: tl.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = ids_of("ab"), ids_of("x" * 250)  # the second fills its context after 7 tokens
    want = generate(model, short, Options(40)).finish().tokens
    got = generate_batch(model, [long, short], Options(40))
    assert got[1].tokens == want
    assert len(got[0].tokens) == 7
    assert got[0].note == "the context of 256 tokens is full"
    assert generate_batch(model, []) == []


class Script:
    """A model that says what it is told: its logits are one-hot at the next scripted token."""

    def __init__(self, model: tl.Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch):
        self.tokens = iter(tokens)
        monkeypatch.setattr(model, "head", lambda hidden: self.next()[None, None])
        monkeypatch.setattr(model, "step", lambda tokens, cache: self.next()[None])

    def next(self) -> torch.Tensor:
        logits = torch.zeros(272)
        logits[next(self.tokens)] = 1.0
        return logits


@pytest.mark.parametrize(
    ("said", "stop", "text", "finish"),
    [
        ("one two three", ("two",), "one ", "stop"),
        ("ababac rest", ("abac",), "ab", "stop"),
        ("aab", ("aac", "ab"), "a", "stop"),
        ("no such thing", ("thing!",), "no such thing", "eos"),
        ("né字🙂", ("字",), "né", "stop"),
        ("né字🙂!", (), "né字🙂!", "eos"),
    ],
)
def test_stop_strings_across_tokens(
    said: str, stop: tuple[str, ...], text: str, finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused()
    Script(model, [*ids_of(said), 0], monkeypatch)
    stream = model.generate("x", 50, stop=stop)
    pieces = list(stream)
    assert "".join(pieces) == text == stream.result.text
    assert stream.result.finish == finish
    assert not any("�" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    Script(model, ids_of("a字")[:-1], monkeypatch)
    assert model.generate("x", 3).finish().text == "a�"


@given(data=st.lists(st.sampled_from([*"a é字🙂".encode(), 0xFF, 0xF0]), max_size=120))
def test_streamed_text_is_the_decoded_text(data: list[int]) -> None:
    tokenizer = MODELS["plain"].tokenizer
    assert tokenizer is not None
    stream, ids = tokenizer.stream(), [BYTE_0 + b for b in data]
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == bytes(data).decode(errors="replace") == tokenizer.decode(ids)
    assert len(stream._ids) <= 33


@given(
    said=st.text("ab", min_size=1, max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_held_back_text_is_what_may_become_a_stop(said: str, stop: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        model = MODELS["plain"]
        Script(model, [*ids_of(said), 0], patch)
        stream = model.generate("x", 50, stop=tuple(stop))
        shown = ""
        for piece in stream:
            shown += piece
            assert not any(s in shown for s in stop)
        cut = min((said.find(s) for s in stop if s in said), default=len(said))
        assert shown == said[:cut]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=1, top_k=2), {1, 3}),
        (Sampling(temperature=1, top_p=0.6), {1, 3}),
        (Sampling(temperature=1, top_p=0.4), {1}),
        (Sampling(temperature=1, min_p=0.3), {1, 3, 4}),
        (Sampling(temperature=1, top_k=3, top_p=0.7), {1, 3}),
        (Sampling(temperature=1), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1e-6), {1}),
        (Sampling(temperature=1, min_p=1), {1}),
    ],
)
def test_sampling_keeps_what_it_says(sampling: Sampling, possible: set[int]) -> None:
    rng = sampling.rng(0)
    assert {pick(LOGITS, sampling, rng) for _ in range(400)} == possible


def test_sampling_follows_the_probabilities() -> None:
    how = Sampling(temperature=2, top_k=4)
    rng = how.rng(0)
    counts = np.bincount([pick(LOGITS, how, rng) for _ in range(8000)], minlength=5) / 8000
    want = np.exp(LOGITS / 2.0) * (np.arange(5) != 0)
    np.testing.assert_allclose(counts, want / want.sum(), atol=4 * 0.5 / 8000**0.5)


def test_a_nucleus_of_many_tokens_is_exact() -> None:
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 3
    p = np.exp(logits - logits.max(), dtype=np.float64)
    order = np.argsort(-p, kind="stable")
    nucleus = set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.5 * p.sum())) + 1].tolist())
    how = Sampling(temperature=1, top_p=0.5)
    rng = how.rng(0)
    drawn = {pick(logits, how, rng) for _ in range(3000)}
    assert drawn <= nucleus
    assert len(drawn) > 0.6 * len(nucleus)


def test_seeds_and_streams_differ() -> None:
    draws = {
        (seed, stream): tuple(pick(LOGITS, how, rng) for _ in range(20))
        for seed in (0, 1)
        for stream in (0, 1)
        if (how := Sampling(temperature=1, seed=seed, stream=stream)) and (rng := how.rng(0)) is not None
    }
    assert len(set(draws.values())) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_logits_are_an_error_not_token_0(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    head = model.head
    monkeypatch.setattr(model, "head", lambda hidden: head(hidden) + bad)
    with pytest.raises(NumericalError, match=r"row 0, after 0 new tokens: the logits are NaN or infinite"):
        model.generate("x", 3).finish()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.generate("x" * 257), "the prompt has 257 tokens, the model's context is 256; shorten it"),
        (lambda m: m.generate(""), "the prompt is empty"),
        (lambda m: m.generate([]), "the prompt is empty"),
        (lambda m: m.generate([BYTE_0, 272]), r"prompt token 272 is not in the vocabulary; ids are 0\.\.271"),
        (lambda m: m.generate("x", 0), "max_tokens=0 must be ≥ 1"),
        (lambda m: m.generate("x", stop=("",)), "none of them empty"),
        (lambda m: m.generate("x", loops=0), "loops=0 must be ≥ 1"),
        (lambda m: m.generate([{"role": "king", "content": "x"}]), "role king is not user or assistant"),
        (lambda m: Sampling(temperature=-1), "temperature=-1 must be a number ≥ 0"),
        (lambda m: Sampling(temperature=float("nan")), "temperature=nan"),
        (lambda m: Sampling(top_k=-1), "top_k=-1 must be ≥ 0"),
        (lambda m: Sampling(top_p=0), "top_p=0 must be above 0 and at most 1"),
        (lambda m: Sampling(min_p=1.5), "min_p=1.5 must be 0 to 1"),
        (lambda m: Sampling(seed=-1), "seed=-1 must be ≥ 0"),
    ],
)
def test_refusals_come_before_work(make: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["fused"]
    monkeypatch.setattr(model, "hidden", lambda *args, **kwargs: pytest.fail("work before the check"))
    with pytest.raises(InputError, match=message):
        make(model)  # type: ignore[operator]


def test_a_prompt_as_long_as_the_context_gives_one_token() -> None:
    got = MODELS["plain"].generate("x" * 256, 5).finish()
    assert len(got.tokens) + (got.finish == "eos") == 1


def test_chat_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    chat, fresh = Chat(model, Options(5)), []
    for text in ("Hello", "And then?", "Why?"):
        said = "".join(chat.say(text))
        fresh.append(model.generate(chat.messages[:-1], 5).finish())
        assert chat.last is not None
        assert said == fresh[-1].text == chat.messages[-1]["content"]
    read: list[int] = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda t, c: read.append(t.shape[1]) or hidden(t, c))
    "".join(chat.say("Now?"))
    assert read[0] < 20
    chat.reset()
    assert chat.messages == []
    assert "".join(chat.say("Hello")) == fresh[0].text


def test_chat_survives_a_break_and_a_full_context() -> None:
    model = MODELS["plain"]
    chat = Chat(model, Options(5))
    reply = chat.say("Hello")
    next(reply, None)
    reply.close()  # type: ignore[attr-defined]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    before = list(chat.messages)
    with pytest.raises(InputError, match="the model's context is 256"):
        chat.say("x" * 300)
    assert chat.messages == before
    "".join(chat.say("Still there?"))
    assert chat.last is not None
    assert chat.last.text == model.generate(chat.messages[:-1], 5).finish().text


def test_an_interrupt_waits_for_the_end_of_a_step() -> None:
    reached = []

    def step() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert reached
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_plain_models_generate_too() -> None:
    model = tl.Model(tiny_checkpoint(segments=PLAIN, tied=False), dtype=torch.bfloat16)
    assert len(model.generate("x", 4, sampling=Sampling(temperature=1)).finish().tokens) <= 4


@pytest.mark.parametrize("given", [b"text", [1.5, 2.5], torch.ones(2, 3, dtype=torch.int64), torch.ones(3), ["a"]])
def test_token_ids_are_whole_numbers_wherever_they_come_in(given: Any) -> None:
    model = tl.Model(tiny_checkpoint(), torch.float32)
    for use in (model.score, model.generate):
        with pytest.raises(InputError, match=r"no list of token ids.*give text \(str\) or whole numbers"):
            use(given)


def test_messages_and_token_ids_do_not_mix() -> None:
    with pytest.raises(InputError, match="mixes chat messages and token ids"):
        tl.Model(tiny_checkpoint(), torch.float32).generate([{"role": "user", "content": "x"}, 5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens='5' must be a whole number"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number"),
        ({"loops": "2"}, "loops='2' must be a whole number"),
        ({"sampling": "greedy"}, "sampling='greedy' must be a tinyloop.Sampling"),
    ],
)
def test_settings_of_the_wrong_type(settings: dict[str, Any], message: str) -> None:

    with pytest.raises(InputError, match=message):
        list(tl.Model(tiny_checkpoint()).generate("a", **settings))
