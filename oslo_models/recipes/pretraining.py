"""The model, the data and the trainer of ``oslo-models pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oslo_models.config.sources import auto_config
from oslo_models.data import DatasetBlender, DatasetForCausalLM
from oslo_models.recipes.keys import PretrainArguments
from oslo_models.recipes.parsing import Recipe


def load_samples(recipe: Recipe) -> tuple[Any, Any]:
    """Return the blended samples to train on, and the samples to evaluate on or ``None``.

    Raises:
        ValueError: a dataset or a weight is missing or invalid.
        OSError: there is no such dataset.
    """
    script: PretrainArguments = recipe.script
    names, weights, share = script.data or [], script.data_weights, script.validation_share
    if not names:
        raise ValueError("data: it is missing; give datasets of `oslo-models preprocess`, without .bin and .idx")
    for name in names:
        if missing := [ending for ending in (".bin", ".idx") if not Path(name + ending).is_file()]:
            raise FileNotFoundError(
                f"data={name}: there is no file {name}{missing[0]}; `oslo-models preprocess` writes it"
            )
    if weights is not None and (len(weights) != len(names) or min(weights) < 0 or sum(weights) <= 0):
        raise ValueError(f"data_weights={weights}: give a weight of at least 0 for each of the {len(names)} datasets")
    if not 0 <= share < 1:
        raise ValueError(f"validation_share={share}: give a number from 0 to less than 1")
    evaluates = recipe.training.eval_strategy != "no"
    if evaluates and not share:
        raise ValueError(f"eval_strategy={recipe.training.eval_strategy.value}: add validation_share, such as 0.01")
    seed = recipe.training.data_seed if recipe.training.data_seed is not None else recipe.training.seed

    def samples(kind: str, start: float, end: float) -> Any:
        options = {"split_type": kind, "start_weight": start, "end_weight": end, "seed": seed}
        return [DatasetForCausalLM(name, script.max_length, labels=True, **options) for name in names]

    try:
        train = DatasetBlender(samples("train", 0.0, 1.0 - share), weights)
        return train, DatasetBlender(samples("valid", 1.0 - share, 1.0)) if evaluates else None
    except ValueError as error:
        raise ValueError(f"data={', '.join(names)}: {error}") from error


def load_model(recipe: Recipe, cls: Any, parallel: dict[str, Any]) -> Any:
    """Return the model of a checkpoint, or a new model of a configuration with weights drawn by the seed."""
    script, model, args = recipe.script, recipe.model, recipe.training
    options = dict(parallel)
    options |= {name: value for name in ("dtype", "attn_implementation") if (value := getattr(model, name)) is not None}
    if script.config_name is None:
        return cls.from_pretrained_with_parallel(model.model_name_or_path, revision=model.model_revision, **options)
    if options.get("dtype") == "auto":
        del options["dtype"]  # the configuration states the dtype
    return cls.from_config_with_parallel(auto_config(script.config_name), seed=args.seed, **options)


def make_trainer(recipe: Recipe, model: Any) -> Any:
    """Return the trainer over blended samples."""
    from transformers import AutoTokenizer, default_data_collator

    from oslo_models.integrations import Trainer

    script = recipe.script
    name = script.tokenizer_name or recipe.model.model_name_or_path
    train, evaluated = load_samples(recipe)
    return Trainer(
        model,
        recipe.training,
        data_collator=default_data_collator,
        train_dataset=train,
        eval_dataset=evaluated,
        processing_class=None if name is None else AutoTokenizer.from_pretrained(name),
    )
