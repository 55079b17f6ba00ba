"""The command line: help without importing torch, error messages, exit codes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oslo_models.checkpoint import save_checkpoint
from oslo_models.cli import main as cli
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.sharding.layout import EvenSplit, Layout

from support import ROOT
from support.pool import Pool

LAYOUTS = {"weight": Layout.sharded((5, 4), 0, [EvenSplit(5)], 2), "bias": Layout((4,))}


def _save_split(folder: Path) -> None:
    mesh = ParallelMesh(2)
    full = {name: torch.ones(layout.shape) for name, layout in LAYOUTS.items()}
    local = {name: LAYOUTS[name].shard(tensor, mesh.tp.rank) for name, tensor in full.items()}
    about = {"architectures": ["GPT2LMHeadModel"]}
    save_checkpoint(folder, local, LAYOUTS, mesh, merging=False, tied={}, metadata=about)


@pytest.fixture
def split(pool: Pool, tmp_path: Path) -> Path:
    pool.run(2, _save_split, tmp_path / "split")
    return tmp_path / "split"


COMMANDS = ["", "demo", "list", "inspect", "merge", "reshard", "preprocess", "serve", "sft", "pretrain"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command: str) -> None:
    code = "import sys; from oslo_models.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    arguments = [command, "--help"] if command else []
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage: oslo-models" in done.stdout and "Traceback" not in done.stderr


def test_list_names_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert {"gpt2", "  GPT2LMHeadModel", "llama", "  LlamaForCausalLM"} <= set(every)
    assert cli.main(["list", "gpt2"]) == 0
    some = capsys.readouterr().out.splitlines()
    assert some[0] == "gpt2" and "llama" not in some


def test_inspect_describes_a_split_checkpoint(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(split)]) == 0
    shown = capsys.readouterr().out
    assert "split checkpoint, tensor_parallel_size=2, pipeline_parallel_size=1" in shown
    assert "GPT2LMHeadModel" in shown
    assert "pytorch_model_tp=0_pp=0.bin" in shown and "2 tensors, 16 elements, float32" in shown
    assert cli.main(["inspect", str(split), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == [2, 1]


def test_inspect_verify_finds_damage(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(split), "--verify"]) == 0
    assert "every file has the size and the checksum" in capsys.readouterr().out
    file = split / "pytorch_model_tp=1_pp=0.bin"
    data = bytearray(file.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f") + 1] ^= 1  # in a float32 1.0
    file.write_bytes(data)
    assert cli.main(["inspect", str(split), "--verify"]) == 2
    assert_one_line(capsys, "pytorch_model_tp=1_pp=0.bin")


def test_inspect_describes_a_merged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {name: Layout(layout.shape) for name, layout in LAYOUTS.items()}
    tensors = {name: torch.ones(layout.shape) for name, layout in whole.items()}
    save_checkpoint(tmp_path, tensors, whole, ParallelMesh(), merging=True, tied={})
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "merged checkpoint\n" in capsys.readouterr().out
    (tmp_path / "oslo_manifest.json").unlink()
    assert cli.main(["inspect", str(tmp_path), "--verify"]) == 0
    assert "no manifest" in capsys.readouterr().out


def test_user_errors_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "absent")]) == 2
    assert_one_line(capsys, "absent")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert_one_line(capsys, str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert_one_line(capsys, "model.safetensors")
    assert cli.main(["list", "gpt5"]) == 2
    assert_one_line(capsys, "gpt5")
    for arguments in (["reshard", "a", "b", "--tensor-parallel-size", "0"], ["merge", "a"], ["unknown"]):
        with pytest.raises(SystemExit) as info:
            cli.main(arguments)
        assert info.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_internal_errors_have_another_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> None:
        raise KeyError("missing")

    monkeypatch.setattr(cli, "_list", broken)
    assert cli.main(["list"]) == 1
    assert_one_line(capsys, "KeyError")
    with pytest.raises(KeyError):
        cli.main(["--traceback", "list"])


def test_closed_output_pipe_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m oslo_models list | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


def assert_one_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("oslo-models ") and error.count("\n") == 1 and text in error
