"""Functions and classes that the workers of deployment tests import by name."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, LogitsProcessor, StoppingCriteria

from benchmarks.faulty import (
    CONFIG,
    LONG,
    Collected,
    Trouble,
    application,
    server_address,
    start_forked_worker,
    use_server,
)
from oslo_models import BertModel, GPT2LMHeadModel, LlamaForCausalLM
from oslo_models.deploy import torchrun_executor as torchrun
from oslo_models.distributed.sharded_tensor import local_tensor

__all__ = ["CONFIG", "LONG", "SENSITIVE", "Collected", "Trouble", "application", "prompt", "server_address"]


SENSITIVE = GPT2Config(**{**CONFIG.to_diff_dict(), "initializer_range": 0.3, "tie_word_embeddings": False})
"""Each token depends on the whole context. With smaller weights it hardly does; tied weights repeat the last token."""


def prompt(seed: int, rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Never(LogitsProcessor):
    """Bans one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.token] = -float("inf")
        return scores


class Shouts(LogitsProcessor):
    """Writes 1 MB to standard output and error at the first token, and may end the process then."""

    def __init__(self, exits: bool = False) -> None:
        self.exits, self.count = exits, 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not self.count:
            for stream in (sys.stdout, sys.stderr):
                for _ in range(10_000):
                    print("a line that a worker writes" * 4, file=stream)
            os.write(2, b"written below Python\n" * 10_000)
        self.count += 1
        if self.exits:
            print("the last words", file=sys.stderr)
            os._exit(3)
        return scores


class After(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class FailsToLoad(GPT2LMHeadModel):
    """Raises on one rank."""

    def __init__(self, config: GPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if kwargs.get("mesh") is not None and dist.get_rank() == 1:
            raise MemoryError("no room for the weights")


def launched_script(address: str, checkpoint: Path, prompt: dict[str, torch.Tensor]) -> Any:
    """A script that a launcher starts: everything after the constructor runs on rank 0 only."""
    use_server(address)
    torchrun.start_worker = start_forked_worker
    reached = []
    try:
        model = GPT2LMHeadModel.from_pretrained_with_parallel(checkpoint, tensor_parallel_size=2, deploy=True)
        with model:
            reached.append(model.generate(**prompt, max_new_tokens=5, do_sample=False))
            os.kill(model._engine.pids[1], signal.SIGKILL)
            try:
                model.generate(**prompt, **LONG)
            except RuntimeError as error:
                reached.append(str(error))
            model.restart()
            reached.append(model.generate(**prompt, max_new_tokens=5, do_sample=False))
            other = GPT2LMHeadModel.from_config_with_parallel(CONFIG, deploy=True)  # single-process model
            reached.append(other.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape[1])
            try:
                other.cpu()
            except RuntimeError as error:
                reached.append(str(error))
            reached.append([*model._engine.pids, *other._engine.pids])
            other.close()
    except SystemExit as end:
        return end.code
    torchrun._created.cache_clear()  # like the end of the program
    return reached


class Shelf:
    """Holds one model at a time, so that one pair of workers serves many models in turn.

    Args:
        make: the pickled model constructor and arguments that a deployment sends to its workers.
    """

    def __init__(self, make: bytes) -> None:
        self.put(make)

    def put(self, make: bytes) -> None:
        cls, constructor, args, kwargs = pickle.loads(make)
        self.model = getattr(cls, constructor)(*args, **kwargs).eval()

    @classmethod
    def holding(cls, make: bytes) -> Shelf:
        return cls(make)

    def eval(self) -> Shelf:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)


class SentenceEncoder(BertModel):
    """An application class that adds methods."""

    scale = 2.0

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The mean of the hidden states, ``[rows, hidden]``."""
        hidden = self(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden.mean(1) * self.scale

    def encode_many(self, batches: list[Tensor]) -> dict[str, Any]:
        return {"means": tuple(self.encode(batch) for batch in batches), "count": len(batches)}

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        return self.embeddings.word_embeddings(input_ids)

    def fails(self, number: int) -> None:
        raise LookupError(f"there is no number {number}")

    def layers(self) -> Any:
        return self.encoder.layer

    def stream(self) -> Any:
        yield from range(3)


class ScoringGPT2(GPT2LMHeadModel):
    """Calls its language-model head directly; the outputs of the head are sharded."""

    def scores(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(input_ids).last_hidden_state)


class LlamaWithWidth(LlamaForCausalLM):
    """Tells the size of its shard on rank 0."""

    def mlp_width(self) -> int:
        return len(local_tensor(self.model.layers[0].mlp.gate_proj.weight))
