"""Pipeline parallelism: models with enough blocks, batches of four rows, and comparison of a stage with a reference.

Parameters have the names of the full model: `stage_parameters` maps the parameters of a stage to these names.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from oslo_models import registry

from support import zoo
from support.float64 import lifted_casts
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    make_optimizer,
    reference_model,
    tensors,
)

ROWS = 4
DEPTH: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"n_layer": 4},
    "llama": {"num_hidden_layers": 4},
    "t5": {"num_layers": 4, "num_decoder_layers": 3},
}
"""Enough blocks for four stages."""

Batch = dict[str, Any]
Weights = dict[str, Tensor]


def config(variant: str, dropout: float = 0.0, **changes: Any) -> PreTrainedConfig:
    model_type = zoo.VARIANTS[variant][0] if variant in zoo.VARIANTS else variant
    return zoo.config(variant, dropout, **{**DEPTH.get(model_type, {}), **changes})


def heads_with_loss(variant: str) -> list[str]:
    known = {"labels", "start_positions"}
    return [name for name in zoo.heads(variant) if known & zoo.parameters_of_forward(name).keys()]


def batch(
    name: str, config: PreTrainedConfig, seed: int, rows: int = ROWS, dtype: torch.dtype = torch.float64
) -> Batch:
    """Return rows with left padding and unequal numbers of labels; row 2 has no valid token labels.

    Row 1 has no padding, and its first label is valid, so that a loss with shifted labels averages fewer labels.
    """
    parts = [zoo.batch(name, config, seed + 1000 * part, dtype) for part in range(-(-rows // 3))]
    made: Batch = {**parts[0]}
    for key, x in made.items():
        if isinstance(x, Tensor):  # three rows have three images, and four rows have four
            joined = torch.cat([part[key] for part in parts])
            made[key] = joined[: len(joined) * rows // (3 * len(parts))]
    if "target_sizes" in made:  # MiniCPM-V, with the patches of all images as one row
        patches = torch.cat([part["pixel_values"] for part in parts], -1)
        made["pixel_values"] = patches[..., : patches.shape[2] * int(made["target_sizes"].prod(-1).sum())]
    if "labels" in made and made["labels"].dim() > 1 and not made["labels"].is_floating_point():
        ignored = zoo.ignored_label(name, config)
        made["labels"][2] = ignored
        made["labels"][1, ..., 0] = 1
        made["labels"][0, ..., : 4 + seed % 3] = ignored
    if name == "FSMTModel":  # without labels, transformers hides later tokens only without a cache
        made["use_cache"] = False  # type: ignore[assignment]
    if "start_positions" in made:
        made["start_positions"][0] = 1000  # out of range: ignored
    return made


# Stages ---------------------------------------------------------------------------------------------------------------


def model_on_stages(
    name: str,
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    tp: int,
    pp: int,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """Return this rank's pipeline stage and shard of a model with the given full weights."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tp, pp, dtype=dtype, seed=0, **options)
    load_weights(model, weights)
    return model


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy the local shards of full weights into this rank's pipeline stage."""
    full_names = {} if model.stage is None else model.stage.full_names
    for full_name, param in stage_parameters(model).items():
        layout = model_layout(model, full_name)
        param.copy_(layout.shard(weights[full_name], model.mesh.rank_in(layout)))
    for name, buffer in model.named_buffers():
        if (full_name := full_names.get(name, name)) in weights:
            layout = model.layouts.get(name)
            full = weights[full_name]
            buffer.copy_(full if layout is None else layout.shard(full, model.mesh.rank_in(layout)))


def stage_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the local parameters by their full-model names; tied parameters occur under each of their names."""
    aliases = {} if model.stage is None else model.stage.full_names
    return {aliases.get(name, name): param for name, param in model.named_parameters(remove_duplicate=False)}


def model_layout(model: Any, full_name: str) -> Any:
    aliases = {} if model.stage is None else {full: local for local, full in model.stage.full_names.items()}
    return model.layouts[aliases.get(full_name, full_name)]


def to_full_tensor(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def stage_differences(
    model: Any, what: str, own: Mapping[str, Tensor | None], full: Mapping[str, Tensor | None], tolerance: float
) -> list[str]:
    """Return a line for each local tensor that differs from its shard, under its full-model name."""
    lines = []
    for name, part in own.items():
        expected = full[name]
        if expected is not None:
            layout = model_layout(model, name)
            expected = layout.shard(expected, model.mesh.rank_in(layout))
        lines += differences(f"{what} {name}", to_full_tensor(part), expected, tolerance)
    return lines


def gradients_on_stage(model: Any) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in stage_parameters(model).items()}


def gradient_differences(
    model: Any, full: Mapping[str, Tensor | None], tolerance: float = TOLERANCE, what: str = "gradient of"
) -> list[str]:
    return stage_differences(model, what, gradients_on_stage(model), full, tolerance)


def run_micro_batches(model: Any, batch: Mapping[str, Any], scale: float = 1.0, lift: bool = True) -> Tensor:
    """Run the loop of the documents, forward and backward of every micro-batch; return the sum of the losses."""
    losses = []
    with torch.overrides.BaseTorchFunctionMode() if not lift else lifted_casts():
        for output in model(**batch):
            losses.append(output.loss)
            (output.loss * scale).backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


# The reference --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A training step of one process and its parameters after some optimizer steps, as full tensors.

    Attributes:
        batches: the batch of each replica for each optimizer step.
        norm: the norm of all gradients together.
    """

    name: str
    config: PreTrainedConfig
    batches: list[list[Batch]]
    weights: Weights
    loss: list[Tensor]
    gradients: dict[str, Tensor | None]
    trained: dict[str, Weights] = field(default_factory=dict)
    norm: float = float("nan")


