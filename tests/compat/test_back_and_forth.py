"""A model that is full again after sharding or serving is unchanged, and can be sharded again in any way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor

import oslo_models

from support import zoo
from support.float64 import lifted_casts
from support.pipelines import stage_parameters
from support.pool import Pool
from support.reference import TOLERANCE, reference_model

pytestmark = pytest.mark.filterwarnings("ignore:num_gpus=2")
DOORS = {"p": "parallelize", "i": "initialize", "t": "tensor_parallel"}
MORE = ("gpt_neo", "gptj", "opt", "bloom", "falcon", "gpt_neox", "codegen", "llama-one-kv", "mixtral", "gpt_oss")


class Before:
    """State of a model before sharding."""

    def __init__(self, model: Any) -> None:
        self.cls, self.names = type(model), vars(model).keys() - {"_oslo"}
        self.classes = [type(module) for module in model.modules()]
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        self.frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
        self.config = model.config.to_dict()
        self.training = model.training

    def check(self, model: Any) -> None:
        """Check that the model equals the earlier state bit for bit."""
        assert type(model) is self.cls and vars(model).keys() == self.names
        assert [type(module) for module in model.modules()] == self.classes
        for expected, found in ((self.state, model.state_dict()), (self.buffers, dict(model.named_buffers()))):
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name].cpu()) for name in expected)
        assert {name for name, param in model.named_parameters() if not param.requires_grad} == self.frozen
        assert all(type(param) is torch.nn.Parameter for param in model.parameters())
        marks = {mark for param in model.parameters() for mark in vars(param)}
        assert marks <= {"_is_hf_initialized"}  # transformers' own
        assert model.config.to_dict() == self.config and model.training is self.training


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), lifted_casts():
        found: Tensor = model(input_ids=ids).logits
    return found


def through(door: str, model: Any, ids: Tensor, expected: Tensor) -> None:
    """Shard the model through one entry point and back, in one process."""
    if door == "initialize":
        assert oslo_models.initialize(model, {"model_parallelism": {"tensor_parallel_size": 1}}) is model
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=TOLERANCE)
        assert model.deparallelize() is model
    elif door == "parallelize":
        assert oslo_models.parallelize(model, num_gpus=2) is model
        atol = TOLERANCE if "GPT2" in type(model).__name__ else 1e-5  # in workers, norms compute in float32
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=atol)
        assert model.cpu() is model
    else:
        other = oslo_models.tensor_parallel(model, ["cpu"] * 2)
        torch.testing.assert_close(logits(other, ids), expected, rtol=0, atol=TOLERANCE)
        again = other.deparallelize()
        Before(model).check(again)
        assert not {param.data_ptr() for param in again.parameters()} & {p.data_ptr() for p in other.parameters()}


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_model_goes_through_the_front_doors_in_any_order(forked: None, variant: str, seed: int) -> None:
    """In one process: three times through each entry point, and through each after every other."""
    model = reference_model(zoo.lm_head(variant), zoo.config(variant), seed).eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    ids = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed))
    before, expected, parameters = Before(model), logits(model, ids), [*model.parameters()]
    for door in "piptitpit" if variant == "gpt2" else "pit":
        through(DOORS[door], model, ids, expected)
        before.check(model)
        assert all(param is old for param, old in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(logits(model, ids), expected)


def test_model_made_at_size_one_is_sharded_later(forked: None, seed: int) -> None:
    """A parallel model with all its weights is served, initialised and sharded over devices like a full model."""
    config = zoo.config("gpt2")
    model = oslo_models.GPT2LMHeadModel.from_config_with_parallel(config, seed=seed, dtype=torch.float64).eval()
    ids = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed))
    expected, state = logits(model, ids), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for door in ("tensor_parallel", "parallelize"):
        if door == "tensor_parallel":
            other = oslo_models.tensor_parallel(model, ["cpu"] * 3)
            torch.testing.assert_close(logits(other, ids), expected, rtol=0, atol=TOLERANCE)
            assert not {"mesh", "mpu", "check_inputs"} & vars(other).keys() and model.mesh is not None
        else:
            through(door, model, ids, expected)
        assert type(model) is oslo_models.GPT2LMHeadModel and torch.equal(logits(model, ids), expected)
    assert oslo_models.initialize(model, {}) is model
    assert type(model) is oslo_models.GPT2LMHeadModel and torch.equal(logits(model, ids), expected)
    model.deparallelize()
    assert type(model) is oslo_models.GPT2LMHeadModel and model.mesh is None and model.layouts == {}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def check_round_trips(variant: str, stages: int, seed: int) -> None:
    """On the ranks of a launcher."""
    torch.manual_seed(seed)
    model = reference_model(zoo.lm_head(variant), zoo.config(variant), seed).eval()
    ids = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(seed))
    before, expected, embeddings = Before(model), logits(model, ids), model.get_input_embeddings().weight
    ranks = dist.get_world_size()
    sizes = {"tensor_parallel_size": ranks // stages, "pipeline_parallel_size": stages, "micro_batch_size": 2}
    for turn in range(3):
        oslo_models.initialize(model, {"model_parallelism": sizes})
        assert model.is_model_parallelized() and model.mesh.world.size == ranks
        if stages == 1:
            torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=TOLERANCE)
            model.fuse()
        if turn == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)
        assert model.deparallelize() is model
        if turn == 1:
            with torch.no_grad():
                assert all(
                    torch.equal(tensor, before.state[name] + 1.0) or name in dict(model.named_buffers())
                    for name, tensor in model.state_dict().items()
                )
                for name, param in model.named_parameters(remove_duplicate=False):
                    param.copy_(before.state[name])
        before.check(model)
        assert torch.equal(logits(model, ids), expected)
        if stages == 1:
            assert model.get_input_embeddings().weight is embeddings
        through("tensor_parallel", model, ids, expected)


@pytest.mark.parametrize(("variant", "ranks", "stages"), [("gpt2", 2, 1), ("llama", 2, 1), ("gpt2", 4, 2)])
def test_initialized_model_becomes_full_again(pool: Pool, variant: str, ranks: int, stages: int, seed: int) -> None:
    pool.run(ranks, check_round_trips, variant, stages, seed)


@pytest.mark.zoo
@pytest.mark.parametrize("variant", MORE)
def test_initialized_model_of_other_architectures_becomes_full_again(pool: Pool, variant: str, seed: int) -> None:
    pool.run(2, check_round_trips, variant, 1, seed)


def check_full_from_checkpoint(directory: str, expected: dict[str, Tensor]) -> None:
    model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(directory, tensor_parallel_size=2)
    model.deparallelize()
    assert type(model) is oslo_models.GPT2LMHeadModel and model.mesh is None
    state = model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    oslo_models.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}})
    assert model.is_tensor_parallelized()
    parts = stage_parameters(model)
    assert all(
        torch.equal(part, model.layouts[name].shard(expected[name], model.mesh.tp.rank)) for name, part in parts.items()
    )


def test_loaded_model_becomes_full(pool: Pool, tmp_path: Any, seed: int) -> None:
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed)
    model.save_pretrained(tmp_path)
    pool.run(2, check_full_from_checkpoint, str(tmp_path), model.state_dict())


def test_half_precision_of_a_served_model_stays(forked: None, seed: int) -> None:
    """As in parallelformers: `fp16=True` changes the model, also when the workers have ended."""
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed, torch.float32)
    half, parameters = {name: tensor.half() for name, tensor in model.state_dict().items()}, [*model.parameters()]
    oslo_models.parallelize(model, True, 2)
    with pytest.raises(RuntimeError, match=r"served by workers: model.cpu\(\)"):
        oslo_models.parallelize(model, num_gpus=2)
    model.deparallelize()
    assert type(model) is hf.GPT2LMHeadModel and model.dtype == torch.float16
    assert all(torch.equal(tensor, half[name]) for name, tensor in model.state_dict().items())
    assert all(param is old for param, old in zip(model.parameters(), parameters, strict=True))


def test_sharded_models_are_not_sharded_again(seed: int) -> None:
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed)
    other = oslo_models.tensor_parallel(model, ["cpu"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (
            lambda: oslo_models.tensor_parallel(other, ["cpu"] * 2),
            lambda: oslo_models.initialize(other, {}),
            lambda: oslo_models.parallelize(other, num_gpus=2),
        ):
            with pytest.raises(RuntimeError, match=r"already sharded: model.deparallelize\(\) makes it full again"):
                again()
