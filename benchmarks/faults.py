"""Does anything hang? Every fault that a deployed model or a training script may meet, many times over.

``python -m benchmarks.faults --times 20`` prints a table and writes ``benchmarks/faults.csv``. Every fault has to end
in an exception soon (or, where the application itself ends, in the end of its workers), to leave no process behind, and
nothing in shared memory. In a training script, every other rank has to name the one that failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.fault_table import FIGURES, TABLE, write
from benchmarks.faulty import CONFIG, LONG, Collected, Trouble, application
from benchmarks.short_paths import shorten_socket_paths
from benchmarks.training_faults import TRAINING_FAULTS, Training, WrongEndError
from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import EngineError

LIMIT = 60.0
"""Seconds after which an operation counts as a hang."""
WHENS = ("load", "call", "idle")


class Hang(BaseException):
    """Nothing happened for `LIMIT`."""


class Stand:
    """A model on two workers, deployed on first use.

    Attributes:
        ended: Processes that should be gone after a fault.
    """

    def __init__(self, folder: Path, seed: int | None = None) -> None:
        self.checkpoint, self.rng = folder / "checkpoint", random.Random(seed)
        torch.manual_seed(0)
        self.whole = transformers.GPT2LMHeadModel(CONFIG).eval()
        self.whole.save_pretrained(self.checkpoint)
        self.ended: list[int] = []
        self.load_seconds = 0.0

    @cached_property
    def model(self) -> Any:
        load, since = GPT2LMHeadModel.from_pretrained_with_parallel, time.perf_counter()
        made = load(self.checkpoint, tensor_parallel_size=2, deploy=True)
        self.load_seconds = time.perf_counter() - since
        return made

    @cached_property
    def training(self) -> Training:
        return Training(self.checkpoint, self.rng)

    @property
    def pids(self) -> list[int]:
        return self.model._engine.pids

    def prompt(self) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[self.rng.randrange(3, 101) for _ in range(7)]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def answers(self) -> None:
        """Start the model if it is down, and check that it answers as transformers does."""
        if self.model._engine._executor is None:
            self.model.restart()
        batch, options = self.prompt(), {"max_new_tokens": 5, "do_sample": False}
        found, expected = self.model.generate(**batch, **options), self.whole.generate(**batch, **options)
        if not torch.equal(found, expected):
            raise RuntimeError(f"the answer was {found.tolist()}, not {expected.tolist()}")

    @contextmanager
    def raising(self, *kinds: type[BaseException], text: str = "") -> Iterator[None]:
        """Require that the block raises one of ``kinds``, with ``text`` in its message."""
        try:
            yield
        except kinds as error:
            if text not in f"{error} {error.__cause__}":
                raise RuntimeError(f"{error!r} does not say {text!r}") from error
        else:
            raise RuntimeError("nothing was raised")

    def close(self) -> None:
        for made in ("model", "training"):
            if made in self.__dict__:
                getattr(self, made).close()


# Workers --------------------------------------------------------------------------------------------------------------


def killed_idle(stand: Stand) -> float:
    stand.answers()
    stand.ended = stand.pids
    victim = stand.rng.randrange(2)
    pid = stand.ended[victim]
    since = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    with stand.raising(EngineError, text=f"rank {victim} (pid {pid}) was killed by SIGKILL"):
        while True:  # the first call may overtake the news of the death
            stand.model.generate(**stand.prompt(), max_new_tokens=1)
    return time.perf_counter() - since


def killed_in_call(stand: Stand) -> float:
    stand.answers()
    stand.ended = stand.pids
    victim, struck = stand.rng.randrange(2), [0.0]
    pid = stand.ended[victim]

    def strike() -> None:
        struck[0] = time.perf_counter()
        os.kill(pid, signal.SIGKILL)

    threading.Timer(stand.rng.uniform(0.05, 1.0), strike).start()
    with stand.raising(EngineError, text=f"rank {victim} (pid {pid}) was killed by SIGKILL"):
        stand.model.generate(**stand.prompt(), **LONG, logits_processor=[Trouble("sleep", 0)])
    return time.perf_counter() - struck[0]


def killed_in_load(stand: Stand) -> float:
    stand.answers()
    before = stand.pids
    victim, struck, pids = stand.rng.randrange(2), [0.0], list[int]()
    delay = stand.rng.uniform(0.0, 0.8) * stand.load_seconds

    def strike() -> None:
        while not (found := stand.pids) or found == before:
            time.sleep(0.001)
        pids.extend(found)
        time.sleep(delay)
        struck[0] = time.perf_counter()
        os.kill(pids[victim], signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    with stand.raising(EngineError, text=f"rank {victim} ("):
        stand.model.restart()
        stand.model.generate(**stand.prompt(), **LONG, logits_processor=[Trouble("sleep", 0)])  # it was loaded sooner
    seconds = time.perf_counter() - struck[0]
    thread.join()
    stand.ended = before + pids
    return seconds


def raises_alone(stand: Stand) -> float:
    stand.answers()
    victim, since = stand.rng.randrange(2), time.perf_counter()
    with stand.raising(MemoryError, text=f"raised by rank {victim} (pid {stand.pids[victim]})"):
        # with beams, which every rank computes; in the running batch one rank chooses the tokens for all
        trouble = {"logits_processor": [Trouble("raise", victim)], "num_beams": 2}
        stand.model.generate(**stand.prompt(), max_new_tokens=3, **trouble)
    seconds = time.perf_counter() - since
    stand.answers()  # all ranks learn of errors in user code, so the workers go on
    return seconds


# The caller -----------------------------------------------------------------------------------------------------------

Bad = tuple[Callable[[Any, dict[str, Any]], Any], tuple[type[BaseException], ...], str]
BAD: dict[str, Bad] = {
    "a number out of range": (lambda m, p: m.generate(**p, max_new_tokens=-3), (ValueError,), "max_new_tokens"),
    "an unknown setting": (lambda m, p: m.generate(**p, max_new_tokns=3), (ValueError,), "max_new_tokns"),
    "no such token": (lambda m, p: m(input_ids=torch.tensor([[500]])), (IndexError,), "index"),
    "two inputs": (lambda m, p: m(**p, inputs_embeds=torch.zeros(1, 7, 48)), (ValueError,), "input_ids"),
    "a lambda": (lambda m, p: m.generate(**p, stopping_criteria=[lambda *_: 1]), (ValueError,), "importable by name"),
    "shapes that differ": (
        lambda m, p: m(input_ids=torch.ones(2, 3, dtype=torch.long), labels=torch.ones(3, 3, dtype=torch.long)),
        (ValueError, RuntimeError),
        "batch",
    ),
    "too long": (lambda m, p: m(input_ids=torch.ones(1, 600, dtype=torch.long)), (IndexError, RuntimeError), ""),
    "beams and a streamer": (lambda m, p: m.generate(**p, num_beams=2, streamer=Collected()), (ValueError,), "stream"),
    "training": (lambda m, p: m.train(), (RuntimeError,), "cannot be trained"),
    "text": (lambda m, p: m.generate("text"), (ValueError, AttributeError, TypeError), "str"),
}


def bad_argument(stand: Stand, what: str) -> float:
    call, kinds, text = BAD[what]
    stand.answers()
    batch, since = stand.prompt(), time.perf_counter()
    with stand.raising(*kinds, text=text):
        call(stand.model, batch)
    seconds = time.perf_counter() - since
    stand.answers()
    return seconds


def abandoned_stream(stand: Stand) -> float:
    """Seconds until the workers are free again. The whole text would take 20 seconds."""
    stand.answers()
    streamer = Collected(limit=stand.rng.randrange(8, 20))
    with stand.raising(BrokenPipeError):
        stand.model.generate(**stand.prompt(), **LONG, streamer=streamer, logits_processor=[Trouble("sleep", 0)])
    since = time.perf_counter()
    stand.answers()
    if not streamer.ended:
        raise RuntimeError("the streamer was not ended")
    return time.perf_counter() - since


def full_disk(stand: Stand) -> float:
    """Seconds to load and answer while writes to standard output and error fail."""
    engine = stand.model._engine
    engine.close()
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    full = os.open("/dev/full", os.O_WRONLY)
    since = time.perf_counter()
    try:
        os.dup2(full, 1), os.dup2(full, 2)
        stand.answers()
        stand.model.generate(**stand.prompt(), max_new_tokens=2, do_sample=False, temperature=0.5)  # has a warning
    finally:
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        for fd in (*kept, full):
            os.close(fd)
    seconds = time.perf_counter() - since
    stand.ended = stand.pids
    engine.close()
    return seconds


# The application ------------------------------------------------------------------------------------------------------


def application_ends(stand: Stand, how: int) -> float:
    """Seconds until the application and its workers are gone."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    when = stand.rng.choice(WHENS)
    app = context.Process(target=application, args=(theirs, stand.checkpoint, when))
    app.start()
    theirs.close()
    pids = ours.recv()
    if when == "load":
        time.sleep(stand.rng.uniform(0.0, 1.0))
    elif ours.recv() != "loaded":
        raise RuntimeError("the application did not load its model")
    else:
        time.sleep(0.2)
    since = time.perf_counter()
    (os.killpg if how == signal.SIGINT else os.kill)(app.pid, how)
    app.join(LIMIT)
    stand.ended = [app.pid, *pids]
    gone(stand.ended)
    return time.perf_counter() - since


