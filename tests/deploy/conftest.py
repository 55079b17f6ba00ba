"""The deployed model of `stand` and the full model that it was made from; and a pair of them in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from oslo_models import GPT2LMHeadModel

from support import deployment, faults
from support.prepared_rows import Prepared


@pytest.fixture
def whole(stand: faults.Stand) -> Any:
    return stand.whole


@pytest.fixture
def model(stand: faults.Stand) -> Any:
    stand.answers()
    return stand.model


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """A float64 GPT-2 with tokens that depend on the whole context, and the same model in plain transformers."""
    torch.manual_seed(0)
    config = deployment.SENSITIVE
    model: Any = GPT2LMHeadModel.from_config_with_parallel(config, dtype=torch.float64).eval()
    whole = transformers.GPT2LMHeadModel(config).double().eval()
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        yield model, whole


@pytest.fixture(scope="module")
def drafter() -> Any:
    """A model that agrees with the model of `pair` on many tokens, but not on all."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel.from_config_with_parallel(deployment.SENSITIVE, dtype=torch.float64)
    small = GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    small.load_state_dict(model.state_dict())
    with torch.no_grad():
        for param in small.parameters():
            param += 0.002 * torch.randn_like(param)
    return small


@pytest.fixture
def prepared(pair: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
    model, _ = pair
    former = copy.deepcopy(model.generation_config)
    yield Prepared(model, monkeypatch)
    model.generation_config = former
