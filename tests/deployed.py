"""What the tests of deployment have workers import by name."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, LogitsProcessor, StoppingCriteria

from oslo_models import GPT2LMHeadModel

CONFIG = GPT2Config(
    **{"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 512},
    **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
)


class Never(LogitsProcessor):
    """Bans one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.token] = -float("inf")
        return scores


class After(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Trouble(LogitsProcessor):
    """On one rank: raises, sleeps, or ends the process."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if dist.get_rank() == self.rank:
            if self.what == "raise":
                raise MemoryError("no room for the cache")
            if self.what == "exit":
                os._exit(3)
            time.sleep(0.05)
        return scores


class FailsToLoad(GPT2LMHeadModel):
    """Raises on one rank."""

    def __init__(self, config: GPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if kwargs.get("mesh") is not None and dist.get_rank() == 1:
            raise MemoryError("no room for the weights")
