"""The prose against the tree: paths, make targets, commands and the README's tree must be what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import tracked_files

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
KINDS = (".py", ".md", ".toml", ".cu", ".cuh", ".sh")


@pytest.fixture(scope="module")
def tree() -> set[str]:
    """Tracked files and their folders, folders with a slash at the end."""
    files = set(tracked_files())
    return files | {f"{parent}/" for name in files for parent in list(Path(name).parents)[:-1]}


def quoted(page: Path) -> list[str]:
    """What stands in single backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S))


def command_lines(page: Path) -> list[str]:
    """Lines of code blocks and single quotes, as one would type them."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line) for line in lines + quoted(page)]


def looks_like_a_path(text: str, tree: set[str]) -> bool:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", text):
        return False
    first = text.split("/")[0]
    return text.endswith(KINDS) or ("/" in text and f"{first}/" in tree)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path, tree: set[str]) -> None:
    """A path may be given from the root, from the package, or as a bare file name."""
    names = {name.rsplit("/", 1)[-1] for name in tree if not name.endswith("/")}
    for text in quoted(page):
        if looks_like_a_path(text, tree):
            found = {text, f"{text}/", f"src/tinyloop/{text}", f"src/{text}"} & tree or text in names
            assert found, f"{page.name} names `{text}`, which is not in the tree"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M))
    assert {"demo", "test"} <= targets
    for line in command_lines(page):
        if called := re.match(r"make ([a-z][\w-]*)", line):
            assert called[1] in targets, f"{page.name}: {line}"


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """Subcommand → click command, of the real command line."""
    import typer

    from tinyloop.cli import app

    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def check_call(where: str, line: str, commands: dict[str, Any]) -> None:
    called = re.match(r"tinyloop ([a-z][\w-]*)(?= |$)(.*)", line)
    if not called:
        return
    name, rest = called[1], called[2].split("#")[0]
    assert name in commands, f"{where}: {line}"
    known = {flag for p in commands[name].params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
    for flag in re.findall(r"(?<=\s)--?[a-z][\w-]*", rest):
        assert flag in known, f"{where}: {line} has {flag}, which `tinyloop {name}` does not take"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_exist(page: Path, commands: dict[str, Any]) -> None:
    for line in command_lines(page):
        check_call(page.name, line, commands)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_commands_in_messages_exist(source: Path, commands: dict[str, Any]) -> None:
    """An error that advises a command must advise one that is there."""
    for call in re.findall(r"(?:with: |use: |run: |`)(tinyloop [a-z][^\"`;,)]*)", source.read_text("utf-8")):
        check_call(source.name, call, commands)


def readme_tree() -> dict[str, str]:
    """Path → annotation, from the first code block under the heading Tree; two spaces indent one level."""
    section = (ROOT / "README.md").read_text("utf-8").split("\n## Tree\n", 1)[1]
    entries, folders = {}, [""]
    for line in section.split("```")[1].splitlines()[1:]:
        shown = re.fullmatch(r"((?:  )*)(\S+)\s+(\S.*)", line)
        assert shown, f"no `path  annotation`: {line!r}"
        level = len(shown[1]) // 2
        path = folders[level] + shown[2]
        entries[path] = shown[3]
        folders[level + 1 :] = [path] if path.endswith("/") else []
    return entries


def test_readme_tree_is_the_tree(tree: set[str]) -> None:
    """Every entry exists. Where the README lists a folder's content, as at the root, it lists all of it."""
    entries = readme_tree()
    assert not entries.keys() - tree, "in the README, not in the tree"
    assert "src/tinyloop/" in entries
    for folder in ["", *(e for e in entries if any(other.startswith(e) and other != e for other in entries))]:
        if folder == "src/":
            continue
        inside = {e for e in tree if e.startswith(folder) and e != folder and "/" not in e[len(folder) : -1]}
        hidden = {e for e in inside if Path(e).name in (".gitignore", "__init__.py", "py.typed") or e == "src/"}
        assert inside - hidden <= entries.keys(), "in the tree, not in the README"


FORBIDDEN = "|".join((
    r"(?<![\w.])/(?:work|tmp|root|home|opt|mnt)/", r"(?<![\w.])/(?:root|work)\b", r"pypi\.org", r"pythonhosted",
    r"download\.pytorch", r"anaconda\.org", r"conda\.io", r"crates\.io", r"npmjs", r"index-url",
))  # fmt: skip


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run", *SOURCES],
    ids=lambda page: page.name,
)  # fmt: skip
def test_no_machine_and_no_registry_is_named(page: Path) -> None:
    if not page.exists():  # .ci is not in the sdist
        pytest.skip(f"{page.name} is not here")
    assert not re.findall(FORBIDDEN, page.read_text("utf-8"))


def test_the_page_on_the_environment_names_all_of_it() -> None:
    """Every variable that the sources know, and no other."""
    known = {name for f in SOURCES for name in re.findall(r"TINYLOOP_[A-Z0-9_]+", f.read_text("utf-8"))}
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    rows = re.findall(r"^\| `(TINYLOOP_[A-Z0-9_]+)` \| ([01]) \|", page, flags=re.M)
    assert {name for name, _ in rows} == known == set(re.findall(r"TINYLOOP_[A-Z0-9_]+", page))
    from tinyloop import dispatch

    defaults = {"TINYLOOP_USE_MARLIN": dispatch.use_marlin(), "TINYLOOP_CROSS_ITER_ROUND": dispatch.cross_iter_round()}
    defaults["TINYLOOP_EXPERIMENTAL_FP16_BODY"] = dispatch.fp16_body()
    assert {name: bool(int(value)) for name, value in rows} == defaults


def test_the_checks_find_what_they_look_for(tree: set[str]) -> None:
    """Each rule on a line that breaks it, since a pattern that matches nothing passes everything."""
    assert re.search(FORBIDDEN, "see /work/notes")
    assert re.search(FORBIDDEN, "from https://pypi.org/simple")
    assert looks_like_a_path("docs/nothing.md", tree)
    assert looks_like_a_path("nothing.py", tree)
    assert not looks_like_a_path("tokenizer.json", tree)
    assert not looks_like_a_path("q/scale", tree)
