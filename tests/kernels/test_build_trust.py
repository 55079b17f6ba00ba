"""Compiled code comes only from files that nobody else can write to; native code checks its arguments."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from oslo_kernels import build
from oslo_kernels.blending import blend
from oslo_kernels.kept_timings import KeptTimings
from oslo_kernels.ngrams import block_repeats_

from support import ROOT

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "oslo_models"


def test_the_cache_is_private_for_every_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert build.cache_folder() == cache
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_cache_of_this_user_that_others_could_write_to_is_made_private(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    planted = cache / "planted.so"
    planted.touch()
    planted.chmod(0o777)
    assert build.cache_folder() == cache and stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not build.is_trusted(planted)
    planted.chmod(0o700)
    assert build.is_trusted(planted)


@pytest.mark.parametrize("how", ["link", "parent", pytest.param("owner", marks=as_root)])
def test_a_cache_that_others_can_write_to_is_replaced_with_one_warning(cache: Path, how: str) -> None:
    cache.parent.mkdir(parents=True)
    if how == "link":
        (cache.parent / "other").mkdir()
        cache.symlink_to(cache.parent / "other")
    else:
        cache.mkdir()
    if how == "parent":
        cache.parent.chmod(0o777)
    if how == "owner":
        os.chown(cache, NOBODY, NOBODY)
    with pytest.warns(UserWarning, match="is not used for compiled code"):
        own = build.cache_folder()
    assert own != cache and stat.S_IMODE(own.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.cache_folder() == own


@pytest.mark.parametrize("how", ["mode", "link", pytest.param("owner", marks=as_root)])
def test_a_library_that_others_can_write_is_compiled_again(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def compile_(command: list[str], source: Path, library: Path) -> None:
        compiled.append(library)
        library.unlink(missing_ok=True)
        library.touch(mode=0o700)

    monkeypatch.setattr(build, "_compile", compile_)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: path)
    build.load.__wrapped__("blending.cpp")
    build.load.__wrapped__("blending.cpp")
    (library,) = compiled
    if how == "mode":
        library.chmod(0o777)
    elif how == "link":
        library.rename(cache / "other")
        library.symlink_to(cache / "other")
    else:
        os.chown(library, NOBODY, NOBODY)
    build.load.__wrapped__("blending.cpp")
    assert len(compiled) == 2


@pytest.mark.parametrize("how", ["group", "others", "link", pytest.param("owner", marks=as_root)])
def test_timings_that_others_can_write_are_measured_again(cache: Path, how: str) -> None:
    found = {8: {"ours": (0.25, 0.5)}}
    KeptTimings().add("a layer", found)
    assert KeptTimings().get("a layer") == found
    (file,) = cache.glob("linear-timings-*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if how == "link":
        file.rename(cache / "other")
        file.symlink_to(cache / "other")
    elif how == "owner":
        os.chown(file, NOBODY, NOBODY)
    else:
        file.chmod(0o660 if how == "group" else 0o602)
    assert KeptTimings().get("a layer") is None
    KeptTimings().add("another layer", found)  # replaces the file, without the timings of others
    assert KeptTimings().get("a layer") is None and KeptTimings().get("another layer") == found
    assert build.is_trusted(file)


WRONG = """
import numpy as np, torch
from oslo_kernels.blending import blend
from oslo_kernels.ngrams import block_repeats_
ids = torch.randint(0, 9, (4, 20))
for wrong in (
    lambda: blend(np.array([0, 0]), 5),
    lambda: blend(np.array([-1, 3]), 5),
    lambda: blend(np.array([1]), -5),
    lambda: block_repeats_(torch.zeros(1, 300), ids[:1], 2, ids),
    lambda: block_repeats_(torch.zeros(3, 300), ids[:3], 2, ids[:2]),
    lambda: block_repeats_(torch.zeros(4, 300), ids, 0),
    lambda: block_repeats_(torch.zeros(1, 300), ids, 2),
    lambda: block_repeats_(torch.zeros(4, 300), ids.int(), 2),
    lambda: block_repeats_(torch.zeros(4, 300), ids, 2, ids[:0]),
):
    try:
        wrong()
    except ValueError:
        continue
    raise SystemExit("no error")
"""


def test_native_code_checks_its_arguments_without_assertions() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-O", "-c", WRONG], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_right_arguments_still_work() -> None:
    dataset, _ = blend(np.array([1, 1]), 4)
    assert sorted(dataset.tolist()) == [0, 0, 1, 1]
    ids = torch.tensor([[1, 2, 1]])
    assert block_repeats_(torch.zeros(1, 5), ids, 2)[0, 2] == -float("inf")
