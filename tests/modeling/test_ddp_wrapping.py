"""DistributedDataParallel around a sharded model: works over its replicas, rejected over ranks of one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, Trainer, TrainingArguments

pytest.importorskip("accelerate")

import accelerate

from oslo_models import registry

from support import zoo
from support.pool import Pool
from support.reference import full_parameters, parallel_model, reference_model, shard_differences


class Parent(nn.Module):
    """User module that contains the model."""

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
    """Start training; the trainer wraps the model before it reads a batch."""
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
    """Return the message of the error. The wrapping must not change a parameter."""
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
        assert "from oslo_models.integrations import Trainer, Accelerator" in message


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
    """Rank 2 rejects the group too, although the group has no other rank of its model."""
    assert all(pool.run(4, wrap_over_three_of_four, seed)[:3])


def wrap_rightly(config: PreTrainedConfig, weights: dict[str, Tensor], batch: dict[str, Tensor], expected: Any) -> None:
    """Gradients match one process in every supported wrapping, since all replicas get the same batch."""
    lines = []
    for how in ("model", "parent", "device mesh", "ignored"):
        model = parallel_model("GPT2LMHeadModel", config, weights, 2, torch.float32)
        group = {"process_group": model.mpu.get_data_parallel_group()}
        if how == "device mesh":
            group = {"device_mesh": model.mesh.device_mesh["dp"]}
        if how == "ignored":  # DDP ignores the model and handles only the parent's parameter
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
