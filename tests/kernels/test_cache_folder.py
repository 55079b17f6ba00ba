"""The folder of compiled kernels and timings: at home, or a private folder without a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from oslo_kernels import build


@pytest.fixture(params=["no home", "no folder", "read-only"])
def without_home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a user without a writable home; return the folder for temporary files."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "no home":
        monkeypatch.setattr(Path, "home", fail)
    elif request.param == "no folder":
        monkeypatch.setenv("HOME", "/proc/nowhere")
    else:  # also for root, who may write everywhere
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path / "home")))
    return tmp_path


def test_user_without_a_home_has_a_private_folder(without_home: Path) -> None:
    folder = build.cache_folder()
    assert folder.parent == without_home and folder.stat().st_mode & 0o077 == 0
    assert build.cache_folder() == folder and build._library("x.so") == folder / "x.so"


def test_folder_that_others_can_write_to_is_made_private(without_home: Path) -> None:
    folder = build.cache_folder()
    folder.chmod(0o777)
    build._private.cache_clear()
    assert build.cache_folder() == folder and folder.stat().st_mode & 0o077 == 0


def test_library_in_a_read_only_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = build.cache_folder() / "x.so"
    kept.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert build._library("x.so") == kept
