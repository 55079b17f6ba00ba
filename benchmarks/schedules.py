"""Idle time of pipeline schedules: four stages whose forward, backward and weight gradient sleep, so that it needs no
quiet machine, beside the schedules of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

STAGES, WIDTH, LENGTH = 4, 16, 4
Durations = tuple[float, float, float]
"""Seconds of a forward, of the gradient of the input, and of the gradient of the weight."""


class _Slept(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


def ours(schedule: str, durations: Durations, number: int) -> Callable[[], None]:
    """A step of a tiny Llama with one block on each stage."""
    from transformers import LlamaConfig

    from oslo_models import LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "vocab_size": 32}
    model = LlamaForCausalLM.from_config_with_parallel(
        LlamaConfig(**sizes, num_hidden_layers=STAGES),
        pipeline_parallel_size=STAGES,
        blocks_per_stage=[1] * STAGES,
        schedule=schedule,
        seed=0,
    )
    forward, backward, weights = durations
    edges = []
    for block in model.model.layers:
        block.register_forward_hook(lambda block, args, output: _Slept.apply(output, forward, backward))
        edges.append(get_gradient_edge(block.mlp.down_proj.weight).node)
        edges[-1].register_hook(lambda *_: time.sleep(weights))
    ids = torch.zeros(number, LENGTH, dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        for output in model(input_ids=ids, labels=ids):
            output.loss.backward()
        assert len(edges) == 1

    return step


class _Stage(nn.Module):
    """A linear layer that sleeps."""

    def __init__(self, durations: Durations, first: bool) -> None:
        super().__init__()
        self.durations, self.linear = durations, nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.zeros(())) if first else None

    def forward(self, x: Tensor) -> Tensor:
        forward, backward, weights = self.durations
        if self.start is not None:  # otherwise the first stage has no gradient of its input
            x = x + self.start
        x = _Slept.apply(x, forward, backward)
        x = F.linear(x, _Slept.apply(self.linear.weight, 0.0, weights), self.linear.bias)
        return x.clone()  # torch detaches outputs in place, which must be no views


def of_torch(schedule: Any, per_rank: int, durations: Durations, number: int) -> Callable[[], None]:
    """A step of linear layers by a schedule of torch, with ``per_rank`` stages on each rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, count = dist.get_rank(), STAGES * per_rank
    each: Any = tuple(seconds / per_rank for seconds in durations)
    numbers = range(rank, count, STAGES)
    stages = [PipelineStage(_Stage(each, i == 0), i, count, torch.device("cpu")) for i in numbers]
    options = {"n_microbatches": number, "loss_fn": F.mse_loss}
    run = schedule(stages[0] if per_rank == 1 else stages, **options)
    x = torch.randn(number, LENGTH, WIDTH)

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        if rank == 0:
            run.step(x)
        else:
            run.step(**({"target": x, "losses": []} if rank == STAGES - 1 else {}))

    return step


SCHEDULES: dict[str, Callable[..., Callable[[], None]]] = {
    "oslo_models-1f1b": partial(ours, "1f1b"),
    "oslo_models-zb-h1": partial(ours, "zb-h1"),
    "torch-1f1b-pp4": partial(of_torch, Schedule1F1B, 1),
    "torch-interleaved-zb-pp4": partial(of_torch, ScheduleInterleavedZeroBubble, 2),
}
"""Peers of the case: each takes durations and the number of micro-batches, and returns a step."""
