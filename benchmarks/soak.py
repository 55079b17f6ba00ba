"""A server under load for a long time, with clients that misbehave and workers that are killed or stopped.

Every answer is compared with what transformers computes for the same prompt, so that an answer that goes to another
client is noticed. At the end nothing may be in flight, and memory, threads and open files have to be as before.
The table is printed and added to ``benchmarks/faults.csv``; the exit code is 1 if something was wrong.

  python -m benchmarks soak --minutes 30
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_table import TABLE, write
from benchmarks.records import stamp
from benchmarks.soak_clients import (
    ADAPTER,
    DRAFTER,
    KINDS,
    LIMIT,
    Client,
    Prompt,
    UnavailableError,
    WrongAnswerError,
    prepare,
)

PROBE_SECONDS = 0.5
"""Limit for the liveness probe, at the 99.9th percentile."""
RECOVERY = 60.0
"""Seconds after a fault in which requests may be refused."""
KILLED, ALL_KILLED, KILLED_AGAIN = "worker killed", "all workers killed", "worker killed, another one as it starts"
STOPPED = "worker stopped for up to 6 s"
FAULTS = {KILLED: 3, ALL_KILLED: 1, KILLED_AGAIN: 1, STOPPED: 2}
"""The relative frequencies of the faults."""


GROWTH = {"MB": 30, "descriptors": 5, "threads": 64}
"""Growth that is not a leak. The pool of calls starts a thread when it has no idle one, up to ``--max-queue-size``."""


class Server:
    """``oslo-models serve`` in a process, with its log in a file."""

    def __init__(self, checkpoint: Path, log: Path, drafted: int) -> None:
        options = ["--port", "0", "--tensor-parallel-size", "2", "--dtype", "float64", "--header-seconds", "5"]
        options += ["--restart-workers", "100000", "--restart-window", "30", "--max-length", "256"]
        options += ["--adapter", f"{ADAPTER}={checkpoint / ADAPTER}"]
        if drafted:
            options += ["--speculative-model", str(checkpoint / DRAFTER), "--speculative-tokens", str(drafted)]
        self.log = log
        command = [sys.executable, "-m", "oslo_models", "serve", str(checkpoint), *options]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 180
        while not (found := re.search(r" at http://127\.0\.0\.1:(\d+)", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        self.port, self.itself = int(found[1]), psutil.Process(self.process.pid)

    @property
    def workers(self) -> list[psutil.Process]:
        below = self.itself.children(recursive=True)
        forking = {process.ppid() for process in below}  # exclude their fork server
        return [process for process in below if process.pid not in forking]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=LIMIT) as answer:
            return str(answer.read().decode())

    def measure(self) -> dict[str, float]:
        """Return the resources that may leak."""
        found: dict[str, float] = {"MB of the server": self.itself.memory_info().rss / 1e6}
        with contextlib.suppress(psutil.Error):  # a worker may be killed meanwhile
            found["MB of the workers"] = sum(worker.memory_info().rss for worker in self.workers) / 1e6
        found |= {"threads": self.itself.num_threads(), "descriptors": self.itself.num_fds()}
        return found


class Soak:
    """The clients, the faults and the observations.

    Attributes:
        seconds: Durations of answered requests, by kind.
        refused: Number of requests answered with 429 or 503.
        wrong: Errors, by kind.
        faults: Times at which workers were killed or stopped.
    """

    def __init__(self, server: Server, name: str, prompts: list[Prompt], seed: int) -> None:
        self.server, self.name, self.prompts, self.seed = server, name, prompts, seed
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.refused: dict[str, int] = defaultdict(int)
        self.wrong: dict[str, list[str]] = defaultdict(list)
        self.hangs: dict[str, int] = defaultdict(int)
        self.faults, self.recoveries, self.samples = list[float](), dict[str, list[float]](), list[dict[str, float]]()
        self.probes = list[float]()
        self._drawn: dict[Any, str] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()

    def client(self, number: int) -> None:
        made = Client(self.server.port, self.name, self.prompts, self._drawn, self.seed * 1000 + number)
        weights = [weight for _, weight in KINDS.values()]
        while not self._stop.is_set():
            (kind,) = made.draw.choices(list(KINDS), weights)
            self._once(kind, made)
            time.sleep(made.draw.uniform(0, 0.1))

    def probe(self) -> None:
        """Measure the liveness probe."""
        while not self._stop.wait(0.05):
            began = time.monotonic()
            try:
                self.server.get("/health/live")
            except OSError as error:
                with self._lock:
                    self.wrong["liveness probe"].append(f"{error!r}")
            self.probes.append(time.monotonic() - began)

    def slowest_probe(self) -> float:
        """Return the 99.9th percentile of the liveness probe, in seconds."""
        return sorted(self.probes)[int(0.999 * (len(self.probes) - 1))] if self.probes else 0.0

    def _once(self, kind: str, made: Client) -> None:
        began = time.monotonic()
        try:
            KINDS[kind][0](made)
        except UnavailableError:
            with self._lock:
                self.refused[kind] += 1
            time.sleep(0.2)
            self._note_refusal(kind, began)
            return
        except TimeoutError:
            with self._lock:
                self.hangs[kind] += 1
            return
        except (WrongAnswerError, OSError, ValueError, LookupError) as error:
            with self._lock:
                self.wrong[kind].append(f"{error!r}")
            print(f"wrong: {kind}: {error!r}", file=sys.stderr, flush=True)
            return
        with self._lock:
            self.seconds[kind].append(time.monotonic() - began)

    def _note_refusal(self, kind: str, began: float) -> None:
        """Refusals are right within `RECOVERY` of a fault only: there are fewer clients than places."""
        if not any(fault - 1 <= time.monotonic() and began <= fault + RECOVERY for fault in self.faults):
            with self._lock:
                self.wrong[kind].append("refused without a fault")

    def strike(self, kind: str, draw: random.Random) -> None:
        """One of `FAULTS`; then wait until the server is ready again."""
        workers = self.server.workers
        victim = draw.choice(workers)
        began = time.monotonic()
        self.faults.append(began)
        if kind == STOPPED:
            victim.suspend()
            time.sleep(draw.uniform(0.5, 6.0))
            began = time.monotonic()
            victim.resume()
        else:
            for each in workers if kind == ALL_KILLED else [victim]:
                each.kill()
            time.sleep(0.5)
        if kind == KILLED_AGAIN:
            while not (workers := self.server.workers) and time.monotonic() < began + LIMIT:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 4))
            with contextlib.suppress(psutil.Error):
                draw.choice(workers).kill()
            time.sleep(0.5)
        while True:
            with contextlib.suppress(OSError):
                self.server.get("/health/ready")
                break
            if time.monotonic() > began + LIMIT:
                with self._lock:
                    self.hangs[kind] += 1
                return
            time.sleep(0.1)
        self.recoveries.setdefault(kind, []).append(time.monotonic() - began)
        self.faults[-1] = time.monotonic()

    def run(self, seconds: float, clients: int, between: float) -> None:
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(clients)]
        threads.append(threading.Thread(target=self.probe))
        for thread in threads:
            thread.start()
        draw, end = random.Random(self.seed), time.monotonic() + seconds
        next_fault = time.monotonic() + between
        while time.monotonic() < end and self.server.process.poll() is None:
            time.sleep(2.0)
            self.samples.append(self.server.measure())
            if time.monotonic() > next_fault and time.monotonic() < end - 20:
                self.strike(draw.choices(list(FAULTS), list(FAULTS.values()))[0], draw)
                next_fault = time.monotonic() + between * draw.uniform(0.5, 1.5)
                print(self.progress(), flush=True)
        self._stop.set()
        for thread in threads:
            thread.join(2 * LIMIT)
            if thread.is_alive():
                self.hangs["client"] += 1

    def progress(self) -> str:
        done = sum(map(len, self.seconds.values()))
        last = ", ".join(f"{name} {value:.0f}" for name, value in self.samples[-1].items())
        return f"{done} answered, {sum(self.refused.values())} refused, {len(self.faults)} faults; {last}"

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for kind in [*KINDS, *self.recoveries]:
            seconds = self.seconds[kind] or self.recoveries.get(kind, [])
            row = {"fault": f"server: {kind}", "times": len(seconds) + self.refused[kind], "hangs": self.hangs[kind]}
            row |= {"refused": self.refused[kind], "wrong": len(self.wrong[kind])}
            if seconds:
                row |= {"median s": f"{statistics.median(seconds):.3f}", "max s": f"{max(seconds):.3f}"}
            rows.append(row)
        return rows


@contextlib.contextmanager
def _served(checkpoint: Path, log: Path, drafted: int) -> Iterator[Server]:
    server = Server(checkpoint, log, drafted)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def _settled(server: Server) -> tuple[dict[str, float], str]:
    """Wait until the server is idle. Return its measurements, and the calls and connections still in flight."""
    deadline = time.monotonic() + 45  # the server gives up on half a body after 30 s
    while True:
        time.sleep(1.0)
        busy = [line for line in server.get("/metrics").splitlines() if line.startswith("oslo_models_calls_in_flight")]
        found = server.measure()
        connections = len(server.itself.net_connections("tcp"))
        if (busy == ["oslo_models_calls_in_flight 0"] and connections <= 1) or time.monotonic() > deadline:
            return found, f"{busy[0].split()[1]} calls, {connections - 1} connections"


def _terminate(server: Server) -> tuple[int, int]:
    """Return the exit code after SIGTERM, and the number of remaining processes."""
    workers = server.workers
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(LIMIT)
    return code, len(psutil.wait_procs(workers, 5)[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", metavar="M", type=float, default=30.0, help="how long (default: %(default)s)")
    add("--clients", metavar="N", type=int, default=12, help="at the same time (default: %(default)s)")
    between = "seconds between two faults, on average (default: %(default)s)"
    add("--between", metavar="S", type=float, default=45.0, help=between)
    add("--seed", metavar="N", type=int, default=random.SystemRandom().randrange(10**6), help="of prompts and faults")
    add("--out", metavar="FILE", type=Path, default=TABLE, help="where the table is (default: %(default)s)")
    drafts = "tokens that a model drafts for each answer (default: %(default)s)"
    add("--speculative-tokens", metavar="N", type=int, default=0, help=drafts)
    add("--note", metavar="TEXT", default="", help="for the rows, such as what else ran on the machine")
    add("--log", metavar="FILE", type=Path, help="keep the log of the server here")
    args = parser.parse_args(argv)
    print(f"--seed {args.seed}", flush=True)
    header = stamp()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        prompts = prepare(checkpoint, 100, args.seed)
        with _served(checkpoint, args.log or Path(folder) / "log", args.speculative_tokens) as server:
            soak = Soak(server, str(checkpoint), prompts, args.seed)
            soak.run(min(20.0, 6 * args.minutes), args.clients, 1e9)  # to warm up
            before, _ = _settled(server)
            soak.samples.clear()
            soak.probes.clear()
            soak._stop.clear()
            soak.run(60 * args.minutes, args.clients, args.between)
            after, left = _settled(server)
            print(*re.findall(r"^\w+(?:drafted|accepted)_tokens.*", server.get("/metrics"), re.MULTILINE))
            code, processes = _terminate(server)
            tracebacks = server.log.read_text().count("Traceback")
    return _report(soak, header, args, before, after, left, code, processes, tracebacks)


def _report(
    soak: Soak,
    header: dict[str, str],
    args: argparse.Namespace,
    before: dict[str, float],
    after: dict[str, float],
    left: str,
    code: int,
    processes: int,
    tracebacks: int,
) -> int:
    note = f"serve, {args.minutes:g} min, {args.clients} clients"
    note += f", {args.speculative_tokens} drafted tokens" if args.speculative_tokens else ""
    note += f", {args.note}" if args.note else ""
    rows = [{**header, "workers": note, **row} for row in soak.rows()]
    growth = {name: after[name] - value for name, value in before.items()}
    ends = {"fault": "server: at the end", "times": 1, "processes left": processes, "growth": _text(growth)}
    rows.append({**header, "workers": note, **ends})
    for row in rows:
        print(f"{row['fault']:45}", *(f"{key} {row[key]}" for key in row if key in _SHOWN))
    grows = False
    quarter = max(1, len(soak.samples) // 4)
    for name in before:
        values = [sample[name] for sample in soak.samples if name in sample]
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        grows |= last - first > GROWTH[name.split()[0]]
        print(f"{name}: idle {before[name]:.0f} -> {after[name]:.0f}; busy, first quarter {first:.0f}, last {last:.0f}")
    print(f"liveness probe: {len(soak.probes)} times, 99.9 % within {soak.slowest_probe():.3f} s")
    print(f"in flight at the end: {left}; exit code {code}; processes left {processes}; tracebacks logged {tracebacks}")
    if args.minutes >= 1:
        write(args.out, rows)
    leaks = grows or growth["descriptors"] > 5 or soak.slowest_probe() > PROBE_SECONDS
    bad = any(soak.wrong.values()) or any(soak.hangs.values()) or code or processes or tracebacks or leaks
    return int(bool(bad) or left != "0 calls, 0 connections")


_SHOWN = ("times", "hangs", "refused", "wrong", "median s", "max s", "processes left", "growth")


def _text(growth: dict[str, float]) -> str:
    return "; ".join(f"{name} {value:+.0f}" for name, value in growth.items())


if __name__ == "__main__":
    sys.exit(main())
