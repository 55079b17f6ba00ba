"""Lower bounds for any implementation on this machine, measured in the processes of a peer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from benchmarks.instruments import local

_STREAM = 256 << 20
"""Bytes of one read: far more than the caches hold."""


def has_limits(model: Any) -> bool:
    """Return whether these limits apply to a model. They exclude stacked experts: a token uses only some of them."""
    return all(param.dim() < 3 for param in model.parameters())


def tokens_by_memory(model: Any, batch: int, length: int) -> float:
    """Tokens per second if decoding only had to read the weights, and the keys and values of ``length`` tokens.

    Each rank reads its shard at the measured speed of summing a tensor while all ranks do the same. A token reads
    one row of the embedding, so the embedding counts only if the head shares its weight.
    """
    model = getattr(model, "module", model)  # of DeepSpeed's engine
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = [param for param in model.parameters() if param is not embedding or param is head]
    config, ranks = model.config, dist.get_world_size() if dist.is_initialized() else 1
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = heads * (config.hidden_size // config.num_attention_heads)
    cache = 2 * config.num_hidden_layers * width * length * batch * weights[0].itemsize // ranks
    stream = torch.ones(_STREAM // 4)
    read = sum(local(weight).nbytes for weight in weights) + cache
    return batch / (_fastest(stream.sum, 8) * read / _STREAM)


def seconds_by_products(model: Any, rows: int) -> float:
    """Seconds of the matrix products of a training step: outputs and both gradients of each linear layer.

    torch computes the products of this rank's shards, while the other ranks compute theirs.
    """
    shapes: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = local(module.weight)
            shapes[tuple(weight.shape if isinstance(module, Conv1D) else weight.T.shape)] += 1

    def products(x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], Any]:
        return lambda: (x @ weight, grad @ weight.T, x.T @ grad)

    total = 0.0
    for (fan_in, fan_out), count in shapes.items():
        given = torch.randn(rows, fan_in), torch.randn(fan_in, fan_out), torch.randn(rows, fan_out)
        total += count * _fastest(products(*given), 3)
    return total


def _fastest(run: Callable[[], Any], times: int) -> float:
    """Return the seconds of the fastest call after a warm-up call. All ranks begin each call together."""
    seconds = []
    for _ in range(times + 1):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
