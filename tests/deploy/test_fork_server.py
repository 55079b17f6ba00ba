"""The server that forks workers: a copy of the application or a new process, and how both end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_models.deploy import fork_server, forking, process_copy, process_executor

from support import ROOT, faults
from support.corpora import tokenizer
from support.faults import gone
from support.waiting import wait_until

SCRIPT = """
import os, signal, sys, threading, torch
from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import process_copy
from oslo_models.deploy.process_copy import _is_like_new

changes = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "precision": (
        lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "memory": (lambda: setattr(process_copy, "MOST_BYTES", 1), lambda: setattr(process_copy, "MOST_BYTES", 1 << 30)),
    "output": (lambda: setattr(sys, "stdout", sys.stderr), lambda: setattr(sys, "stdout", sys.__stdout__)),
}
assert _is_like_new()
for name, (change, back) in changes.items():
    change()
    assert not _is_like_new(), name
    back()
with torch.inference_mode():
    assert not _is_like_new()
with torch.autocast("cpu"):
    assert not _is_like_new()
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()
assert not _is_like_new()
event.set(), thread.join()
assert _is_like_new()

reader, writer = os.pipe()
file = open(sys.argv[2], "w")
file.write("once")
signal.signal(signal.SIGTERM, lambda *_: os.write(writer, b"by a worker"))
torch.manual_seed(3)
print("printed", end=" ")
model = GPT2LMHeadModel.from_pretrained_with_parallel(sys.argv[1], tensor_parallel_size=2, deploy=True)
os.close(writer)
assert os.read(reader, 100) == b""  # no worker has the other end, nor does what forks them
print(*model._engine.pids, flush=True)
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
file.close()
print(len(os.listdir("/proc/self/task")), flush=True)
sys.stdin.read()
"""


def state(pid: int) -> list[str]:
    """Return the state of a process, the id of its parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    return int(state(pid)[1])


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return [child for above, child in pairs if above == pid]


def test_fork_server_is_a_copy_of_an_application_that_has_imported_only(stand: faults.Stand, tmp_path: Path) -> None:
    """It inherits no open files, no unflushed output and no signal handlers, and ends with the application."""
    stand.model.save_pretrained_with_parallel(tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    script = tmp_path / "app.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tmp_path / "model", tmp_path / "file"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as app:
        printed, *pids = app.stdout.readline().split()
        assert printed == "printed" and len(pids) == 2
        server = {parent(int(pid)) for pid in pids}
        (copy,) = server
        assert parent(copy) == app.pid and os.listdir(f"/proc/{copy}/task") == [str(copy)]
        assert str(script) in Path(f"/proc/{copy}/cmdline").read_text()  # forked, not started
        app.stdout.readline()
        assert (tmp_path / "file").read_text() == "once"
        os.kill(int(pids[0]), signal.SIGTERM)
        assert gone([int(pids[0])])  # the worker has no such handler
        app.kill()
    assert gone([int(pid) for pid in pids])
    wait_until(lambda: not Path(f"/proc/{copy}").exists() or state(copy)[0] == "Z")  # the system has yet to reap it


@pytest.mark.parametrize(("driver", "usable"), [(False, True), (True, False)])
def test_process_that_has_counted_gpus_is_usable_without_a_driver(
    driver: bool, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch for CUDA on a machine without a GPU behaves so."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(fork_server, "_has_driver", lambda: driver)
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])  # a test process has threads of pytest
    assert fork_server._is_usable() == usable


def test_workers_survive_the_server_that_forked_them(stand: faults.Stand) -> None:
    """The workers answer and can be ended, and another server forks the next workers."""
    stand.answers()
    before, server = stand.pids, parent(stand.pids[0])
    assert server == parent(before[1]) != os.getpid() and os.listdir(f"/proc/{server}/task") == [str(server)]
    os.kill(server, signal.SIGKILL)
    stand.answers()
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: stand.model._engine._executor is None)
    assert gone(before)
    stand.model.restart()
    assert parent(stand.pids[0]) not in (server, os.getpid(), 1)
    stand.answers()


