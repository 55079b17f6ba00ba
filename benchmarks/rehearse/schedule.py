"""Runs each case in a separate process. Cases prepare in parallel, and each measures while all others are stopped."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.rehearse.cases import ROOT, Case

QUIET = 0.3
"""Seconds between stopping the other cases and measuring, so that their launched kernels finish."""
TICK = 0.1
CACHES = {"TRITON_CACHE_DIR": ".triton", "TORCHINDUCTOR_CACHE_DIR": ".inductor"}
"""The variables that name the compilation caches of a case."""
Report = Callable[[Case, dict[str, Any]], None]


class Running:
    """A case with a live process.

    Attributes:
        state: ``"preparing"``, ``"waiting"`` for its turn, ``"measuring"``, or ``"ended"``.
        used: Seconds that it has run.
    """

    def __init__(self, case: Case, folder: Path, dry: bool, environment: dict[str, str]) -> None:
        self.case, self.state, self.used = case, "preparing", 0.0
        self.log = tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False)  # noqa: SIM115
        receive, send = os.pipe()
        # separate caches: a stopped case may hold a lock
        caches = {name: self.log.name + suffix for name, suffix in CACHES.items()}
        how = [case.run, json.dumps(case.options), "dry" if dry else "gpu"]
        with os.fdopen(send, "w"):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rehearse.child", *how, str(send)], cwd=ROOT,
                env={**environment, **caches}, pass_fds=(send,), stdin=subprocess.PIPE, stdout=self.log,
                stderr=subprocess.STDOUT, start_new_session=True, text=True,
            )  # fmt: skip
        os.set_blocking(receive, False)
        self.rows: IO[bytes] = os.fdopen(receive, "rb", buffering=0)
        self._rest = b""

    def messages(self) -> list[dict[str, Any]] | None:
        """Return the messages of the process since the last call; ``None`` once it has closed its end."""
        data = self.rows.read(1 << 16)
        if data is None:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: int) -> None:
        """Send a signal to the process group of the case."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def begin(self) -> None:
        self.state = "measuring"
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> int:
        """Kill the process group of the case, and return the exit code of the process."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self.state == "ended" else 1)
        self.signal(signal.SIGKILL)
        code = self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.rows.close()
        self.log.close()
        return code

    def said(self, size: int = 3000) -> str:
        """The end of its output."""
        return Path(self.log.name).read_bytes()[-size:].decode(errors="replace")


class Schedule:
    """One part.

    Args:
        report: Function that takes every row.
        workers: Maximum number of concurrent cases.
        gigabytes: Maximum memory of all concurrent cases.
    """

    def __init__(
        self, folder: Path, dry: bool, environment: dict[str, str], report: Report, workers: int, gigabytes: float
    ) -> None:
        self.folder, self.dry, self.environment, self.report = folder, dry, environment, report
        self.workers, self.gigabytes = workers, gigabytes
        self.running: list[Running] = []
        self.selector = selectors.DefaultSelector()

    def run(self, cases: Iterable[Case], deadline: float) -> None:
        """Run the cases in order until they are done or ``time.monotonic()`` is past the deadline."""
        waiting = list(cases)
        try:
            then = time.monotonic()
            while (waiting or self.running) and then < deadline:
                while waiting and self._fits(waiting[0]):
                    self._start(waiting.pop(0))
                self._give_turn()
                for key, _ in self.selector.select(TICK):
                    self._listen(key.data)
                for running in [each for each in self.running if each.process.poll() is not None]:
                    self._listen(running, ended=True)  # a child process may still hold the pipe open
                now = time.monotonic()
                self._charge(now - then)
                then = now
        finally:
            for running in self.running[:]:
                self._stop(running, "limit of the part", "not finished")
            for case in waiting:
                self.report(case, {"state": "not run", "error": "limit of the part"})

    def _fits(self, case: Case) -> bool:
        if not self.running:
            return True
        if any(running.state == "measuring" for running in self.running) or len(self.running) >= self.workers:
            return False
        return sum(running.case.gigabytes for running in self.running) + case.gigabytes <= self.gigabytes

    def _start(self, case: Case) -> None:
        running = Running(case, self.folder, self.dry, self.environment)
        self.running.append(running)
        self.selector.register(running.rows, selectors.EVENT_READ, running)

    def _give_turn(self) -> None:
        """Let the first ready case measure, while all preparing cases are stopped."""
        if any(running.state == "measuring" for running in self.running):
            return
        ready = next((running for running in self.running if running.state == "waiting"), None)
        if ready is not None:
            self._signal_others(ready, signal.SIGSTOP)
            if not self.dry:
                time.sleep(QUIET)
            ready.begin()

    def _signal_others(self, running: Running, number: int) -> None:
        for other in self.running:
            if other is not running and other.state == "preparing":
                other.signal(number)

    def _listen(self, running: Running, ended: bool = False) -> None:
        messages = running.messages()
        measuring = running.state == "measuring"
        for message in messages or ():
            kind = message.pop("kind")
            if kind == "row":
                self.report(running.case, message)
            else:
                running.state = {"ready": "waiting", "end": "ended"}[kind]
        if running.state == "ended" or messages is None or (ended and not messages):
            finished = running.state == "ended"
            code = self._remove(running, measuring)
            if not finished:
                self.report(running.case, {"state": "failed", "error": f"{running.said()}\nexit code {code}"})
            self.report(running.case, {"state": "done", "seconds": round(running.used, 1)})

    def _charge(self, seconds: float) -> None:
        stopped = any(running.state == "measuring" for running in self.running)
        for running in self.running[:]:
            if running.state == "measuring" or (running.state == "preparing" and not stopped):
                running.used += seconds
            if running.used > running.case.limit:
                self._stop(running, f"more than {running.case.limit:g} s, while {running.state}")

    def _stop(self, running: Running, why: str, state: str = "failed") -> None:
        """Kill a case, and report its location."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(running.process.pid, number)
        time.sleep(TICK)
        running.signal(signal.SIGKILL)
        while messages := running.messages():  # rows still in the pipe
            for message in messages:
                if message.pop("kind") == "row":
                    self.report(running.case, message)
        self._remove(running, running.state == "measuring")
        self.report(running.case, {"state": state, "error": f"{running.said()}\n{why}"})

    def _remove(self, running: Running, measured: bool) -> int:
        self.selector.unregister(running.rows)
        self.running.remove(running)
        code = running.end()
        if measured:
            self._signal_others(running, signal.SIGCONT)
        return code
