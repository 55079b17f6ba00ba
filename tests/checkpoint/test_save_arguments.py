"""The arguments of transformers' `save_pretrained`, and OSLO's arguments in their order, for both file layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor

import oslo_models
from oslo_models.checkpoint.filenames import MANIFEST

from support import zoo
from support.hub_server import TOKEN, hub_server, using_hub
from support.pool import Pool
from support.reference import reference_model

DEFAULTS = {  # of transformers' save_pretrained
    "is_main_process": True,
    "push_to_hub": False,
    "max_shard_size": "50GB",
    "variant": None,
    "token": None,
    "save_peft_format": True,
    "save_original_format": True,
    "distributed_checkpoint": False,
}
SPLIT = {f"pytorch_model_tp={rank}_pp=0.bin" for rank in range(2)}
CONFIGURATIONS = {"config.json", "generation_config.json", MANIFEST}


@pytest.fixture
def checkpoint(tmp_path: Path, seed: int) -> tuple[Path, dict[str, Tensor]]:
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed)
    model.save_pretrained(tmp_path / "full")
    return tmp_path / "full", model.state_dict()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def require_same(directory: Path | str, expected: dict[str, Tensor]) -> None:
    """Plain transformers loads it."""
    state = hf.GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float64).state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def save_in_many_ways(full: Path, target: Path) -> None:
    model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(full, tensor_parallel_size=2)
    calls = []

    def save_function(state: Any, path: Any) -> None:
        calls.append(Path(path).name)
        torch.save(state, path)

    # the order of OSLO 1 and OSLO 2
    model.save_pretrained_with_parallel(target / "merged", True, True, model.state_dict(), save_function)
    model.save_pretrained_with_parallel(target / "split", True, False, model.state_dict(), torch.save)
    model.save_parallelized(target / "underscores", False, model.state_dict(), save_function, False)
    assert calls == (["pytorch_model.bin"] if dist.get_rank() == 0 else []) + [
        f"pytorch_model_tp_{dist.get_rank()}_pp_0.bin"
    ]
    # arguments of save_pretrained, at their default values and others
    model.save_pretrained_with_parallel(target / "defaults", **DEFAULTS)
    model.save_pretrained_with_parallel(target / "merged-defaults", save_with_merging=True, **DEFAULTS)
    main = {"is_main_process": dist.get_rank() == 0, "token": f"hf_{dist.get_rank()}"}  # differ between ranks
    model.save_pretrained_with_parallel(target / "of-main", **main)
    model.save_pretrained_with_parallel(target / "of-none", is_main_process=False)
    model.save_parallelized(
        target / "small", merge_checkpoints=True, max_shard_size="20KB", variant="fp64", is_main_process=True
    )
    for options, message in (
        ({"max_shard_size": "20KB"}, "split files are one per rank"),
        ({"variant": "fp64"}, "split files are one per rank"),
        ({"distributed_checkpoint": True}, "distributed_checkpoint=True is not supported"),
        ({"repo_id": "a/b"}, r"\['repo_id'\] are for push_to_hub=True"),
        ({"push_to_hub": "a/b"}, "push_to_hub must be True or False"),
        ({"is_main_process": 0}, "is_main_process must be True or False"),
        ({"colour": "red"}, r"unknown arguments \['colour'\]"),
        ({"save_function": save_function, "safe_serialization": True}, "save_function writes .bin files"),
    ):
        with pytest.raises(ValueError, match=message):
            model.save_pretrained_with_parallel(target / "none", **options)
    assert not (target / "none").exists()


def test_arguments_of_saving(pool: Pool, checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    full, expected = checkpoint
    pool.run(2, save_in_many_ways, full, tmp_path)
    assert files(tmp_path / "merged") == {"pytorch_model.bin", *CONFIGURATIONS}
    assert files(tmp_path / "split") == files(tmp_path / "defaults") == files(tmp_path / "of-main")
    assert files(tmp_path / "split") == SPLIT | CONFIGURATIONS
    assert files(tmp_path / "underscores") == {*(name.replace("=", "_") for name in SPLIT), MANIFEST}
    assert files(tmp_path / "merged-defaults") == {"model.safetensors", *CONFIGURATIONS}
    assert files(tmp_path / "of-none") == SPLIT | {MANIFEST}
    assert "model.safetensors.index.fp64.json" in files(tmp_path / "small")
    require_same(tmp_path / "merged", expected)
    require_same(tmp_path / "merged-defaults", expected)
    state = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "small", variant="fp64").state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("save", ["save_pretrained_with_parallel", "save_parallelized"])
def test_one_process_saves_files_for_transformers(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, save: str
) -> None:
    full, expected = checkpoint
    model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(full)
    getattr(model, save)(tmp_path / "saved", **DEFAULTS)
    assert files(tmp_path / "saved") == {"model.safetensors", *CONFIGURATIONS}
    require_same(tmp_path / "saved", expected)
    getattr(model, save)(tmp_path / "saved", True, save_function=torch.save, safe_serialization=False)
    assert files(tmp_path / "saved") == {"pytorch_model.bin", *CONFIGURATIONS}
    require_same(tmp_path / "saved", expected)


# The hub ------------------------------------------------------------------------------------------------------------


def push(full: Path, target: Path, url: str) -> None:
    model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(full, tensor_parallel_size=2)
    hub = {"push_to_hub": True, "token": TOKEN}
    with using_hub(url):
        model.save_pretrained_with_parallel(target / "mine", **hub)
        model.save_pretrained_with_parallel(target / "other", repo_id="team/split", private=True, **hub)
        model.save_parallelized(
            target / "merged", merge_checkpoints=True, repo_id="team/merged", commit_message="It", **hub
        )
        model.save_parallelized(target / "again", merge_checkpoints=True, repo_id="team/split", **hub)
        with pytest.raises(OSError, match="wrong is saved, but could not be uploaded to team/wrong"):
            model.save_pretrained_with_parallel(target / "wrong", repo_id="team/wrong", push_to_hub=True, token="no")


def load(target: Path, url: str, expected: dict[str, Tensor]) -> None:
    with using_hub(url):
        model = oslo_models.GPT2LMHeadModel.from_pretrained_with_parallel(
            "somebody/mine", tensor_parallel_size=2, cache_dir=target / "cache"
        )
    for name, param in model.named_parameters():
        assert torch.equal(param, model.layouts[name].shard(expected[name], model.mesh.tp.rank))


def test_checkpoints_are_uploaded_to_a_hub(
    pool: Pool, checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Upload split and merged files, and load them on ranks again. A commit deletes the files that it replaces."""
    full, expected = checkpoint
    with hub_server() as hub:
        pool.run(2, push, full, tmp_path, hub.url)
        assert {name: set(held) for name, held in hub.repos.items()} == {
            "somebody/mine": SPLIT | CONFIGURATIONS,
            "team/split": {"model.safetensors", *CONFIGURATIONS},
            "team/merged": {"model.safetensors", *CONFIGURATIONS},
        }
        assert [commit[2] for commit in hub.commits] == [set(), set(), set(), SPLIT]
        assert files(tmp_path / "wrong") == SPLIT | CONFIGURATIONS
        assert json.loads(hub.repos["somebody/mine"][MANIFEST])["tp"] == 2
        pool.run(2, load, tmp_path, hub.url, expected)
