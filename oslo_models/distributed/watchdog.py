"""Knows where every rank is, so that an error can say which one failed and not only that somebody waited in vain.

A side thread of each process posts its place (step, phase, what it waits for) to the store of the process group. When
waiting for others ends badly, `Watchdog.explain` reads the posts of those and names who died, stopped or stayed away.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from oslo_models.distributed.failure_diagnosis import FailureDiagnosis, Post, born, home, is_gone
from oslo_models.distributed.store_client import StoreClient, StoreLostError

TIMEOUT = 60.0
"""Seconds that a rank waits for others by default."""
LONG = 1800.0
"""Seconds that it waits for one that is alive but reads or writes files."""
BEAT = 1.0
"""Seconds from post to post where nothing changes."""
LINGER = 10.0
"""Seconds that the end of rank 0, which may host the store, waits at most for others to read what rank 0 has found."""


class RankFailedError(RuntimeError):
    """Other ranks of the model died, stopped or stayed away while this one waited for them.

    The process groups are of no use after it: end the process, and let the launcher start all of them again.

    Attributes:
        ranks: the global ranks that failed; empty if all are alive and wait for each other.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Watchdog:
    """What a process tells the others of itself, and what it can find out about them; one for each process group.

    Attributes:
        step: how many batches the models of this process have been called with.
        place: the phase it is in, and since when.
        waits: the ranks that it waits for, in what, and since when; ``None`` while it does not wait.
        failed: what this rank has raised, if it has; nothing can be exchanged any more.
        found: the ranks that failed according to this one, and what there is to say of each.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self.step = 0
        self.place = ("start", time.monotonic())
        self.waits: tuple[tuple[int, ...], str, float] | None = None
        self.failed: RankFailedError | None = None
        self.found: dict[int, str] | None = None
        self.beat = BEAT
        self._posting, self._asking = (StoreClient(store, "oslo_models.distributed.watchdog") for _ in range(2))
        self.ask = self._asking.ask
        self.known: dict[int, Post] = {}
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self._store = store  # rank 0 may host it
        self._number, self._left, self._wake = 0, False, threading.Event()
        self._gates: dict[str, int] = {}
        self._self = {"pid": os.getpid(), "host": socket.gethostname(), "home": home(), "born": born(os.getpid())}
        self._thread = threading.Thread(target=_keep_posting, args=(weakref.ref(self),), daemon=True, name="oslo-watch")
        self._thread.start()
        atexit.register(_leave, weakref.ref(self))
        Finalize(None, _leave, (weakref.ref(self),), exitpriority=0)  # children of multiprocessing skip atexit

    def belongs_to(self, world: dist.ProcessGroup) -> Watchdog:
        """Note the process group of the world, which keeps the store, and with which the side thread ends."""
        self.world, self._store = weakref.ref(world), None
        return self

    @property
    def _is_over(self) -> bool:
        """Whether the process group has been destroyed; models may outlive that."""
        return self.world is not None and (self.world() is None or self.world() is not dist.group.WORLD)

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
            "failed": self.found,
            "told": self._is_told,
        }
        self._posting.store.set(str(self.rank), json.dumps(post))

    @property
    def _is_told(self) -> bool:
        """Whether this rank knows what rank 0 has found."""
        return 0 in self.known and self.known[0]["failed"] is not None

    def _at(self, phase: str) -> str:
        return f"step {self.step}, {phase}" if self.step else phase

    def _tick(self, last: tuple[Any, float]) -> tuple[Any, float]:
        """Post if there is news or it is time, and keep what the store's usual host says: it may take the store along.

        ``last`` is what was posted last and when; so is what is returned.
        """
        news, now = (self.place, self.failed, self._is_told), time.monotonic()
        if news == last[0] and now < last[1] + self.beat:
            return last
        self._post()
        if self.rank and self._posting.store.check(["0"]):
            self.known[0] = json.loads(self._posting.store.get("0"))
        return news, now

    # Finding out ------------------------------------------------------------------------------------------------------

    def read(self, store: Any, ranks: Iterable[int]) -> dict[int, Post]:
        """The posts of these ranks, and of all that they wait for or found to have failed."""
        posts: dict[int, Post] = {}
        todo = [rank for rank in ranks if rank != self.rank]
        while todo:
            rank = todo.pop()
            if rank in posts or not store.check([str(rank)]):
                continue
            posts[rank] = post = json.loads(store.get(str(rank)))
            more = [*(post["waits"] or [()])[0], *map(int, post["failed"] or ())]
            todo.extend(other for other in more if other != self.rank)
        self.known.update(posts)
        return posts

    def explain(self, error: Exception, axis: Any) -> Exception:
        """The error to raise when waiting for the ranks of ``axis`` ended with ``error``: itself if nobody failed."""
        assert self.waits is not None
        ranks, what, since = self.waits
        waited = time.monotonic() - since
        late = waited >= 0.9 * axis.timeout
        inquiry = FailureDiagnosis(self, ranks, axis.timeout)
        deadline = time.monotonic() + 4 * self.beat
        failed = inquiry.failed(3 * self.beat)
        while not failed and (inquiry.awaits_store or time.monotonic() < deadline):
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
        if self.world is not None and (world := self.world()) is not None:
            self._store = world.get_group_store()  # it stays until `_leave`, even if the group is destroyed before
        self.found, self.failed = failed, error
        deadline, number = time.monotonic() + 1.0 + 4 * self.beat, self._number
        self._wake.set()
        while self._number == number and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        return error

    def _linger(self) -> None:
        """Rank 0 may take the store along when it ends. Others would then take its end for the cause of everything."""
        others = set(range(self._size)) - {0, *self.found} if self.found else set()
        deadline = time.monotonic() + LINGER
        while others and time.monotonic() < deadline:
            try:
                posts = self.ask(partial(self.read, ranks=others.copy()))
            except StoreLostError:
                return
            except TimeoutError:
                continue
            others &= {r for r, post in posts.items() if not (post["told"] or post["failed"] is not None)}
            others -= {r for r in others if is_gone(posts[r])}
            time.sleep(0.02)

    def leave(self) -> None:
        """Say good-bye, and end all threads: one that runs while the interpreter ends could break it."""
        self._left = True
        self._wake.set()
        self._thread.join(1.0)
        if not self._posting.lost and not self._thread.is_alive():
            with suppress(TimeoutError):
                self._posting.ask(lambda _: self._post(), 0.5)
        if self.rank == 0:
            self._linger()
        self._asking.close()
        self._posting.close(self._thread)

    def meet(self, axis: Any, what: str, unheard: float = 0.0) -> None:
        """Wait until all ranks of ``axis`` are here, however long they read or write files, as long as they live.

        Args:
            unheard: seconds to wait for a rank that has not posted anything yet, if longer than the timeout.

        Raises:
            RankFailedError: one died, or was not heard of for the timeout of the axis, or is not here after half an
                hour.
        """
        place = f"{axis.name} {axis.ranks[0]} {axis.ranks[-1]} {axis.size}"
        number = self._gates[place] = self._gates.get(place, 0) + 1
        timeout, start = axis.timeout, time.monotonic()
        key, asked, pause, inquiry = (
            f"gate {place} {number}",
            start,
            1e-4,
            FailureDiagnosis(self, axis.ranks, timeout, unheard),
        )
        arrived, missed, add = 0, start, 1
        # The more ranks there are, the less often each may ask for all.
        longest, interval = max(0.05, axis.size / 5000), max(self.beat, axis.size**2 / 10_000)
        while arrived < axis.size:
            with suppress(TimeoutError):
                amount, add = add, 0
                arrived, missed = self.ask(partial(_add, key=key, amount=amount)), time.monotonic()
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
                self.ask(lambda store: store.delete_key(f"gate {place} {number - 1}"))


class waiting:  # noqa: N801  a context manager; a class, since one made by `contextmanager` takes twice the time
    """Around everything that blocks until other ranks come: if they do not, the error says which one failed, and where.

    Args:
        what: what this rank waits in, for the message: ``"a sum"``.
        peer: the position on the axis of the only one that it waits for.
        slow: first wait until all of them are here, however long they take as long as they live.

    Raises:
        RankFailedError: one of them died, stopped, or stayed away for longer than the timeout.
    """

    __slots__ = ("axis", "peer", "slow", "what")

    def __init__(self, axis: Any, what: str, peer: int | None = None, slow: bool = False) -> None:
        self.axis, self.what, self.peer, self.slow = axis, what, peer, slow

    def __enter__(self) -> None:
        watch, axis = self.axis.watch, self.axis
        if watch is None:
            return
        if watch.failed is not None:
            raise watch.failed
        ranks = axis.ranks if self.peer is None else (axis.ranks[self.peer],)
        watch.waits = (ranks, self.what, time.monotonic())
        if self.slow:
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


def _keep_posting(ref: weakref.ref[Watchdog]) -> None:
    """The side thread; it ends with the watch, with the process group, or when the store is gone."""
    last: tuple[Any, float] = (None, 0.0)
    while (watch := ref()) is not None and not watch._left and not watch._is_over:
        with suppress(Exception):  # explaining will tell
            try:
                last = watch._tick(last)
            except dist.DistNetworkError:
                watch._posting.lost = True
                return
        pause, wake = watch.beat / 4, watch._wake
        del watch
        wake.wait(pause)
        wake.clear()


def _add(store: Any, key: str, amount: int) -> Any:
    return store.add(key, amount)


def _leave(ref: weakref.ref[Watchdog]) -> None:
    """At the end of a process; that of a forked child is not the end of this rank."""
    watch = ref()
    if watch is not None and not watch._left and watch._self["pid"] == os.getpid():
        watch.leave()


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watchdog] = weakref.WeakKeyDictionary()


def watchdog_of_world(timeout: float, watch: Watchdog | None = None) -> Watchdog:
    """The watch of the process group of the world: ``watch``, or one begun when it is first asked for."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _watches:
        watch = watch or Watchdog(world.get_group_store(), dist.get_rank(), dist.get_world_size())
        _watches[world] = watch.belongs_to(world)
    _watches[world].hurry(timeout)
    return _watches[world]
