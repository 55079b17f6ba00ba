"""Recipe keys that TRL and transformers do not have, and the dataclasses of each command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TASKS = ("sft", "dpo", "grpo", "pretrain")


@dataclass
class ParallelArguments:
    """Sizes of the parallel model, and the processes to start."""

    tensor_parallel_size: int | None = field(
        default=None,
        metadata={"help": "Ranks over which each layer is sharded. By default as few GPUs as fit, or all processes."},
    )
    pipeline_parallel_size: int = field(default=1, metadata={"help": "Pipeline stages (sft and pretrain only)."})
    tensor_parallel_shares: list[int] | None = field(
        default=None,
        metadata={"help": "Part of each layer on each rank, as a ratio for unequal devices. Equal by default."},
    )
    blocks_per_stage: list[int] | None = field(
        default=None, metadata={"help": "Blocks of each stage (sft and pretrain only). By parameters by default."}
    )
    micro_batch_size: int = field(default=1, metadata={"help": "Rows of a micro-batch of pipeline stages."})
    schedule: str = field(default="1f1b", metadata={"help": "Schedule of pipeline stages: 1f1b or zb-h1."})
    expert_parallel_size: int = field(default=1, metadata={"help": "Groups of ranks that divide the experts."})
    sequence_parallel: bool = field(
        default=False, metadata={"help": "Divide the tokens of hidden states over the ranks of each layer."}
    )
    context_parallel_size: int = field(default=1, metadata={"help": "Ranks that divide the tokens of each row."})
    fuse: bool = field(default=False, metadata={"help": "Replace modules by fused ones where they are faster."})
    merge_adapter: bool = field(
        default=False, metadata={"help": "Also write the model with the merged adapter, to output_dir/merged."}
    )
    devices: int | None = field(
        default=None,
        metadata={"help": "Processes on this machine. By default one per GPU, or the product of the sizes."},
    )
    nnodes: int = field(default=1, metadata={"help": "Machines. Run the same command on each."})
    rdzv_endpoint: str | None = field(
        default=None, metadata={"help": "HOST:PORT of the first machine, where the machines of nnodes meet."}
    )


@dataclass
class PretrainArguments:
    """The model and the data of ``pretrain``."""

    config_name: str | None = field(
        default=None, metadata={"help": "Configuration of a new model: a file, a folder or a name on the hub."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to save with the model. By default the tokenizer of the checkpoint."}
    )
    data: list[str] | None = field(
        default=None, metadata={"help": "Datasets of `oslo-models preprocess`, without .bin and .idx."}
    )
    data_weights: list[float] | None = field(
        default=None, metadata={"help": "Share of each dataset in the blend. By default every sample occurs once."}
    )
    max_length: int = field(default=1024, metadata={"help": "Tokens per sample."})
    validation_share: float = field(
        default=0.0, metadata={"help": "Share of the documents, at the end of each dataset, to evaluate on."}
    )


def dataclasses_of(task: str) -> tuple[Any, ...]:
    """Return the dataclasses with the keys of a command, as in TRL's command of the same name.

    Raises:
        ImportError: TRL or datasets is not installed.
    """
    try:
        from trl import DatasetMixtureConfig, DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig
        from trl.scripts.grpo import GRPOScriptArguments
    except ImportError as error:
        raise ImportError(f'recipes need trl and datasets: pip install "oslo-models[recipes]" ({error})') from error
    from transformers import TrainingArguments

    if task == "pretrain":
        return PretrainArguments, TrainingArguments, ModelConfig, ParallelArguments
    script, training = {
        "sft": (ScriptArguments, SFTConfig),
        "dpo": (ScriptArguments, DPOConfig),
        "grpo": (GRPOScriptArguments, GRPOConfig),
    }[task]
    return script, training, ModelConfig, DatasetMixtureConfig, ParallelArguments