FAULTS: dict[str, Callable[[Stand], float]] = {
    "worker killed while idle": killed_idle,
    "worker killed in a call": killed_in_call,
    "worker killed while loading": killed_in_load,
    "user code raises on one rank": raises_alone,
    "application killed": partial(application_ends, how=signal.SIGKILL),
    "application interrupted (Ctrl-C)": partial(application_ends, how=signal.SIGINT),
    "application terminated (SIGTERM)": partial(application_ends, how=signal.SIGTERM),
    **{f"bad argument: {what}": partial(bad_argument, what=what) for what in BAD},
    "reader of a stream leaves": abandoned_stream,
    "disk full of logs": full_disk,
}


def training(stand: Stand, name: str) -> float:
    return TRAINING_FAULTS[name](stand.training)


ALL = FAULTS | {name: partial(training, name=name) for name in TRAINING_FAULTS}


def gone(pids: list[int], seconds: float = LIMIT) -> bool:
    """Return whether these processes end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            print(f"still there: {alive}", file=sys.stderr)
            return False
        time.sleep(0.005)
    return True


def strike(stand: Stand, fault: Callable[[Stand], float]) -> tuple[float, bool]:
    """Inject one fault. Return the seconds to its end, and whether all expected processes have ended.

    Raises:
        Hang: It took longer than `LIMIT`.
    """

    def give_up(*_: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    stand.ended = []
    try:
        seconds = fault(stand)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return seconds, gone(stand.ended)


def _shared() -> list[str]:
    """List shared memory, except locks of applications forked here: their locks are removed with this process."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))


