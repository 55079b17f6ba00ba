"""The cases of `test_kernels_match_torch_in_the_triton_interpreter` find mistakes in kernels."""

from __future__ import annotations

import os
import subprocess
import sys

from support import ROOT


def test_mistakes_in_kernels_are_found() -> None:
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "kernels", ROOT)))
    variables = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "kernel_mutants.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
