"""The memory table of the guide for consumer GPUs equals the planner's figures."""

from __future__ import annotations

import re

import pytest

from benchmarks.consumer_gpus import GPUS, MODELS, TASKS, cell

from support import ROOT

ROWS = dict(
    re.findall(r"^\| (\w+B \| \w+) \| (.*) \|$", (ROOT / "docs/guides/consumer-gpus.md").read_text(), re.MULTILINE)
)


def test_every_row_is_there() -> None:
    assert list(ROWS) == [f"{model} | {task}" for model in MODELS for task in TASKS]


@pytest.mark.zoo
@pytest.mark.parametrize("model, task", [(model, task) for model in MODELS for task in TASKS])
def test_figures_are_the_planners(model: str, task: str) -> None:
    assert ROWS[f"{model} | {task}"] == " | ".join(cell(model, task, gpus) for gpus in GPUS)
