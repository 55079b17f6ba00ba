"""What training needs beside the weights to go on as if it had not stopped: optimizer and random states, by rank.

It lies beside the model's checkpoint or by itself, and is put in its place at once like it: see `staging`.
"""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oslo_models.checkpoint.atomic_commit import finish_interrupted_save, replacing
from oslo_models.checkpoint.filenames import MANIFEST, OPTIMIZER, CheckpointError, optimizer_name, with_variant
from oslo_models.checkpoint.manifest import checksum, read_manifest, seal, write_manifest
from oslo_models.checkpoint.serialization import reporting
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.distributed.rng import default_generator

State = Mapping[str, Any]


def save_optimizer(
    directory: str | os.PathLike[str], optimizer: Optimizer, mesh: ParallelMesh, state: State | None = None
) -> None:
    """Write the state of the optimizer and the random states of all ranks. A collective of all ranks.

    Replicas whose state is that of the first one do not write it again.

    Args:
        state: what else is to be given back: numbers, strings, tensors, and lists and dictionaries of them.

    Raises:
        ValueError: ``state`` holds what cannot be read back.
        OSError: the directory cannot be written, or the disk is full.
    """
    target, world = Path(directory), mesh.world
    held = _local(optimizer.state_dict())
    marks = gather_objects(mesh.dp, _fingerprint(held))
    needed = sum(leaf.nbytes for leaf in _leaves(held) if isinstance(leaf, Tensor))
    content: dict[str, Any] = {
        "optimizer": held if marks.index(marks[mesh.dp.rank]) == mesh.dp.rank else None,
        "shared_with": marks.index(marks[mesh.dp.rank]),
        "shapes": _shapes(optimizer),
        "random": _random_states(mesh.device),
        "state": dict(state or {}),
    }
    name = _own_name(mesh, mesh.dp.rank)
    with replacing(target, world, needed, OPTIMIZER) as staging:
        with agree(world, f"writing {name}"), reporting(staging / name, needed, world.rank):
            torch.save(content, staging / name)
            try:
                torch.load(staging / name, weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                names = ", ".join(content["state"])
                raise ValueError(f"the state ({names}) holds what cannot be read back: {error}") from error
            record = seal(staging / name)
        records = dict(gather_objects(world, (name, record)))
        with agree(world, f"writing the manifest of {target}"):
            if world.rank == 0:
                sizes = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
                kind = {"kind": "optimizer", "variant": OPTIMIZER, "optimizer": type(optimizer).__name__}
                manifest = {**kind, **sizes, "model": _mark_of_model(target), "files": records}
                write_manifest(staging / with_variant(MANIFEST, OPTIMIZER), manifest)


def load_optimizer(directory: str | os.PathLike[str], optimizer: Optimizer, mesh: ParallelMesh) -> dict[str, Any]:
    """Bring the optimizer and the random generators of all ranks into their saved states. A collective of all ranks.

    Returns:
        What was given to `save_optimizer` as ``state``.

    Raises:
        FileNotFoundError: there is no optimizer state in the directory.
        ValueError: it is of other sizes, or of another optimizer.
        CheckpointError: a file is damaged, or the model beside it was saved again without it.
    """
    target = Path(directory)
    with agree(mesh.world, f"loading the optimizer of {target}"):
        finish_interrupted_save(target)
        manifest = _read_manifest(target)
        _check(target, manifest, optimizer, mesh)
        content = _read(target, manifest, _own_name(mesh, mesh.dp.rank))
        if content["shapes"] != _shapes(optimizer):
            raise ValueError(
                f"the optimizer state in {target} is of parameters of the shapes {content['shapes']}, and this "
                f"optimizer has {_shapes(optimizer)}: give it the parameters in the same groups and order"
            )
        held = content["optimizer"]
        if held is None:
            held = _read(target, manifest, _own_name(mesh, content["shared_with"]))["optimizer"]
        optimizer.load_state_dict(_divided(held, optimizer))
        _set_random_states(content["random"], mesh.device)
    return dict(content["state"])


# The state of the optimizer -------------------------------------------------------------------------------------------


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for inner in value.items() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _local(value: Any) -> Any:
    """The same state with the local parts of what FSDP divides over the replicas."""
    if isinstance(value, dict):
        return {key: _local(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_local(inner) for inner in value)
    return value.to_local() if isinstance(value, DTensor) else value


def _divided(held: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The inverse of `_local`, for the parameters of the optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {}
    for index, entry in held["state"].items():
        param = params[index] if isinstance(index, int) and index < len(params) else None
        if isinstance(param, DTensor):
            part = param.to_local().shape
            entry = {
                key: DTensor.from_local(
                    value.to(param.device),
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                if isinstance(value, Tensor) and value.dim() and value.shape == part
                else value
                for key, value in entry.items()
            }
        state[index] = entry
    return {**held, "state": state}


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """The shapes of the parameters on this rank, by groups."""
    return [
        [list((param.to_local() if isinstance(param, DTensor) else param).shape) for param in group["params"]]
        for group in optimizer.param_groups
    ]


def _fingerprint(held: Any) -> int:
    """The same for equal states."""
    mark = 0
    for leaf in _leaves(held):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            mark = zlib.crc32(flat.view(torch.uint8).numpy().data, mark) if flat.numel() else mark
        else:
            mark = zlib.crc32(repr(leaf).encode(), mark)
    return mark


# Random states --------------------------------------------------------------------------------------------------------


def _random_states(device: torch.device) -> dict[str, Any]:
    generator, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [generator, torch.tensor(keys, dtype=torch.int64), *rest],
        "torch": torch.get_rng_state(),
        "device": default_generator(device).get_state(),
    }


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    generator, keys, *rest = states["numpy"]
    numpy.random.set_state((generator, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    default_generator(device).set_state(states["device"])


# Files ----------------------------------------------------------------------------------------------------------------


def _own_name(mesh: ParallelMesh, dp_rank: int) -> str:
    return optimizer_name(mesh.tp.rank, mesh.pp.rank, dp_rank)


def _mark_of_model(directory: Path) -> int | None:
    """Tells whether the checkpoint of the model in the directory is still the same."""
    manifest = directory / MANIFEST
    return zlib.crc32(manifest.read_bytes()) if manifest.is_file() else None


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / with_variant(MANIFEST, OPTIMIZER)
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no optimizer state ({path.name}): save_optimizer writes it")
    return read_manifest(path)


def _check(directory: Path, manifest: Mapping[str, Any], optimizer: Optimizer, mesh: ParallelMesh) -> None:
    """Raise unless the state is one for this optimizer on this mesh, and of the model that lies beside it."""
    own = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
    saved = {axis: manifest[axis] for axis in own}
    if saved != own:
        raise ValueError(
            f"the optimizer state in {directory} was saved with tensor_parallel_size={saved['tp']}, "
            f"pipeline_parallel_size={saved['pp']} and {saved['dp']} replicas, and this run has {own['tp']}, "
            f"{own['pp']} and {own['dp']}: optimizer states are not resharded, so go on with the sizes of before, or "
            "load only the model and begin with a new optimizer"
        )
    kind = type(optimizer).__name__
    if manifest["optimizer"] != kind:
        raise ValueError(f"the optimizer state in {directory} is one of {manifest['optimizer']}, not of {kind}")
    if manifest["model"] is not None and manifest["model"] != _mark_of_model(directory):
        raise CheckpointError(
            f"the optimizer state in {directory} was saved with another checkpoint of the model than the one that is "
            "there now; save both in turn, the optimizer last, into a new directory each time"
        )


def _read(directory: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    path, record = directory / name, manifest["files"][name]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: copy it there, or go on from another checkpoint")
    with open(path, "rb") as file:
        size, found = os.fstat(file.fileno()).st_size, checksum(file.fileno())
        if (size, found) != (record["size"], record["crc32"]):
            raise CheckpointError(
                f"{path}: expected {record['size']} bytes with CRC-32 {record['crc32']:08x}, found {size} bytes with "
                f"CRC-32 {found:08x}: the file is damaged or of another save; go on from another checkpoint"
            )
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content
