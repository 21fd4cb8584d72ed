"""`tinyloop quantize`: flags → settings, a bar while it works, and a table of what it did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import InputError
from .terminal import bar, say, stdout

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .quantize import QuantSpec, Report, Settings


def quantize(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A dense model: Hugging Face folder, .gguf, .tinyloop.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The .tinyloop file to write.")],
    group: Annotated[
        str, typer.Option(help="Weights along K that share scale and zero; K: one group a column.")
    ] = "128",
    method: Annotated[str, typer.Option(help="gptq, or nearest: plain rounding.")] = "gptq",
    zero: Annotated[str, typer.Option(help="float, or integer: zero = -z * scale with z in 0..15.")] = "float",
    clip: Annotated[bool, typer.Option("--clip/--no-clip", help="Shrink ranges where that lowers the error.")] = True,
    order: Annotated[bool, typer.Option("--order/--no-order", help="Visit inputs by energy.")] = True,
    channel: Annotated[
        str | None, typer.Option(help="sign_bit or frac4: another rounding in each loop iteration; see docs/looped.md.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="GLOB=skip keeps weights dense, GLOB=64 gives them a group; the first that fits; repeatable."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text. [default: a bundled sample of English books]")
    ] = None,
    texts: Annotated[int, typer.Option(help="Calibration windows, spread over the text.")] = 40,
    length: Annotated[int | None, typer.Option(help="Tokens of a window. [default: 1024, or the context]")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of finished layers. [default: DST.work]")] = None,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Leave it, with its log, after success.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Convert a dense model to 4 bits, calibrated block by block. Run it again after Ctrl-C or a kill: it goes on.

    Embedding and head stay as they are unless a rule gives them a group. A result that is NaN or more than twice as
    perplexed as the source, on text held back from calibration, is refused.

    \b
    tinyloop quantize examples/looped-12m looped.tinyloop --rule embed=32 --channel sign_bit
    tinyloop quantize ~/models/qwen3-0.6b qwen.tinyloop --group 64 --rule 'layers.0.*=skip' --rule '*.mlp_down=32'
    tinyloop quantize model.tinyloop small.tinyloop --calibration book.txt --texts 64 --zero integer
    """
    from .quantize import Calibration, Output, QuantSpec
    from .quantize import quantize as run

    spec = QuantSpec(_group(group, "--group"), _integer(zero), clip, order, channel=channel)
    settings = _settings(spec, method, rule or [])
    folder = work or dst.with_name(dst.name + ".work")
    try:
        with bar("quantising") as update:
            result = run(
                src, dst, settings=settings, calibration=Calibration(calibration, texts, length),
                output=Output(force, folder, keep_work), progress=update,  # type: ignore[arg-type]
            )  # fmt: skip
    except KeyboardInterrupt:
        if folder.exists():
            say(f"tinyloop: finished layers are kept in {folder}; the same command goes on after the last of them")
        raise
    for report in result.report.layers:
        if report.note:
            say(f"tinyloop: warning: {report.name}: {report.note}")
    if as_json:
        print(json.dumps({"path": str(dst), "file_bytes": dst.stat().st_size, **result.report.to_dict()}))
    else:
        stdout().print(*_table(dst, result.report), sep="\n")


def _settings(spec: QuantSpec, method: str, rules: list[str]) -> Settings:
    from .quantize import Settings

    pairs: list[tuple[str, QuantSpec | None]] = []
    for text in rules:
        pattern, found, value = text.rpartition("=")
        if not found or not pattern:
            raise InputError(f"--rule {text!r} is not GLOB=skip or GLOB=GROUP, as in 'layers.0.*=skip' or embed=32")
        own = None if value == "skip" else dataclasses.replace(spec, group_size=_group(value, f"--rule {text!r}"))
        pairs.append((pattern, own))
    return Settings(spec, method, tuple(pairs))


def _group(text: str, flag: str) -> int | None:
    if text.upper() == "K":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise InputError(f"{flag}: {text!r} is no group; give a whole number from 1 on, or K for one group per column")
    return int(text)


def _integer(zero: str) -> bool:
    if zero not in ("float", "integer"):
        raise InputError(f"--zero {zero} is none of float, integer")
    return zero == "integer"


def _table(dst: Path, r: Report) -> Iterator[RenderableType]:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "before", "after", "change")
    change = f"{100 * (r.perplexity_after / r.perplexity_before - 1):+.2f} %"
    table.add_row("perplexity", f"{r.perplexity_before:.4f}", f"{r.perplexity_after:.4f}", change)
    size = f"{100 * (r.bytes_after / r.bytes_before - 1):+.1f} %"
    table.add_row("bytes of weights", f"{r.bytes_before:,}", f"{r.bytes_after:,}", size)
    yield table
    worst = max((x for x in r.layers if x.relative_loss is not None), key=lambda x: x.relative_loss or 0, default=None)
    loss = "" if worst is None else f"; largest relative loss {worst.relative_loss:.2e}, in {worst.name}"
    yield escape(
        f"{dst}: {r.bits_per_weight:.3f} bits per quantised weight, {r.seconds:.0f} s{loss}. Perplexity on "
        f"{r.held_tokens} tokens of {r.held_text}, held back from calibration."
    )
