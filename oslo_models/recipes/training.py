"""Trains a recipe on this rank: loads the model and the rows, trains, saves, and prints how to use the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, set_seed
from transformers.trainer_callback import ProgressCallback
from transformers.utils.logging import disable_progress_bar

from oslo_models.distributed.mesh import start_process_group, world_axis
from oslo_models.distributed.object_exchange import agree, broadcast_object
from oslo_models.integrations.trainer import last_complete_checkpoint
from oslo_models.modeling.quantizing import is_quantized
from oslo_models.recipes.checks import NO_MERGING, reward_functions
from oslo_models.recipes.parsing import Recipe, build
from oslo_models.recipes.progress import TrainingProgress
from oslo_models.recipes.record import text_of, write_record
from oslo_models.recipes.rows import load_rows
from oslo_models.recipes.sizes import Sizes

MERGED = "merged"
"""Folder of the merged model in the output folder."""
PLACING_OPTIONS = ("device_map", "quantization_config", "tp_plan", "distributed_config")
"""Arguments of ``model_init_kwargs`` that place or quantise weights."""


def train(recipe: Recipe, sizes: Sizes, cls: Any) -> None:
    """Train a recipe. A collective of all ranks."""
    start_process_group()
    world = world_axis()
    disable_progress_bar()  # `TrainingProgress` shows the only bar
    build(recipe)
    args, folder = recipe.training, Path(recipe.training.output_dir)
    set_seed(args.seed)
    model = _load_model(recipe, sizes, cls)
    if recipe.parallel.merge_adapter and any(map(is_quantized, model.state_dict().values())):
        raise ValueError(f"merge_adapter=true: {recipe.model.model_name_or_path} {NO_MERGING}")
    trainer = _make_trainer(recipe, model)
    trainer.remove_callback(ProgressCallback)  # `TrainingProgress` replaces it
    tokens = recipe.script.max_length * trainer.get_total_train_batch_size(args) if recipe.task == "pretrain" else None
    trainer.add_callback(TrainingProgress(tokens, folder))
    checkpoint = _checkpoint(args, folder, world)
    if world.rank == 0:
        tokens_over = f"context_parallel_size={sizes.context}, " if sizes.context > 1 else ""
        print(
            f"{cls.__name__}: tensor_parallel_size={sizes.tensor}, pipeline_parallel_size={sizes.pipeline}, "
            f"{tokens_over}replicas={sizes.replicas}, on {'GPUs' if torch.cuda.is_available() else 'the CPU'}; "
            f"{'from the start' if checkpoint is None else f'continues from {checkpoint}'}",
            flush=True,
        )
    with agree(world, f"writing to {folder}"):
        if world.rank == 0:
            write_record(recipe, sizes, folder)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder))
    trainer.save_state()
    if recipe.parallel.merge_adapter:
        _save_merged(trainer, folder / MERGED)
    with agree(world, f"writing to {folder}"):
        if world.rank == 0:
            _write_card(recipe, sizes, trainer, folder)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=getattr(recipe.script, "dataset_name", None))
    if hasattr(trainer, "end"):
        trainer.end()
    if world.rank == 0:
        print("\n".join(commands(recipe, sizes, folder)), flush=True)


def _load_model(recipe: Recipe, sizes: Sizes, cls: Any) -> Any:
    own = recipe.parallel
    parallel = {**sizes.arguments, "micro_batch_size": own.micro_batch_size, "schedule": own.schedule}
    if recipe.task == "pretrain":
        from oslo_models.recipes.pretraining import load_model

        model = load_model(recipe, cls, parallel)
    else:
        from trl import get_quantization_config

        args, model_args = recipe.training, recipe.model
        options = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
        options |= {"revision": model_args.model_revision, **(args.model_init_kwargs or {})}
        args.model_init_kwargs = None  # these options are used here
        if placed := [name for name in PLACING_OPTIONS if options.get(name) is not None]:
            raise ValueError(
                f"model_init_kwargs: {placed[0]}={options[placed[0]]!r} does not work with a sharded model"
            )
        options = {name: value for name, value in options.items() if value is not None}
        if (quantization := get_quantization_config(model_args)) is not None:
            options["quantization_config"] = quantization
        options.pop("trust_remote_code", None)  # the class is this library's
        model = cls.from_pretrained_with_parallel(model_args.model_name_or_path, **parallel, **options)
    return model.fuse() if recipe.parallel.fuse else model


def _make_trainer(recipe: Recipe, model: Any) -> Any:
    if recipe.task == "pretrain":
        from oslo_models.recipes.pretraining import make_trainer

        return make_trainer(recipe, model)
    from accelerate import PartialState
    from trl import get_peft_config

    from oslo_models import integrations

    with PartialState().main_process_first():  # rank 0 fills the cache
        train_rows, eval_rows = load_rows(recipe)
    args, model_args = recipe.training, recipe.model
    processor = AutoProcessor.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code
    )
    options = {"reward_funcs": reward_functions(recipe)} if recipe.task == "grpo" else {}
    return getattr(integrations, f"{recipe.task.upper()}Trainer")(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=processor,
        peft_config=get_peft_config(model_args),
        **options,
    )


def _save_merged(trainer: Any, folder: Path) -> None:
    """Merge the adapter and save the full model with its tokenizer. The adapter cannot be trained any further."""
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained_with_parallel(folder, save_with_merging=True)
    if trainer.args.should_save and trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def _checkpoint(args: Any, folder: Path, world: Any) -> str | None:
    """Return the checkpoint to continue from: the given one, or the last complete one of the output folder."""
    given = args.resume_from_checkpoint
    if given is not None and given.lower() in ("false", "no"):
        return None
    if given is not None and given.lower() not in ("true", "yes"):
        return str(given)
    found: str | None = broadcast_object(world, last_complete_checkpoint(folder) if world.rank == 0 else None)
    if found is None and given is not None:
        raise ValueError(f"resume_from_checkpoint={given}: {folder} has no complete checkpoint; leave the key out")
    return found


def _write_card(recipe: Recipe, sizes: Sizes, trainer: Any, folder: Path) -> None:
    """Write the model card of the trainer, with the recipe and the commands."""
    trainer.create_model_card(model_name=folder.name, **_datasets(recipe))
    card = folder / "README.md"
    shown = "\n".join(commands(recipe, sizes, folder))
    recipe_text = text_of(recipe, sizes)
    with card.open("a", encoding="utf-8") as file:
        file.write(
            f"\n\n## Recipe\n\n`oslo-models {recipe.task}` trained this model with:\n\n```yaml\n{recipe_text}```\n"
        )
        file.write(f"\n## Use\n\n```\n{shown}\n```\n")


def _datasets(recipe: Recipe) -> dict[str, Any]:
    name = getattr(recipe.script, "dataset_name", None)
    return {"dataset_name": name} if name and not Path(name).exists() else {}


def commands(recipe: Recipe, sizes: Sizes, folder: Path) -> list[str]:
    """Return the commands that load the result in plain transformers and serve it."""
    size = f" --tensor-parallel-size {sizes.tensor}" if sizes.tensor > 1 else ""
    if sizes.shares:
        size += f" --tensor-parallel-shares {','.join(map(str, sizes.shares))}"
    if recipe.parallel.merge_adapter:
        folder = folder / MERGED
    code = f"from transformers import AutoModelForCausalLM as A; print(A.from_pretrained({str(folder)!r}))"
    served = str(folder)
    if (folder / "adapter_config.json").is_file():
        served = f"{recipe.model.model_name_or_path} --adapter {folder.name}={folder}"
    return [f'load:  python -c "{code}"', f"serve: oslo-models serve {served}{size}"]
