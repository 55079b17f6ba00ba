"""What strangers send is answered or refused: drawn requests, grammars, checkpoint folders and data files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from support.fuzzing import fuzz

COUNTS = {
    "requests": 200,
    "connections": 60,
    "grammars": 100,
    "images": 400,
    "checkpoints": 100,
    "data": 100,
    "files": 60,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_drawn_inputs(name: str, count: int, tmp_path: Path, seed: int) -> None:
    done = fuzz(name, count, seed, tmp_path)
    assert done.outcomes.total() >= count // 2 and len(done.outcomes) > 1, done.outcomes
