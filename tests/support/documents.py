"""Runs the code blocks of OSLO's documents, with the files and data that these expect."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import DistributedSampler

from support import pipelines, zoo
from support.pipelines import Weights, stage_differences, stage_parameters
from support.reference import TOLERANCE, full_gradients, full_parameters, reference_model

ADAPTED = {
    "from oslo import": "from oslo_models import",
    "from parallelformers import": "from oslo_models import",
    "import oslo\n": "import oslo_models as oslo\n",
    # data: the working directory holds "gpt2", a tiny model with a byte tokenizer, and all saved files
    '"/path/to/': '"path/to/',
    "dataset: Dataset = ...": "dataset: Dataset = given",
    "ds_config: dict = ...": "ds_config: dict = given",
    "num_workers=4": "num_workers=0",  # otherwise each of eight ranks on two cores would start four processes
    "from datasets import load_dataset\n": "",
    'load_dataset("squad").data["train"]["context"]': "given",
    "EleutherAI/gpt-neo-2.7B": "gpt2",
    "max_length=15,": "max_length=30,",  # tokens are bytes
    # device
    "from torch.cuda import current_device\n": "",
    "device_ids=[current_device()]": "device_ids=None",
    "output_device=current_device()": "output_device=None",
    ".cuda()": "",
    '.to("cuda")': '.to("cpu")',
    "torch.cuda.amp.GradScaler()": 'torch.amp.GradScaler("cpu")',
    "torch.cuda.amp.autocast()": 'torch.autocast("cpu", dtype=torch.bfloat16)',
}

Sample = dict[str, Tensor]
BATCH_SIZE = 16
TEXTS = [f"{'many ' * (number % 5)}words, number {number * 37 % 101}" for number in range(64)]
TOKENIZER = hf.ByT5Tokenizer(extra_ids=0)
SHAPES = {"n_positions": 96, "vocab_size": len(TOKENIZER)}


def run_block(*blocks: str, **namespace: Any) -> dict[str, Any]:
    """Run blocks of a document one after another; returns their variables."""
    for block in blocks:
        for printed, adapted in ADAPTED.items():
            block = block.replace(printed, adapted)
        exec(compile(block, "<document>", "exec"), namespace)
    return namespace


def tiny_gpt2(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """Make the "gpt2" of the documents in the working directory."""
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2", **SHAPES), seed, dtype)
    model.save_pretrained("gpt2")
    TOKENIZER.save_pretrained("gpt2")
    return model


def without_stages(block: str) -> str:
    """The code block without pipeline parallelism."""
    assert "pipeline_parallel_size=2" in block
    return block.replace("pipeline_parallel_size=2", "pipeline_parallel_size=1")


def samples() -> list[Sample]:
    """A dataset of padded texts; the number of labels that count differs between rows."""
    tokens = TOKENIZER(TEXTS, return_tensors="pt", padding="max_length", max_length=24, truncation=True)
    labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)
    fields = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask, "labels": labels}
    return [{name: value[row] for name, value in fields.items()} for row in range(len(TEXTS))]


def steps_of(replicas: int) -> list[list[Sample]]:
    """Return the batch of each replica for each step, distributed by a `DistributedSampler`."""
    dataset, steps = samples(), []
    dealt = [list(DistributedSampler(dataset, num_replicas=replicas, rank=rank)) for rank in range(replicas)]
    for start in range(0, len(dealt[0]), BATCH_SIZE):
        rows = [[dataset[row] for row in indices[start : start + BATCH_SIZE]] for indices in dealt]
        steps.append([{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in rows])
    return steps


def reference_training(
    model: Any, optimizer: torch.optim.Optimizer, replicas: int
) -> tuple[list[Tensor], Weights, Weights]:
    """Run the loop in one process; return losses and gradients of the last step, and the final parameters."""
    for batches in steps_of(replicas):
        optimizer.zero_grad()
        losses = pipelines.run_reference_step(model, batches)
        optimizer.step()
    gradients = {name: grad for name, grad in full_gradients(model).items() if grad is not None}
    return losses, gradients, full_parameters(model)


def weight_differences(model: Any, weights: Weights, tolerance: float = TOLERANCE) -> list[str]:
    return stage_differences(model, "", stage_parameters(model), weights, tolerance)


def needs_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip('needs DeepSpeed: pip install "oslo-models[deepspeed]"')
