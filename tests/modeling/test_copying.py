"""A parallel model can be copied; pickling it raises an error with the reason."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from oslo_models import registry

from support import zoo
from support.pool import Pool
from support.reference import Step, parallel_model, reference_step, step_differences


def check_copy(step: Step) -> None:
    """The copy's step matches one process, and does not change the original's weights and gradients."""
    model = parallel_model(step.name, step.config, step.weights, 2)
    copied = copy.deepcopy(model)
    assert copied.mesh is model.mesh
    lines = step_differences(copied, step, without=("logits",))
    assert all(param.grad is None for param in model.parameters())
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    lines += step_differences(model, step, without=("logits",))
    marks = [
        [(param.model_parallel, param.ds_pipe_replicated) for param in each.parameters()]  # type: ignore[attr-defined]
        for each in (model, copied)
    ]
    assert marks[0] == marks[1]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["gpt2", "llama", "t5"])
def test_copy_of_a_sharded_model_computes_as_one_process(pool: Pool, variant: str, seed: int) -> None:
    pool.run(2, check_copy, reference_step(zoo.lm_head(variant), zoo.config(variant), seed))


def stage_losses(name: str, config: PreTrainedConfig, batch: dict[str, Any], seed: int) -> list[float]:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, pipeline_parallel_size=2, seed=seed, dtype=torch.float64).eval()
    copied = copy.deepcopy(model)
    losses = [each.train_batch(**batch).item() for each in (model, copied)]
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert own is not other
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)
    with torch.no_grad():
        for param in copied.parameters():
            param.mul_(1.5)
    return [*losses, copied.train_batch(**batch).item(), model.train_batch(**batch).item()]


@pytest.mark.parametrize("variant", ["gpt2", "t5"])
def test_copy_of_a_pipeline_stage_is_a_stage_of_its_own(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    for first, copied, changed, again in pool.run(2, stage_losses, name, config, zoo.batch(name, config, seed), seed):
        assert first == copied == again != changed


class BeforeWeights(pickle.Pickler):
    """Pickler that refuses weights."""

    def reducer_override(self, obj: Any) -> Any:
        assert not isinstance(obj, torch.Tensor), "a weight is pickled before the model is refused"
        return NotImplemented


def refuse_to_pickle(sizes: dict[str, int]) -> list[str]:
    cls: Any = registry.find("GPT2LMHeadModel")
    model = cls.from_config_with_parallel(zoo.config("gpt2"), **sizes)
    messages = []
    parts = [model, model.transformer.h[0].attn.c_attn] if model.mesh.tp.size > 1 else [model]
    with pytest.raises(pickle.PicklingError):
        BeforeWeights(io.BytesIO()).dump(model)
    for save in (pickle.dump, torch.save):
        for part in parts:
            with pytest.raises(pickle.PicklingError) as refused:
                save(part, io.BytesIO())
            messages.append(str(refused.value))
    torch.save(model.state_dict(), io.BytesIO())
    return messages


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_pickling_a_parallel_model_is_refused(pool: Pool, size: str) -> None:
    for messages in pool.run(2, refuse_to_pickle, {size: 2}):
        for message in messages:
            assert "a parallel model cannot be pickled" in message
            assert "save_pretrained_with_parallel(directory)" in message and "state_dict()" in message


@pytest.mark.parametrize("made", ["by transformers", "alone"])
def test_models_of_one_process_are_pickled_as_in_transformers(made: str) -> None:
    cls: Any = registry.find("GPT2LMHeadModel")
    config = transformers.GPT2Config(**zoo.config("gpt2").to_dict())
    model = cls(config) if made == "by transformers" else cls.from_config_with_parallel(config)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is cls
    for own, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(own, other)
