"""A loop of Ray Train around a sharded model: its processes and process group are Ray's."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from support import recipes, zoo
from support.float64 import lifted_casts
from support.ports import short_path
from support.reference import TOLERANCE, differences, full_parameters, parallel_model, reference_model

pytestmark = [pytest.mark.zoo, pytest.mark.ray]
STEPS, CLIP = 5, 0.05


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray on this host, with four logical CPUs."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    # a short path, because Ray adds long socket names
    with tempfile.TemporaryDirectory(prefix="ray-") as long, short_path(long) as folder:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": environment},
            log_to_driver=False,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


def loop(given: dict[str, Any]) -> None:
    """The loop of docs/guides/torch.md, on each of Ray's processes."""
    import ray.train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    model = parallel_model("GPT2LMHeadModel", given["config"], given["weights"], 2)
    replicas, rank = model.mpu.get_data_parallel_world_size(), model.mpu.get_data_parallel_rank()
    with pytest.raises(ValueError, match=r"would overwrite the shards of one rank with other shards"):
        prepare_model(model)
    replica = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.AdamW(model.gpu_parameters(), lr=0.01)
    with lifted_casts():
        for step in range(1, STEPS + 1):
            ids = given["tokens"][step - 1].chunk(replicas)[rank]
            optimizer.zero_grad()
            replica(input_ids=ids, labels=ids).loss.backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step in (1, STEPS):
                model.save_pretrained_with_parallel(f"{given['folder']}/{step}", save_with_merging=True)
    ray.train.report({"step": step})


def test_ray_train_trains_as_one_process(ray: Any, tmp_path: Path, seed: int) -> None:
    """Two replicas of two shards, clipped; Ray's wrapper over all ranks is refused."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config = zoo.config("gpt2")
    model = reference_model("GPT2LMHeadModel", config, seed)
    tokens = torch.randint(config.vocab_size, (STEPS, 4, 7), generator=torch.Generator().manual_seed(seed))
    given = {"config": config, "weights": full_parameters(model), "tokens": tokens, "folder": str(tmp_path)}
    trainer = TorchTrainer(
        loop,
        train_loop_config=given,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    )
    trainer.fit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lifted_casts():
        for step, ids in enumerate(tokens, 1):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            assert clip_grad_norm_(model.parameters(), CLIP) > CLIP
            optimizer.step()
            if step in (1, STEPS):
                trained = type(model).from_pretrained(tmp_path / str(step), dtype=torch.float64)
                lines = []
                for name, expected in full_parameters(model).items():
                    lines += differences(
                        name, dict(trained.named_parameters(remove_duplicate=False))[name], expected, TOLERANCE
                    )
                assert not lines, "\n".join(lines)


def train_recipe(given: dict[str, str]) -> None:
    """Train a recipe on each of Ray's processes."""
    import ray.train

    torch.set_num_threads(1)
    os.chdir(given["folder"])
    recipes.run_on_rank("sft", [given["recipe"]])
    ray.train.report({})


def test_recipe_joins_the_processes_of_ray(
    ray: Any, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="recipes are TRL's")
    from datasets import load_dataset
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    monkeypatch.chdir(tmp_path)
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, "sft", seed)
    recipes.run_trl("sft", recipe, tmp_path / "trl", load_dataset("json", data_files=str(tmp_path / "sft.jsonl")))
    TorchTrainer(
        train_recipe,
        train_loop_config={"folder": str(tmp_path), "recipe": str(recipe)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    expected, found = (recipes.logged(tmp_path / name, 4) for name in ("trl", "out"))
    assert len(found) == len(expected) == 4
    for own, right in zip(found, expected, strict=True):
        assert abs(own["loss"] - right["loss"]) <= TOLERANCE * max(1.0, abs(right["loss"])), (own, right)
    assert "tensor_parallel_size: 2" in (tmp_path / "out/README.md").read_text()