def test_server_without_workers_ends_and_is_no_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the memory of its imports, so it does not outlive the last model by more than a minute."""
    assert fork_server.IDLE_SECONDS < 60
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()  # otherwise it would not see the other copy close
        fork_server.serve(theirs)
    theirs.close()
    server = forking.ForkServer({}, ours, process_copy.ProcessCopy(pid))
    try:
        assert server.is_usable in (True, False)  # the test process has threads
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)
        with pytest.raises(ConnectionError), socket.socket() as connection:
            server.fork(connection, {})  # the caller starts another server
    finally:
        server.close()


def test_server_of_another_environment_is_replaced_and_ends_with_its_workers(
    stand: faults.Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.answers()
    before, server = stand.pids, parent(stand.pids[0])
    monkeypatch.setenv("OSLO_MODELS_TEST_OF_THE_FORK_SERVER", "1")
    stand.model.restart()
    after = parent(stand.pids[0])
    assert after != server and gone([*before, server])
    environment = Path(f"/proc/{after}/environ").read_text()
    assert "OSLO_MODELS_TEST_OF_THE_FORK_SERVER=1" in environment
    stand.answers()


def test_without_a_usable_server_workers_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_worker(theirs: socket.socket, rank: int) -> None:
        raise LookupError(f"rank {rank} was started")

    monkeypatch.setattr(process_executor, "start_worker", start_worker)
    monkeypatch.setattr(forking.ForkServer, "is_usable", False)
    forking._servers(os.getpid()).discard()  # a server of another test knows that it is usable
    with pytest.raises(LookupError, match="rank 0 was started"):
        process_executor.ProcessExecutor(2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not forking.is_available()
    with pytest.raises(LookupError, match="rank 0 was started"):
        process_executor.ProcessExecutor(2)


def test_a_server_that_stands_still_is_replaced(stand: faults.Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.answers()
    before, server = stand.pids, parent(stand.pids[0])
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 1.0)
    os.kill(server, signal.SIGSTOP)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stand.model._engine._executor is None)
    stand.model.restart()
    assert parent(stand.pids[0]) not in (server, os.getpid(), 1)
    wait_until(lambda: gone([server]))
    stand.answers()


pytestmark = pytest.mark.drawn(2, of="file")
PIPE = """
import os, sys
reading, writing = os.pipe()
os.dup2(writing, 2)
import torch
from oslo_models import GPT2LMHeadModel
with GPT2LMHeadModel.from_pretrained_with_parallel(sys.argv[1], deploy=True) as model:
    print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape[1])
"""


def test_an_application_with_stderr_as_a_pipe_deploys(stand: faults.Stand, tmp_path: Path) -> None:
    stand.model.save_pretrained_with_parallel(tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", PIPE, tmp_path / "model"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split() == ["6"]


LAST = """
import gc, sys, torch
from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import fork_server
from oslo_models.deploy.grammar import Grammar, Vocabulary

fork_server.IDLE_SECONDS = 0.5  # the copy of this process has it too
ids = torch.tensor([[5, 6, 7]])
models = [GPT2LMHeadModel.from_pretrained_with_parallel(sys.argv[1], deploy=True) for _ in range(2)]
vocabulary = Vocabulary(sys.argv[2], int(sys.argv[3]), (0,))
Grammar.compiled("regex", "a+", vocabulary)
grammars = vocabulary.checker._process.pid
print(*[pid for model in models for pid in model._engine.pids], grammars, flush=True)
ends = {"cpu": lambda: models.pop().cpu(), "close": lambda: models.pop().close(), "del": lambda: models.pop() and None}
for line in sys.stdin:
    kept = ends[line.strip()]()
    gc.collect()
    print(*[model.generate(ids, max_new_tokens=3).shape[1] for model in models], flush=True)
"""


@pytest.mark.parametrize("end", ["cpu", "close", "del"])
def test_nothing_stays_behind_after_the_last_model(stand: faults.Stand, tmp_path: Path, end: str) -> None:
    """The fork server and the process for grammars end soon after the last model, and not before.

    The application goes on.
    """
    pytest.importorskip("llguidance")
    words = tokenizer()
    of_words = [words.backend_tokenizer.to_str(), str(len(words))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", LAST, stand.checkpoint, *of_words]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (tmp_path / "log").open("w") as log:
        app = subprocess.Popen(command, env=environment, text=True, stderr=log, **pipes)
    try:
        *pids, grammars = [int(pid) for pid in app.stdout.readline().split()]
        server = parent(pids[0])
        assert len(pids) == 2 and parent(pids[1]) == server and parent(server) == app.pid, (
            tmp_path / "log"
        ).read_text()
        for left in ("6", ""):
            print(end, file=app.stdin, flush=True)
            assert app.stdout.readline().strip() == left
            if left:
                assert gone(pids[1:])
                time.sleep(1.5)
                assert all(Path(f"/proc/{pid}").exists() for pid in (server, grammars, pids[0]))
        wait_until(lambda: not children(app.pid))
        assert gone([*pids, server, grammars]) and app.poll() is None
    finally:
        app.kill()
        app.wait()
