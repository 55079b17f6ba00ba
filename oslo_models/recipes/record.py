"""Records the recipe of a run in its output folder, so that another recipe does not continue its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oslo_models.recipes.parsing import Recipe
from oslo_models.recipes.sizes import Sizes

RECORD = "recipe.yaml"
FREE = (
    *(
        "devices",
        "nnodes",
        "rdzv_endpoint",
        "resume_from_checkpoint",
        "report_to",
        "run_name",
        "project",
        "disable_tqdm",
        "merge_adapter",
    ),
    *("logging_steps", "logging_first_step", "log_level", "save_steps", "save_total_limit", "output_dir"),
    *("dataloader_num_workers", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy"),
)
"""Keys that may change when a run continues."""


def record_of(recipe: Recipe, sizes: Sizes) -> dict[str, Any]:
    """Return the given keys and the sizes as plain values."""
    own = {"tensor_parallel_size": sizes.tensor, "replicas": sizes.replicas}
    return {**{key: _plain(value) for key, value in recipe.values.items()}, **own}


def check_record(recipe: Recipe, sizes: Sizes, folder: Path) -> None:
    """Raise ``ValueError`` if the folder has checkpoints of another recipe.

    A recipe with ``resume_from_checkpoint`` is not compared.
    """
    import yaml

    from oslo_models.integrations.trainer import last_complete_checkpoint

    file = folder / RECORD
    if recipe.namespace.resume_from_checkpoint or not file.is_file():
        return
    checkpoint = last_complete_checkpoint(folder)
    if checkpoint is None:
        return
    before, now = yaml.safe_load(file.read_text()) or {}, record_of(recipe, sizes)
    changed = [key for key in {**before, **now} if key not in FREE and before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise ValueError(
            f"output_dir={folder}: {checkpoint} belongs to a recipe with {key}={before.get(key)}, and this one has "
            f"{key}={now.get(key)}; give another output_dir, or resume_from_checkpoint: true to continue, false to "
            "start over"
        )


def write_record(recipe: Recipe, sizes: Sizes, folder: Path) -> None:
    """Write the recipe of a run that begins."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(text_of(recipe, sizes))


def text_of(recipe: Recipe, sizes: Sizes) -> str:
    """Return the recipe as YAML."""
    import yaml

    text: str = yaml.safe_dump(record_of(recipe, sizes), sort_keys=False, allow_unicode=True)
    return text


def _plain(value: Any) -> Any:
    """Return a value that YAML can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    value = getattr(value, "value", value)  # the value of an enumeration member
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
