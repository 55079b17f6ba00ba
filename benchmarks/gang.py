"""Four ranks of a training script, as a user starts them, and the load beside them: the victims of `training_faults`.

``python -m benchmarks.gang`` is a server that has imported torch and forks a process for each line of its input.
Unlike children of `multiprocessing`, its children end like any Python script: a traceback on standard error, the
functions of `atexit`, and the shutdown of the interpreter, which C++ threads may still abort.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.launch import COMMON, ROOT

PHASES = ("loading", "forward", "backward", "optimizer step", "generation", "saving")
NOTE = 32
"""Bytes of the note with the current phase of a rank and the number of phases begun."""


class Server:
    """The process that forks ranks. Closing it kills the remaining ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, **COMMON, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gang"],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment},
        )

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: list[str], environment: dict[str, str], log: Path) -> int:
        """Start `train`; returns the process id."""
        started: int = self._ask(arguments=arguments, environment=environment, log=str(log))
        return started

    def status(self, pid: int) -> int | None:
        """The exit code of a process, negative for a signal; ``None`` while it runs."""
        found: int | None = self._ask(pid=pid)
        return found

    def close(self) -> None:
        self._process.communicate()


def serve() -> list[str]:
    """Run the server. In each forked process, return the arguments of the script."""
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid = request["pid"]
            if codes[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
            print(json.dumps(codes[pid]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
            os.environ.update(request["environment"])
            return list(request["arguments"])
        codes[pid] = None
        print(json.dumps(pid), flush=True)
    for pid, code in codes.items():
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.exit()


def train(checkpoint: str, folder: str, timeout: str) -> None:
    """Train, generate and save in a loop. Like users' scripts, it catches no exceptions."""
    import torch

    from oslo_models import GPT2LMHeadModel

    note = noting(Path(folder) / f"note-{os.environ['RANK']}")
    ids = torch.arange(4 * 7).view(4, 7)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "timeout": float(timeout)}
    for _ in range(200):
        note("loading")
        model = GPT2LMHeadModel.from_pretrained_with_parallel(checkpoint, **sizes).train()
        optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=1e-4)
        for _ in range(3):
            note("forward")
            for output in model(input_ids=ids, labels=ids):
                note("backward")
                output.loss.backward()
                note("forward")
            note("optimizer step")
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        note("generation")
        model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        note("saving")
        model.save_pretrained_with_parallel(f"{folder}/saved")
        model.save_optimizer(optimizer, f"{folder}/saved")


def noting(path: Path) -> Callable[[str], None]:
    """Return the function that a rank calls at the beginning of a phase."""
    file, begun = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), 0

    def note(phase: str) -> None:
        nonlocal begun
        begun += 1
        os.pwrite(file, f"{begun} {phase}".ljust(NOTE).encode(), 0)

    return note


def noted(path: Path) -> tuple[int, str]:
    """Return the number of phases that a rank has begun, and its current phase."""
    with suppress(FileNotFoundError, ValueError):
        begun, phase = path.read_text().split(maxsplit=1)
        return int(begun), phase.strip()
    return 0, ""


class Load:
    """Processes that keep every idle core busy."""

    def __init__(self) -> None:
        loop = [sys.executable, "-c", "import os\nwhile os.getppid() == " + str(os.getpid()) + ": sum(range(10**5))"]
        idle = max(0, (os.cpu_count() or 1) - int(os.getloadavg()[0]))
        self._processes = [subprocess.Popen(loop) for _ in range(idle)]
        time.sleep(0.1)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    import torch

    import oslo_models.models.gpt2  # noqa: F401  what every rank would import

    torch.set_num_threads(1)
    train(*serve())
