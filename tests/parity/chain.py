"""One link of the chain by itself: `python -m tests.parity.test_marlin_asymmetric_parity`, from the root.

    exit status   0  it holds    1  it does not    77  it could not be tried here: every test was skipped, and says why

A link states its premise once, for all its tests: `pytestmark = needs(gpu(), looped_model())`.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

PASSED, FAILED, SKIPPED = 0, 1, 77


def needs(*premises: str | None) -> pytest.MarkDecorator:
    """Skips where a premise fails, with its reason; each premise is None where it holds."""
    reasons = [reason for reason in premises if reason is not None]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons) or "every premise holds")


def gpu() -> str | None:
    """Why no tensor-core kernel can run here, or None."""
    import torch

    from tinyloop import dispatch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if not dispatch.marlin_available():
        on = dispatch.chip("cuda")
        return on.missing or f"{on.name} has compute capability {on.capability[0]}.{on.capability[1]}, below 8.0"
    return None


def run(path: str) -> int:
    """pytest on one file, its outcome as an exit status."""
    outcomes = _Outcomes()
    status = pytest.main([path, "-q", "-rs"], plugins=[outcomes])
    skipped = bool(outcomes.seen["skipped"]) and not outcomes.seen["passed"]
    if skipped and status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return SKIPPED
    return PASSED if status == pytest.ExitCode.OK else FAILED


class _Outcomes:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped:
            self.seen[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file
            self.seen["skipped"] += 1


def main(path: str) -> None:
    sys.exit(run(path))
