"""``python -m oslo_models.testing`` tells working, failing, hanging and missing features apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from oslo_models.testing import features, running
from oslo_models.testing.running import Feature, run_feature

from support import ROOT
from support.waiting import LIMIT

pytestmark = pytest.mark.drawn(6, of="file")


def fine(folder: Path) -> None:
    assert dist.get_world_size() == 2


def wrong_on_one_rank(folder: Path) -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank\nhas more to say")


def ended(folder: Path) -> None:
    os._exit(3)


def hanging(folder: Path) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("test", "says"),
    [
        (fine, r"ok$"),
        (wrong_on_one_rank, r"failed: rank 1: ValueError: the second rank \("),
        (ended, r"failed: rank [01]: the process ended without a result"),  # whichever ends first
        (hanging, "failed: no result in 1 s"),
    ],
)
def test_verdicts(test: object, says: str) -> None:
    with mock.patch.object(running, "PATIENCE", 0.1):
        timeout = 1 if test is hanging else LIMIT
        verdict = run_feature(Feature("a feature", test, ranks=2), timeout=timeout)  # type: ignore[arg-type]
    assert re.match(says, verdict), verdict


def test_missing_libraries_are_no_failure() -> None:
    feature = Feature("a feature", fine, needs=("torch", "a_library_that_nobody_has"))
    assert run_feature(feature) == "not installed: a_library_that_nobody_has"


def run_self_test(feature: str, change: str = "") -> tuple[int, str]:
    """Return exit code and output of the self-test after a change of the library."""
    code = (
        f"import sys; sys.argv[1:] = ['--only', {feature!r}]\n{change}\nfrom oslo_models.testing.__main__ import main"
    )
    code += "\nsys.exit(main())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.stacks
@pytest.mark.parametrize("feature", [feature.name for feature in features.FEATURES])
def test_every_feature_passes(warm: None, feature: str) -> None:
    code, output = run_self_test(feature)
    assert code == 0 and "no feature failed" in output and " ok (" in output, output


WRONG_LOSS = """
import oslo_models.layers.linear as linear
forward = linear.RowParallelLinear.forward
linear.RowParallelLinear.forward = lambda self, *args: 1.001 * forward(self, *args)
"""


def test_a_wrong_layer_fails(warm: None) -> None:
    code, output = run_self_test("parity: two tensor-parallel", WRONG_LOSS)
    assert code == 1 and re.search(r"LlamaForCausalLM: AssertionError: \S.* differs by", output), output
