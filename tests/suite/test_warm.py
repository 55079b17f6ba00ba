"""A forked copy behaves like a new Python process: the same programs give the same output in both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.waiting import LIMIT
from support.warm import Order
from support.warm_process import start_warm_server

SCRIPT = """
import atexit, json, logging, os, sys, threading, warnings

def own():
    return sys.modules["__main__"].own is own and __name__

atexit.register(print, "the end")
threads = threading.active_count()
print(json.dumps({
    "argv": sys.argv, "path": sys.path[:2], "main": own(), "file": globals().get("__file__"),
    "parent": os.getppid() == int(sys.stdin.read()), "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(),
    "variables": sorted(set(os.environ) - {"TRITON_INTERPRET"}), "threads": threads,
    "tests": [name for name in sys.modules if name.startswith(("test_", "support"))],
    "files": sorted(number for number in range(3, 200) if os.path.exists(f"/proc/self/fd/{number}")
                    and os.readlink(f"/proc/self/fd/{number}") != os.devnull),
}))
warnings.warn("said")
warnings.warn("not said", DeprecationWarning, 2)
logging.getLogger("some").error("logged")
threading.Timer(0.1, print, ["a thread"]).start()
"""
ENDINGS = {
    "0": "",
    "text": "sys.exit('no')",
    "3": "sys.exit(3)",
    "raised": "raise KeyError('wrong')",
    "killed": "os.kill(os.getpid(), 9)",
}


def programs(folder: Path, code: str) -> dict[str, list[str]]:
    (folder / "program.py").write_text(code)
    return {"script": ["program.py", "--x"], "module": ["-m", "program", "--x"], "code": ["-u", "-c", code, "--x"]}


def said(folder: Path, arguments: list[str], new: bool, **options: Any) -> tuple[int, str, str]:
    """Run a process that reads this process's id; return its exit status and output.

    Args:
        new: Set a variable that modules read on import, so that the process cannot be a copy.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OF_THE_TEST": "1", **({"TRITON_INTERPRET": "1"} if new else {})},
        text=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        **options,
    )
    out, err = process.communicate(str(os.getpid()), timeout=LIMIT)
    return process.returncode, out, err


def found(said: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = said
    line, _, rest = out.partition("\n")
    messages = [message for message in err.splitlines() if not message.startswith("  ")]
    # without lines of source code, which Python 3.13 shows for programs of the command line
    return {"code": code, "after": rest, "err": messages, **json.loads(line)}


@pytest.mark.parametrize("kind", ["script", "module", "code"])
def test_a_program_finds_the_state_of_a_new_process(kind: str, tmp_path: Path, warm: None) -> None:
    arguments = programs(tmp_path, SCRIPT)[kind]
    for options in ({}, {"start_new_session": True}):
        copy, new = (found(said(tmp_path, arguments, new=new, **options)) for new in (False, True))
        assert copy == new


def test_each_draws_its_own_numbers(tmp_path: Path, warm: None) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    drawn = [said(tmp_path, ["-c", code], new=False)[1].split() for _ in range(2)]
    assert len(drawn[0]) == 3 and not set(drawn[0]) & set(drawn[1])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_a_new_process_does(ending: str, tmp_path: Path, warm: None) -> None:
    arguments = programs(tmp_path, f"import os, sys\nprint('x', end='')\n{ENDINGS[ending]}\n")["script"]
    assert said(tmp_path, arguments, new=False) == said(tmp_path, arguments, new=True)


def test_a_signal_reaches_it_and_files_are_passed_on(tmp_path: Path, warm: None) -> None:
    code = "import os, sys, time; os.write(int(sys.argv[1]), b'ready'); time.sleep(60)"
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code, str(writing)], pass_fds=[writing])
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == -signal.SIGTERM and os.read(reading, 1) == b""
    os.close(reading)


def test_children_of_a_copy_are_copies(tmp_path: Path, warm_launchers: None) -> None:
    """The copy is a copy of the start, without later changes of the process."""
    inner = "import sys; print('inner', 'torch' in sys.modules, hasattr(sys, 'changed'), sys.argv[1:], flush=True)"
    outer = (
        "import subprocess, sys; sys.changed = True\n"
        f"done = subprocess.run([sys.executable, '-u', '-c', {inner!r}, 'x'])\n"
        "print('outer', done.returncode, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "inner True False ['x']\nouter 0\n", done.stderr


def test_a_server_that_has_ended_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken on import')")
    (tmp_path / "lacking_module.py").write_text("from transformers import NewerThanInstalled")
    monkeypatch.syspath_prepend(tmp_path)
    order = Order([str(tmp_path / "empty.py")], dict(os.environ), str(tmp_path), [], False, False)
    (tmp_path / "empty.py").touch()
    pid = start_warm_server({}, ["lacking_module"]).start(order, [])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(RuntimeError, match=r"warm processes has ended:\n(.|\n)*ValueError: broken on import"):
        start_warm_server({}, ["broken_module"]).start(order, [])