def main() -> int:
    """Try all faults. Return 1 for any hang, remaining process or wrong result."""
    from benchmarks.records import stamp as _stamp

    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--times", metavar="N", type=int, default=20, help="how often each (default: 20)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only faults whose name contains this; others stay")
    parser.add_argument("--out", metavar="FILE", type=Path, default=TABLE, help="where the table is written")
    parser.add_argument("--seed", metavar="N", type=int, help="repeats the moments of an earlier run")
    args = parser.parse_args()
    shorten_socket_paths()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.faulty", "oslo_models.models.gpt2"])
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    stamp, rows, before = _stamp(), [], _shared()
    print(f"{'fault':42}", *(f"{field:>14}" for field in FIGURES))
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder), args.seed)
        for name in [name for name in ALL if args.only in name]:
            rows.append({**stamp, "workers": "forked", **_row(stand, name, args.times)})
            print(f"{name:42}", *(f"{rows[-1].get(field, '')!s:>14}" for field in FIGURES), flush=True)
        stand.close()
    write(args.out, rows)
    after = _shared()
    print("/dev/shm is as it was" if after == before else f"/dev/shm: {before} became {after}")
    wrong = ("hangs", "unnamed", "aborts", "processes left")
    return int(any(int(row.get(figure) or 0) for row in rows for figure in wrong) or after != before)


def _row(stand: Stand, name: str, times: int) -> dict[str, Any]:
    seconds, hangs, left, ends = [], 0, 0, Counter[str]()
    for _ in range(times):
        try:
            took, all_gone = strike(stand, ALL[name])
        except Hang:
            hangs += 1
            with suppress(Exception):
                stand.close()
            continue
        except WrongEndError as error:
            print(error, file=sys.stderr)
            hangs += "hang" in error.ends.values()
            ends.update(error.ends.values())
            continue
        seconds.append(took)
        left += not all_gone
    figures = {"median s": statistics.median(seconds), "max s": max(seconds)} if seconds else {}
    rounded = {key: f"{value:.3f}" for key, value in figures.items()}
    others = {} if name in FAULTS else {"unnamed": ends["other"], "aborts": ends["abort"]}
    return {"fault": name, "times": times, "hangs": hangs, **others, **rounded, "processes left": left}


if __name__ == "__main__":
    sys.exit(main())
