"""Refuses arguments of TRL's trainers that a parallel model does not support, before training starts."""

from __future__ import annotations

from typing import Any

from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.modeling.base import ParallelModel

_COMPARED = (
    *("max_length", "packing", "padding_free", "loss_type", "beta", "precompute_ref_log_probs", "sync_ref_model"),
    *("num_generations", "steps_per_generation", "num_iterations", "max_completion_length", "temperature"),
)
"""Arguments that determine the number of steps and collectives, and their results. They must be equal on all ranks."""

OF_MODELS = ("nll", "chunked_nll")
"""Values of ``loss_type`` with the loss that a model computes itself."""

OVER_CONTEXT = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers that divide the tokens of each row over the ranks of ``context_parallel_size``."""


def check_trl_arguments(trainer: str, args: Any, model: ParallelModel) -> None:
    """Check the arguments of a TRL trainer. A collective of all ranks.

    Args:
        trainer: the name of the trainer class in TRL.

    Raises:
        ValueError: an argument, or pipeline stages, do not work with the trainer, or an argument differs between ranks;
            on every rank.
    """
    assert model.mesh is not None
    mesh = model.mesh
    with agree(mesh.world, f"checking arguments of {trainer}"):
        loss = getattr(args, "loss_type", "nll")
        if mesh.pp.size > 1 and (trainer != "SFTTrainer" or loss not in OF_MODELS):
            instead = ", or loss_type='nll'" if trainer == "SFTTrainer" else ""
            raise ValueError(
                f"TRL's {trainer} computes its loss{f' {loss!r}' if instead else ''} from the logits itself, and with "
                f"pipeline_parallel_size={mesh.pp.size} only the last stage has them: load the model with "
                f"pipeline_parallel_size=1 and a larger tensor_parallel_size{instead}"
            )
        if mesh.cp.size > 1 and trainer not in OVER_CONTEXT:
            raise ValueError(
                f"TRL's {trainer} was not tested with context_parallel_size={mesh.cp.size}: leave it out, or use "
                "sequence_parallel=True"
            )
        for what, (given, advice) in refused_options(args).items():
            if given:
                raise ValueError(f"{what} of TRL's {trainer} does not work with a sharded model: {advice}")
    require_equal(mesh.world, {name: getattr(args, name, None) for name in _COMPARED}, f"arguments of {trainer}")


def refused_options(args: Any) -> dict[str, tuple[Any, str]]:
    """Return unsupported arguments by name, each with a flag (given or not) and advice for the error message."""

    def given(name: str) -> Any:
        return getattr(args, name, None)

    return {
        "activation_offloading=True": (
            given("activation_offloading"),
            "it finds the tensors to keep by the classes of full layers; use gradient_checkpointing=True",
        ),
        "use_vllm=True": (
            given("use_vllm"),
            "vLLM would get the shards of one rank as weights; leave it out: the sharded model itself generates",
        ),
        "use_transformers_continuous_batching=True with bf16 or fp16": (
            given("use_transformers_continuous_batching") and (given("bf16") or given("fp16")),
            "TRL would round the trained weights to 16 bits; leave it out: the running batch generates without it",
        ),
        "cast_lm_head_to_fp32=True": (
            given("cast_lm_head_to_fp32"),
            "it replaces the forward of the sharded head; leave it out: probabilities are computed in float32",
        ),
    }
