"""Compiles a source of ``csrc/`` for CPU or GPU on first use, caches it in the user's cache folder, and loads it.

For GPUs it may have been compiled when the package was installed. setup.py runs this file too, so it imports only
Python's standard library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_CUDA_FLAGS = (
    *("-x", "cu", "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"),
    # machine code for Ampere and Hopper, and PTX, which the driver compiles for later GPUs
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
)


class BuildError(RuntimeError):
    """There is no compiler, or compiling failed; the message says what to do about it."""


@cache
def load(source: str, cuda: bool = False) -> ctypes.CDLL:
    """Load the shared library of ``csrc/<source>``, compiling it first (some seconds) unless it is cached.

    The compiler is ``$CXX``, ``c++``, ``g++`` or ``clang++``, whichever is found first; for GPUs see `find_nvcc`. Safe
    to call in several processes at once.

    Args:
        cuda: compile for GPUs.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    path = SOURCES / source
    if cuda and (installed := SOURCES / _installed_name(path)).exists():
        return ctypes.CDLL(str(installed))
    command = _nvcc_command(source) if cuda else [_cpp_compiler(source), *_FLAGS]
    flags = command if cuda else [*command, processor()]
    key = hashlib.sha256("\0".join((*texts_of(source), *flags)).encode()).hexdigest()[:16]
    library = _library(f"{path.stem}-{key}.so")
    if not library.exists():
        _compile(command, path, library)
    return ctypes.CDLL(str(library))


def _cpp_compiler(source: str) -> str:
    for name in (os.environ.get("CXX") or "", "c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise BuildError(f"{source} needs a C++ compiler (c++, g++ or clang++), and none was found; install one")


def find_nvcc() -> Path | None:
    """Find ``nvcc`` in ``$CUDA_HOME``, on the path, in ``/usr/local/cuda``, or where pip installs it."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(home, "bin", "nvcc") for home in homes if home]
    found += [Path(on_path)] if (on_path := shutil.which("nvcc")) else []
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in sys.path:
        found += sorted(Path(folder, "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    return next((path for path in found if os.access(path, os.X_OK) and path.is_file()), None)


def _nvcc_command(source: str) -> list[str]:
    """``nvcc`` with its flags; pip's does not search its own folder of libraries."""
    compiler = find_nvcc()
    if compiler is None:
        raise BuildError(
            f"{source} needs nvcc, and none was found in $CUDA_HOME, on the path, in /usr/local/cuda or in pip's "
            "packages; install CUDA's compiler, or set CUDA_HOME to its folder"
        )
    root = compiler.resolve().parents[1]
    folders = [root / name for name in ("lib64", "lib") if (root / name / "libcudart_static.a").exists()]
    return [str(compiler), *_CUDA_FLAGS, *(f"-L{folder}" for folder in folders)]


def texts_of(source: str) -> list[str]:
    """What the compiler reads: ``csrc/<source>`` and the headers that it includes, directly or not."""
    found: dict[str, str] = {}
    left = [source]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = (SOURCES / name).read_text()
            left += _INCLUDE.findall(found[name])
    return [found[name] for name in sorted(found)]


def why_not(library: Callable[[], object]) -> str | None:
    """Why a library cannot be compiled or loaded by the function ``library``, in one line; ``None`` if it can."""
    try:
        library()
    except (BuildError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def install_cuda(source: str, folder: Path) -> None:
    """Compile ``csrc/<source>`` for GPUs into ``folder``; `load` prefers what it finds in ``csrc`` itself.

    Raises:
        BuildError: there is no ``nvcc``, or it failed.
    """
    path = SOURCES / source
    _compile(_nvcc_command(source), path, folder / _installed_name(path))


def _installed_name(path: Path) -> str:
    """The file name of a library for GPUs, which changes with source, flags and processor architecture."""
    key = hashlib.sha256("\0".join((path.read_text(), platform.machine(), *_CUDA_FLAGS)).encode()).hexdigest()[:16]
    return f"{path.stem}-cuda-{key}.so"


def _compile(command: list[str], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=library.parent
        ) as folder:  # then renamed, so that the library is complete or absent
            built = Path(folder, library.name)
            done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, text=True)
            if done.returncode != 0:
                raise BuildError(f"{command[0]} could not compile {source}:\n{done.stderr[-2000:]}")
            built.replace(library)
    except OSError as error:
        raise BuildError(f"{source} could not be compiled into {library.parent}: {error}") from error


def cache_folder() -> Path:
    """Return the folder for libraries and timings that a machine makes once.

    Users without a home, or with one that is read-only, have a folder of their own among the temporary files.

    Raises:
        PermissionError: Another user can write to that folder.
    """
    with suppress(OSError, RuntimeError):  # the latter if the user has no home
        folder = _user_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"oslo_models-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"other users can write to {folder}; set XDG_CACHE_HOME to a folder that only you can write to"
        )
    return folder


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oslo_models"


def _library(name: str) -> Path:
    """Return where a library is, or is to be built: an existing one is used from a read-only folder too."""
    with suppress(RuntimeError):
        if (kept := _user_folder() / name).exists():
            return kept
    return cache_folder() / name


def processor() -> str:
    """What ``-march=native`` depends on, since machines with other processors may share the home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
