"""Compares the installed torch and transformers with the tested versions, without importing either."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence

from oslo_models._version import OPTIONAL, TESTED, __version__, requirement


def check_versions(path: Sequence[str] | None = None) -> None:
    """Warn about versions of torch and transformers that are newer than the tested ones.

    The check takes a millisecond, since it only reads the names of directories. Importing `importlib.metadata` takes
    far longer.

    Args:
        path: directories of the installed libraries. Default: ``sys.path``.

    Raises:
        ImportError: a library is older than its first tested version.
    """
    untested = {}
    for library, (first, end) in TESTED.items():
        version = installed_version(library, path)
        if version is None:
            continue
        if release_of(version) < release_of(first):
            raise ImportError(
                f"oslo_models {__version__} needs {library} {first} or later, but {version} is installed; run "
                f"pip install '{requirement(library)}'",
                name=library,
            )
        if release_of(version) >= release_of(end):
            untested[library] = version
    if untested:
        installed = " and ".join(f"{library} {version}" for library, version in untested.items())
        warnings.warn(
            f"oslo_models {__version__} is tested with {' and '.join(map(requirement, untested))}, but {installed} is "
            "installed; `python -m oslo_models.testing` checks in two minutes whether they work together",
            UserWarning,
            stacklevel=3,  # the import of oslo_models
        )


def require_first_version(library: str, path: Sequence[str] | None = None) -> None:
    """Raise ``ImportError`` if an optional library is older than its first version that works with sharded models.

    Args:
        path: directories of the installed libraries. Default: ``sys.path``.
    """
    version, first = installed_version(library, path), OPTIONAL[library]
    if version is not None and release_of(version) < release_of(first):
        raise ImportError(
            f"sharded models need {library} {first} or later, but {version} is installed; run "
            f"pip install '{library}>={first}'",
            name=library,
        )


def installed_version(library: str, path: Sequence[str] | None = None) -> str | None:
    """Return the version of an installed library, or None."""
    pattern = re.compile(rf"{library}-(\d[^-]*)\.dist-info")
    for directory in sys.path if path is None else path:
        try:
            entries = os.listdir(directory or os.curdir)
        except OSError:  # zip files, and directories that do not exist
            continue
        for entry in entries:
            if match := pattern.fullmatch(entry):
                return match[1]
    return None


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: 2.16 for 2.16.0.dev1, which may already behave like 2.16."""
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)
