"""Refuses training arguments that a parallel model does not support, before training starts."""

from __future__ import annotations

import inspect
import re
from typing import Any

from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.modeling.base import ParallelModel

_COMPARED = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "max_grad_norm", "seed", "data_seed", "bf16", "fp16", "optim", "learning_rate"),
    *("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
    *("save_only_model", "load_best_model_at_end", "dataloader_drop_last", "activation_checkpointing"),
)
"""Arguments that determine the number of steps and collectives, and their results. They must be equal on all ranks."""
ELEMENTWISE = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "sgd"),
    *("adagrad", "rmsprop", "ademamix", "lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "paged_adamw_32bit"),
    *("paged_ademamix_32bit", "paged_lion_32bit"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
)
"""Values of ``optim`` that update each element alone, so that a shard gets the updates of one process."""
OF_A_MODEL = ("lomo", "adalomo", "grokadamw")
"""Values of ``optim`` that combine the gradients of all parameters, or update them during the backward pass."""


def check_training_arguments(args: Any, model: ParallelModel) -> None:
    """Check the arguments of a Trainer for a parallel model. A collective of all ranks.

    Raises:
        ValueError: an argument does not work with the model, or differs between ranks; on every rank.
    """
    assert model.mesh is not None
    world = model.mesh.world
    sizes = f"tensor_parallel_size={model.mesh.tp.size} and pipeline_parallel_size={model.mesh.pp.size}"
    if model.mesh.cp.size > 1:
        sizes += f" and context_parallel_size={model.mesh.cp.size}"
    with agree(world, "checking training arguments"):
        for what, (given, advice) in _refused(args, model).items():
            if given:
                raise ValueError(f"{what} does not work with a model of {sizes}: {advice}")
    require_equal(world, {name: getattr(args, name, None) for name in _COMPARED}, "training arguments")


def _refused(args: Any, model: ParallelModel) -> dict[str, tuple[Any, str]]:
    """Return unsupported arguments by name, each with a flag (given or not) and advice for the error message."""
    sharded = "the model is distributed already, so leave it out, or, with both sizes 1, use transformers' Trainer"
    refused = {
        f"fsdp={args.fsdp!r}": (args.fsdp, sharded),
        "deepspeed": (args.deepspeed, sharded),
        "parallelism_config": (args.parallelism_config, sharded),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "only some ranks may run out of memory; set the size"),
        "enable_jit_checkpoint=True": (
            args.enable_jit_checkpoint,
            "ranks would save at different steps; use save_steps",
        ),
        "use_liger_kernel=True": (args.use_liger_kernel, "it replaces sharded modules; call model.fuse()"),
        "train_sampling_strategy='batch_rebalance'": (
            args.train_sampling_strategy == "batch_rebalance",
            "it gives another batch to each rank; use 'random' or 'group_by_length'",
        ),
        "dispatch_batches=True": (
            args.accelerator_config.dispatch_batches,
            "it gives another part of a batch to each rank; leave it out of accelerator_config",
        ),
    }
    mesh, optim = model.mesh, getattr(args.optim, "value", args.optim)
    advice = optimizer_advice(optim, max(mesh.tp.size, mesh.expert_parallel_size), mesh.pp.size)
    refused[f"optim={optim}"] = (advice, advice)
    if not model.is_pipeline_parallelized():
        return refused
    rows, size = args.per_device_train_batch_size, model.micro_batch_size
    logits = "it needs logits, which only the last pipeline stage has; leave it out, or use tensor parallelism alone"
    return refused | {
        f"per_device_train_batch_size={rows}": (
            rows % size,
            f"it has to be a multiple of micro_batch_size={size}; change one of them (model.set_micro_batch_size)",
        ),
        f"label_smoothing_factor={args.label_smoothing_factor}": (args.label_smoothing_factor, logits),
        "torch_compile=True": (args.torch_compile, "the loop over micro-batches is not compiled; leave it out"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "later stages have no token embedding; leave it out"),
        "ddp_find_unused_parameters=True": (args.ddp_find_unused_parameters, "a step is a loop of calls; leave it out"),
    }


def optimizer_advice(optim: str, shards: int, stages: int) -> str:
    """Return why an optimizer of transformers does not train a model of these sizes, and what to use instead.

    Args:
        optim: the value of ``optim``.
        shards: the number of shards of a parameter.
        stages: the number of pipeline stages.

    Returns:
        An empty string if the optimizer makes the updates of one process.
    """
    instead = "use adamw_torch_fused"
    if optim in ELEMENTWISE or shards == stages == 1:
        return ""
    if optim in OF_A_MODEL or optim.endswith("_layerwise"):
        return f"it updates parameters during the backward pass, or by the gradients of the full model; {instead}"
    if shards == 1:
        return ""
    if "8bit" in optim or "4bit" in optim:
        return (
            "it quantises its states in blocks, and the blocks of a shard differ from one process; "
            f"{instead}: its states have the dtype of the weights, two bytes with dtype=bfloat16"
        )
    matrices = "optimizers=(model.matrix_optimizer(...), None)"
    return f"it needs full matrices, and each rank has a shard; {instead}, or {matrices}"


def divides_loss_by_items(cls: type[ParallelModel]) -> bool:
    """Return whether the forward of a class passes its ``**kwargs``, with ``num_items_in_batch``, to its loss function.

    Many transformers models accept ``num_items_in_batch`` without using it. If the source of the forward does not pass
    it on, return ``False``: the loss is then a mean over the batch.
    """
    source = inspect.getsource(inspect.unwrap(cls.forward))
    return re.search(r"self\.loss_function\((?:[^()]|\([^()]*\))*\*\*\w+", source) is not None
