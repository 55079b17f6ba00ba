"""Finds the files that make up a checkpoint. Reads manifests and indexes, never weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oslo_models.checkpoint.manifest import read_manifest
from oslo_models.checkpoint.names import MANIFEST, MERGED, CheckpointError, index_name, split_position, with_variant
from oslo_models.checkpoint.staging import finish_interrupted_save


@dataclass(frozen=True)
class Found:
    """A checkpoint.

    Attributes:
        weights: its weights files, by name.
        grid: the names of split files by ``(tp_rank, pp_rank)``; empty for a merged checkpoint.
        manifest: the content of its manifest, if it has one.
    """

    where: Path
    weights: dict[str, Path]
    grid: dict[tuple[int, int], str] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    @property
    def split(self) -> tuple[int, int] | None:
        """``(tp, pp)`` of split files."""
        return (max(t for t, _ in self.grid) + 1, max(p for _, p in self.grid) + 1) if self.grid else None


def find(source: Sequence[Path], variant: str | None) -> Found:
    """Find the checkpoint in a directory, or among the files named.

    Raises:
        FileNotFoundError: there is no checkpoint, or files of it are missing.
        CheckpointError: manifest or index are damaged, or do not fit to the files.
    """
    directory = source[0] if len(source) == 1 and source[0].is_dir() else None
    if directory:
        finish_interrupted_save(directory)
        source = [path for path in directory.iterdir() if path.is_file()]
    missing = [str(path) for path in source if not path.is_file()]
    if missing or not source:
        raise FileNotFoundError(f"there is no checkpoint: {', '.join(missing) or directory} is missing or empty")
    paths = {path.name: path for path in source}
    where = directory or source[0].parent
    if with_variant(MANIFEST, variant) in paths:
        return _by_manifest(where, paths, read_manifest(paths[with_variant(MANIFEST, variant)]))
    grid = _grid(where, paths) if variant is None else {}
    names = list(grid.values()) or _merged(paths, variant)
    if not names and directory is None:
        names = [name for name in paths if name.endswith((".safetensors", ".bin"))]
    if not names:
        merged = ", ".join(with_variant(name, variant) for name in MERGED)
        raise FileNotFoundError(
            f"{where} holds no weights: looked for split files (pytorch_model_tp=0_pp=0.bin ...), {merged} and their "
            f"indexes, found {', '.join(sorted(paths)[:10])}"
        )
    return Found(where, {name: paths[name] for name in names}, grid)


def mismatch(path: Path, expected: str, actual: str) -> CheckpointError:
    """The error for a file that is not what the manifest says."""
    return CheckpointError(
        f"{path}: expected {expected}, found {actual}, according to {MANIFEST}. The file is damaged or of another "
        f"checkpoint: copy or save it again. If the change was meant, remove {MANIFEST}, which switches this check off"
    )


def _by_manifest(where: Path, paths: Mapping[str, Path], manifest: dict[str, Any]) -> Found:
    records = {name: record for name, record in manifest["files"].items() if not name.endswith(".json")}
    grid = {position: name for name in records if (position := split_position(name))}
    for name, record in records.items():
        if name not in paths:
            raise mismatch(where / name, f"a file of {record['size']} bytes", "none")
        if paths[name].stat().st_size != record["size"]:
            raise mismatch(paths[name], f"{record['size']} bytes", f"{paths[name].stat().st_size}")
    for name in paths if grid else ():
        if split_position(name) and name not in records:
            raise mismatch(paths[name], "no such file", "one of another checkpoint")
    return Found(where, {name: paths[name] for name in records}, grid, manifest)


def _grid(where: Path, paths: Mapping[str, Path]) -> dict[tuple[int, int], str]:
    grid: dict[tuple[int, int], str] = {}
    for name in sorted(paths, key=lambda name: ("_tp=" in name, name.endswith(".safetensors"))):  # the last one wins
        position = split_position(name)
        if position:
            grid[position] = name
    tp, pp = (max((position[axis] for position in grid), default=-1) + 1 for axis in (0, 1))
    missing = [f"tp={t} pp={p}" for t in range(tp) for p in range(pp) if (t, p) not in grid]
    if missing:
        raise FileNotFoundError(
            f"the split files in {where} are of a {tp} x {pp} grid (tp x pp), in which {', '.join(missing)} are "
            "missing; copy them there, or remove the split files if others are meant"
        )
    return dict(sorted(grid.items()))


def _merged(paths: Mapping[str, Path], variant: str | None) -> list[str]:
    for name in MERGED:
        if with_variant(name, variant) in paths:
            return [with_variant(name, variant)]
        index = paths.get(index_name(name, variant))
        if index is None:
            continue
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: expected an index with a weight_map, but {error!r}; copy it again"
            ) from error
        missing = [name for name in names if name not in paths]
        if missing:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}; copy them there")
        return names
    return []
