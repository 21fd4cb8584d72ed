"""The chain's own machinery: what a link returns when it holds, breaks, or cannot be tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = "from tests.parity.chain import needs\n"
LINKS = {
    "holds": ("def test(): pass", 0),
    "breaks": ("def test(): assert False", 1),
    "breaks beside a skip": ("import pytest\ndef test(): assert False\ndef test_2(): pytest.skip('no')", 1),
    "cannot be imported": ("import no_such_module", 1),
    "is empty": ("", 1),
    "premise fails": (f"{NEEDS}pytestmark = needs(None, 'no such thing')\ndef test(): assert False", 77),
    "premise holds": (f"{NEEDS}pytestmark = needs(None, None)\ndef test(): pass", 0),
    "premise of a file fails": ("import pytest\npytest.skip('no', allow_module_level=True)", 77),
    "holds in part": ("import pytest\ndef test(): pass\ndef test_2(): pytest.skip('no')", 0),
}


@pytest.mark.parametrize("link", LINKS)
def test_exit_status(tmp_path: Path, link: str) -> None:
    code, status = LINKS[link]
    path = tmp_path / "test_link.py"
    path.write_text(code)
    script = f"from tests.parity.chain import main; main({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    if status == 77:
        assert "no" in done.stdout  # the reason is printed
