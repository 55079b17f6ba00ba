"""Processes of the library import nothing from the working directory, since other users may write there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oslo_models import starting
from oslo_models.data.tokenizer_pool import Encoder, TokenizerPool
from oslo_models.deploy import forking, process_executor
from oslo_models.deploy.fork_server import USABLE

from support import ROOT
from support.corpora import tokenizer


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with foreign files that leave a mark if they run."""
    for name in ("oslo_models/__init__.py", "tokenizers.py", "pickle.py", "ctypes/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write(__file__)\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "kernels"), *(path for path in sys.path if path)])
    return tmp_path


@pytest.mark.parametrize("old", [False, True])
def test_modules_run_with_their_arguments_and_without_the_working_directory(
    shared: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared / "app").mkdir()
    (shared / "app" / "program.py").write_text("import sys; print(sys.argv[1:], __name__, *sys.path, sep='|')")
    if old:
        monkeypatch.setattr(sys, "version_info", (3, 10))
    command = starting.python_module("program", "-x", "y")
    environment = {**os.environ, "PYTHONPATH": str(shared / "app")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    arguments, name, *path = done.stdout.strip().split("|")
    assert (arguments, name, path[0]) == ("['-x', 'y']", "__main__", str(shared / "app"))
    assert not {"", ".", str(shared)} & {*path}


def test_tokenizer_processes_import_nothing_from_the_working_directory(shared: Path) -> None:
    pool = TokenizerPool(Encoder(tokenizer(), 7, "uint16"), 1)
    try:
        (encoded,) = [encoded for _, encoded in pool.encode([["abc"]])]
    finally:
        pool.close()
    assert encoded.tokens[-1] == 7 and not (shared / "mark").exists()


def test_fork_servers_and_workers_import_nothing_from_the_working_directory(shared: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        server = forking._new_process(theirs, process_executor.worker_environment(0), ())
        assert ours.recv(1) == USABLE
    worker_ours, worker_theirs = socket.socketpair()
    with worker_theirs:
        worker = process_executor.start_worker(worker_theirs, 0)
    worker_ours.close()
    assert server.wait(30) == 0 and worker.wait(60) in (0, 1)
    assert not (shared / "mark").exists()


def test_only_one_place_starts_python() -> None:
    found = [path for path in (ROOT / "oslo_models").rglob("*.py") if "sys.executable" in path.read_text()]
    assert [path.name for path in found] == ["starting.py"]
