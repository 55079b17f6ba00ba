"""Greedy search that detects finished rows one token late: the same tokens, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from oslo_models import registry
from oslo_models.fusion import decoding

from support import zoo

PROMPT = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [1, 2, 1, 2]])


class Reads(TorchDispatchMode):
    """Counts host reads of the flag for no rows left (``waits``), and of copies after an event (``late``)."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.late = 0, 0
        self.flags: list[Tensor] = []
        self.copied: list[int] = []
        self.arrived: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.late += args[0].data_ptr() in self.arrived
            self.waits += any(args[0] is flag for flag in self.flags)
        if func is torch.ops.aten.copy_.default and (args[2:] == (True,) or (kwargs or {}).get("non_blocking")):
            self.copied.append(args[0].data_ptr())
            self.arrived.discard(args[0].data_ptr())
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.eq.Scalar and args[0].dim() == 0 and args[1] == 0:
            self.flags.append(out)
        return out


@contextmanager
def counted() -> Iterator[Reads]:
    reads = Reads()

    class Event:
        def __init__(self, **_: Any) -> None:
            self.holds: list[int] = []

        def record(self) -> None:
            self.holds, reads.copied = reads.copied, []

        def synchronize(self) -> None:
            reads.arrived.update(self.holds)

    with mock.patch.object(torch, "Event", Event), reads:
        yield reads


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        pass


def model_of(seed: int) -> Any:
    config = zoo.config("gpt2", num_hidden_layers=1)
    model = registry.find("GPT2LMHeadModel").from_config_with_parallel(config, seed=seed, dtype=torch.float64)
    model._decodes_in_graphs = True
    return model.eval()


def generated(model: Any, late: bool, **options: Any) -> tuple[Any, Reads]:
    given = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), "pad_token_id": 0, "eos_token_id": None}
    given |= {"do_sample": False, "cache_implementation": "dynamic"} | options
    with counted() as reads, mock.patch.object(decoding, "STOPS_LATE_ON", ("cpu",) if late else ()):
        torch.manual_seed(1)
        return model.generate(**given), reads


class Ends(StoppingCriteria):
    """Ends rows after these numbers of tokens; padding follows."""

    eos_token_id = 0  # makes transformers pad
    tokens = torch.tensor([2, 5, 3])

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - PROMPT.shape[1] >= self.tokens[: len(input_ids)]


def test_tokens_are_the_same_and_nothing_waits(seed: int) -> None:
    model, ends = model_of(seed), {"stopping_criteria": StoppingCriteriaList([Ends()])}
    options: list[tuple[dict[str, Any], int]] = [
        ({"max_new_tokens": 12, **ends}, 5),
        ({"max_new_tokens": 12}, 12),
        ({"max_new_tokens": 5, **ends}, 5),
        ({"max_new_tokens": 4, **ends}, 4),
        ({"max_new_tokens": 1, **ends}, 1),
        ({"max_new_tokens": 12, "use_cache": False, **ends}, 5),
        ({"max_new_tokens": 12, "cache_implementation": "static", **ends}, 5),
        ({"max_new_tokens": 12, "max_time": 1e-9, **ends}, 1),
    ]
    for given, steps in options:
        expected, before = generated(model, False, **given)
        found, after = generated(model, True, **given)
        assert expected.shape[1] - PROMPT.shape[1] == steps and torch.equal(found, expected), (given, found, expected)
        assert (before.waits, after.waits, before.late) == (steps, 0, 0) and after.late <= steps, given
    scores = {"output_scores": True, "return_dict_in_generate": True, "use_cache": False, **options[0][0]}
    (expected, _), (found, after) = generated(model, False, **scores), generated(model, True, **scores)
    assert after.late and torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.scores, expected.scores)) and len(found.scores) == len(expected.scores)


@pytest.mark.parametrize("why", ["sampling", "cache", "stream", "unfused", "own loop", "earlier release"])
def test_where_it_waits(why: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra token would consume random numbers, enter the cache, or reach the reader late."""
    model = model_of(seed)
    options: dict[str, Any] = {"max_new_tokens": 6, "stopping_criteria": StoppingCriteriaList([Ends()])}
    options |= {
        "sampling": {"do_sample": True},
        "cache": {"return_dict_in_generate": True},
        "stream": {"streamer": Streamed(), "input_ids": PROMPT[:1], "attention_mask": torch.ones_like(PROMPT[:1])},
    }.get(why, {})
    if why == "unfused":
        model._decodes_in_graphs = False
    if why == "own loop":
        own = utils.GenerationMixin._sample
        monkeypatch.setattr(utils.GenerationMixin, "_sample", lambda *args, **kwargs: own(*args, **kwargs))
        monkeypatch.setattr(decoding, "FunctionType", None)
    if why == "earlier release":
        monkeypatch.delattr(utils, "DeferredStopCheck")
        assert decoding.without_waiting(model._sample, torch.device("cuda"), model.generation_config, None)
        return
    _, after = generated(model, True, **options)
    assert after.waits >= 1 and after.late == 0
