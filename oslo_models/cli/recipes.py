"""``oslo-models sft``, ``dpo``, ``grpo`` and ``pretrain``: their help, and the run of a recipe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

# torch takes seconds to import: the command line asks this file for its texts only.

SUMMARIES = {
    "sft": "fine-tune on texts, chats or prompts with completions",
    "dpo": "fine-tune on pairs of preferred and rejected answers",
    "grpo": "fine-tune with rewards of generated answers",
    "pretrain": "train on datasets of `oslo-models preprocess`",
}
_OWN = """\
Further keys:
  tensor_parallel_size    ranks over which each layer is sharded (default: as few GPUs as fit; on CPUs, all processes)
  tensor_parallel_shares  part of each layer on each rank, such as [2, 1, 1] for unequal devices (default: equal)
  expert_parallel_size    groups of ranks that divide the experts (default: 1)
  pipeline_parallel_size  stages, with micro_batch_size rows at a time (sft and pretrain only, default: 1)
  schedule                schedule of the stages: 1f1b or zb-h1 (default: 1f1b)
  fuse                    replace modules by fused ones where they are faster
  devices                 processes on this machine (default: one per GPU)
  nnodes, rdzv_endpoint   machines, and HOST:PORT of the first one; run the same command on each

Inside torchrun, Ray Train and srun of SLURM, or where RANK and WORLD_SIZE are set, the command joins the processes that
run."""
DESCRIPTIONS = {
    task: f"""\
Train a recipe over several devices. A recipe has the keys of `trl {task} --config`; every key is a flag too. The same
command after an interruption continues from the last checkpoint.

{_OWN}
With use_peft, merge_adapter also writes the model with the merged adapter, to output_dir/merged.
Needs: pip install "oslo-models[recipes]"

examples:
  oslo-models {task} recipe.yaml
  oslo-models {task} recipe.yaml --tensor_parallel_size 2 --learning_rate 1e-5
  oslo-models {task} --model_name_or_path gpt2 --dataset_name rows.jsonl --output_dir out"""
    for task in ("sft", "dpo", "grpo")
}
DESCRIPTIONS["pretrain"] = f"""\
Train a checkpoint, or a new model of a configuration, on datasets of `oslo-models preprocess`. A recipe has the keys of
transformers' TrainingArguments; every key is a flag too. The same command after an interruption continues from the last
checkpoint.

The model and the data:
  model_name_or_path      the checkpoint, or
  config_name             the configuration of a new model; tokenizer_name is saved with it
  data, data_weights      names of datasets without .bin and .idx, and the share of each
  max_length              tokens per sample (default: 1024)
  validation_share        share of the documents to evaluate on (default: 0)

{_OWN}
Needs: pip install "oslo-models[recipes]"

examples:
  oslo-models pretrain recipe.yaml
  oslo-models pretrain --config_name config.json --data data/wiki --output_dir out --max_steps 1000"""


def run(args: argparse.Namespace) -> int:
    """Run a recipe.

    Returns:
        0; 1 if a rank failed; 128 and the number of the signal if one ended the run.

    Raises:
        ValueError: the recipe has a mistake.
        OSError: a file is missing.
        ImportError: a package is missing.
    """
    from oslo_models.recipes.launching import Interrupted, RanksFailed
    from oslo_models.recipes.run import run as run_recipe

    try:
        run_recipe(args.command, args.rest)
    except RanksFailed as error:
        print(f"oslo-models {args.command}: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        _say(f"oslo-models {args.command}: {error}; the same command continues from the last checkpoint")
        return 128 + error.signal
    return 0


def _say(text: Any) -> None:
    print(text, file=sys.stderr)
