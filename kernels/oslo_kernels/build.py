"""Compiles a source of ``csrc/`` for CPU or GPU on first use and loads it; it is kept in the user's cache folder.

For GPUs it may have been compiled when the package was installed. This file needs Python's own library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_CUDA_FLAGS = (
    *("-x", "cu", "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"),
    # machine code for Ampere and Hopper, and what later ones compile from
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
)


class BuildError(RuntimeError):
    """There is no compiler, or it failed; says what to do about it."""


@cache
def load(source: str, cuda: bool = False) -> ctypes.CDLL:
    """The shared library of ``csrc/<source>``; compiled (some seconds) unless this machine has done so before.

    The compiler is ``$CXX``, ``c++``, ``g++`` or ``clang++``, whichever is found first; for GPUs it is ``nvcc``. Any
    number of processes may do this at once.

    Args:
        cuda: compile for GPUs.

    Raises:
        BuildError: it could not be compiled.
    """
    path = SOURCES / source
    if cuda and (installed := SOURCES / _installed_name(path)).exists():
        return ctypes.CDLL(str(installed))
    names = ("nvcc",) if cuda else (os.environ.get("CXX") or "", "c++", "g++", "clang++")
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        needed = "nvcc" if cuda else "a C++ compiler (c++, g++ or clang++)"
        raise BuildError(f"{source} needs {needed}, and none was found; install one")
    flags = _CUDA_FLAGS if cuda else (*_FLAGS, _processor())
    sources = (file.read_text() for file in (path, *sorted(SOURCES.glob("*.h"))))
    key = hashlib.sha256("\0".join((*sources, compiler, *flags)).encode()).hexdigest()[:16]
    library = _cache() / f"{path.stem}-{key}.so"
    if not library.exists():
        _compile([compiler, *(_CUDA_FLAGS if cuda else _FLAGS)], path, library)
    return ctypes.CDLL(str(library))


def install_cuda(source: str, folder: Path) -> None:
    """Compile ``csrc/<source>`` for GPUs into ``folder``, where `load` looks first if that is its own.

    Raises:
        BuildError: there is no ``nvcc``, or it failed.
    """
    compiler, path = shutil.which("nvcc"), SOURCES / source
    if compiler is None:
        raise BuildError(f"{source} needs nvcc, and none was found")
    _compile([compiler, *_CUDA_FLAGS], path, folder / _installed_name(path))


def _installed_name(path: Path) -> str:
    """Of what is compiled for GPUs: the same whichever machine compiles, another when source or flags change."""
    key = hashlib.sha256("\0".join((path.read_text(), platform.machine(), *_CUDA_FLAGS)).encode()).hexdigest()[:16]
    return f"{path.stem}-cuda-{key}.so"


def _compile(command: list[str], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # renamed from there: it is whole or absent
            built = Path(folder, library.name)
            done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, text=True)
            if done.returncode != 0:
                raise BuildError(f"{command[0]} could not compile {source}:\n{done.stderr[-2000:]}")
            built.replace(library)
    except OSError as error:
        raise BuildError(f"{source} could not be compiled into {library.parent}: {error}") from error


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oslo_models"


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
