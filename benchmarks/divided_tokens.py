"""Sequence parallelism of torch: a Llama of transformers over two ranks, sharded by hand as torch's tutorial shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.definitions import Step

RANKS = 2


def _redistributed(given: Placement, wanted: Placement) -> ParallelStyle:
    return PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(wanted,), use_local_output=True)


def _plan() -> dict[str, ParallelStyle]:
    """Tokens are divided at the entry of the first block, since transformers reads the length off the embeddings."""
    parts, whole = Shard(1), Replicate()
    hidden = {"hidden_states": parts}, {"hidden_states": whole}
    norm = SequenceParallel(use_local_output=True)
    block: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1], use_local_output=True
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=parts),
        "post_attention_layernorm": norm,
        "mlp": _redistributed(parts, whole),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=parts),
    }
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.layers.0": _redistributed(whole, parts),
        **{f"model.layers.*.{name}": style for name, style in block.items()},
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
    }


def trainer(load: Callable[..., Any], cls: str, checkpoint: Path) -> tuple[Any, Step]:
    """A model, and a step of AdamW on it. The loss reads logits that are sharded over the vocabulary."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(load(cls, checkpoint).train(), mesh, _plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Any) -> Any:
        with loss_parallel():
            logits = model(input_ids=ids).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step
