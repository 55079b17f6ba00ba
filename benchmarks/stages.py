"""A peer for pipeline parallelism: stages made by hand of transformers' blocks, run by torch's `Schedule1F1B`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from oslo_models.pipeline.partition import partition


class Stage(nn.Module):
    """One stage of a causal language model, partitioned like ours: by parameters, including the head."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        self.config = model.config
        base, is_gpt2 = model.base_model, model.config.model_type == "gpt2"
        blocks = base.h if is_gpt2 else base.layers
        costs = [float(sum(param.numel() for param in block.parameters())) for block in blocks]
        start, stop = partition(costs, count, after=model.lm_head.weight.numel())[index]
        first, last = index == 0, index == count - 1
        self.blocks = blocks[start:stop]
        self.tokens = (base.wte if is_gpt2 else base.embed_tokens) if first else None
        self.positions = base.wpe if is_gpt2 and first else None
        self.rotary = None if is_gpt2 else base.rotary_emb
        self.norm = (base.ln_f if is_gpt2 else base.norm) if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (first stage) or hidden states to hidden states or logits (last stage)."""
        position = torch.arange(x.shape[1]).unsqueeze(0)
        if self.tokens is not None:
            x = self.tokens(x)
        if self.positions is not None:
            x = x + self.positions(position)
        rotary = {} if self.rotary is None else {"position_embeddings": self.rotary(x, position)}
        for block in self.blocks:
            x = block(x, **rotary)
        return x if self.head is None else self.head(self.norm(x))


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """transformers' loss without ignored labels."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trainer(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Stage, Callable[[Tensor], Tensor]]:
    """The stage of this rank, and steps of AdamW over micro-batches of one row."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    index, count = dist.get_rank(), dist.get_world_size()
    model = load(cls, checkpoint).train()
    module, tied = Stage(model, index, count), model.config.tie_word_embeddings
    del model
    stage = PipelineStage(module, index, count, torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    schedule: Schedule1F1B | None = None

    def step(ids: Tensor) -> Tensor:
        nonlocal schedule
        schedule = schedule or Schedule1F1B(stage, n_microbatches=len(ids), loss_fn=shifted_loss)
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(ids)
        elif index == count - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        if tied:
            shared = (module.tokens or module.head).weight
            dist.all_reduce(shared.grad)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, count - 1)
        return loss

    return module, step
