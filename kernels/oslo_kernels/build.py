"""Compile a source of ``csrc/`` for CPU or GPU on first use, cache it in the user's cache folder, and load it.

The GPU library may have been compiled at installation. setup.py runs this file too, so it imports only Python's
standard library.
"""

from __future__ import annotations

import atexit
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
import warnings
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
    """There is no compiler, or compiling failed. The message names the fix."""


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
    try:
        library = _library(f"{path.stem}-{key}.so")
    except OSError as error:
        raise BuildError(f"{source} could not be compiled: {error}") from error
    if not is_trusted(library):
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
    """Return the ``nvcc`` command and flags. The ``nvcc`` of pip does not search its library folder by itself."""
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
    """Return the texts of ``csrc/<source>`` and of all headers it includes, directly or indirectly."""
    found: dict[str, str] = {}
    left = [source]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = (SOURCES / name).read_text()
            left += _INCLUDE.findall(found[name])
    return [found[name] for name in sorted(found)]


def unavailable_reason(library: Callable[[], object]) -> str | None:
    """Return in one line why the function ``library`` cannot compile or load a library, or ``None`` if it can."""
    try:
        library()
    except (BuildError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def install_cuda(source: str, folder: Path) -> None:
    """Compile ``csrc/<source>`` for GPUs into ``folder``. `load` prefers a library in ``csrc`` itself.

    Raises:
        BuildError: there is no ``nvcc``, or it failed.
    """
    path = SOURCES / source
    _compile(_nvcc_command(source), path, folder / _installed_name(path))


def _installed_name(path: Path) -> str:
    """Return the file name of a GPU library. It changes with source, flags and processor architecture."""
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
            built.chmod(0o700)
            built.replace(library)
    except OSError as error:
        raise BuildError(f"{source} could not be compiled into {library.parent}: {error}") from error


def cache_folder() -> Path:
    """Return the private cache folder for compiled libraries and timings of this machine. Only this user can write it.

    Without a writable home, the folder is among the temporary files. If others can write to the folder, a folder for
    this process replaces it, with one warning.

    Raises:
        OSError: there is no folder to write to.
    """
    with suppress(OSError, RuntimeError):  # the latter if the user has no home
        folder = _user_folder()
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if os.access(folder, os.W_OK):
            return _private(folder, os.getpid())
    return _private(Path(tempfile.gettempdir(), f"oslo_models-{os.getuid()}"), os.getpid())


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oslo_models"


@cache
def _private(folder: Path, pid: int) -> Path:
    """Return this folder, with mode 0700, or another one if others can write to it."""
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
        with suppress(FileExistsError):  # another process makes it at the same time, or it is a broken link
            missing.mkdir(mode=0o700)
    if (reason := _why_untrusted(folder)) is None:
        return folder
    own = Path(tempfile.mkdtemp(prefix="oslo_models-"))
    atexit.register(_remove, own, pid)
    warnings.warn(
        f"{folder} is not used for compiled code, since {reason}: it is compiled for this process only. Set "
        "XDG_CACHE_HOME to a folder that only you can write to",
        stacklevel=3,
    )
    return own


def _why_untrusted(folder: Path) -> str | None:
    """Return why others could put files into a folder, or ``None``. Make a folder of this user private."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        return f"it cannot be opened as a folder ({error.strerror})"
    try:
        if (status := os.fstat(descriptor)).st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
        if not _is_own(os.fstat(descriptor)):
            return "it belongs to another user, or others can write to it"
    finally:
        os.close(descriptor)
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace it in {parent}"
    return None


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_trusted(file: Path) -> bool:
    """Return whether a cache file exists and only this user can have written it."""
    try:
        status = os.lstat(file)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_own(status)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a process forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _library(name: str) -> Path:
    """Return where a library is, or is to be built: an existing one is used from a read-only folder too."""
    with suppress(RuntimeError):
        folder = _user_folder()
        if is_trusted(folder / name) and not os.access(folder, os.W_OK):
            return folder / name
    return cache_folder() / name


def processor() -> str:
    """Return the processor's model and features, as ``-march=native`` sees them. Machines may share the home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
