"""Checks a recipe before any process starts. An error names the key, its value and the remedy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from oslo_models import registry
from oslo_models.recipes.parsing import Recipe
from oslo_models.recipes.sizes import Sizes
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B, SCHEDULES, ZERO_BUBBLE

POSITIVE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "lora_r"),
    *("max_length", "max_prompt_length", "max_completion_length", "num_generations", "micro_batch_size"),
)
NOT_NEGATIVE = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "lora_dropout", "num_train_epochs")
NO_MERGING = (
    "has quantised weights, and a merged weight would be rounded again; leave merge_adapter out, and merge the saved "
    "adapter into the model that was quantised"
)
PACKAGES = {"use_peft": "peft", "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}


def check_values(recipe: Recipe) -> None:
    """Check the numbers and options in the namespace of a recipe.

    Raises:
        ValueError: a value is out of range, or does not work with parallel models.
        ImportError: a package is missing.
    """
    keys = vars(recipe.namespace)
    for name in POSITIVE:
        if isinstance(value := keys.get(name), (int, float)) and value < 1:
            raise ValueError(f"{name}={value}: give an integer of at least 1")
    for name in NOT_NEGATIVE:
        if isinstance(value := keys.get(name), (int, float)) and value < 0:
            raise ValueError(f"{name}={value}: give a number of at least 0")
    for name in ("use_peft", "load_in_4bit", "load_in_8bit", "merge_adapter"):
        if keys[name] and recipe.task == "pretrain":
            raise ValueError(f"{name}=true: pretrain trains all weights; leave it out, or use oslo-models sft")
    for name in ("load_in_4bit", "load_in_8bit"):
        if keys[name] and not keys["use_peft"]:
            raise ValueError(f"{name}=true: quantised weights are frozen; add use_peft: true to train an adapter")
    if keys["merge_adapter"]:
        if not keys["use_peft"]:
            raise ValueError("merge_adapter=true: there is no adapter; add use_peft: true, or leave it out")
        for name in ("load_in_4bit", "load_in_8bit"):
            if keys[name]:
                raise ValueError(f"merge_adapter=true: {name}=true {NO_MERGING}")
    if keys["sequence_parallel"]:
        _check_divided_tokens("sequence_parallel=true", keys)
    if (size := keys["context_parallel_size"]) > 1:
        _check_divided_tokens(f"context_parallel_size={size}", keys)
    for name, package in PACKAGES.items():
        if keys[name] and importlib.util.find_spec(package) is None:
            raise ImportError(f"{name}=true: it needs {package}; run pip install {package}")
    if keys["fuse"] and (keys["load_in_4bit"] or keys["load_in_8bit"]):
        raise ValueError("fuse=true: quantised weights cannot be fused; leave fuse out")
    _check_stages(recipe.task, keys)
    if keys["nnodes"] > 1 and not keys["rdzv_endpoint"] and "RANK" not in os.environ:
        raise ValueError(f"nnodes={keys['nnodes']}: the machines need a place to meet; add rdzv_endpoint: HOST:PORT")
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if keys.get(name):
            raise ValueError(f"{name}={keys[name]!r}: the model is sharded by tensor_parallel_size; leave {name} out")
    if keys["use_cpu"] and gpu_count():
        raise ValueError("use_cpu=true: this machine has GPUs; start the command with CUDA_VISIBLE_DEVICES= (empty)")
    _check_output(recipe)


def _check_stages(task: str, keys: dict[str, Any]) -> None:
    stages, rows, size = (
        keys[name] for name in ("pipeline_parallel_size", "per_device_train_batch_size", "micro_batch_size")
    )
    if task in ("dpo", "grpo") and stages > 1:
        raise ValueError(
            f"pipeline_parallel_size={stages}: TRL computes the loss of {task} from the logits, which only the last "
            "stage has; use tensor_parallel_size instead"
        )
    if stages > 1 and rows % size:
        raise ValueError(
            f"micro_batch_size={size}: it does not divide per_device_train_batch_size={rows}; change one of them"
        )
    if (schedule := keys["schedule"]) not in SCHEDULES:
        raise ValueError(f"schedule={schedule}: give one of {', '.join(SCHEDULES)}")
    if schedule != ONE_F_ONE_B and stages == 1:
        raise ValueError(f"schedule={schedule}: it is for pipeline stages; add pipeline_parallel_size, or leave it out")
    if schedule == ZERO_BUBBLE and keys["gradient_checkpointing"]:
        raise ValueError(f"schedule={schedule}: it does not work with gradient_checkpointing; leave one of them out")


def _check_divided_tokens(option: str, keys: dict[str, Any]) -> None:
    """Refuse keys that do not work with divided tokens. `sizes.check_sizes` checks the model."""
    for name in ("fuse", "load_in_4bit", "load_in_8bit"):
        if keys[name]:
            raise ValueError(f"{option}: it does not work with {name}=true; leave one of them out")
    if (schedule := keys["schedule"]) != ONE_F_ONE_B:
        raise ValueError(f"{option}: it does not work with schedule={schedule}; leave one of them out")


def check_training(recipe: Recipe) -> None:
    """Check training arguments: options that do not work with sharded models, and trackers.

    Raises:
        ValueError: an option is refused, or a tracker is unknown or not installed.
    """
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    if recipe.task != "pretrain":
        from oslo_models.integrations.trl.refusals import refused_options

        for what, (given, advice) in refused_options(recipe.training).items():
            if given:
                raise ValueError(f"{what}: it does not work with a sharded model: {advice}")
    for tracker in recipe.training.report_to:
        if tracker not in INTEGRATION_TO_CALLBACK:
            hint = registry.did_you_mean(tracker, INTEGRATION_TO_CALLBACK)
            raise ValueError(f"report_to={tracker}: transformers has no such tracker{hint}")
        if tracker not in get_available_reporting_integrations():
            raise ValueError(f"report_to={tracker}: it is not installed; run pip install {tracker}")


_LIBRARIES = {
    "torchao": re.compile(r"^adamw_torch_[48]bit$"),
    "bitsandbytes": re.compile(r"bnb|^adamw_8bit$|^(paged_)?(adamw|lion|ademamix)_(8bit|32bit)$|^ademamix"),
}
"""Libraries of optimizers, with transformers' names of these optimizers."""


