"""Starts Python processes of this library without the working directory on their import path.

``python -m`` puts the working directory first on the path, so that a process started in a folder where others may write
would import their files. `python_module` leaves it out, and `import_path` gives the process the path of this one.
"""

from __future__ import annotations

import os
import sys

_RUN = """\
import sys; del sys.path[0]; import runpy
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as ``python -m`` does, but never imports from the working directory."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _RUN, module, *arguments]


def import_path() -> str:
    """Return the import path of this process, as the variable ``PYTHONPATH`` for another one."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
