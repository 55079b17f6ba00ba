"""PyTorch Lightning around a sharded model: one trainer per rank, and DDP over replicas inside the module."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedConfig

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, full_parameters, parallel_model, reference_model, shard_differences

pytestmark = [
    pytest.mark.zoo,  # importing it takes many seconds
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]
Rows = list[dict[str, Tensor]]
CLIP = 0.05


def lightning_module(model: Any) -> Any:
    """The module of the guide."""
    import lightning

    class Sharded(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            group = model.mpu.get_data_parallel_group()
            self.model = model
            self.replica = DistributedDataParallel(model.gpu_modules(), process_group=group)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.replica(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.gpu_parameters(), lr=0.01)

    return Sharded()


def trainer(**options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", enable_checkpointing=False, max_epochs=1, **quiet, **options)


def train_sharded(config: PreTrainedConfig, weights: Any, rows: Rows, trained: dict[str, Tensor], clip: Any) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    model = parallel_model("GPT2LMHeadModel", config, weights, 2)
    replicas, rank = model.mpu.get_data_parallel_world_size(), model.mpu.get_data_parallel_rank()
    sampler: Any = DistributedSampler(rows, replicas, rank, shuffle=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(rows, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    with lifted_casts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the number of workers of the loader, and such
        fit = trainer(strategy=SingleDeviceStrategy(torch.device("cpu")), gradient_clip_val=clip)
        fit.fit(lightning_module(model), loader)
    own = dict(model.named_parameters(remove_duplicate=False))
    lines = shard_differences(model, "trained", own, trained, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("ranks", [2, 4], ids=["tp2", "tp2-dp2"])
@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clipped"])
def test_lightning_trains_as_one_process(pool: Pool, ranks: int, clip: float | None, seed: int) -> None:
    config, replicas = zoo.config("gpt2"), ranks // 2
    model = reference_model("GPT2LMHeadModel", config, seed)
    weights = full_parameters(model)
    tokens = torch.randint(config.vocab_size, (12, 7), generator=torch.Generator().manual_seed(seed))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lifted_casts():
        for ids in tokens.split(2 * replicas):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                assert norm > clip
            optimizer.step()
    pool.run(ranks, train_sharded, config, weights, rows, full_parameters(model), clip, env=True)


def train_by_ddp_strategy(config: PreTrainedConfig, weights: Any, rows: Rows) -> None:
    import lightning

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parallel_model("GPT2LMHeadModel", config, weights, 2)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        trainer(strategy="ddp", devices=2).fit(Plain(), loader)


def test_lightning_ddp_over_tensor_parallel_ranks_is_rejected(pool: Pool, seed: int) -> None:
    config = zoo.config("gpt2")
    weights = full_parameters(reference_model("GPT2LMHeadModel", config, seed))
    rows = [{"input_ids": torch.arange(7), "labels": torch.arange(7)} for _ in range(4)]
    for error in pool.run(2, train_by_ddp_strategy, config, weights, rows, env=True, expect=ValueError):
        assert "DistributedDataParallel over ranks [0, 1] would overwrite the shards" in str(error)
