"""Expert-parallel training resumes from torch's checkpoints and from ours, with its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from support import pipelines
from support.experts import average_gradients, load, own_differences, saved_case
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import make_optimizer

Sizes = tuple[int, int, int]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trainer(folder: Path, given: pipelines.Case, sizes: Sizes, cp: int) -> tuple[Any, torch.optim.Optimizer]:
    model = load(folder, given, sizes, context_parallel_size=cp, experts_implementation="eager")
    return model, make_optimizer("AdamW", [param for _, param in sorted(model.named_parameters())])


def take_step(model: Any, optimizer: torch.optim.Optimizer, given: pipelines.Case, step: int) -> None:
    optimizer.zero_grad()
    with lifted_casts():
        model.train_batch(**given.batches[step][model.mesh.dp.rank])
    average_gradients(model)
    optimizer.step()


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def step_and_save(folder: Path, given: pipelines.Case, sizes: Sizes, cp: int) -> None:
    model, optimizer = trainer(folder / "hub", given, sizes, cp)
    take_step(model, optimizer, given, 0)
    dcp.save(states(model, optimizer), checkpoint_id=folder / "torch")
    model.save_pretrained_with_parallel(folder / "ours")
    model.save_optimizer(optimizer, folder / "ours", step=1)


def load_and_step(folder: Path, given: pipelines.Case, sizes: Sizes, cp: int, is_same: bool) -> None:
    model, optimizer = trainer(folder / "hub", given, sizes, cp)
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder / "torch")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    resumed = [(model, optimizer)]
    model, optimizer = trainer(folder / "ours", given, sizes, cp)
    if is_same:
        assert model.load_optimizer(optimizer, folder / "ours") == {"step": 1}
        resumed.append((model, optimizer))
    else:
        with pytest.raises(ValueError, match=r"was saved with expert_parallel_size=|is of experts over 2 ranks that"):
            model.load_optimizer(optimizer, folder / "ours")
    for model, optimizer in resumed:
        for step in range(1, pipelines.STEPS["AdamW"]):
            take_step(model, optimizer, given, step)
        own = {name: param.detach() for name, param in pipelines.stage_parameters(model).items()}
        lines = own_differences(model, "trained", own, given.trained["AdamW"])
        assert not lines, lines


@pytest.mark.parametrize(
    ("saved", "loaded", "replicas", "context"),
    [
        ((4, 1, 2), (4, 1, 2), 1, (1, 1)),
        ((2, 1, 4), (1, 1, 2), 2, (1, 1)),
        ((1, 1, 2), (1, 1, 2), 1, (2, 2)),
        ((1, 1, 2), (1, 1, 2), 2, (2, 1)),
        pytest.param((2, 1, 4), (2, 1, 4), 2, (1, 1), marks=pytest.mark.zoo),
        pytest.param((4, 1, 2), (2, 1, 4), 2, (1, 1), marks=pytest.mark.zoo),
        pytest.param((1, 1, 4), (1, 1, 4), 2, (2, 2), marks=pytest.mark.zoo),
        pytest.param((2, 1, 4), (1, 1, 2), 1, (2, 4), marks=pytest.mark.zoo),
    ],
)
def test_training_goes_on_from_checkpoints_with_its_optimizer(
    pool: Pool, tmp_path: Path, seed: int, saved: Sizes, loaded: Sizes, replicas: int, context: tuple[int, int]
) -> None:
    """Resume as on one process: from torch's checkpoints at other sizes too, from ours at the same sizes."""
    given = saved_case(tmp_path / "hub", "mixtral", seed, replicas, ("AdamW",))
    is_same = (saved, context[0]) == (loaded, context[1])
    pool.run(saved[0] * context[0] * replicas, step_and_save, tmp_path, given, saved, context[0])
    pool.run(loaded[0] * context[1] * replicas, load_and_step, tmp_path, given, loaded, context[1], is_same)
