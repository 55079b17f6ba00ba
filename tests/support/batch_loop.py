"""The loop of the running batch in one process, with messages that arrive at chosen steps."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from oslo_models.deploy.messages import Failure, Reply, Request, Stepped
from oslo_models.deploy.running_batch.admission import Admission
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.loop import Messages, RunningBatch
from oslo_models.deploy.running_batch.plan_channel import NoFollowers

from support.deployment import prompt

LIMITS = BatchLimits(3, 64, 4)


class Application:
    """The other end of a batch on one rank: its messages arrive after given numbers of steps with tokens.

    Attributes:
        sent: the messages of the batch.
        at: for each message, the number of steps before it.
        rows: after each step, the call numbers of the rows.
    """

    def __init__(self, model: Any, limits: BatchLimits = LIMITS, groups: int = 1, draft_model: Any = None) -> None:
        self.sent: list[Any] = []
        self.at: list[int] = []
        self.rows: list[list[int]] = []
        self.cancelled: set[int] = set()
        self._looks, self._steps, self._later = 0, 0, list[tuple[int, Callable[[], Any]]]()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        report = (self._send, self.cancelled, self._count)
        self.batch = RunningBatch(model, limits, NoFollowers(), True, *report, groups, draft_model)

    def send(self, step: int, message: Any) -> None:
        self._later.append((step, lambda: self._inbox.put(message)))

    def cancel(self, step: int, number: int) -> None:
        self._later.append((step, lambda: self.cancelled.add(number)))

    def run(self) -> None:
        """Run until everything is answered, like a worker."""
        self._later.sort(key=lambda each: each[0])
        while self._later or not self._inbox.empty():
            if self._inbox.empty():
                self._steps = max(self._steps, self._later[0][0])
            with_rows = self.get_nowait()
            if with_rows.joins or with_rows.gives_way:
                self.batch.run(with_rows, Messages(self, self._answer))
            else:
                self._answer(with_rows)

    def get_nowait(self) -> Any:
        self._looks += 1
        assert self._looks < 1000, "the batch does not come to its end"
        while self._later and self._later[0][0] <= self._steps:
            self._later.pop(0)[1]()
        return self._inbox.get_nowait()

    def get(self) -> Any:
        return self.get_nowait()

    def _count(self) -> None:
        self._steps += 1
        self.rows.append(list(self.batch.runners[0].numbers))

    def _send(self, message: Any, number: int) -> None:
        self.sent.append(message)
        self.at.append(self._steps)

    def _answer(self, request: Request) -> None:
        """Answer a call that cannot join. ``args`` of `generate` is its number of tokens."""
        assert not self.batch._ahead, "other ranks have yet to compute steps"
        for _ in range(*request.args if request.method == "generate" else (0,)):
            if self.batch.wants_turn():
                self.batch.take_turn()
        self._send(Reply(request.number, request.method), request.number)

    def answer(self, number: int) -> Any:
        """Return the only reply or failure of a call."""
        (found,) = [each for each in self.sent if isinstance(each, (Reply, Failure)) and each.number == number]
        return found

    def streamed(self, number: int) -> list[Any]:
        pairs = [pair for each in self.sent if isinstance(each, Stepped) for pair in each.values]
        return [value for which, value in pairs if which == number]


def request(number: int, call: dict[str, Any], stream: bool = False, config: Any = None) -> Request:
    """Return the message of a call that joins. ``config`` is needed for a call with images."""
    options, images = {key: value for key, value in call.items() if key != "seed"}, ()
    if config is not None:
        options, images = Admission(config, LIMITS, takes_features=True).separate_images(options)
    return Request(number, "generate", (), options, call.get("seed", 0), stream, joins=True, images=images)


def greedy(seed: int, new: int, length: int = 7, **options: Any) -> dict[str, Any]:
    return {**prompt(seed, 1, length), "max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
