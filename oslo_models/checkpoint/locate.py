"""Finds the files of a checkpoint by manifest, index or file names. Never reads weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from oslo_models.checkpoint.filenames import MANIFEST, MERGED, CheckpointError, index_name, split_position, with_variant
from oslo_models.checkpoint.journal import current_files
from oslo_models.checkpoint.manifest import read_manifest
from oslo_models.checkpoint.reader import CheckpointReader
from oslo_models.checkpoint.weights_file import WeightsFile

Grid = dict[tuple[int, int], str]
"""Names of split files by ``(rank, pp_rank)``, with ``rank = replica * tp_size + tp_rank``."""


def open_files(directory: Path, variant: str | None) -> CheckpointReader:
    """Find and open the files of the checkpoint in a directory, without reading their tensor names.

    Raises:
        FileNotFoundError: there is no checkpoint, or files are missing.
        CheckpointError: manifest or index are damaged or do not match the files.
    """
    paths = current_files(directory)
    manifest = None
    if with_variant(MANIFEST, variant) in paths:
        manifest = read_manifest(paths[with_variant(MANIFEST, variant)])
        names = _names_in_manifest(directory, paths, manifest["files"])
        grid = _grid(names)
    else:
        grid = {} if variant else _complete_grid(directory, paths)
        names = list(grid.values()) or _merged_names(paths, variant)
    if not names:
        merged = ", ".join(with_variant(name, variant) for name in MERGED)
        raise FileNotFoundError(
            f"{directory} holds no weights: looked for split files (pytorch_model_tp=0_pp=0.bin ...), {merged} and "
            f"their indexes, found {', '.join(sorted(paths)[:10]) or 'nothing'}"
        )
    return CheckpointReader(directory, {name: WeightsFile(paths[name]) for name in names}, grid, manifest)


def manifest_mismatch(path: Path | str, expected: str, actual: str) -> CheckpointError:
    """Return the error for a file that differs from its record in the manifest."""
    return CheckpointError(
        f"{path}: expected {expected}, found {actual}, according to {MANIFEST}. The file is damaged or of another "
        f"checkpoint: copy or save it again. If the change was meant, remove {MANIFEST}, which switches this check off"
    )


def _names_in_manifest(directory: Path, paths: Mapping[str, Path], records: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights files in a manifest. All must exist, and no other split files."""
    names = [name for name in records if not name.endswith(".json")]
    for name in names:
        size = records[name]["size"]
        if name not in paths:
            raise manifest_mismatch(directory / name, f"a file of {size} bytes", "none")
        if paths[name].stat().st_size != size:
            raise manifest_mismatch(paths[name], f"{size} bytes", f"{paths[name].stat().st_size}")
    for name in paths if _grid(names) else ():
        if split_position(name) and name not in names:
            raise manifest_mismatch(paths[name], "no such file", "one of another checkpoint")
    return names


def _grid(names: Iterable[str]) -> Grid:
    """Return the split files by rank. For one rank, names with ``=`` and then safetensors take precedence."""
    ordered = sorted(names, key=lambda name: ("_tp=" in name, name.endswith(".safetensors")))
    found = {position: name for name in ordered if (position := split_position(name))}  # the last one takes precedence
    tp = 1 + max((tp_rank for tp_rank, _, _ in found), default=0)
    grid = {(replica * tp + tp_rank, pp_rank): name for (tp_rank, pp_rank, replica), name in found.items()}
    return dict(sorted(grid.items()))


def _complete_grid(directory: Path, names: Iterable[str]) -> Grid:
    """Return the split files by rank. Raise ``FileNotFoundError`` if some are missing."""
    grid = _grid(names)
    if of_replicas := [name for name in grid.values() if (split_position(name) or (0,))[-1]]:
        raise FileNotFoundError(
            f"{directory} holds experts over replicas ({of_replicas[0]}), and {MANIFEST}, which describes them, is "
            "missing: copy it there, or save the model again where it can be loaded"
        )
    tp, pp = (max((position[axis] for position in grid), default=-1) + 1 for axis in (0, 1))
    absent = (f"tp={t} pp={p}" for t in range(tp) for p in range(pp) if (t, p) not in grid)
    missing = list(islice(absent, 10))  # a name may have any number
    if missing:
        raise FileNotFoundError(
            f"the split files in {directory} are of a {tp} x {pp} grid (tp x pp), in which {', '.join(missing)} are "
            "missing; copy them there, or remove the split files to load others"
        )
    return grid


def _merged_names(paths: Mapping[str, Path], variant: str | None) -> list[str]:
    """Return the names of merged weights files by transformers' order of precedence; empty if there are none."""
    for name in MERGED:
        if with_variant(name, variant) in paths:
            return [with_variant(name, variant)]
        index = paths.get(index_name(name, variant))
        if index is None:
            continue
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{index}: expected an index with a weight_map, but {error!r}; copy it again"
            ) from error
        missing = [name for name in names if name not in paths]
        if missing:
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            some = f"{', '.join(missing[:10]):.1000}{more}"
            raise FileNotFoundError(f"{index} names files that are missing: {some}; copy them there")
        return names
    return []
