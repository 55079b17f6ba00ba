"""``oslo-models demo`` with few steps."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from pathlib import Path

import pytest
import transformers as hf

from oslo_models.cli import demo


def options(output: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--output", str(output), *arguments])


def test_demo_runs_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seed: int, warm_launchers: None
) -> None:
    monkeypatch.chdir(tmp_path)
    code = demo.run(options(Path("demo"), "--steps", "3", "--seed", str(seed)))
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "3/3" in err and "Traceback" not in err and "Warning" not in err
    for text in ("held-out loss", "rank 1", "full model", "logits differ", "'def '"):
        assert out.count(text) >= 1, out
    assert out.count("held-out loss") == 1, "every rank speaks"
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    files = {path.name for path in Path("demo").iterdir()}
    assert {"split", "merged", "summary.json"} <= files <= {"split", "merged", "summary.json", "loss.png"}
    summary = json.loads(Path("demo/summary.json").read_text())
    before, after = summary["held_out"]
    assert after < before < 6 and len(summary["losses"]) == 3
    model = hf.AutoModelForCausalLM.from_pretrained("demo/merged")
    assert f"{model.num_parameters():,}" in out


@pytest.mark.parametrize(("difference", "code", "expected"), [(0.0, 0, 0), (0.1, 0, 1), (math.nan, 0, 1), (0.0, 3, 3)])
def test_demo_fails_when_logits_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, code: int, expected: int
) -> None:
    def ended(*args: object, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
        (tmp_path / "summary.json").write_text(json.dumps({"largest_difference": difference}))
        return subprocess.CompletedProcess([], code)

    monkeypatch.setattr(subprocess, "run", ended)
    assert demo.run(options(tmp_path)) == expected


def test_demo_rejects_bad_arguments_before_it_starts(tmp_path: Path) -> None:
    for arguments in (["-n", "9"], ["-n", "0"], ["--steps", "0"], ["--seed", "-1"]):
        with pytest.raises(ValueError, match=arguments[1]):
            demo.run(options(tmp_path / "demo", *arguments))
    assert not (tmp_path / "demo").exists()