STEPS = {"SGD": 1, "AdamW": 3}


def case(
    name: str,
    config: PreTrainedConfig,
    seed: int,
    replicas: int = 1,
    optimizers: Iterable[str] = (),
    batches: list[list[Batch]] | None = None,
) -> Case:
    """Compute the reference in one process. Several replicas differentiate the mean loss of their batches."""
    steps = max((STEPS[optimizer] for optimizer in optimizers), default=1)
    if batches is None:
        batches = [
            [batch(name, config, seed + 10 * step + replica) for replica in range(replicas)] for step in range(steps)
        ]
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    loss = run_reference_step(model, batches[0])
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]).item()
    made = Case(name, config, batches, weights, loss, full_gradients(model), norm=norm)
    for optimizer in optimizers:
        model = reference_model(name, config, seed)
        stepper = make_optimizer(optimizer, model.parameters())
        for step in range(STEPS[optimizer]):
            stepper.zero_grad()
            run_reference_step(model, batches[step])
            stepper.step()
        made.trained[optimizer] = full_parameters(model)
    return made


def run_reference_step(model: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the loss of each replica's batch; accumulate the gradients of the mean loss in the model."""
    losses = []
    with lifted_casts():
        for given in batches:
            loss = model(**given).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
    return losses


def gather_from_all_ranks(value: Any) -> list[Any]:
    """The values that all ranks of the world pass, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def floats(output: Any) -> dict[str, Tensor]:
    return dict(tensors(output))


def import_deepspeed() -> Any:
    """Import DeepSpeed for the CPU, without compiling its operations, and silence its messages."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


# Language models of each founding architecture -----------------------------------------------------------------------

LM = {variant: zoo.lm_head(variant) for variant in zoo.FOUNDING}


def lm_case(variant: str, seed: int, **options: Any) -> Case:
    return case(zoo.lm_head(variant), config(variant), seed, **options)


def case_on_stages(given: Case, tp: int, pp: int, **options: Any) -> Any:
    return model_on_stages(given.name, given.config, given.weights, tp, pp, **options)


def case_differences(model: Any, given: Case, micro_batch_size: int = 1) -> list[str]:
    """Compare a loss, gradients, and trained parameters with micro-batches of one and two rows."""
    model.set_micro_batch_size(micro_batch_size)
    lines = differences("loss", run_micro_batches(model, given.batches[0][0]), given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients)
    for optimizer, expected in given.trained.items():
        load_weights(model, given.weights)  # into the same model: making one takes longer than training it
        stepper = make_optimizer(optimizer, model.gpu_parameters())
        for step in range(STEPS[optimizer]):
            model.set_micro_batch_size(2 - step % 2)
            stepper.zero_grad()
            run_micro_batches(model, given.batches[step][0])
            stepper.step()
        lines += stage_differences(model, f"{optimizer}:", stage_parameters(model), expected, TOLERANCE)
    return lines


def replica_differences(wrap: Callable[[Any], Any], given: Case, tp: int, pp: int, **options: Any) -> list[str]:
    """Train each replica on its batch, and compare with training on the mean loss of all batches."""
    lines = []
    for optimizer, expected in given.trained.items():
        model = model_on_stages(given.name, given.config, given.weights, tp, pp, **options)
        wrapped = wrap(model)
        stepper = make_optimizer(optimizer, wrapped.parameters())
        for step in range(STEPS[optimizer]):
            model.set_micro_batch_size(1 + step % 2)
            stepper.zero_grad()
            loss = run_micro_batches(wrapped, given.batches[step][model.mesh.dp.rank])
            if step == 0:
                lines += differences("loss", loss, given.loss[model.mesh.dp.rank], TOLERANCE)
                lines += gradient_differences(model, given.gradients)
                norm = model.clip_grad_norm_(1e9)
                lines += differences("norm", norm, torch.tensor(given.norm, dtype=norm.dtype), TOLERANCE)
            stepper.step()
        lines += stage_differences(model, f"{optimizer}:", stage_parameters(model), expected, TOLERANCE)
    return lines


def loop_differences(model: Any, step: Step) -> list[str]:
    """Compare the losses and gradients of micro-batches, or their outputs if there is no loss."""
    if "loss" not in step.outputs:
        with torch.no_grad(), lifted_casts():
            outputs = [dict(tensors(output)) for output in model(**step.batch)]
        own = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        lines = [line for name in own for line in differences(name, own[name], step.outputs[name], TOLERANCE)]
        return lines if own or not model.stage.is_last else ["no outputs"]
    loss = run_micro_batches(model, step.batch)
    lines = [] if (loss - step.value).abs() < 1e-10 else [f"loss: {loss.item()} instead of {step.value.item()}"]
    return lines + gradient_differences(model, step.gradients)
