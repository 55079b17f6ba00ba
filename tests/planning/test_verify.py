"""The certificate: equal ranks pass, and one changed weight of one rank fails."""

from __future__ import annotations

import bisect
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oslo_models import registry
from oslo_models.cli import main as cli
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.planning import certificate, certificate_rank, reference
from oslo_models.planning.certificate import _merged
from oslo_models.planning.certificate_rank import compare
from oslo_models.planning.reference import compute_reference, truncate
from oslo_models.testing.features import plain_model

from support import ROOT, quantized
from support.pool import Pool

NAME = "Qwen3ForCausalLM"


def _compare(
    folder: Path, tp: int, pp: int, changed: bool, source: str = "model", shares: list[int] | None = None
) -> dict[str, bool]:
    cls: Any = registry.find(NAME)
    options = {"dtype": torch.float64, "tensor_parallel_shares": shares}
    model = cls.from_pretrained_with_parallel(folder / source, tp, pp, **options).eval()
    if changed and model.mesh.world.rank == 1:
        weight = next(param for name, param in model.named_parameters() if "down_proj" in name)
        with torch.no_grad(), without_override():
            weight[0, 0] += 1e-3
    return {name: passed for name, passed, _ in compare(model, folder, 1e-6)}


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)])
@pytest.mark.parametrize("changed", [False, True], ids=["same", "changed"])
def test_one_changed_weight_of_one_rank_fails(pool: Pool, tmp_path: Path, tp: int, pp: int, changed: bool) -> None:
    plain_model(NAME).save_pretrained(tmp_path / "model")
    cls: Any = registry.find(NAME)
    compute_reference(cls, tmp_path / "model", {}, torch.float64, None, 16, tmp_path)
    found = pool.run(2, _compare, tmp_path, tp, pp, changed)
    passed = {name for checks in found for name in checks if all(each[name] for each in found)}
    everything = {"loss", "gradients", "greedy tokens", "merged files"}
    assert set(found[0]) == everything
    assert (passed == everything) if not changed else not passed & {"gradients", "merged files"}


def _split(folder: Path) -> None:
    cls: Any = registry.find(NAME)
    model = cls.from_pretrained_with_parallel(folder / "model", 2, tensor_parallel_shares=[1, 2])
    model.save_pretrained_with_parallel(folder / "split")


def test_split_files_are_merged_for_the_reference(pool: Pool, tmp_path: Path) -> None:
    plain_model(NAME).save_pretrained(tmp_path / "model")
    pool.run(2, _split, tmp_path)
    (tmp_path / "split" / "tokenizer_config.json").write_text("{}")
    cls: Any = registry.find(NAME)
    whole = _merged(cls, tmp_path / "split", torch.float64, tmp_path / "whole")
    names = {path.name for path in whole.iterdir()}
    assert "tokenizer_config.json" in names and not any("_tp=" in name for name in names)
    compute_reference(cls, whole, {}, torch.float64, None, 16, tmp_path)
    found = pool.run(2, _compare, tmp_path, 2, 1, False, "split", [2, 1])
    assert all(all(checks.values()) for checks in found), found


