"""Restarts dead workers of a model, a limited number of times."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment

log = logging.getLogger("oslo_models.server")


@dataclass(frozen=True)
class RestartPolicy:
    """Limits and delays for restarts of a model's workers.

    Attributes:
        restarts: limit of restarts within ``window``; after one more death, the server ends.
        window: length of the window in seconds.
        first_delay: seconds before the second restart within ``window``. The delay doubles with each further restart,
            up to ``longest_delay``. The first restart has no delay.
        silence: seconds without an answer after which live workers are ended too.
        interval: seconds between two checks.
    """

    restarts: int = 3
    window: float = 600.0
    first_delay: float = 1.0
    longest_delay: float = 60.0
    silence: float = 60.0
    interval: float = 1.0

    def delay(self, past: int) -> float | None:
        """Return the delay in seconds after ``past`` restarts within the window; ``None`` beyond the limit."""
        if past >= self.restarts:
            return None
        return min(self.longest_delay, self.first_delay * 2 ** min(past - 1, 30)) if past else 0.0


class Supervisor:
    """Watches deployed models, with one thread per model.

    Args:
        models: the models by name.
        restarted: called with the name of a model before its workers restart.
        give_up: called once, with the reason, after too many restarts.
    """

    def __init__(
        self,
        models: Mapping[str, Deployment],
        policy: RestartPolicy,
        restarted: Callable[[str], object],
        give_up: Callable[[str], object],
    ) -> None:
        self._policy, self._restarted, self._give_up = policy, restarted, give_up
        self._stopped = threading.Event()
        for name, model in models.items():
            threading.Thread(target=self._watch, args=(name, model), daemon=True, name="oslo-supervisor").start()

    def stop(self) -> None:
        """Make no further restarts. A running restart ends when its model is closed."""
        self._stopped.set()

    def _watch(self, name: str, model: Deployment) -> None:
        policy, past = self._policy, deque[float]()
        while (reason := self._failure(model)) is not None:
            now = time.monotonic()
            while past and past[0] < now - policy.window:
                past.popleft()
            delay = policy.delay(len(past))
            log.error("%s: %s", name, reason)
            if delay is None:
                self._give_up(f"{name}: {reason}; restarts within {policy.window:g} s before: {len(past)}")
                return
            if self._stopped.wait(delay):
                return
            past.append(now + delay)
            self._restarted(name)
            self._restart(name, model)

    def _failure(self, model: Deployment) -> str | None:
        """Wait until the workers die or are silent for too long. Return the reason, or ``None`` after `stop`."""
        heard = time.monotonic()
        while not self._stopped.wait(self._policy.interval):
            state = model.health()
            if state["healthy"]:
                heard = time.monotonic()
            elif not state["ranks"] or time.monotonic() - heard > self._policy.silence:
                return str(state["reason"])
        return None

    def _restart(self, name: str, model: Deployment) -> None:
        began = time.monotonic()
        try:
            model.restart()
        except Exception as error:  # noqa: BLE001  it counts as a restart, and is tried again
            log.error("%s: the workers could not be started: %s", name, error)
        else:
            log.warning("%s: its workers were started again in %.1f s", name, time.monotonic() - began)
