"""Loads the rows of a recipe: a dataset on the hub, a folder, or a file of JSON lines, Parquet, CSV or text."""

from __future__ import annotations

from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from oslo_models.recipes.parsing import Recipe

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
NEEDED = {"dpo": [{"chosen", "rejected"}], "grpo": [{"prompt"}]}


def load_rows(recipe: Recipe) -> tuple[Any, Any]:
    """Return the rows to train on, and the rows to evaluate on or ``None``.

    Raises:
        ValueError: a dataset cannot be read, or lacks a split or the columns of the task.
        OSError: a file or a dataset on the hub does not exist.
    """
    key, splits = _load(recipe)
    train = _split(splits, key, "dataset_train_split", recipe.script.dataset_train_split)
    _check_columns(recipe, key, train)
    if recipe.training.eval_strategy == "no":
        return train, None
    return train, _split(splits, key, "dataset_test_split", recipe.script.dataset_test_split)


def _load(recipe: Recipe) -> tuple[str, Mapping[str, Any]]:
    """Return the key that names the rows, and the splits."""
    import datasets
    from trl import get_dataset

    script, mixture = recipe.script, recipe.mixture
    if mixture.datasets:
        for number, each in enumerate(mixture.datasets):
            name = f"datasets[{number}]"
            if (kind := _format(each.path)) is not None:
                _check_exists(f"{name}.path", each.path)
                each.path, each.data_files = kind, each.path
            _check_files(f"{name}.data_files", each.data_files)
        key, load = "datasets", lambda: get_dataset(mixture)
    elif script.dataset_name:
        key, name = f"dataset_name={script.dataset_name}", script.dataset_name
        _check_exists("dataset_name", name)
        kind = _format(name)
        options = {"data_files": name} if kind is not None else {"name": script.dataset_config}
        streaming = script.dataset_streaming
        load = lambda: datasets.load_dataset(kind or name, streaming=streaming, **options)  # noqa: E731
    else:
        raise ValueError("dataset_name: it is missing; give a name on the hub, a folder, or a file such as rows.jsonl")
    try:
        return key, load()
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{key}: it cannot be loaded: {reason[:300]}; check the name and the files") from error


def _split(splits: Mapping[str, Any], source: str, key: str, name: str) -> Any:
    if name not in splits:
        raise ValueError(f"{key}={name}: {source} has the splits {', '.join(map(str, splits))}; name one of them")
    return splits[name]


def _check_columns(recipe: Recipe, source: str, rows: Any) -> None:
    """Check that the dataset has the columns of the task. Streamed datasets may not know theirs."""
    columns = set(rows.column_names or ())
    text = getattr(recipe.training, "dataset_text_field", "text")
    needed = NEEDED.get(recipe.task) or [
        {text},
        {"messages"},
        {"conversations"},
        {"prompt", "completion"},
        {"input_ids"},
    ]
    if columns and not any(each <= columns for each in needed):
        wanted = ", or ".join(" and ".join(sorted(each)) for each in needed)
        raise ValueError(f"{source}: it has the columns {', '.join(sorted(columns))}; {recipe.task} needs {wanted}")


def _format(name: str) -> str | None:
    """Return the format of a file by its ending; ``None`` for folders and names on the hub."""
    path = Path(name)
    if path.is_dir():
        return None
    return FORMATS.get(path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix)


def _check_exists(key: str, name: str) -> None:
    if (_format(name) or name.startswith((".", "/", "~"))) and not Path(name).exists():
        raise FileNotFoundError(f"{key}={name}: there is no such file or folder; a path is relative to {Path.cwd()}")


def _check_files(key: str, files: Any) -> None:
    """Check that local files of a dataset exist; the names may be patterns."""
    each = list(files.values()) if isinstance(files, dict) else files if isinstance(files, list) else [files]
    for name in each:
        if isinstance(name, str) and "://" not in name and not glob(name):
            raise FileNotFoundError(f"{key}={name}: there is no such file; a path is relative to {Path.cwd()}")
