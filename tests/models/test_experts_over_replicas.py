"""Experts over data-parallel replicas: tokens are sent to the ranks that hold their experts, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from oslo_models import registry

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import differences

TOLERANCE = 1e-10


def average_gradients(model: Any) -> None:
    """Of what every replica has, as DistributedDataParallel does after backward."""
    experts = {id(param) for param in model.expert_parameters()}
    for param in model.parameters():
        if param.grad is not None and id(param) not in experts:
            dist.all_reduce(param.grad.div_(model.mesh.dp.size), group=model.mesh.dp.group)


def own_differences(model: Any, what: str, own: dict[str, Any], full: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in own.items():
        layout = pipelines.model_layout(model, name)
        expected = None if full[name] is None else layout.shard(full[name], model.mesh.rank_in(layout))
        lines += differences(f"{what} {name}", pipelines.to_full_tensor(part), expected, TOLERANCE)
    return lines


def model_of(given: pipelines.Case, sizes: tuple[int, int, int], **options: Any) -> Any:
    tp, pp, ep = sizes
    cls: Any = registry.find(given.name)
    model = cls.from_config_with_parallel(
        given.config, tp, pp, expert_parallel_size=ep, dtype=torch.float64, seed=0, **options
    )
    with torch.no_grad():
        for name, param in pipelines.stage_parameters(model).items():
            layout = pipelines.model_layout(model, name)
            param.copy_(layout.shard(given.weights[name], model.mesh.rank_in(layout)))
    return model.train()


def take_steps(given: pipelines.Case, sizes: tuple[int, int, int], options: dict[str, Any], steps: int) -> None:
    """The loss, the gradients and their norm of a step; the parameters after some steps of optimizers."""
    for optimizer in ("SGD", "AdamW")[: len(given.trained)] or ("SGD",):
        model = model_of(given, sizes, **options)
        stepper = getattr(torch.optim, optimizer)(model.gpu_parameters(), lr=0.01)
        for step in range(steps if optimizer == "AdamW" else 1):
            stepper.zero_grad()
            batch = given.batches[step][model.mesh.dp.rank]
            with lifted_casts():
                loss = model.train_batch(**batch)
            average_gradients(model)
            if step == 0:
                expected = given.loss[model.mesh.dp.rank]
                assert not model.mesh.pp.rank == model.mesh.pp.size - 1 or (loss - expected).abs() < TOLERANCE
                gradients = pipelines.gradients_on_stage(model)
                assert not (lines := own_differences(model, "gradient of", gradients, given.gradients)), lines
                norms = [
                    model.clip_grad_norm_(1e9).item(),
                    float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
                ]
                assert all(abs(norm - given.norm) < 1e-9 for norm in norms), (norms, given.norm)
            stepper.step()
        if optimizer in given.trained:
            own = {name: param.detach() for name, param in pipelines.stage_parameters(model).items()}
            lines = own_differences(model, f"{optimizer}: parameter", own, given.trained[optimizer])
            assert not lines, lines


def case(model_type: str, seed: int, replicas: int, **changes: Any) -> pipelines.Case:
    name = zoo.main_head(model_type)
    config = zoo.config(model_type, num_hidden_layers=2, **changes)
    return pipelines.case(name, config, seed, replicas, ("SGD", "AdamW"))


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("model_type", "sizes", "replicas", "implementation"),
    [
        ("mixtral", (1, 1, 2), 2, "eager"),
        ("mixtral", (2, 1, 4), 2, "batched_mm"),
        ("glm4_moe", (2, 1, 4), 2, "eager"),
        pytest.param("mixtral", (1, 1, 2), 4, "eager", marks=pytest.mark.zoo),
        pytest.param("mixtral", (1, 1, 4), 4, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("mixtral", (1, 2, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("gpt_oss", (1, 1, 2), 2, "eager", marks=pytest.mark.zoo),
        pytest.param("gpt_oss", (2, 1, 4), 2, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("qwen2_moe", (2, 1, 4), 2, "grouped_mm", marks=pytest.mark.zoo),
        pytest.param("deepseek_v3", (1, 1, 2), 2, "batched_mm", marks=pytest.mark.zoo),
    ],
)
def test_training_matches_one_process(
    pool: Pool, seed: int, model_type: str, sizes: tuple[int, int, int], replicas: int, implementation: str
) -> None:
    given = case(model_type, seed, replicas, **(AUXILIARY if sizes[1] == 1 and model_type == "mixtral" else {}))
    options = {"experts_implementation": implementation, "micro_batch_size": pipelines.ROWS}
    pool.run(sizes[0] * sizes[1] * replicas, take_steps, given, sizes, options, pipelines.STEPS["AdamW"])