def check_optimizer(recipe: Recipe, sizes: Sizes) -> None:
    """Check that the optimizer makes the updates of one process at these sizes, and that its library is there.

    Raises:
        ValueError: its updates would differ.
        ImportError: its library is missing.
    """
    from oslo_models.integrations.training_arguments import optimizer_advice

    optim = recipe.training.optim
    shards = max(sizes.tensor, recipe.parallel.expert_parallel_size)
    if advice := optimizer_advice(optim.value, shards, sizes.pipeline):
        given = f"tensor_parallel_size={sizes.tensor}, pipeline_parallel_size={sizes.pipeline}"
        raise ValueError(f"optim={optim.value}: it does not work with {given}: {advice}")
    package = next((package for package, names in _LIBRARIES.items() if names.search(optim.value)), None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ImportError(f"optim={optim.value}: it needs {package}; run pip install {package}")


def model_class(recipe: Recipe) -> tuple[Any, Any]:
    """Return the class of this library and the configuration of the recipe's model.

    Raises:
        ValueError: no model is named, or its architecture is not supported.
        OSError: the model does not exist.
    """
    from oslo_models.config.sources import auto_config

    keys = vars(recipe.namespace)
    key = "config_name" if keys.get("config_name") else "model_name_or_path"
    name = keys[key]
    if not name:
        more = ", or config_name for a new model" if recipe.task == "pretrain" else ""
        raise ValueError(f"model_name_or_path: it is missing; give a folder or a name on the hub{more}")
    if key == "config_name" and keys["model_name_or_path"]:
        raise ValueError(f"config_name={name}: model_name_or_path={keys['model_name_or_path']} has one; leave one out")
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        raise FileNotFoundError(f"{key}={name}: there is no such folder; a path is relative to {Path.cwd()}")
    options = {} if key == "config_name" else {"revision": keys["model_revision"]}
    try:
        config = auto_config(name, trust_remote_code=keys.get("trust_remote_code", False), **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{key}={name}: its configuration cannot be read: {reason[:300]}") from error
    names = config.architectures or [_causal_class(config)]
    try:
        return registry.find(names[0]), config
    except AttributeError as error:
        raise ValueError(f"{key}={name}: {error}") from error


def reward_functions(recipe: Recipe) -> list[Any]:
    """Return the reward functions and models of a recipe of ``grpo``, found as TRL finds them.

    Raises:
        ValueError: a reward is unknown, or none is given.
    """
    from trl import rewards

    names = recipe.namespace.reward_funcs or []
    if recipe.namespace.reward_model_name_or_path:
        names = [*names, recipe.namespace.reward_model_name_or_path]
    if not names:
        raise ValueError("reward_funcs: it is missing; give names of TRL's rewards, or import paths such as my.reward")
    known = {
        "accuracy_reward": rewards.accuracy_reward,
        "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
        "think_format_reward": rewards.think_format_reward,
        "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(
            max_completion_len=1280, soft_punish_cache=256
        ),
    }
    model = recipe.namespace.reward_model_name_or_path
    found = [model] if model else []  # first, as in TRL
    return found + [known[name] if name in known else _imported(name, known) for name in names if name != model]


def _imported(name: str, known: dict[str, Any]) -> Any:
    """Import a reward function from the working directory or an installed package."""
    module, _, function = name.rpartition(".")
    hint = registry.did_you_mean(name, known)
    if not module:
        raise ValueError(f"reward_funcs={name}: TRL has no such reward{hint}; it has {', '.join(known)}")
    path = Path(*module.split(".")).with_suffix(".py")
    try:
        if path.is_file():
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        return getattr(loaded, function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward_funcs={name}: it cannot be imported: {error}") from error


def _check_output(recipe: Recipe) -> None:
    folder = Path(recipe.namespace.output_dir or "trainer_output").expanduser()
    parents = [each for each in (folder, *folder.parents) if each.exists()]
    if not parents[0].is_dir():
        raise ValueError(f"output_dir={folder}: {parents[0]} is a file; give a folder")
    if not os.access(parents[0], os.W_OK):
        raise ValueError(f"output_dir={folder}: {parents[0]} cannot be written to; give another folder")


def _causal_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, f"{config.model_type} for text")


def gpu_count() -> int:
    """Return the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