def test_the_command_certifies_a_checkpoint(warm_launchers: None, tmp_path: Path) -> None:
    plain_model(NAME).float().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "oslo_models", "verify", str(tmp_path), "--tensor-parallel-size", "2", "--json"]
    done = subprocess.run([*command, "--blocks", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and [check["passed"] for check in found["checks"]] == [True] * 4
    assert found["versions"]["torch"] == torch.__version__


def _run_in_pool(pool: Pool, scratch: Path, ranks: int) -> tuple[certificate.Check, ...]:
    """Compare on processes of the pool. Return the checks of all ranks."""
    pool.run(ranks, certificate_rank.main, scratch)
    reports = [json.loads(file.read_text()) for file in scratch.glob("rank-*.json")]
    return tuple(certificate.Check(*check) for report in reports for check in report["checks"])


CERTIFIED = {
    "dense": ("GPT2LMHeadModel", 1, "transformer.h.0.mlp.c_proj.weight"),
    "mixture": ("MixtralForCausalLM", 2, "model.layers.0.mlp.experts.down_proj"),
    "encoder-decoder": ("T5ForConditionalGeneration", 1, "decoder.block.0.layer.2.DenseReluDense.wo.weight"),
}


def _split_with_a_change(name: str, experts: int, changed: str, folder: Path) -> None:
    """Save split files after rank 1 has changed one weight, so that the checksums fit."""
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder / "model", 2, expert_parallel_size=experts, dtype=torch.float32)
    if model.mesh.world.rank == 1:
        with torch.no_grad(), without_override():
            model.get_parameter(changed).view(-1)[0] += 0.1
    model.save_pretrained_with_parallel(folder / "split")


def _printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the certificate. DeepSpeed logs to the captured output where it is imported first."""
    out = capsys.readouterr().out
    return json.loads(out[out.index("{\n") :])


@pytest.mark.parametrize("case", CERTIFIED)
def test_exit_status_of_equal_and_changed_checkpoints(
    pool: Pool, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, experts, changed = CERTIFIED[case]
    plain_model(name).float().save_pretrained(tmp_path / "model")
    pool.run(2, _split_with_a_change, name, experts, changed, tmp_path)
    monkeypatch.setattr(certificate, "_run_ranks", partial(_run_in_pool, pool))
    command = ["verify", str(tmp_path / "model"), "--tensor-parallel-size", "2", "--length", "16", "--json"]
    command += ["--expert-parallel-size", str(experts)]
    assert cli.main(command) == 0
    found = _printed(capsys)
    assert found["passed"] and len(found["checks"]) == 8 and found["sizes"].get("expert_parallel_size", 1) == experts
    assert cli.main([*command, "--ranks-from", str(tmp_path / "split")]) == 1
    failed = {check["name"] for check in _printed(capsys)["checks"] if not check["passed"]}
    assert failed >= {"gradients", "merged files"}


def test_a_changed_checkpoint_ends_the_command_with_status_1(warm_launchers: None, pool: Pool, tmp_path: Path) -> None:
    plain_model(NAME).float().save_pretrained(tmp_path / "model")
    pool.run(2, _split_with_a_change, NAME, 1, "model.layers.0.mlp.down_proj.weight", tmp_path)
    command = [sys.executable, "-m", "oslo_models", "verify", str(tmp_path / "model"), "--tensor-parallel-size", "2"]
    command += ["--ranks-from", str(tmp_path / "split"), "--length", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED merged files" in done.stdout, done.stdout + done.stderr
    assert "FAILED: do not train on this" in done.stdout


def test_quantized_weights_are_dequantized_on_both_sides(
    pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed scale that only the ranks read fails."""
    quantized.write_checkpoint(tmp_path / "model", seed, quantized.fp8_settings(8, 16), quantized.fp8(8, 16))

    monkeypatch.setattr(certificate, "_run_ranks", partial(_run_in_pool, pool))
    found = certificate.verify(tmp_path / "model", 2, dtype="float64", length=16)
    assert found.passed and len(found.checks) == 8 and "the weights are quantised" in str(found), str(found)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    tensors = load_file(tmp_path / "other/model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale_inv"))
    tensors[name][0, 0] *= 1.01
    save_file(tensors, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    found = certificate.verify(tmp_path / "model", 2, dtype="float64", length=16, ranks_from=tmp_path / "other")
    assert {check.name for check in found.checks if not check.passed} >= {"gradients", "merged files"}, str(found)


def test_an_adapter_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    for command in (["verify", str(tmp_path)], ["plan", str(tmp_path)]):
        assert cli.main(command) == 2
        assert "holds an adapter, not a model: give its model, gpt2, or a folder with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, named",
    [
        (["--tensor-parallel-size", "5"], "tensor_parallel_size=5"),
        (["--dtype", "int8"], "int8"),
        (["--blocks", "9"], "--blocks 9"),
        (["--expert-parallel-size", "2"], "expert_parallel_size=2"),
    ],
)
def test_bad_input_is_answered_by_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    plain_model(NAME).config.save_pretrained(tmp_path)
    assert cli.main(["verify", str(tmp_path), *options]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("oslo-models")]
    assert len(lines) == 1 and named in lines[0], lines


def test_a_model_that_one_process_cannot_hold_is_truncated(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too little memory for the model, and enough for a block, the first blocks are compared."""
    config = plain_model(NAME).config
    cls: Any = registry.find(NAME)

    def fit(available: int) -> int | None:
        """Return the number of blocks that fit, 0 for none, or ``None`` for all."""
        monkeypatch.setattr(reference, "free_memory", lambda device: available)
        try:
            return reference.blocks_that_fit(cls, config, torch.float32)
        except ValueError:
            return 0

    depth = config.num_hidden_layers
    sizes = range(1 << 12, 1 << 26, 1 << 10)
    least = sizes[bisect.bisect_left(sizes, True, key=lambda size: fit(size) is None)]
    assert fit(least - (1 << 10)) == depth - 1 and fit(1 << 10) == 0
    with pytest.raises(ValueError, match=r"one block of Qwen3ForCausalLM .* needs more than the"):
        reference.blocks_that_fit(cls, config, torch.float32)
    plain_model(NAME).float().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(certificate, "_run_ranks", partial(_run_in_pool, pool))
    fit(least - (1 << 10))
    found = certificate.verify(tmp_path / "model", 2, length=16)
    assert found.passed and f"only the first {depth - 1} blocks of each stack are compared" in str(found), str(found)


def test_stacks_are_truncated() -> None:
    config = plain_model(NAME).config
    assert truncate(config, None) == {} and truncate(config, 1)["num_hidden_layers"] == 1
