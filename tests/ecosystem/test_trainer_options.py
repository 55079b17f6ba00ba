"""Options of Trainer on sharded models: supported options, and refusals before training."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from oslo_models import RankFailedError
from oslo_models.distributed.watchdog import TIMEOUT
from oslo_models.integrations import ParallelTrainerMixin, Trainer
from oslo_models.integrations.training_arguments import optimizer_advice

from support import pipelines, trainers
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE
from support.trainers import SIZES, Run

pytestmark = pytest.mark.drawn(8, of="file")

NAME = "GPT2LMHeadModel"


def start(seed: int, variant: str = "gpt2", name: str = NAME, dtype: torch.dtype = torch.float32) -> Run:
    config = pipelines.config(variant)
    return Run(name, config, trainers.full_parameters(trainers.reference_model(name, config, seed, dtype)))


def own_model(run: Run, tp: int, pp: int, dtype: torch.dtype = torch.float32) -> Any:
    trainers.fresh_accelerate()
    return pipelines.model_on_stages(run.name, run.config, run.weights, tp, pp, dtype, micro_batch_size=2)


# Bounded differences --------------------------------------------------------------------------------------------------

INEXACT = {"bf16": {"bf16": True}, "checkpointing": {"gradient_checkpointing": True}}


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train_own(run: Run, tp: int, pp: int, args: dict[str, Any], rows: trainers.Rows) -> list[float]:
    model = own_model(run, tp, pp)
    trainer = type("Own", (trainers.Ordered, Trainer), {})(model, trainers.arguments(**args), train_dataset=rows)
    losses = losses_of(trainer)
    assert model.is_gradient_checkpointing == args.get("gradient_checkpointing", False)
    return losses


@pytest.mark.parametrize("option", INEXACT)
@trainers.at_sizes("tp=2", "pp=2")
def test_rounding_and_recomputation(pool: Pool, sizes: str, option: str, tmp_path: Path, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    run, rows = start(seed), trainers.text_rows(pipelines.config("gpt2"), seed, 24)
    model = trainers.reference_model(NAME, run.config, seed, torch.float32)
    args = {"output_dir": str(tmp_path), **INEXACT[option]}
    trainers.fresh_accelerate()
    whole = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * ranks // tp // pp})
    expected = losses_of(type("One", (trainers.Ordered, transformers.Trainer), {})(model, whole, train_dataset=rows))
    results = pool.run(ranks, train_own, run, tp, pp, args, rows, env=True)
    assert results == [results[0]] * ranks
    assert results[0] == pytest.approx(expected, rel=2e-2 if option == "bf16" else 1e-4)


# Batches --------------------------------------------------------------------------------------------------------------


class Masked:
    """Collator with a random mask per batch; in a pipeline, dropout draws different numbers on each stage."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in rows])
        labels = tokens.masked_fill(torch.rand(tokens.shape) > 0.4, -100)
        labels[:, 0] = tokens[:, 0]
        return {"input_ids": tokens, "labels": labels}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: trainers.Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def train_on_random_batches(run: Run, tp: int, pp: int, out: str, rows: trainers.Rows, streams: bool) -> list[float]:
    run.config.attn_pdrop = run.config.resid_pdrop = run.config.embd_pdrop = 0.1
    model = own_model(run, tp, pp)
    model.check_inputs.when = "always"
    dataset = Stream(rows) if streams else rows
    trainer = Trainer(model, trainers.arguments(out), train_dataset=dataset, data_collator=Masked(), eval_dataset=rows)
    losses = losses_of(trainer)
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("streams", [False, True])
@trainers.at_sizes("pp=2", "tp=2, dp=2")
def test_ranks_of_a_replica_share_batches(pool: Pool, sizes: str, streams: bool, tmp_path: Path, seed: int) -> None:
    """Batches of a random collator, and of a stream."""
    tp, pp, ranks = SIZES[sizes]
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 40)
    results = pool.run(ranks, train_on_random_batches, start(seed), tp, pp, str(tmp_path), rows, streams, env=True)
    assert results == [results[0]] * ranks


