"""Workers as Ray actors, which Ray places on one host or several."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oslo_models.deploy.serialization import decode, encode

PLACEMENT_TIMEOUT = 60.0
"""Seconds that Ray gets to place the workers. An autoscaling cluster may need time to grow."""


class _Mailbox:
    """The connection to the application, as a worker sees it (`worker.Channel`): two queues."""

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.recv_bytes, self.send_bytes = self.incoming.get, self.outgoing.put


class _Actor:
    """A worker. Its three concurrency groups run in parallel. Calls within a group run in order."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()

    def introduce(self) -> tuple[int, str]:
        return os.getpid(), get_node_ip_address()

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def work(self) -> None:
        from oslo_models.deploy.worker import Worker

        Worker(self._mailbox).run()

    @ray.method(concurrency_group="deliver")  # type: ignore[untyped-decorator]
    def deliver(self, data: bytes) -> None:
        self._mailbox.incoming.put(data)

    @ray.method(concurrency_group="collect")  # type: ignore[untyped-decorator]
    def collect(self) -> list[bytes]:
        """Return the messages that the worker has sent since the last call. Waits for the first message."""
        messages = [self._mailbox.outgoing.get()]
        with suppress(queue.Empty):
            while True:
                messages.append(self._mailbox.outgoing.get_nowait())
        return messages


class RayExecutor:
    """Actors in a placement group. The actors of one pipeline stage are on one host.

    If Ray does not run yet, it is started on this host only. Ray ends the actors when the application exits.
    """

    port = 0

    def __init__(self, count: int, stages: int = 1) -> None:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=True)
        resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        self._exit_reasons: dict[int, str] = {}
        self._closed = threading.Event()
        self.pids: list[int] = []
        self.host = "127.0.0.1"
        self._group = placement_group([{resource: count // stages}] * stages, strategy="PACK")
        try:
            self._place(count, stages, resource)
        except BaseException:
            self.kill()
            raise

    def _place(self, count: int, stages: int, resource: str) -> None:
        if not self._group.wait(PLACEMENT_TIMEOUT):
            raise ValueError(
                f"Ray found no {stages} placements with {count // stages} {resource}s on one host each within "
                f"{PLACEMENT_TIMEOUT:g} s; "
                f"the cluster has {ray.cluster_resources().get(resource, 0):g}, with "
                f"{ray.available_resources().get(resource, 0):g} free"
            )
        actor = ray.remote(concurrency_groups={"work": 1, "deliver": 1, "collect": 1})(_Actor)
        for rank in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, rank // (count // stages))
            resources = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": 1}
            self._actors.append(actor.options(scheduling_strategy=place, max_restarts=0, **resources).remote())
        introductions = ray.get([actor.introduce.remote() for actor in self._actors])
        self.pids = [pid for pid, _ in introductions]
        self.host = introductions[0][1]
        for rank, actor in enumerate(self._actors):
            actor.work.remote()
            self._pending[actor.collect.remote()] = rank

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._actors[rank].deliver.remote(encode(message))

    def broadcast(self, data: bytes) -> None:
        for actor in self._actors:
            actor.deliver.remote(data)

    def wait(self, timeout: float, spin: float = 0.0) -> None:
        self._wait_ready(timeout)

    def _wait_ready(self, timeout: float) -> list[Any]:
        if self._closed.is_set() or not ray.is_initialized():
            raise OSError("the actors ended")
        ready, _ = ray.wait(list(self._pending), timeout=timeout)
        return ready

    def receive(self) -> Iterator[tuple[int, Any]]:
        for ref in self._wait_ready(0):
            rank = self._pending.pop(ref)
            try:
                messages = ray.get(ref)
            except RayError as error:
                self._exit_reasons[rank] = " ".join(str(error).split())
                yield rank, None
                return
            self._pending[self._actors[rank].collect.remote()] = rank
            for data in messages:
                yield rank, decode(data)

    def exit_reason(self, rank: int) -> str:
        reason = self._exit_reasons.get(rank, "the reason is not known")
        return f"rank {rank} (pid {self.pids[rank]}, an actor of Ray) died: {reason}"

    def kill(self) -> None:
        self._closed.set()
        if not ray.is_initialized():  # the actors ended with it
            return
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
        deadline = time.monotonic() + 10.0
        for ref in list(self._pending):
            with suppress(RayError):
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
