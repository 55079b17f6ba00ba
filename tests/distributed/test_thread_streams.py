"""Ranks in threads use the caller's streams. Streams are mocked, since there may be no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models.distributed.collectives import SUM
from oslo_models.distributed.thread_group import ThreadGroup


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Current device and a stream per device, by thread, as in torch; entering a stream enters its device."""

    class Current(threading.local):
        def __init__(self) -> None:
            self.streams, self.device = {0: "default 0", 1: "default 1"}, 0

    state = Current()

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        before = dict(state.streams), state.device
        state.streams[given.device.index], state.device = given.name, given.device.index
        yield
        state.streams, state.device = before

    @contextmanager
    def device(given: torch.device) -> Iterator[None]:
        before, state.device = state.device, given.index
        yield
        state.device = before

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(name=state.streams[device.index], device=device)

    generators = [torch.Generator(), torch.Generator()]
    for name, stand_in in (("stream", stream), ("device", device), ("current_stream", current_stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    return state


def test_ranks_run_and_reduce_in_the_streams_of_the_caller(current: threading.local) -> None:
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    group = ThreadGroup(gpus)
    seen: list[Any] = []

    class Observed(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "add" in func.__name__:
                seen.append(("sum", dict(current.streams)))
            return super().__torch_function__(func, types, args, kwargs or {})

    def task(rank: int) -> dict[int, str]:
        assert current.device == rank
        began = dict(current.streams)
        x = torch.ones(2).as_subclass(Observed)
        own = SimpleNamespace(name=f"own {rank}", device=gpus[rank])
        with torch.cuda.stream(own):  # such as a layer that overlaps its communication
            group.all_reduce(rank, x, SUM)
        assert x.tolist() == [2, 2] and current.streams == began
        return began

    mine = [SimpleNamespace(name=f"mine {gpu.index}", device=gpu) for gpu in gpus]
    with torch.cuda.stream(mine[0]), torch.cuda.stream(mine[1]):
        found = group.run(task)
    assert found == [{0: "mine 0", 1: "mine 1"}] * 2
    assert seen == [("sum", {0: "own 0", 1: "own 1"})]