class Recorder(Trainer):
    """Records the first token of each training row."""

    seen: list[list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def rows_of_steps(run: Run, tp: int, pp: int, out: str, rows: trainers.Rows) -> tuple[int, list[list[int]]]:
    model = own_model(run, tp, pp)
    trainer = Recorder(model, trainers.arguments(out, max_steps=-1, num_train_epochs=2), train_dataset=rows)
    trainer.seen = []
    trainer.train()
    return model.mesh.dp.rank, trainer.seen


@trainers.at_sizes("pp=2", "dp=2")
def test_each_epoch_is_shuffled_and_has_each_row_once(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 16)
    for number, row in enumerate(rows):
        row["input_ids"][0] = number
    results = pool.run(ranks, rows_of_steps, start(seed), tp, pp, str(tmp_path), rows, env=True)
    replicas = dict(results)
    assert len(replicas) == ranks // (tp * pp)
    assert all(seen == replicas[replica] for replica, seen in results), "ranks of a replica have other batches"
    orders = []
    for epoch in range(2):
        size = 4 // len(replicas)
        batches = [batch for seen in replicas.values() for batch in seen[epoch * size : (epoch + 1) * size]]
        orders.append([row for batch in batches for row in batch])
    assert [sorted(order) for order in orders] == [list(range(16))] * 2
    assert orders[0] != orders[1] and sorted(orders[0]) not in orders


# Callbacks ------------------------------------------------------------------------------------------------------------


class StopsOnOneRank(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and torch.distributed.get_rank() == 1:
            control.should_training_stop = control.should_save = True


def stop_early(run: Run, out: str, rows: trainers.Rows) -> int:
    model = own_model(run, 2, 1)
    trainer = Trainer(model, trainers.arguments(out), train_dataset=rows, callbacks=[StopsOnOneRank()])
    trainer.train()
    return int(trainer.state.global_step)


def test_a_callback_on_one_rank_speaks_for_all(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 24)
    assert pool.run(2, stop_early, start(seed), str(tmp_path), rows, env=True) == [2, 2]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


class Broken(transformers.TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise LookupError("no tracker")


class BrokenRows(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise LookupError("no row")


def raise_on_one_rank(run: Run, tp: int, pp: int, where: str, out: str, rows: trainers.Rows) -> str:
    """Return the message of the error on this rank. The processes live on."""
    model = own_model(run, tp, pp)
    fails = torch.distributed.get_rank() == 1
    callbacks = [Broken()] if fails and where == "callback" else []
    data = BrokenRows(rows) if fails and where == "data" else rows
    args = trainers.arguments(out, max_steps=1)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    with pytest.raises(LookupError if fails else RankFailedError) as raised:
        trainer.train() if where == "callback" else trainer.evaluate()
    return str(raised.value)


@pytest.mark.parametrize(("where", "sizes"), [("callback", "tp=2"), ("data", "pp=2")])
def test_an_error_of_user_code_on_one_rank_ends_all_ranks(
    pool: Pool, where: str, sizes: str, tmp_path: Path, seed: int
) -> None:
    """The other rank does not wait for the end of the process or for a timeout."""
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 4)
    tp, pp, _ = SIZES[sizes]
    begin = time.monotonic()
    waiting, _ = pool.run(2, raise_on_one_rank, start(seed), tp, pp, where, str(tmp_path), rows, env=True)
    assert time.monotonic() - begin < TIMEOUT
    assert re.match(r"rank 1 \(host .*\) raised LookupError: no ", waiting), waiting


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "fsdp": ({"fsdp": True}, 2, 1, "fsdp=.* leave it out"),
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 2, 1, "deepspeed does not .* leave it out"),
    "batch size": ({"per_device_train_batch_size": 3}, 1, 2, "multiple of micro_batch_size=2"),
    "auto batch size": ({"auto_find_batch_size": True}, 2, 1, "only some ranks may run out of memory"),
    "smoothing": ({"label_smoothing_factor": 0.1}, 1, 2, "only the last pipeline stage has"),
    "neftune": ({"neftune_noise_alpha": 5.0}, 1, 2, "no token embedding"),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, 2, 1, "another batch to each rank"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, 2, 1, "another part of a batch"),
    "parallelism": ({"parallelism_config": "tp"}, 2, 1, "parallelism_config does not .* leave it out"),
    "preemption": ({"enable_jit_checkpoint": True}, 2, 1, "different steps; use save_steps"),
    "liger": ({"use_liger_kernel": True}, 2, 1, r"replaces sharded modules; call model\.fuse"),
    "compile": ({"torch_compile": True, "torch_compile_backend": "eager"}, 1, 2, "micro-batches is not compiled"),
    "unused": ({"ddp_find_unused_parameters": True}, 1, 2, "a step is a loop of calls"),
    "one process": ({"use_cpu": False}, 2, 1, r"sees 1 process\(es\) of 2"),
    "steps differ": ({"max_steps": "rank"}, 2, 1, "max_steps: rank 0 has 5, rank 1 has 6"),
    "states in 8 bits": ({"optim": "adamw_8bit"}, 2, 1, "optim=adamw_8bit does not .*in blocks.*adamw_torch_fused"),
    "states in 4 bits": ({"optim": "adamw_torch_4bit"}, 2, 1, "optim=adamw_torch_4bit does not .*adamw_torch_fused"),
    "paged states in 8 bits": ({"optim": "paged_lion_8bit"}, 2, 1, "optim=paged_lion_8bit does not .*adamw_torch_f"),
    "matrices": ({"optim": "adafactor"}, 2, 1, "optim=adafactor does not .*needs full matrices.*matrix_optimizer"),
    "backward updates": ({"optim": "lomo"}, 1, 2, "optim=lomo does not .*backward pass.*use adamw_torch_fused"),
    "loss function": ({"compute_loss_func": print}, 1, 2, "compute_loss_func needs logits"),
}


