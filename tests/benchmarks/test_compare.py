"""``python -m benchmarks compare``: with stand-ins for the measurements."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import Change, Figures

KEY = ("a case", "a peer", "generation")


def figures(value: float) -> Figures:
    return {KEY: (value, "tokens/s")}


@pytest.mark.parametrize(
    "factor, unit, verdict", [(1.0, "tokens/s", "noise"), (1.2, "tokens/s", "better"), (1.2, "ms", "WORSE")]
)
def test_change_is_told_from_noise_of_a_drifting_machine(factor: float, unit: str, verdict: str) -> None:
    """The machine becomes three times as slow; pairs cancel the drift, but not the noise of 4 % of single runs."""
    draw, runs = random.Random(3), iter(range(1000))

    def measure(folder: Path, case: str) -> Figures:
        speed = 100 / (1 + next(runs) / 10) * draw.uniform(0.98, 1.02)
        return figures(speed * (factor if folder == Path("head") else 1))

    ratios = compare.compare(Path("base"), Path("head"), "a case", 20, measure)[KEY]
    assert len(ratios) == 20
    assert Change.of(ratios).verdict(unit) == verdict


def test_compare_alternates_which_commit_is_first() -> None:
    order: list[str] = []

    def measure(folder: Path, case: str) -> Figures:
        order.append(str(folder))
        return figures(1.0)

    compare.compare(Path("base"), Path("head"), "a case", 3, measure)
    assert order == ["head", "base", "base", "head", "head", "base"]


def test_checkouts_are_those_commits_and_are_removed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-qm", text)
    with compare.checkouts(tmp_path, "main~1", "main") as folders:
        assert [(folder / "file").read_text() for folder in folders] == ["old", "new"]
    assert len(git("worktree", "list").splitlines()) == 1 and not folders[0].exists()
    with pytest.raises(ValueError, match="nowhere cannot be checked out"), compare.checkouts(tmp_path, "nowhere"):
        pass


def test_compare_command_refuses_unknown_cases_and_few_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["a", "b", "--only", "x"], "no case x"), (["--help"], "bootstrap of the median")):
        with pytest.raises(SystemExit):
            compare.main(arguments)
        output = capsys.readouterr()
        assert message in output.out + output.err
    with pytest.raises(SystemExit):
        compare.main(["a", "b", "--only", "all-reduce-4kb", "--pairs", "2"])
    assert "too few for an interval" in capsys.readouterr().err
