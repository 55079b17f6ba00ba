"""Knows where every rank is, so that an error can say which one failed and not only that somebody waited in vain.

A side thread of each process posts its place (step, phase, what it waits for) to the store of the process group. When
waiting for others ends badly, `Watch.explain` reads the posts of those and names who died, stopped or stayed away.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from oslo_models.inquiry import Inquiry, Post, born, home

PATIENCE = 60.0
"""Seconds that a rank waits for others by default."""
LONG = 1800.0
"""Seconds that it waits for one that is alive but reads or writes files."""
BEAT = 1.0
"""Seconds from post to post where nothing changes."""


class RankFailedError(RuntimeError):
    """Other ranks of the model died, stopped or stayed away while this one waited for them.

    The process groups are of no use after it: end the process, and let the launcher start all of them again.

    Attributes:
        ranks: the global ranks that failed; empty if all are alive and wait for each other.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Watch:
    """What a process tells the others of itself, and what it can find out about them; one for each process group.

    Attributes:
        step: how many batches the models of this process have been called with.
        place: the phase it is in, and since when.
        waits: the ranks that it waits for, in what, and since when; ``None`` while it does not wait.
        failed: what this rank has raised, if it has; nothing can be exchanged any more.
    """

    def __init__(self, world: dist.ProcessGroup, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.place = ("start", time.monotonic())
        self.waits: tuple[tuple[int, ...], str, float] | None = None
        self.failed: RankFailedError | None = None
        self.beat = BEAT
        # A connection that waits for an answer is not for two threads.
        store: Any = world.get_group_store()
        self._posting, self._asking = (PrefixStore("oslo_models.watch", store.clone()) for _ in range(2))
        self.known: dict[int, Post] = {}
        self._number, self._left = 0, False
        self._gates: dict[str, int] = {}
        self._self = {"pid": os.getpid(), "host": socket.gethostname(), "home": home(), "born": born(os.getpid())}
        arguments = weakref.ref(self), weakref.ref(world)
        self._thread = threading.Thread(target=_keep_posting, args=arguments, daemon=True, name="oslo-watch")
        self._thread.start()
        atexit.register(_leave, weakref.ref(self))

    def at(self, phase: str) -> None:
        """Note where this process is; the side thread tells the others."""
        self.place = (phase, time.monotonic())

    def hurry(self, timeout: float) -> None:
        """Post often enough for those who wait no longer than ``timeout``."""
        self.beat = min(self.beat, max(timeout / 10, 0.05))

    # Posting ----------------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Tell where this process is."""
        self._number += 1
        (phase, since), waits, now = self.place, self.waits, time.monotonic()
        post = {
            **self._self,
            **{"number": self._number, "time": time.time(), "left": self._left},
            **{"place": self._at(phase), "since": now - since},
            "waits": waits and [waits[0], waits[1], now - waits[2]],
            "failed": None if self.failed is None else self.failed.ranks,
        }
        self._posting.set(str(self.rank), json.dumps(post))

    def _at(self, phase: str) -> str:
        return f"step {self.step}, {phase}" if self.step else phase

    def _tick(self, last: tuple[Any, float]) -> tuple[Any, float]:
        """Post if there is news or it is time, and keep what the store's usual host says: it may take the store along.

        ``last`` is what was posted last and when; so is what is returned.
        """
        news, now = (self.place, self.failed), time.monotonic()
        if news == last[0] and now < last[1] + self.beat:
            return last
        self._post()
        if self.rank and self._posting.check(["0"]):
            self.known[0] = json.loads(self._posting.get("0"))
        return news, now

    # Finding out ------------------------------------------------------------------------------------------------------

    def ask(self, question: Callable[[], Any], seconds: float = 2.0) -> Any:
        """Ask the store something. It may have been stopped with its host, so another thread does the waiting.

        Raises:
            TimeoutError: it does not answer.
        """
        answer: list[Any] = []

        def ask() -> None:
            with suppress(Exception):  # the store is gone
                answer.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        if not answer:
            raise TimeoutError("the store of the process group does not answer")
        return answer[0]

    def read(self, ranks: Iterable[int]) -> dict[int, Post]:
        """The posts of these ranks, and of all that they wait for or found to have failed."""
        posts: dict[int, Post] = {}
        todo = [rank for rank in ranks if rank != self.rank]
        while todo:
            rank = todo.pop()
            if rank in posts or not self._asking.check([str(rank)]):
                continue
            posts[rank] = post = json.loads(self._asking.get(str(rank)))
            more = [*(post["waits"] or [()])[0], *(post["failed"] or ())]
            todo.extend(other for other in more if other != self.rank)
        self.known.update(posts)
        return posts

    def explain(self, error: Exception, axis: Any) -> Exception:
        """The error to raise when waiting for the ranks of ``axis`` ended with ``error``: itself if nobody failed."""
        assert self.waits is not None
        ranks, what, since = self.waits
        waited = time.monotonic() - since
        late = waited >= 0.9 * axis.timeout
        inquiry = Inquiry(self, ranks)
        deadline = time.monotonic() + 4 * self.beat
        failed = inquiry.failed(3 * self.beat)
        while not failed and time.monotonic() < deadline:
            time.sleep(min(0.05, self.beat / 4))
            failed = inquiry.failed(3 * self.beat)
        if not failed and not late and not inquiry.others_gave_up():
            return error
        where = f"{what} with ranks {list(ranks)} ({axis.name})"
        return self._fail(failed or inquiry.absent(), where, waited, f"timeout={axis.timeout:g}; {error}")

    def _fail(self, failed: dict[int, str], where: str, waited: float, cause: str) -> RankFailedError:
        """Make the error, and tell the others before this process ends and looks like one that failed by itself."""
        found = "\n".join(failed.values()) or "all ranks are alive and wait for each other"
        mine = f"rank {self.rank} waited {waited:.1f} s in {where}, {self._at(self.place[0])}; {cause}"
        error = RankFailedError(f"{found}\n{mine}", tuple(failed))
        self.failed = error
        with suppress(TimeoutError):
            deadline, number = time.monotonic() + 1.0, self._number
            while self._number == number and time.monotonic() < deadline and self._thread.is_alive():
                time.sleep(0.01)  # the side thread sees that there is news
        return error

    def meet(self, axis: Any, what: str) -> None:
        """Wait until all ranks of ``axis`` are here, however long they read or write files, as long as they live.

        Raises:
            RankFailedError: one died, or was not heard of for the timeout of the axis, or is not here after half an
                hour.
        """
        place = f"{axis.name} {axis.ranks[0]} {axis.ranks[-1]} {axis.size}"
        number = self._gates[place] = self._gates.get(place, 0) + 1
        key, start, pause, inquiry = f"gate {place} {number}", time.monotonic(), 1e-4, Inquiry(self, axis.ranks)
        timeout, asked = axis.timeout, start
        arrived, missed, add = 0, start, 1
        # The more ranks there are, the less often each may ask for all.
        longest, interval = max(0.05, axis.size / 5000), max(self.beat, axis.size**2 / 10_000)
        while arrived < axis.size:
            with suppress(TimeoutError):
                amount, add = add, 0
                arrived, missed = self.ask(partial(self._asking.add, key, amount)), time.monotonic()
            now = time.monotonic()
            if now > asked + interval:
                asked, failed = now, inquiry.failed(timeout)
                if now > start + max(LONG, timeout) or now > missed + timeout:
                    failed = failed or inquiry.absent()
                if failed:
                    where = f"{what} with ranks {list(axis.ranks)} ({axis.name})"
                    raise self._fail(failed, where, now - start, f"timeout={timeout:g}")
            if arrived < axis.size:
                time.sleep(pause)
                pause = min(1.5 * pause, longest)
        if axis.rank == 0 and number > 1:
            with suppress(TimeoutError):
                self.ask(lambda: self._asking.delete_key(f"gate {place} {number - 1}"))


class waiting:  # noqa: N801  a context manager; a class, since one made by `contextmanager` takes twice the time
    """Around everything that blocks until other ranks come: if they do not, the error says which one failed, and where.

    Args:
        what: what this rank waits in, for the message: ``"a sum"``.
        peer: the position on the axis of the only one that it waits for.
        long: first wait until all of them are here, however long they take as long as they live.

    Raises:
        RankFailedError: one of them died, stopped, or stayed away for longer than the timeout.
    """

    __slots__ = ("axis", "long", "peer", "what")

    def __init__(self, axis: Any, what: str, peer: int | None = None, long: bool = False) -> None:
        self.axis, self.what, self.peer, self.long = axis, what, peer, long

    def __enter__(self) -> None:
        watch, axis = self.axis.watch, self.axis
        if watch is None:
            return
        if watch.failed is not None:
            raise watch.failed
        ranks = axis.ranks if self.peer is None else (axis.ranks[self.peer],)
        watch.waits = (ranks, self.what, time.monotonic())
        if self.long:
            watch.meet(axis, self.what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = self.axis.watch
        if watch is None or watch.waits is None:
            return
        found: BaseException | None = error
        if isinstance(error, RuntimeError) and not isinstance(error, RankFailedError):
            found = watch.explain(error, self.axis)
        watch.waits = None
        if found is not error and found is not None:
            raise found from error


def _keep_posting(ref: weakref.ref[Watch], group: weakref.ref[dist.ProcessGroup]) -> None:
    """The side thread; it ends with the watch, or when its process group is destroyed: models may outlive that."""
    last: tuple[Any, float] = (None, 0.0)
    while (watch := ref()) is not None and not watch._left and group() is dist.group.WORLD is not None:
        with suppress(Exception):  # the store is gone: explaining will tell
            last = watch._tick(last)
        pause = watch.beat / 4
        del watch
        time.sleep(pause)


def _leave(ref: weakref.ref[Watch]) -> None:
    """Say good-bye; a thread that runs while the interpreter ends could break it."""
    watch = ref()
    if watch is not None and not watch._left:
        watch._left = True
        watch._thread.join(1.0)
        with suppress(TimeoutError):
            watch.ask(watch._post, 0.5)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def watch_of_world(timeout: float) -> Watch:
    """The watch of the process group of the world, begun when it is first asked for."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _watches:
        _watches[world] = Watch(world, dist.get_rank())
    _watches[world].hurry(timeout)
    return _watches[world]