def construct(run: Run, args: dict[str, Any], tp: int, pp: int, out: str) -> None:
    model = own_model(run, tp, pp)
    if args.get("max_steps") == "rank":
        args["max_steps"] = 5 + torch.distributed.get_rank()
    options = {"compute_loss_func": args.pop("compute_loss_func")} if "compute_loss_func" in args else {}
    parallelism = args.pop("parallelism_config", None)
    arguments = trainers.arguments(out, **args)
    arguments.parallelism_config = parallelism  # its checks need another version of accelerate, or GPUs
    Trainer(model, arguments, train_dataset=[], **options)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("what", REFUSED)
def test_unsuitable_arguments_are_refused_before_training(pool: Pool, what: str, tmp_path: Path, seed: int) -> None:
    args, tp, pp, message = REFUSED[what]
    for error in pool.run(2, construct, start(seed), args, tp, pp, str(tmp_path), env=True, expect=ValueError):
        with pytest.raises(ValueError, match=message):
            raise error


def test_every_optimizer_of_transformers_is_exact_or_refused() -> None:
    """Names of a later release are refused until they are known to work."""
    names = {name.value for name in transformers.training_args.OptimizerNames}
    refused = {name for name in names if optimizer_advice(name, 2, 1)}
    assert refused == {
        *(name for name in names if "8bit" in name or "4bit" in name or name.startswith(("galore", "apollo"))),
        *("adafactor", "lomo", "adalomo", "grokadamw", "stable_adamw"),
    }
    assert not any(optimizer_advice(name, 1, 1) for name in names)  # replicas have full parameters
    backward = {"lomo", "adalomo", "grokadamw", *(name for name in names if name.endswith("_layerwise"))}
    assert {name for name in names if optimizer_advice(name, 1, 2)} == backward


class DrawnGradients(transformers.TrainerCallback):
    """Replaces the gradients before each step: sums of computed ones are rounded to bfloat16 in another order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, param in model.named_parameters():
            layout = model.layouts[name] if hasattr(model, "layouts") else None
            shape = param.shape if layout is None else layout.shape
            grad = torch.randn(shape, generator=self.generator).to(param.dtype)
            param.grad = grad if layout is None else layout.shard(grad, model.mesh.tp.rank).clone()


def train_in_bfloat16(model: Any, out: str, rows: trainers.Rows, seed: int, cls: Any) -> None:
    args = trainers.arguments(out, max_grad_norm=0.0)
    trainer = cls(model, args, train_dataset=rows, callbacks=[DrawnGradients(seed)])
    trainer.train()
    states = [value for state in trainer.optimizer.state.values() for key, value in state.items() if key != "step"]
    assert states and {value.dtype for value in states} == {torch.bfloat16}


def differences_in_bfloat16(run: Run, out: str, rows: trainers.Rows, seed: int) -> list[str]:
    model = own_model(run, 2, 1, torch.bfloat16)
    train_in_bfloat16(model, out, rows, seed, Trainer)
    return pipelines.stage_differences(model, "trained", pipelines.stage_parameters(model), run.parameters[5], 0.0)


def test_states_in_bfloat16(pool: Pool, tmp_path: Path, seed: int) -> None:
    """The states have the dtype of the weights, and the updates are those of one process bit for bit."""
    config = pipelines.config("gpt2")
    rows = trainers.text_rows(config, seed, 24)
    model = trainers.reference_model(NAME, config, seed, torch.bfloat16)
    run = Run(NAME, config, trainers.full_parameters(model))
    trainers.fresh_accelerate()
    train_in_bfloat16(model, str(tmp_path), rows, seed, transformers.Trainer)
    run.parameters[5] = trainers.full_parameters(model)
    found = pool.run(2, differences_in_bfloat16, run, str(tmp_path), rows, seed, env=True)
    assert found == [[], []]


def search(run: Run, out: str) -> None:
    Trainer(own_model(run, 2, 1), trainers.arguments(out), train_dataset=[]).hyperparameter_search()


def test_search_of_hyperparameters_is_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    for error in pool.run(2, search, start(seed), str(tmp_path), env=True, expect=ValueError):
        assert "run it around torchrun" in str(error)


class OwnLoss(ParallelTrainerMixin, transformers.Trainer):
    """Subclass with a custom loss from logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        return (loss, {"logits": logits}) if return_outputs else loss


