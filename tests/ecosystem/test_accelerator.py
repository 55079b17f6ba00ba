"""accelerate's loop on sharded models: each step matches one process, and each sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

import accelerate

from oslo_models.integrations import Accelerator

from support import pipelines, trainers
from support.float64 import lifted_casts
from support.pipelines import stage_differences, stage_parameters
from support.pool import Pool
from support.reference import TOLERANCE, differences
from support.trainers import SIZES, Run

NAME, ROWS, STEPS, ACCUMULATION = "GPT2LMHeadModel", 4, 4, 2


def batches(config: Any, seed: int, count: int) -> list[dict[str, Tensor]]:
    return [{key: torch.tensor(value) for key, value in row.items()} for row in trainers.text_rows(config, seed, count)]


def prepare(accelerator: Any, model: Any, rows: Any, batch_size: int, shuffle: bool = False) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return accelerator.prepare(model, optimizer, DataLoader(rows, batch_size, shuffle=shuffle), scheduler)  # type: ignore[no-any-return]


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    """Run the documented loop, over micro-batches with stages; return gradient norms before clipping."""
    norms = []
    staged = accelerator.unwrap_model(model).pipeline is not None if hasattr(model, "module") else model.pipeline
    with lifted_casts():
        for batch in loader:
            with accelerator.accumulate(model):
                for output in model(**batch) if staged else [model(**batch)]:
                    accelerator.backward(output.loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return norms


def one_process(run: Run, rows: Any, batch_size: int, replicas: int) -> list[float]:
    """Make the same updates without accelerate, from the mean of all batches' mean losses in a step."""
    model = trainers.reference_model(NAME, run.config, 0)
    model.load_state_dict(run.weights, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    parts = list(DataLoader(rows, batch_size))
    size, norms = ACCUMULATION * replicas, []
    with lifted_casts():
        for first in range(0, len(parts), size):
            for batch in parts[first : first + size]:
                (model(**batch).loss / size).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            for _ in range(replicas):
                scheduler.step()
            optimizer.zero_grad()
    run.parameters = {0: trainers.full_parameters(model)}
    return norms


def loop_on_ranks(run: Run, tp: int, pp: int, rows: Any, test_rows: Any, norms: list[float], logits: Tensor) -> None:
    trainers.fresh_accelerate()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    model = pipelines.model_on_stages(NAME, run.config, run.weights, tp, pp, micro_batch_size=2)
    wrapped, *others = prepare(accelerator, model, rows, ROWS)
    assert train(accelerator, wrapped, *others) == pytest.approx(norms, abs=TOLERANCE)
    lines = stage_differences(model, "trained", stage_parameters(model), run.parameters[0], TOLERANCE)
    loader = accelerator.prepare(DataLoader(test_rows, 2))
    gathered: dict[str, list[Any]] = {"logits": [], "labels": [], "objects": []}
    model.eval().set_micro_batch_size(1)
    for batch in loader:
        with torch.no_grad(), lifted_casts():
            outputs = list(model(**batch)) if pp > 1 else [model(**batch)]
        if outputs[0].logits is not None:
            full = torch.cat([output.logits for output in outputs])
            gathered["logits"].append(accelerator.gather_for_metrics(full))
        gathered["labels"].append(accelerator.gather_for_metrics(batch["labels"]))
        gathered["objects"] += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["labels"]])
    labels = torch.stack([row["labels"] for row in test_rows])
    assert torch.equal(torch.cat(gathered["labels"]), labels)
    assert gathered["objects"] == [str(row.tolist()) for row in labels]
    if gathered["logits"]:
        lines += differences("logits", torch.cat(gathered["logits"]), logits, TOLERANCE)
    total = accelerator.reduce(torch.ones(2, dtype=torch.float64))
    assert total.tolist() == [model.mesh.dp.size] * 2
    assert not lines, "\n".join(lines)


