"""Finds out who failed: from what the ranks posted of themselves, and on this machine from their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oslo_models.distributed.store_client import StoreLostError

Post = dict[str, Any]
GONE = ("died", "has ended")


class FailureDiagnosis:
    """Who, of ``ranks`` and all that they wait for, has failed? Asked again and again, silence becomes an answer.

    Args:
        patience: seconds of silence that mean nothing where a process can be seen to be alive: the machine is busy.
        unheard: seconds to wait for the first post of a rank, if longer than for another.
    """

    def __init__(self, watch: Any, ranks: Sequence[int], patience: float, unheard: float = 0.0) -> None:
        self.watch, self.ranks, self.patience, self.unheard = watch, ranks, patience, unheard
        self.posts: dict[int, Post] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._unanswered: float | None = None

    @property
    def awaits_store(self) -> bool:
        """Whether the store has not answered, and may be slow."""
        return self._unanswered is not None

    def failed(self, silence: float) -> dict[int, str]:
        """Those that died, are stopped, or were not heard of for ``silence`` seconds; what to say of each."""
        now = time.monotonic()
        try:
            self.posts = self.watch.ask(lambda store: self.watch.read(store, self.ranks), silence)
        except StoreLostError:
            return self._without_store()
        except TimeoutError:
            self._unanswered = now if self._unanswered is None else self._unanswered
            if self._may_be_slow() and time.monotonic() - self._unanswered < self.patience:
                return {}
            return self._without_store()
        self._unanswered = None
        found = {}
        for rank in self.posts.keys() | set(self.ranks) - {self.watch.rank}:
            post = self.posts.get(rank, {"number": 0})
            number, since = self._heard.get(rank, (-1, now))
            if number != post["number"]:
                self._heard[rank] = (post["number"], now)
            if post.get("failed") is not None:
                continue  # it gave up because of others
            state, limit = _state(post), silence
            if "pid" not in post:
                limit = max(silence, self.unheard)
            elif is_visible(post) and not state:
                limit = max(silence, self.patience)
            if state in GONE or now - since > limit:  # who is stopped may go on soon
                found[rank] = _sentence(rank, post, state or "has not been heard of")
        return dict(sorted((found or self._told(self.posts)).items()))

    def _told(self, posts: dict[int, Post]) -> dict[int, str]:
        """What others have found, before they ended because of it."""
        told = {int(rank): said for post in posts.values() for rank, said in (post["failed"] or {}).items()}
        told.pop(self.watch.rank, None)
        return told

    def _may_be_slow(self) -> bool:
        """Whether rank 0, which may host the store, can be seen to be running."""
        host = self.watch.known.get(0)
        return self.watch.rank == 0 or (host is not None and is_visible(host) and not _state(host))

    def others_gave_up(self) -> bool:
        """Whether some raised: then the end of a connection is theirs."""
        return any(post["failed"] is not None for post in self.posts.values())

    def _without_store(self) -> dict[int, str]:
        """The store is in rank 0, or in the launcher's process: judge by what the ranks said last."""
        self._unanswered = None
        known = self.watch.known
        if told := self._told(known):
            return told
        found = {rank: _sentence(rank, post, state) for rank, post in known.items() if (state := _state(post))}
        if 0 in found:  # the store went with it, and others after that
            return {0: found[0]}
        if not found and self.watch.rank:
            found[0] = _sentence(0, known.get(0, {}), "or the launcher, who has the store, has not been heard of")
        return found

    def absent(self) -> dict[int, str]:
        """Those that are alive and do not wait for anybody, or whose side thread cannot run any more."""
        found = {}
        for rank, post in sorted(self.posts.items()):
            if post["failed"] is not None:
                continue
            if post["waits"] is None:
                found[rank] = _sentence(rank, post, "did not come: it is alive and waits for no rank of the model")
            elif is_visible(post) and time.time() - post["time"] > self.patience:
                found[rank] = _sentence(rank, post, "has not been heard of")
        return found


def _sentence(rank: int, post: Post, state: str) -> str:
    if "pid" not in post:
        return f"rank {rank} {state} at all"
    ago = max(0.0, time.time() - post["time"])
    where = f"{post['place']}, since {post['since']:.1f} s"
    if post["waits"]:
        where += f", waiting in {post['waits'][1]}"
    return (
        f"rank {rank} (host {post['host']}, pid {post['pid']}) {state}; last heard of {ago:.1f} s ago, then in {where}"
    )


def is_visible(post: Post) -> bool:
    """Whether the process that posted can be seen from here."""
    return bool(post.get("home")) and post["home"] == home()


def is_gone(post: Post) -> bool:
    """Whether that process will not read anything: it has ended or is stopped."""
    return bool(_state(post))


def _state(post: Post) -> str:
    """What has happened to the process that posted; empty if it is alive or cannot be told from here."""
    if post.get("left"):
        return "has ended"
    if not is_visible(post):
        return ""
    try:
        state, born = _stat(post["pid"])
    except OSError:
        return "died"
    if state in "ZX" or born != post["born"]:
        return "died"
    return "is stopped (by SIGSTOP or a debugger)" if state in "Tt" else ""


def _stat(pid: int) -> tuple[str, int]:
    """The state of a process on this machine, and when it was started (another may get its id)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def born(pid: int) -> int:
    try:
        return _stat(pid)[1]
    except OSError:
        return 0


def home() -> str:
    """What ids of processes are comparable; empty where nothing is known of them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
