"""`oslo-models merge` and `reshard`, also of OSLO 1 split files, which have no manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from oslo_models import GPT2LMHeadModel
from oslo_models.checkpoint import save_checkpoint
from oslo_models.cli.main import main

CONFIG = dict(vocab_size=53, n_positions=16, n_embd=24, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=1)


@pytest.fixture
def whole(tmp_path: Path, seed: int) -> tuple[Path, dict[str, Tensor]]:
    """Save a checkpoint with transformers; return its tensors."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole", {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_same(directory: Path, expected: dict[str, Tensor]) -> None:
    found = transformers.GPT2LMHeadModel.from_pretrained(directory).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_reshard_and_merge_keep_every_bit(
    whole: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    warm_launchers: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, expected = whole
    split, merged, binary = tmp_path / "split", tmp_path / "merged", tmp_path / "binary"
    sizes = ["--tensor-parallel-size", "2", "--tensor-parallel-shares", "1,3"]
    assert main(["reshard", str(directory), str(split), *sizes]) == 0
    files = {path.name: path.stat().st_size for path in split.glob("*.bin")}
    assert files.keys() == {f"pytorch_model_tp={tp}_pp=0.bin" for tp in range(2)}
    assert files["pytorch_model_tp=0_pp=0.bin"] < files["pytorch_model_tp=1_pp=0.bin"]
    assert main(["inspect", str(split)]) == 0
    assert "pipeline_parallel_size=1, tensor_parallel_shares=[1, 3]" in capsys.readouterr().out
    assert main(["merge", str(split), str(merged)]) == 0
    require_same(merged, expected)
    assert main(["merge", str(split), str(binary), "--format", "bin"]) == 0
    assert (binary / "pytorch_model.bin").is_file()
    require_same(binary, expected)


def test_merged_file_holds_tied_weights_once(whole: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, _ = whole
    model = GPT2LMHeadModel.from_pretrained_with_parallel(directory)
    tensors, layouts = model._full_names(model.state_dict())
    tied = model.all_tied_weights_keys
    options = {"merging": False, "tied": tied, "files": model._write_config}
    save_checkpoint(tmp_path / "split", tensors, layouts, model.mesh, **options)
    assert "lm_head.weight" in torch.load(tmp_path / "split/pytorch_model_tp=0_pp=0.bin")
    assert main(["merge", str(tmp_path / "split"), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_reshard_rejects_impossible_sizes(
    whole: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def old_files(directory: Path, expected: dict[str, Tensor], tp: int, pp: int) -> None:
    """Write files like OSLO 1.x: chunks of vocabulary and heads, and all layers on every stage, live or stale."""
    for t in range(tp):
        for p in range(pp):
            state = {}
            for name, tensor in expected.items():
                block = int(name.split(".")[2]) if ".h." in name else None
                owner = (
                    min(block // (3 // pp), pp - 1)
                    if block is not None
                    else (0 if "wte" in name or "wpe" in name else pp - 1)
                )
                if "c_attn" in name:  # three matrices side by side
                    part = torch.cat([each.chunk(tp, -1)[t] for each in tensor.chunk(3, -1)], -1)
                elif "c_fc" in name:
                    part = tensor.chunk(tp, -1)[t]
                elif "c_proj.weight" in name or "wte" in name or "lm_head" in name:
                    part = tensor.chunk(tp, 0)[t]
                else:
                    part = tensor
                state[name] = part.clone() if owner == p or name == "lm_head.weight" else part + 1.0  # stale
            torch.save(state, directory / f"pytorch_model_tp={t}_pp={p}.bin")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2), (1, 3)])
def test_merge_reads_oslo_1_split_files(
    whole: tuple[Path, dict[str, Tensor]], tmp_path: Path, tp: int, pp: int
) -> None:
    directory, expected = whole
    old, merged = tmp_path / "old", tmp_path / "merged"
    old.mkdir()
    shutil.copy(directory / "config.json", old)
    old_files(old, expected, tp, pp)
    assert main(["merge", str(old), str(merged)]) == 0
    require_same(merged, expected)
