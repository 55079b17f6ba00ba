"""Cancelled calls, penalties and log-probabilities of a deployed model, against transformers in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.decoding import Decoding, Scored

from support import deployment
from support.deployment import Collected, prompt
from support.waiting import wait_until


def greedy(whole: Any, ids_BL: torch.Tensor, steps: int, change: Callable[[torch.Tensor, list[int]], Any]) -> Any:
    """Return the tokens, and the log-probabilities before ``change``, one by one without a cache."""
    new: list[int] = []
    logits = []
    with torch.no_grad():
        for _ in range(steps):
            logits_V = whole(torch.cat((ids_BL, torch.tensor([new], dtype=torch.long)), 1)).logits[0, -1]
            logits.append(logits_V.log_softmax(-1))
            new.append(int(change(logits_V.clone(), new).argmax()))
    return new, logits


def test_penalties_count_the_generated_tokens_as_openai_defines_them(model: Any, whole: Any, seed: int) -> None:
    batch = prompt(seed, 1)

    def penalized(logits_V: torch.Tensor, new: list[int]) -> torch.Tensor:
        for token, count in Counter(new).items():
            logits_V[token] -= 1.3 * count + 0.7
        return logits_V

    expected, _ = greedy(whole, batch["input_ids"], 12, penalized)
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": None}
    found = model.generate(**batch, **options, decoding=Decoding(frequency_penalty=1.3, presence_penalty=0.7))
    assert found[0, 7:].tolist() == expected
    assert expected != greedy(whole, batch["input_ids"], 12, lambda logits, _: logits)[0]


def test_streamer_gets_log_probabilities_of_the_raw_logits(model: Any, whole: Any, seed: int) -> None:
    batch, read = prompt(seed, 1), list[Any]()

    class Reader:
        put, end = staticmethod(read.append), staticmethod(lambda: None)

    options = {"do_sample": True, "temperature": 0.3, "top_k": 5, "seed": 3, "max_new_tokens": 6, "min_new_tokens": 6}
    found = model.generate(**batch, **options, streamer=Reader(), decoding=Decoding(logprobs=4))
    assert torch.equal(found, model.generate(**batch, **options))  # log-probabilities do not change the tokens
    assert torch.equal(read[0], batch["input_ids"]) and all(isinstance(each, Scored) for each in read[1:])
    assert [each.token for each in read[1:]] == found[0, 7:].tolist()
    for at, scored in enumerate(read[1:]):
        with torch.no_grad():
            expected_V = whole(found[:, : 7 + at]).logits[0, -1].log_softmax(-1)
        top = expected_V.topk(4)
        assert scored.logprob == pytest.approx(float(expected_V[scored.token]), abs=1e-4)
        assert [value for _, value in scored.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert {token for token, _ in scored.top} == set(top.indices.tolist())


@pytest.mark.parametrize("streams", [False, True])
def test_cancelled_call_ends_at_the_next_token(model: Any, seed: int, streams: bool) -> None:
    cancellation, batch = Cancellation(), prompt(seed, 1)
    options = {"streamer": Collected()} if streams else {}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(model.generate, **batch, **deployment.LONG, **options, cancellation=cancellation)
        wait_until(lambda: model._engine._calls)
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            call.result(5)
    wait_until(lambda: not model._engine._calls)
    with pytest.raises(CallCancelled):  # a call that is cancelled before it begins
        model.generate(**batch, **deployment.LONG, cancellation=cancellation)
    assert model.generate(**batch, max_new_tokens=2, min_new_tokens=2).shape[1] == 9
