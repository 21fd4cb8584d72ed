"""What every command shares: where messages go, progress bars, and how errors end a command.

    0  done · 1  the user's mistake, a sentence on stderr · 2  wrong usage · 130  Ctrl-C · 141  the reader went away

Results go to stdout, everything else to stderr. Bars appear only where stderr is a terminal. `--debug` lets errors
through with their tracebacks; what is no `TinyLoopError`, no `OSError` and no lack of memory on a GPU always comes
through, for it is a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from .errors import TinyLoopError

INTERRUPTED, BROKEN_PIPE = 130, 141


def stdout() -> Console:
    """Tables keep their width when they go to a file: 80 columns would break their lines."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """One line for people."""
    stderr().print(message, markup=False, soft_wrap=True)


class Guarded(TyperGroup):
    """The command group; turns what a user can do wrong into a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            say("tinyloop: interrupted")
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
            ctx.exit(BROKEN_PIPE)
        except (TinyLoopError, OSError, torch.OutOfMemoryError) as error:
            if ctx.params.get("debug"):
                raise
            say(f"tinyloop: {describe(error)}")
            ctx.exit(1)


def describe(error: Exception) -> str:
    """An error as a sentence."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory is full; take a shorter window or fewer tokens, another --device, or cpu ({error})"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with an estimate; call what it yields with (done, in all)."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def update(done: int, total: int, note: str = "") -> None:
            progress.update(task, completed=done, total=total or None, description=f"{what} {note}".rstrip())

        yield update