def train_with_own_loss(run: Run, tp: int, pp: int, out: str, rows: trainers.Rows) -> list[float]:
    return losses_of(OwnLoss(own_model(run, tp, pp), trainers.arguments(out), train_dataset=rows))


def test_own_loss_of_a_subclass(pool: Pool, tmp_path: Path, seed: int) -> None:
    """The loss matches one process on tensor-parallel ranks, and pipeline stages refuse it."""
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 24)
    found = pool.run(2, train_with_own_loss, start(seed), 2, 1, str(tmp_path), rows, env=True)
    (expected,) = pool.run(1, train_with_own_loss, start(seed), 1, 1, str(tmp_path), rows, env=True)
    assert found[0] == found[1] and found[0] == pytest.approx(expected, rel=1e-5)
    for error in pool.run(2, train_with_own_loss, start(seed), 1, 2, str(tmp_path), rows, env=True, expect=ValueError):
        assert "called without labels" in str(error)


CLASSIFIER = "GPT2ForSequenceClassification"


def train_classifier(run: Run, tp: int, pp: int, out: str, rows: trainers.Rows) -> list[str]:
    """On each rank: take an SGD step on two batches; return a line for each differing parameter."""
    model = own_model(run, tp, pp, torch.float64)
    options = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
    }
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.0}
    arguments = trainers.arguments(out, **options)
    trainers.in_float64(type("Own", (trainers.Ordered, Trainer), {})(model, arguments, train_dataset=rows).train)
    return pipelines.stage_differences(
        model, "trained", pipelines.stage_parameters(model), run.parameters[1], TOLERANCE
    )


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_accumulated_means_of_classification(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    """The forward accepts the number of labels of all batches and ignores it: the loss of a batch is a mean."""
    config = pipelines.config("gpt2", num_labels=3, pad_token_id=0)
    model = trainers.reference_model(CLASSIFIER, config, seed, torch.float64)
    run = Run(CLASSIFIER, config, trainers.full_parameters(model))
    rows = [{**row, "labels": number % 3} for number, row in enumerate(trainers.text_rows(config, seed, 4, masked=0))]
    for first in (0, 2):
        ids = torch.tensor([row["input_ids"] for row in rows[first : first + 2]])
        labels = torch.tensor([row["labels"] for row in rows[first : first + 2]])
        with lifted_casts():
            (model(input_ids=ids, labels=labels).loss / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    run.parameters[1] = trainers.full_parameters(model)
    lines = pool.run(tp * pp, train_classifier, run, tp, pp, str(tmp_path), rows, env=True)
    assert not any(lines), lines


def initialize_model(run: Run, out: str, rows: trainers.Rows) -> list[float]:
    """``train`` makes a new model, then trains and saves it."""
    trainers.fresh_accelerate()
    args = trainers.arguments(out)
    init = lambda: pipelines.model_on_stages(run.name, run.config, run.weights, 2, 1, torch.float32)  # noqa: E731
    trainer = Trainer(model_init=init, args=args, train_dataset=rows)
    losses = losses_of(trainer)
    trainer.save_model()
    saved = transformers.GPT2LMHeadModel.from_pretrained(out).transformer.wpe.weight
    assert torch.equal(saved, trainer.model.transformer.wpe.weight.detach())
    return losses


def test_model_init(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trainers.text_rows(pipelines.config("gpt2"), seed, 24)
    found = pool.run(2, initialize_model, start(seed), str(tmp_path), rows, env=True)
    assert found[0] == found[1] and len(found[0]) == 5
