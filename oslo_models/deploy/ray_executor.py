"""Workers as actors of Ray, which finds places for them on one host or several."""

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

from oslo_models.deploy.messages import decode, encode

PLACES = 60.0
"""Seconds that Ray gets to find places; a cluster that grows by itself may need some."""


class _Mailbox:
    """What a worker takes for its connection to the application."""

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.recv_bytes, self.send_bytes = self.incoming.get, self.outgoing.put


class _Actor:
    """A worker. Its three methods run beside each other, each in the order of the calls."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()

    def introduce(self) -> tuple[int, str]:
        return os.getpid(), get_node_ip_address()

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def work(self) -> None:
        from oslo_models.deploy.worker import Worker

        Worker(self._mailbox).run()

    @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
    def tell(self, data: bytes) -> None:
        self._mailbox.incoming.put(data)

    @ray.method(concurrency_group="hear")  # type: ignore[untyped-decorator]
    def hear(self) -> list[bytes]:
        """What the worker has said since it was last asked, as soon as that is something."""
        said = [self._mailbox.outgoing.get()]
        with suppress(queue.Empty):
            while True:
                said.append(self._mailbox.outgoing.get_nowait())
        return said


class RayExecutor:
    """Actors in a placement group: those of one pipeline stage are on one host.

    Ray is started on this host alone if it does not run yet. It ends the actors when the application ends.
    """

    def __init__(self, count: int, stages: int = 1) -> None:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=True)
        kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._actors: list[Any] = []
        self._hearing: dict[Any, int] = {}
        self._why: dict[int, str] = {}
        self._closed = threading.Event()
        self.pids: list[int] = []
        self.host = "127.0.0.1"
        self._group = placement_group([{kind: count // stages}] * stages, strategy="PACK")
        try:
            self._place(count, stages, kind)
        except BaseException:
            self.kill()
            raise

    def _place(self, count: int, stages: int, kind: str) -> None:
        if not self._group.wait(PLACES):
            raise ValueError(
                f"Ray found no {stages} places with {count // stages} {kind}s on one host each within {PLACES:g} s; "
                f"the cluster has {ray.cluster_resources().get(kind, 0):g}, of which "
                f"{ray.available_resources().get(kind, 0):g} are free"
            )
        actor = ray.remote(concurrency_groups={"work": 1, "tell": 1, "hear": 1})(_Actor)
        for rank in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, rank // (count // stages))
            resources = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
            self._actors.append(actor.options(scheduling_strategy=place, max_restarts=0, **resources).remote())
        introductions = ray.get([actor.introduce.remote() for actor in self._actors])
        self.pids = [pid for pid, _ in introductions]
        self.host = introductions[0][1]
        for rank, actor in enumerate(self._actors):
            actor.work.remote()
            self._hearing[actor.hear.remote()] = rank

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._actors[rank].tell.remote(encode(message))

    def broadcast(self, data: bytes) -> None:
        for actor in self._actors:
            actor.tell.remote(data)

    def wait(self, timeout: float, awake: float = 0.0) -> None:
        self._ready(timeout)

    def _ready(self, timeout: float) -> list[Any]:
        if self._closed.is_set() or not ray.is_initialized():
            raise OSError("the actors were ended")
        ready, _ = ray.wait(list(self._hearing), timeout=timeout)
        return ready

    def receive(self) -> Iterator[tuple[int, Any]]:
        for ref in self._ready(0):
            rank = self._hearing.pop(ref)
            try:
                said = ray.get(ref)
            except RayError as error:
                self._why[rank] = " ".join(str(error).split())
                yield rank, None
                return
            self._hearing[self._actors[rank].hear.remote()] = rank
            for data in said:
                yield rank, decode(data)

    def obituary(self, rank: int) -> str:
        return (
            f"rank {rank} (pid {self.pids[rank]}, an actor of Ray) died: {self._why.get(rank, 'it is not known how')}"
        )

    def kill(self) -> None:
        self._closed.set()
        if not ray.is_initialized():  # and with it the actors are gone
            return
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
        deadline = time.monotonic() + 10.0
        for ref in list(self._hearing):
            with suppress(RayError):
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
