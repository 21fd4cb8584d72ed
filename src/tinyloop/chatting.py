"""A conversation in a terminal: lines in, replies out as they come.

Ctrl-C breaks off a reply, not the session; Ctrl-D or /quit leaves; /reset begins anew.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import InputError
from .generate import Chat
from .terminal import say, stdout

HELP = "/reset begins anew, /quit or Ctrl-D leaves, Ctrl-C breaks off a reply"


def converse(chat: Chat) -> None:
    """Until the user leaves, or standard input ends."""
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_editing()
        say(HELP)
    while (text := _ask(interactive)) is not None:
        if text == "/quit":
            return
        if text == "/reset":
            chat.reset()
            say("(a new conversation)")
        elif text.startswith("/"):
            say(HELP)
        elif text:
            _reply(chat, text)


def _ask(interactive: bool) -> str | None:
    """The next line; None at the end of input."""
    while True:
        try:
            return stdout().input("[bold cyan]you ›[/] " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            say(HELP)


def _reply(chat: Chat, text: str) -> None:
    try:
        for piece in chat.say(text):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    except KeyboardInterrupt:
        print()
        say("(broken off)")
    except InputError as error:
        say(f"{error}, or begin anew with /reset")
        return
    if chat.last and chat.last.note:
        say(f"({chat.last.note})")
    if chat.last and sys.stdin.isatty():
        stdout().print(f"[dim]{len(chat.last.tokens)} tokens, {chat.last.tokens_per_second:.0f} tokens/s[/]")


def _enable_editing() -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history, where this Python has it
