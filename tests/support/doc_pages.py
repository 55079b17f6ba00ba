"""Reads and runs the code blocks of a documentation page.

HTML comments, which readers of a page do not see, direct the run:

* ``<!-- ranks: 2 -->``: number of processes that run the blocks of the page; the default is one.
* ``<!-- script -->``: the blocks run as one script started by ``python``.
* ``<!-- setup`` and code up to ``-->``: runs at this place. Ranks wait for each other after it: all write its files.
* ``<!-- replace: old -> new; old -> new -->``: in the blocks from here on, such as sizes.
* ``<!-- not run: why -->`` above a block, ``<!-- run: command -->`` above a shell command.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PARTS = re.compile(
    r"^<!-- (?P<comment>.*?)-->$|^(?P<fence>`{3,})(?P<language>\w*)\n(?P<block>.*?)^(?P=fence)$", re.S | re.M
)
SHOWN = ("text", "output", "bibtex")
"""The languages of blocks that are not code."""


@dataclass
class Page:
    """The code and run settings of a page.

    Attributes:
        ranks: the number of processes; 0: a script.
        steps: code, with the output printed below it or ``None``.
        setups: indices of the steps that readers do not see.
        unmarked: the line numbers of blocks that are neither run nor marked.
    """

    ranks: int = 1
    steps: list[tuple[str, str | None]] = field(default_factory=list)
    setups: list[int] = field(default_factory=list)
    unmarked: list[int] = field(default_factory=list)


def read_page(path: Path) -> Page:
    page, skipped, command, replaced = Page(), False, False, {"/path/to/": "path/to/"}
    text = path.read_text()
    for match in PARTS.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if (comment := match["comment"]) is not None:
            kind, _, value = comment.strip().partition(":")
            if kind == "ranks":
                page.ranks = int(value)
            elif kind == "script":
                page.ranks = 0
            elif kind == "replace":
                replaced |= dict(pair.strip().split(" -> ") for pair in value.split(";"))
            elif comment.startswith("setup\n"):
                page.setups.append(len(page.steps))
                page.steps.append(("\n" * line + comment.removeprefix("setup\n"), None))
            skipped, command = kind == "not run", kind == "run"
            continue
        language, block = match["language"], match["block"]
        for old, new in replaced.items():
            block = block.replace(old, new)
        if language == "output":
            page.steps[-1] = (page.steps[-1][0], block)
        elif command:
            calls = (shlex.split(each, comments=True)[1:] for each in block.splitlines())
            page.steps += [(f"\noslo_models.cli.main.main({call!r})", None) for call in calls]
        elif language == "python" and not skipped:
            page.steps.append(("\n" * line + block, None))
        elif language not in SHOWN and not skipped:
            page.unmarked.append(line)
        skipped = command = False
    return page


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder (`contextlib.chdir` of Python 3.11)."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def wait_for_ranks(name: str) -> None:
    """Wait for the other ranks of the page by means of files: there may be no process group yet."""
    Path(f"{name}-{os.environ.get('RANK', '0')}").touch()
    deadline = time.monotonic() + 60
    while missing := [
        rank for rank in range(int(os.environ.get("WORLD_SIZE", "1"))) if not Path(f"{name}-{rank}").exists()
    ]:
        assert time.monotonic() < deadline, f"ranks {missing} did not reach {name}"
        time.sleep(0.01)


def run_page(path: Path, folder: Path) -> None:
    """Run the blocks of a page in a folder, on each rank, and compare what rank 0 prints."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with inside(folder):
        page = read_page(path)
        for step, (code, expected) in enumerate(page.steps):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(code, str(path), "exec"), namespace)
            if step in page.setups:
                wait_for_ranks(f".setup-{step}")
            if expected is not None and os.environ.get("RANK", "0") == "0":
                assert printed.getvalue() == expected, f"{path} prints {expected!r}, which is {printed.getvalue()!r}"
