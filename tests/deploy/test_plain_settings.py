"""Settings that `generate` prepares for a row of the running batch are reused for rows with equal settings only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from oslo_models.deploy.running_batch import plain_settings
from oslo_models.deploy.running_batch.plain_settings import PlainSettings

from support.prepared_rows import Prepared


def test_equal_arguments_are_prepared_once(prepared: Prepared) -> None:
    """Settings are reused for any tokens, and for the rows of one call, but not for other arguments."""
    assert prepared([[1, 2, 3]]) == 1
    assert prepared([[4, 5, 6]]) == prepared([[6, 2, 9]]) == 0
    assert prepared([[1, 2, 3], [3, 4, 5]]) == 0
    assert prepared([[1, 2, 3, 4]]) == 1, "another length"
    assert prepared([[1, 2, 3]], max_new_tokens=6) == 1
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1
    assert prepared([[1, 2, 3]], pad_token_id=4) == 1
    assert prepared([[1, 2, 3]], use_cache=True) == 1
    assert prepared([[1, 2, 3]], use_cache=1) == 1, "another type"
    assert prepared([[4, 5, 6]]) == prepared([[1, 2, 3]], max_new_tokens=6) == 0


def test_padding_is_seen(prepared: Prepared) -> None:
    """The mask determines padding; without a mask, the tokens do."""
    assert prepared([[1, 2, 3]]) == 1
    assert prepared([[0, 2, 3]]) == prepared([[0, 2, 3]]) == 1, "transformers takes the first one for padding"
    assert prepared([[1, 2, 3]], [[1, 1, 1]]) == 1, "with a mask"
    assert prepared([[0, 2, 3]], [[1, 1, 1]]) == 0
    assert prepared([[0, 2, 3]], [[0, 1, 1]]) == prepared([[0, 2, 3]], [[0, 1, 1]]) == 1
    assert prepared([[1, 2, 3], [0, 4, 5]], [[1, 1, 1], [0, 1, 1]]) == 1


def never(ids: Tensor, scores: Any) -> Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 2},
        {"suppress_tokens": [3]},
        {"eos_token_id": [7, 8]},
        {"max_time": 1e6},
        {"stopping_criteria": transformers.StoppingCriteriaList([never])},
        {"generation_config": transformers.GenerationConfig()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_with_states_are_prepared_each_time(prepared: Prepared, options: dict[str, Any]) -> None:
    assert prepared([[1, 2, 3]], **options) == prepared([[1, 2, 3]], **options) == 1


def test_changes_of_the_defaults_and_the_model_are_followed(prepared: Prepared) -> None:
    """Replaced and changed configurations are noticed; an equal one changes nothing."""
    model = prepared.model
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1
    model.generation_config = copy.deepcopy(model.generation_config)
    assert prepared([[1, 2, 3]], eos_token_id=None) == 0
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = 9
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1
    model.generation_config.repetition_penalty = 1.5
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1
    model.generation_config.repetition_penalty = None
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1
    prepared.known.forget()
    assert prepared([[1, 2, 3]], eos_token_id=None) == 1


def test_classes_of_the_application_are_asked_each_time(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    own = type("Own", (type(prepared.model),), {"__module__": "application"})
    monkeypatch.setattr(prepared.model, "__class__", own)
    prepared.known = PlainSettings(prepared.model)
    assert prepared([[1, 2, 3]]) == prepared([[1, 2, 3]]) == 1


def test_only_so_many_are_kept(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_settings, "MOST", 2)
    for length in (1, 2, 3, 4, 5):
        assert prepared([[1] * length]) == 1
        assert len(prepared.known._found) <= 2
    assert prepared([[2] * 5]) == 0
