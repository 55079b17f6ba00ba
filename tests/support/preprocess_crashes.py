"""Kills preprocessing at many points and resumes it; a program run by tests/data/test_preprocess.py.

Every point is a call in the code that writes files, including the last steps. A child process is forked for each point,
so that it need not import anything again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from oslo_models.data import preprocess
from oslo_models.data.preprocess import DatasetPreprocessor

preprocess.COMMIT_SECONDS = 0.0
TEXTS = [" ".join(str(word * text % 97) for word in range(text % 13)) for text in range(70)]


class Numbers:
    """A tokenizer that needs no package."""

    eos_token_id = 97

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(98)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


def run(name: Path, stop_at: int = 0) -> list[bool]:
    """Preprocess, and kill this process at one point; return for each point whether it is one of the last steps."""
    points: list[bool] = []

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        callers = [caller.f_code for caller in (frame, frame.f_back) if caller]
        inside = [code.co_name for code in callers if code.co_filename.endswith("writer.py")]
        if inside:
            points.append("finish" in inside)
            if len(points) == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)

    preprocessor = DatasetPreprocessor(Numbers(), chunk_size=10, num_workers=0)
    sys.setprofile(watch)
    try:
        preprocessor.preprocess(iter(TEXTS), name, log_interval=0)
    finally:
        sys.setprofile(None)
    return points


def content(name: Path) -> tuple[bytes, bytes]:
    return Path(f"{name}.bin").read_bytes(), Path(f"{name}.idx").read_bytes()


def spread(points: Sequence[int], count: int) -> list[int]:
    """Select ``count`` points evenly, including the first and the last."""
    return [points[(len(points) - 1) * number // (count - 1)] for number in range(count)]


def main(folder: Path, kills: int) -> None:
    points = run(folder / "whole")
    last = [number for number, finishing in enumerate(points, start=1) if finishing][-kills::2]
    whole = content(folder / "whole")
    older = b"older"
    for kill, stop_at in enumerate([*spread(range(1, len(points) + 1), kills - len(last)), *last]):
        name = folder / f"run-{kill}"
        for ending in (".bin", ".idx"):
            Path(f"{name}{ending}").write_bytes(older)
        stops = [stop_at] if kill % 3 else [stop_at // 3, stop_at]  # some runs are killed twice
        for stop in filter(None, stops):
            child = os.fork()
            if not child:
                run(name, stop)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) or len(stops) == 2, f"point {stop} was not reached"
        if Path(f"{name}.idx").exists():  # in every case, an index belongs to the tokens beside it
            assert content(name) in (whole, (older, older)), f"files of two runs after a kill at {stop_at}"
        run(name)
        assert content(name) == whole, f"other files after a kill at point {stop_at} of {len(points)}"
        assert not Path(f"{name}.partial").exists()
        for ending in (".bin", ".idx"):
            Path(f"{name}{ending}").unlink()
    shutil.rmtree(folder)
    print(f"{kills} kills at {len(points)} points")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
