"""DistributedDataParallel around a sharded model: works over its replicas, rejected over ranks of one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from transformers import PreTrainedConfig, Trainer, TrainingArguments

from oslo_models import registry

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, full_parameters, parallel_model, reference_model, shard_differences


class Parent(nn.Module):
    """A module of the user's that merely contains the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, **batch: Tensor) -> Any:
        return self.inner["model"](**batch).loss * self.scale


class OwnDDP(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)


def train_by_trainer(model: nn.Module) -> Any:
    """Reaches the wrapping before any batch is looked at."""
    arguments = TrainingArguments(str(Path("unused")), use_cpu=True, report_to=[], save_strategy="no", max_steps=1)
    return Trainer(model, arguments, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}]).train()


def prepare(model: nn.Module) -> Any:
    return accelerate.Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))


WRONG: dict[str, Callable[[nn.Module], Any]] = {
    "default group": DistributedDataParallel,
    "world": lambda model: DistributedDataParallel(model, process_group=dist.group.WORLD),
    "parent": lambda model: DistributedDataParallel(Parent(model)),
    "compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "subclass": OwnDDP,
    "unsynchronized": lambda model: DistributedDataParallel(model, init_sync=False),
    "accelerate": prepare,
    "Trainer": train_by_trainer,
}


def wrap_wrongly(how: str, sizes: dict[str, int], seed: int) -> list[str]:
    """The message of the refusal, and which parameters have changed."""
    cls: Any = registry.find("GPT2LMHeadModel")
    model = cls.from_config_with_parallel(zoo.config("gpt2"), **sizes, seed=seed, dtype=torch.float64)
    before = full_parameters(model)
    with pytest.raises(ValueError, match="DistributedDataParallel over ranks") as refused:
        WRONG[how](model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert not [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert "process_group=model.mpu.get_data_parallel_group()" in str(refused.value)
    return [str(refused.value)]


@pytest.mark.parametrize("how", WRONG)
def test_ddp_over_tensor_parallel_ranks_is_rejected(pool: Pool, how: str, seed: int) -> None:
    needs_env = how in ("accelerate", "Trainer")
    for (message,) in pool.run(2, wrap_wrongly, how, {"tensor_parallel_size": 2}, seed, env=needs_env):
        assert "over ranks [0, 1]" in message
        assert "tensor_parallel_size=2, pipeline_parallel_size=1" in message


def test_ddp_over_stages_is_rejected(pool: Pool, seed: int) -> None:
    for (message,) in pool.run(2, wrap_wrongly, "default group", {"pipeline_parallel_size": 2}, seed):
        assert "tensor_parallel_size=1, pipeline_parallel_size=2" in message


def wrap_over_three_of_four(seed: int) -> str:
    cls: Any = registry.find("GPT2LMHeadModel")
    model = cls.from_config_with_parallel(zoo.config("gpt2"), tensor_parallel_size=2, seed=seed)
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return ""
    with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2\]") as refused:
        DistributedDataParallel(model, process_group=group)
    return str(refused.value)


def test_ddp_over_three_of_four_ranks_is_rejected_on_every_rank(pool: Pool, seed: int) -> None:
    """Rank 2, too, whose model has no other rank in the group."""
    assert all(pool.run(4, wrap_over_three_of_four, seed)[:3])


def wrap_rightly(config: PreTrainedConfig, weights: dict[str, Tensor], batch: dict[str, Tensor], expected: Any) -> None:
    """In each of these ways, gradients are those of one process, since all replicas have the same batch."""
    lines = []
    for how in ("model", "parent", "device mesh", "ignored"):
        model = parallel_model("GPT2LMHeadModel", config, weights, 2, torch.float32)
        group = {"process_group": model.mpu.get_data_parallel_group()}
        if how == "device mesh":
            group = {"device_mesh": model.mesh.device_mesh["dp"]}
        if how == "ignored":  # DDP leaves the model alone, and is there for what is beside it
            parent = Parent(model)
            ignored = [f"inner.model.{name}" for name in weights]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, ignored)
            DistributedDataParallel(parent)(**batch).backward()
        elif how == "parent":
            DistributedDataParallel(Parent(model), **group)(**batch).backward()
        else:
            DistributedDataParallel(model, **group)(**batch).loss.backward()
        own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
        lines += shard_differences(model, f"{how}: gradient of", own, expected, 1e-5)
    assert not lines, "\n".join(lines)


def test_ddp_over_replicas_works(pool: Pool, seed: int) -> None:
    config = zoo.config("gpt2")
    model = reference_model("GPT2LMHeadModel", config, seed, torch.float32)
    batch = zoo.batch("GPT2LMHeadModel", config, seed, torch.float32)
    model(**batch).loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    pool.run(4, wrap_rightly, config, full_parameters(model), batch, expected)


class ReplicaTrainer(Trainer):
    """What the messages advise."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or not hasattr(model, "mpu"):
            return model
        return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())

    def get_train_dataloader(self) -> DataLoader[Any]:
        mpu: Any = self.accelerator.unwrap_model(self.model).mpu
        dataset: Any = self.train_dataset
        replicas, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        sampler: Any = DistributedSampler(dataset, replicas, rank, shuffle=False)
        return DataLoader(dataset, 2, sampler=sampler, collate_fn=self.data_collator)


def train_as_advised(
    config: PreTrainedConfig, weights: dict[str, Tensor], rows: list[Any], trained: dict[str, Tensor], out: str
) -> None:
    model = parallel_model("GPT2LMHeadModel", config, weights, 2)
    arguments = training_arguments(out)
    trainer = ReplicaTrainer(model, arguments, train_dataset=rows, optimizers=(sgd(model), None))
    with lifted_casts():
        trainer.train()
    own = dict(model.named_parameters(remove_duplicate=False))
    lines = shard_differences(model, "trained", own, trained, TOLERANCE)
    assert not lines, "\n".join(lines)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def training_arguments(out: str, batch_size: int = 2) -> TrainingArguments:
    options = {"report_to": [], "save_strategy": "no", "max_steps": 2, "per_device_train_batch_size": batch_size}
    return TrainingArguments(out, use_cpu=True, lr_scheduler_type="constant", max_grad_norm=0.0, **options)


class OrderedTrainer(Trainer):
    """Trainer that takes the rows in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainer_works_as_the_error_message_advises(pool: Pool, ranks: int, tmp_path: Path, seed: int) -> None:
    """Parameters after two steps are those of Trainer in one process, with the batches of all replicas in one."""
    config, replicas = zoo.config("gpt2"), ranks // 2
    model = reference_model("GPT2LMHeadModel", config, seed)
    tokens = torch.randint(config.vocab_size, (8, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    weights = full_parameters(model)
    arguments = training_arguments(str(tmp_path), 2 * replicas)
    with lifted_casts():
        OrderedTrainer(model, arguments, train_dataset=rows, optimizers=(sgd(model), None)).train()
    trained = full_parameters(model)
    assert not torch.equal(trained["lm_head.weight"], weights["lm_head.weight"])
    pool.run(ranks, train_as_advised, config, weights, rows, trained, str(tmp_path), env=True)
