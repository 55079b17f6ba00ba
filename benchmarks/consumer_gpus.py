"""Print the table of the guide "Fine-tune on two or three consumer GPUs": memory as `estimate` computes it.

``python -m benchmarks.consumer_gpus`` reads no weights and downloads nothing. `tests/benchmarks/test_consumer_table.py`
compares the guide with it.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from oslo_models.planning.job import run_rank
from oslo_models.planning.memory import make_job

MODELS: dict[str, dict[str, Any]] = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Sizes of Qwen2.5 7B, 14B and 32B, and of Llama 3 70B."""
TASKS = {"QLoRA": "qlora", "LoRA": "lora", "full": "full"}
GPUS = (1, 2, 3)
GIB = 1 << 30


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a model of the table."""
    sizes = MODELS[model]
    common = {**sizes, "max_position_embeddings": 8192, "tie_word_embeddings": False}
    if model == "70B":
        return LlamaConfig(vocab_size=128256, num_key_value_heads=8, **common)
    return Qwen2Config(vocab_size=152064, num_key_value_heads=4 if model == "7B" else 8, **common)


def cell(model: str, task: str, gpus: int) -> str:
    """Return the memory of rank 0 in GiB. It has the largest part of each layer where parts differ."""
    options: dict[str, Any] = {"tensor_parallel_size": gpus, "length": 1024, "dtype": "bfloat16"}
    job = make_job(config_of(model), task=TASKS[task], **options, gradient_checkpointing=True)
    return f"{run_rank(job, 0, 0).total / GIB:.1f}"


def main() -> None:
    """Print all rows."""
    for model in MODELS:
        for task in TASKS:
            print(f"| {model} | {task} | {' | '.join(cell(model, task, gpus) for gpus in GPUS)} |", flush=True)


if __name__ == "__main__":
    main()
