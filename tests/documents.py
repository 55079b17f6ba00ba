"""What the tests that run the documents of OSLO share: how a printed block is run, and what lies around it."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
import zoo
from reference import whole

ADAPTED = {
    "from oslo import": "from oslo_models import",
    "from parallelformers import": "from oslo_models import",
    "import oslo\n": "import oslo_models as oslo\n",
    # data: below the working directory lie "gpt2", a tiny model with a tokenizer of bytes, and all that is saved
    '"/path/to/': '"path/to/',
    "dataset: Dataset = ...": "dataset: Dataset = given",
    "ds_config: dict = ...": "ds_config: dict = given",
    "num_workers=4": "num_workers=0",  # processes that each of eight ranks on two cores would start
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

TEXTS = [f"{'many ' * (number % 5)}words, number {number * 37 % 101}" for number in range(64)]
TOKENIZER = hf.ByT5Tokenizer(extra_ids=0)
SHAPES = {"n_positions": 96, "vocab_size": len(TOKENIZER)}


def paste(*blocks: str, **namespace: Any) -> dict[str, Any]:
    """Run blocks of a document one after another; returns their variables."""
    for block in blocks:
        for printed, adapted in ADAPTED.items():
            block = block.replace(printed, adapted)
        exec(compile(block, "<document>", "exec"), namespace)
    return namespace


def tiny_gpt2(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """Make the "gpt2" of the documents in the working directory."""
    model = whole("GPT2LMHeadModel", zoo.config("gpt2", **SHAPES), seed, dtype)
    model.save_pretrained("gpt2")
    TOKENIZER.save_pretrained("gpt2")
    return model
