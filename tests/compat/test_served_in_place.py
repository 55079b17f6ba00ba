"""`parallelize` of a model in memory: the memory of its weights while workers load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from oslo_models import parallelize
from oslo_models.compat import parallelformers
from oslo_models.deploy.errors import EngineError

from support import zoo


def model_with_gradients() -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(zoo.config("gpt2"))
    model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss.backward()
    return model


def test_weights_are_released_before_workers_load_and_come_back_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_gradients()
    values = {name: (param.detach().clone(), param.grad.clone()) for name, param in model.named_parameters()}
    held: list[int] = []

    def failing_deploy(*_: Any) -> None:
        held.append(sum(param.numel() + (param.grad is not None) for param in model.parameters()))
        raise EngineError("a worker died while loading")

    monkeypatch.setattr(parallelformers, "deploy", failing_deploy)
    with pytest.warns(UserWarning, match="num_gpus=2"), pytest.raises(EngineError, match="died while loading"):
        parallelize(model, num_gpus=2)
    assert held == [0]
    assert type(model) is GPT2LMHeadModel
    for name, param in model.named_parameters():
        assert torch.equal(param, values[name][0]), name
        assert torch.equal(param.grad, values[name][1]), name
    assert model.lm_head.weight is model.transformer.wte.weight
    model(input_ids=torch.arange(6).view(1, 6)).logits.sum().backward()


def test_deploying_empties_the_cache_of_the_device_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from oslo_models import GPT2LMHeadModel as Parallel
    from oslo_models.deploy import proxy

    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("cache"))

    class Started(Exception):
        pass

    def engine(*_: Any) -> None:
        order.append("engine")
        raise Started

    monkeypatch.setattr(proxy, "Engine", engine)
    with pytest.raises(Started):
        Parallel.from_config_with_parallel(zoo.config("gpt2"), deploy=True)
    assert order == ["cache", "engine"]
