"""Starts Python processes of this library without the working directory on their import path.

``python -m`` puts the working directory first on the path. A process in a folder that others can write to would import
their files. `python_module` leaves out the working directory, and `import_path` passes on the path of this process.
"""

from __future__ import annotations

import os
import sys

_RUN = """\
import sys; del sys.path[0]; import runpy
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return a command like ``python -m`` that never imports from the working directory."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _RUN, module, *arguments]


def python_code(code: str) -> list[str]:
    """Return a command that runs ``code`` without the working directory on its import path."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-c", code]
    return [sys.executable, "-c", f"import sys; del sys.path[0]\n{code}"]


def launch_command(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module in ``ranks`` processes on this machine, started by torchrun."""
    launcher = python_module("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--no-python")
    return [*launcher, f"--nproc-per-node={ranks}", *python_module(module, *arguments)]


def import_path() -> str:
    """Return the import path of this process, as ``PYTHONPATH`` for another process."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
