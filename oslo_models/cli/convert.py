"""Converts checkpoints between merged and split files of any sizes, without allocating a model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models import registry
from oslo_models.checkpoint import CheckpointReader, current_files, current_folder, save_checkpoint
from oslo_models.config.arguments import Arguments
from oslo_models.config.sources import auto_config
from oslo_models.distributed.mesh import ParallelMesh, start_process_group, world_axis
from oslo_models.distributed.object_exchange import agree
from oslo_models.modeling.saved_tensors import as_saved
from oslo_models.modeling.weight_mapping import open_with_mapping
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.starting import import_path, launch_command


def convert(
    directory: Path,
    output: Path,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    merging: bool = False,
    safe_serialization: bool | None = None,
    tensor_parallel_shares: Sequence[int] | None = None,
    blocks_per_stage: Sequence[int] | None = None,
) -> None:
    """Convert a checkpoint, merged or split at any sizes, to other sizes. A collective of all ranks.

    Values and dtypes are preserved bit for bit. Each rank has its part of the model in memory, or when merging one
    full tensor at a time.

    Args:
        directory: the checkpoint to read.
        output: the directory to write.
        tensor_parallel_size, pipeline_parallel_size: of the new checkpoint, as in the constructors, like
            ``tensor_parallel_shares`` and ``blocks_per_stage``.
        merging: write files that transformers loads (with both sizes 1) instead of one file per rank.
        safe_serialization: as in ``save_pretrained_with_parallel``.

    Raises:
        ValueError: the architecture is not supported, or the sizes do not fit it.
        OSError: ``directory`` cannot be read, or ``output`` not written.
    """
    start_process_group()
    with agree(world_axis(), f"reading {directory}"):
        config = auto_config(current_folder(directory, "config.json"))
        cls: Any = registry.find((config.architectures or ["(no architecture in config.json)"])[0])
        sizes = Arguments(
            tensor_parallel_size,
            pipeline_parallel_size,
            tensor_parallel_shares=tensor_parallel_shares,
            blocks_per_stage=blocks_per_stage,
        )
        sizes.check({})
        sizes.check_config(cls, config)
    mesh = ParallelMesh(tensor_parallel_size, pipeline_parallel_size, tensor_parallel_shares=tensor_parallel_shares)
    source = open_with_mapping(cls, config, mesh, directory, blocks_per_stage=blocks_per_stage)
    with source as (mapping, reader):
        tied = dict(mapping.model.all_tied_weights_keys)
        with agree(mesh.world, f"reading {directory}"):
            slices = mapping.slices(reader)
            for name, source in tied.items():  # .bin files hold tied weights under both names
                if name in slices and source in slices and _are_equal(reader, slices[name].name, slices[source].name):
                    del slices[name]
            full_names = {local: mapping.names.get(local, local) for local in slices}
            tensors: Mapping[str, Tensor] = _LazyStateDict({full_names[local]: part for local, part in slices.items()})
            if not merging:
                tensors = dict(tensors.items())
        layouts = {name: mapping.layouts.get(name, Layout(tuple(tensors[name].shape))) for name in tensors}
        if merging:
            tensors, layouts, tied = as_saved(mapping.model, tensors, layouts, tied)
        save_checkpoint(
            output,
            tensors,
            layouts,
            mesh,
            merging=merging,
            tied=tied,
            files=lambda staging: _copy_configs(directory, staging),
            metadata={"model_type": config.model_type, "architectures": [cls.__name__]},
            safe_serialization=safe_serialization,
        )


def launch(
    directory: Path,
    output: Path,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    safe: bool | None,
    **unequal: Sequence[int] | None,
) -> None:
    """Run `convert` in as many processes on this machine as the sizes require.

    Args:
        unequal: ``tensor_parallel_shares`` and ``blocks_per_stage``.

    Raises:
        RuntimeError: the processes failed; the message is their stderr.
    """
    ranks = tensor_parallel_size * pipeline_parallel_size
    if ranks == 1:
        convert(directory, output, safe_serialization=safe)
        return
    sizes = [
        str(tensor_parallel_size),
        str(pipeline_parallel_size),
        json.dumps({**unequal, "safe_serialization": safe}),
    ]
    done = subprocess.run(
        launch_command(ranks, __name__, str(directory), str(output), *sizes),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def _are_equal(reader: CheckpointReader, one: str, other: str) -> bool:
    """Return whether two tensors of a checkpoint are equal. Compares a few rows at a time."""
    shape = reader.tensors[one].shape
    if shape != reader.tensors[other].shape:
        return False
    chunks = Layout.sharded(shape, 0, (EvenSplit(shape[0]),), min(shape[0], 64))
    return all(
        torch.equal(reader.read(one, chunks, chunk), reader.read(other, chunks, chunk))
        for chunk in range(len(chunks.ranges))
    )


class _LazyStateDict(Mapping[str, Tensor]):
    """State dict that reads a tensor from the checkpoint on each access. Keeps no tensors in memory."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self._slices = slices

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._slices[name][...]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def _copy_configs(directory: Path, staging: Path) -> None:
    for name, path in current_files(directory).items():
        if name.endswith(".json") and not name.endswith(".index.json") and not name.startswith("oslo_manifest"):
            shutil.copyfile(path, staging / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    source, target, tp, pp, options = sys.argv[1:]
    convert(Path(source), Path(target), int(tp), int(pp), **json.loads(options))
