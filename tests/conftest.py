"""Tests marked `gpu` run where a CUDA device is, and are counted where there is none, so that no one takes their
absence for success. Hypothesis gives the same examples on every run: a red run can be repeated. Ctrl-C works, even
where a shell has started the run in the background, which ignores it for all that comes of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")

_REASON = "no CUDA device"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small wait for their threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=_REASON))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in getattr(r, "keywords", ())]
    why = f" ({_REASON})" if skipped else ""
    terminalreporter.write_line(f"GPU tests skipped: {len(skipped)}{why}")