@trainers.at_sizes("tp=2", "pp=2", "tp=2, dp=2")
def test_loop_equals_one_process(pool: Pool, sizes: str, seed: int) -> None:
    """The test set has nine rows: with two replicas, padding rows fill the last batch and do not count."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed)))
    rows = batches(config, seed, STEPS * ROWS * replicas)
    test_rows = batches(config, seed + 1, 9)
    norms = one_process(run, rows, ROWS, replicas)
    trained = trainers.reference_model(NAME, config, 0).eval()
    trained.load_state_dict(run.parameters[0], strict=False)
    with torch.no_grad(), lifted_casts():
        logits = trained(input_ids=torch.stack([row["input_ids"] for row in test_rows])).logits
    pool.run(ranks, loop_on_ranks, run, tp, pp, rows, test_rows, norms, logits, env=True)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save_and_load(run: Run, tp: int, pp: int, rows: Any, folder: Path) -> None:
    """Train, save, train; load into a new model, and train to the same parameters."""
    results = []
    for again in (False, True):
        trainers.fresh_accelerate()
        torch.manual_seed(3)
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
        model = pipelines.model_on_stages(NAME, run.config, run.weights, tp, pp, torch.float32, micro_batch_size=2)
        prepared = prepare(accelerator, model, rows, ROWS, shuffle=True)
        if again:
            torch.rand(5)
            accelerator.load_state(folder)
        else:
            train(accelerator, *prepared)
            accelerator.save_state(folder)
        train(accelerator, *prepared)
        results.append([param.detach().clone() for param in model.parameters()])
        learning_rate = prepared[3].get_last_lr()
    assert all(map(torch.equal, *results))
    assert learning_rate == pytest.approx([1e-2 * 0.9 ** (2 * STEPS // ACCUMULATION * model.mesh.dp.size)])
    accelerator.save_model(prepared[0], folder / "merged")


@trainers.at_sizes("tp=2", "pp=2", "tp=2, dp=2")
def test_save_state_and_load_state(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    config = pipelines.config("gpt2", dropout=0.2)
    model = trainers.reference_model(NAME, config, seed, torch.float32)
    rows = batches(config, seed, STEPS * ROWS * (ranks // tp // pp))
    pool.run(ranks, save_and_load, Run(NAME, config, trainers.full_parameters(model)), tp, pp, rows, tmp_path, env=True)
    loaded = type(model).from_pretrained(tmp_path / "merged")
    assert loaded.lm_head.weight.shape == model.lm_head.weight.shape


# Refusals, and the work of each rank ----------------------------------------------------------------------------------


def clip_where_one_stage_has_no_gradients(run: Run) -> tuple[float, int]:
    trainers.fresh_accelerate()
    accelerator = Accelerator()
    model = accelerator.prepare(pipelines.model_on_stages(NAME, run.config, run.weights, 1, 2))
    params = list(model.parameters()) if model.stage.index == 0 else []
    for param in params:
        param.grad = torch.ones_like(param)
    return float(accelerator.clip_grad_norm_(model.parameters(), 0.5)), sum(param.numel() for param in params)


def test_norm_without_gradients_on_one_stage_equals_the_other(pool: Pool, seed: int) -> None:
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed)))
    (first, count), (second, _) = pool.run(2, clip_where_one_stage_has_no_gradients, run, env=True)
    assert first == second == pytest.approx(count**0.5)


def misuse(run: Run, how: str) -> None:
    trainers.fresh_accelerate()
    model = pipelines.model_on_stages(NAME, run.config, run.weights, 2, 1)
    loader = DataLoader([0, 1])
    if how == "loader first":
        accelerator = Accelerator()
        accelerator.prepare(loader)
        accelerator.prepare(model)
    elif how == "dispatch":
        config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
        Accelerator(dataloader_config=config).prepare(model, loader)
    elif how == "one process":
        Accelerator(cpu=False).prepare(model)
    elif how == "state dict":
        Accelerator().get_state_dict(model)
    elif how == "no optimizer":
        accelerator = Accelerator()
        accelerator.prepare(model)
        accelerator.save_state("unused")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loader first", "prepare the model first"),
        ("dispatch", "dispatch_batches=True"),
        ("one process", r"sees 1 process\(es\) of 2"),
        ("state dict", "save_with_merging=True"),
        ("no optimizer", "need one optimizer for each"),
    ],
)
def test_misuse_is_refused_on_every_rank(
    pool: Pool, how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed)))
    for error in pool.run(2, misuse, run, how, env=True, expect=ValueError):
        with pytest.raises(ValueError, match=message):
            raise error


def parts_of_ranks(run: Run) -> tuple[Any, ...]:
    trainers.fresh_accelerate()
    accelerator = Accelerator()
    model = pipelines.model_on_stages(NAME, run.config, run.weights, 2, 1)
    loader = accelerator.prepare(model, DataLoader(list(range(16)), 2, shuffle=True))[1]
    with accelerator.split_between_processes([1, 2, 3, 4]) as part:
        if accelerator.state.process_index == 3:
            accelerator.set_trigger()
        return part, torch.cat(list(loader)).tolist(), accelerator.check_trigger(), accelerator.num_processes


def test_replicas_are_the_processes(pool: Pool, seed: int) -> None:
    """Ranks of a replica get the same parts, shuffled too, and a trigger of any rank reaches all."""
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed)))
    results = pool.run(4, parts_of_ranks, run, env=True)
    assert results[0] == results[1] and results[2] == results[3]
    assert results[0][0] == [1, 2] and results[2][0] == [3, 4]
    assert sorted(results[0][1] + results[2][1]) == list(range(16)) and results[0][1] != sorted(results[0][1])
    assert all(result[2] and result[3] == 2 for result in results)


def bf16_steps(run: Run, tp: int, pp: int, rows: Any) -> tuple[str, float]:
    """Return the dtype of sharded matrix products under autocast, and the gradient norm."""
    trainers.fresh_accelerate()
    accelerator = Accelerator(mixed_precision="bf16")
    model = pipelines.model_on_stages(NAME, run.config, run.weights, tp, pp, torch.float32, micro_batch_size=2)
    seen: list[torch.dtype] = []
    product = next(module for name, module in model.named_modules() if name.endswith("mlp.c_fc"))
    product.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    norms = train(accelerator, *prepare(accelerator, model, rows, ROWS))
    return str(seen[0]), norms[0]


@pytest.mark.parametrize("sizes", ["tp=2", "pp=2"])
def test_mixed_precision_reaches_every_micro_batch(pool: Pool, sizes: str, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed, torch.float32)))
    rows = batches(config, seed, 4)
    model = trainers.reference_model(NAME, config, seed, torch.float32)
    model(**next(iter(DataLoader(rows, 4)))).loss.backward()
    expected = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))
    for dtype, norm in pool.run(ranks, bf16_steps, run, tp, pp, rows, env=True):
        assert dtype == "torch.bfloat16"
        assert norm == pytest.approx(expected, rel=0.1)


def prepared_type(run: Run) -> tuple[str, str]:
    trainers.fresh_accelerate()
    accelerator = Accelerator()
    model = pipelines.model_on_stages(NAME, run.config, run.weights, 1, 1)
    prepared = accelerator.prepare(model)
    return accelerator.distributed_type.value, type(prepared).__name__


@pytest.mark.parametrize(("ranks", "expected"), [(1, NAME), (2, "DistributedDataParallel")])
def test_one_process_needs_no_ddp(pool: Pool, seed: int, ranks: int, expected: str) -> None:
    """Buckets of DDP would be a second copy of the gradients."""
    config = pipelines.config("gpt2")
    run = Run(NAME, config, trainers.full_parameters(trainers.reference_model(NAME, config, seed)))
    for kind, found in pool.run(ranks, prepared_type, run, env=True):
        assert (kind, found) == ("MULTI_CPU", expected)
