"""Docstrings, comments and documents name things by nouns: relative clauses in their place stay rare."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

CLAUSES = (
    r"what (is|are|was|it|they|a|an|the|each|others?|no|does|do|holds?|follows?|has|have|can|must|to)",
    *(r"those (of|that|which|who|in|without|with)", "that of", r"the ones? (of|that|which|by|in)", "of which", "whose"),
    *(r"of (its|their|his) own", "the like", "as many as", "so many", "that which", r"(by|of|from|for) what"),
    *("whatever", r"(nothing|none) but", r"(but|save) for"),
)
CLAUSE = re.compile(rf"\b({'|'.join(CLAUSES)})\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
CODE = ("oslo_models", "kernels", "setup.py")
IN_NAMES = re.compile(r"(what|whose|those_of|that_of|whatever)(_|$)")


def texts_of_python(source: str) -> Iterator[str]:
    """Docstrings, strings that stand alone, and comments; consecutive lines of comments are one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    comment, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield comment
                comment = ""
            comment, last = f"{comment} {token.string.lstrip('# ')}", token.start[0]
    yield comment


def messages_of_python(source: str) -> Iterator[str]:
    """Messages of errors and logs, texts of options: strings of several words, without docstrings."""
    tree = ast.parse(source)
    others = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    others |= {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in others:
            text = node.value
        else:
            continue
        if text.count(" ") > 2:
            yield text


def texts_of(path: Path) -> Iterator[str]:
    source = path.read_text(errors="replace")
    if path.suffix == ".py":
        yield from texts_of_python(source)
    elif path.suffix == ".md":
        yield re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", " X ", source, flags=re.DOTALL)
    else:
        yield from re.findall(r"//[^\n]*|/\*.*?\*/", source, re.DOTALL)


def files(*names: str, suffixes: tuple[str, ...] = (".py", ".cpp", ".h", ".cu")) -> list[Path]:
    found = [ROOT / name for name in names]
    return [
        path
        for each in found
        for path in ([each] if each.is_file() else sorted(each.rglob("*")))
        if path.suffix in suffixes
    ]


def clauses(paths: list[Path]) -> tuple[float, list[str]]:
    """Clauses per 10,000 words, and the places with most of them."""
    words, found = 0, []
    for path in paths:
        texts = [re.sub(r"\s+", " ", text) for text in texts_of(path)]
        words += sum(len(WORD.findall(text)) for text in texts)
        found += [
            f"{path.name}: {text[max(0, m.start() - 40) : m.end() + 30]}"
            for text in texts
            for m in CLAUSE.finditer(text)
        ]
    return 1e4 * len(found) / max(words, 1), found


@pytest.mark.parametrize(
    ("paths", "most"),
    [
        (files(*CODE), 30),
        (files("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", suffixes=(".md",)), 20),
        (files("tests", "benchmarks"), 40),
    ],
    ids=["code", "documents", "tests"],
)
def test_few_clauses_stand_in_place_of_nouns(paths: list[Path], most: int) -> None:
    assert len(paths) > 5
    share, found = clauses(paths)
    assert share < most, found[:200]


def clauses_in_messages(path: Path) -> list[str]:
    texts = (re.sub(r"\s+", " ", text) for text in messages_of_python(path.read_text()))
    return [
        f"{path.name}: {text[max(0, m.start() - 40) : m.end() + 30]}" for text in texts for m in CLAUSE.finditer(text)
    ]


def test_messages_have_no_clauses_in_place_of_nouns() -> None:
    found = [line for path in files(*CODE, suffixes=(".py",)) for line in clauses_in_messages(path)]
    assert not found, "\n".join(found)


def test_names_of_tests_have_no_clauses_in_place_of_nouns() -> None:
    names = [
        name for path in files("tests") for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 1000
    assert not [name for name in names if IN_NAMES.search(name)]


def test_clauses_in_messages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    error = 'raise ValueError(f"a model whose {x}")'
    path.write_text(f'"""Return what is left."""\nx = "of which"\ny = f"{{x}}: what is left of it"\n{error}\n')
    assert len(clauses_in_messages(path)) == 2


def test_clauses_are_found(tmp_path: Path) -> None:
    module, page, source = tmp_path / "a.py", tmp_path / "a.md", tmp_path / "a.cpp"
    module.write_text('"""Return what is left."""\n\nx = "what is code"  # those of all ranks,\n# whatever they are\n')
    page.write_text("That of a page.\n\n```\nwhose code\n```\n\n`of which` is code, too.\n")
    source.write_text('int x;  // as many as there are\nchar* y = "of its own";\n')
    assert [len(clauses([path])[1]) for path in (module, page, source)] == [3, 1, 1]
