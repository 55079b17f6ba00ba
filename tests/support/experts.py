"""Mixtures of experts over several replicas: the model, a step of each replica, and the single-process reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from oslo_models import registry

from support import pipelines, zoo
from support.reference import differences, reference_model

TOLERANCE = 1e-10


def average_gradients(model: Any) -> None:
    """Average the gradients of replicated parameters, as DistributedDataParallel does after backward."""
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


def load(folder: Path, given: pipelines.Case, sizes: tuple[int, int, int], **options: Any) -> Any:
    tp, pp, ep = sizes
    cls: Any = registry.find(given.name)
    return cls.from_pretrained_with_parallel(folder, tp, pp, expert_parallel_size=ep, **options).train()


def saved_case(
    folder: Path, model_type: str, seed: int, replicas: int, optimizers: tuple[str, ...] = (), **changes: Any
) -> pipelines.Case:
    name, config = zoo.main_head(model_type), zoo.config(model_type, num_hidden_layers=2, **changes)
    model = reference_model(name, config, seed)
    model._weight_conversions = None  # save experts as separate weights, like checkpoints on the hub
    model.save_pretrained(folder)
    return pipelines.case(name, config, seed, replicas, optimizers)
