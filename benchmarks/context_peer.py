"""Context parallelism of DeepSpeed: a model of transformers whose attention exchanges heads (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

from benchmarks.definitions import Step

RANKS = 2


def trainer(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    """A model, and a step of AdamW on it. Each rank has its part of the tokens.

    DeepSpeed averages gradients over the ranks, so the loss of a rank counts by its share of the predicted tokens.
    """
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # this process has trained a tiny model before: its groups and its attention would be in the way
    parallel_state_sp._release_sequence_parallel_groups()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    deepspeed.init_distributed("gloo")
    model = load(cls, checkpoint, attn_implementation="sdpa").train()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=RANKS, micro_batch_size=1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": RANKS,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()

    def step(ids: Any) -> Any:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        own, targets, places = (each.chunk(RANKS, 1)[rank] for each in (ids, labels, positions))
        logits = engine(input_ids=own, position_ids=places, use_cache=False).logits
        share = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ids.shape[1] - 1)
        loss = all_reduce(share, group=group)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return model, step
