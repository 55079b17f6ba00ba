"""The current commit decides which random data and which cases a run takes."""

from __future__ import annotations

import random
import subprocess

from support import ROOT

SECONDS_OF_DAY = 24 * 60 * 60


def seed_of_commit() -> int:
    """Return the seed of the current commit. Without a repository, draw a random seed."""
    commit = _git("rev-parse", "HEAD")
    return random.SystemRandom().randrange(2**31) if commit is None else int(commit[:7], 16)


def day_of_commit() -> int:
    """Return the day of the current commit, counted from 1970. Without a repository, draw a random day."""
    seconds = _git("show", "--no-patch", "--format=%ct", "HEAD")
    return random.SystemRandom().randrange(2**15) if seconds is None else int(seconds) // SECONDS_OF_DAY


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
