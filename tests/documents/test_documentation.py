"""The documentation: code runs with the printed output, links have targets, every page is in the navigation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.doc_pages import PAGES, ROOT, inside, read_page, run_page
from support.documents import tiny_gpt2
from support.pool import Pool

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LONGEST_README = 170


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model "gpt2"; the code of the pages finds it before any hub."""
    folder = tmp_path_factory.mktemp("hub")
    with inside(folder):
        tiny_gpt2(0, torch.float32)
    return folder


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


RUN = [path for path in PAGES if read_page(path).steps]


@pytest.mark.parametrize("page", names(RUN))
def test_the_code_runs(page: str, hub: Path, tmp_path: Path, pool: Pool, warm: None) -> None:
    (tmp_path / "gpt2").symlink_to(hub / "gpt2")
    path = ROOT / page
    read = read_page(path)
    if read.ranks:
        pool.run(read.ranks, run_page, path, tmp_path, env=True)
        return
    script = tmp_path / "page.py"
    script.write_text("\n".join(code.strip("\n") for code, _ in read.steps))
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", names(PAGES))
def test_every_block_runs_or_gives_a_reason(page: str) -> None:
    assert read_page(ROOT / page).unmarked == [], "line numbers of blocks without a comment `not run: <why>`"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", names(PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in LINK.findall(path.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


ROWS = [line for line in (ROOT / "docs/ecosystem.md").read_text().splitlines() if re.match(r"\| (?!use \|)", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip().replace("`", "")[:40])
def test_every_use_of_another_library_names_its_tests(row: str) -> None:
    found = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row.rstrip(" |").rpartition(" | ")[2])
    assert found, "the last cell of the row names a test as `folder/file.py::test`"
    for path, name in found:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), f"{path}::{name}"


@pytest.mark.parametrize("page", ["docs/concepts/request.md", "docs/concepts/training_step.md"])
def test_named_modules_exist(page: str) -> None:
    named = re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / page).read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / "oslo_models" / path).is_file()] == []


def test_every_boundary_names_tests_that_exist() -> None:
    """The last cell of a row in the table of boundaries."""
    text = (ROOT / "docs/trust.md").read_text()
    _, *rows = [line for line in text.partition("## Boundaries")[2].splitlines() if re.match(r"\| (?!-)", line)]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row.rstrip(" |").rpartition(" | ")[2])
        assert named, f"no test: {row}"
        assert [path for path in named if not (ROOT / "tests" / path).is_file()] == []
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)`", text)
    assert [path for path in named if not (ROOT / "tests" / path).is_file()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, flags=re.M))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in PAGES if path.parent != ROOT}


def test_the_readme_is_short_and_names_the_targets() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    assert len(text.splitlines()) <= LONGEST_README


def test_images_are_small() -> None:
    for image in (ROOT / "docs/images").iterdir():
        assert 0 < image.stat().st_size < 200_000, image.name
