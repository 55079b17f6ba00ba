"""Saves and loads the training state besides the weights: optimizer and random number generators of each rank.

The files are in the directory of the model's checkpoint or in a separate directory. They are replaced atomically too.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oslo_models.checkpoint.atomic_commit import replace_atomically
from oslo_models.checkpoint.checksum import file_checksum, tensor_checksum
from oslo_models.checkpoint.filenames import MANIFEST, OPTIMIZER, CheckpointError, optimizer_name, with_variant
from oslo_models.checkpoint.journal import current_files
from oslo_models.checkpoint.manifest import read_manifest, sync_and_record, write_manifest
from oslo_models.checkpoint.serialization import explain_write_errors
from oslo_models.distributed.callers import is_over_context
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.distributed.rng import default_generator

State = Mapping[str, Any]


def save_optimizer(
    directory: str | os.PathLike[str], optimizer: Optimizer, mesh: ParallelMesh, state: State | None = None
) -> None:
    """Save the optimizer and the random number generators of all ranks. A collective of all ranks.

    Data-parallel replicas with equal optimizer states write the state once. Ranks that divide the tokens of a sequence
    have the same states, and the first of them writes, unless they have different experts or FSDP2 shards over them.

    Args:
        directory: the target directory. It may be the directory of the model's checkpoint.
        optimizer: the optimizer of this rank's parameters.
        mesh: the mesh of all ranks.
        state: further state to save: numbers, strings, tensors, and lists and dictionaries of these.

    Raises:
        ValueError: ``state`` has objects of other types, which could not be loaded.
        OSError: the directory cannot be written or the disk is full.
    """
    target, world, kind = Path(directory), mesh.world, _kind(optimizer)
    optimizer = _local_optimizer(optimizer)
    local_state = _to_local(optimizer.state_dict())
    axis, numbers = _sharing_ranks(optimizer, mesh)
    checksums = gather_objects(axis, _state_checksum(local_state))
    first_equal = checksums.index(checksums[axis.rank])
    nbytes = sum(leaf.nbytes for leaf in _leaves(local_state) if isinstance(leaf, Tensor))
    content: dict[str, Any] = {
        "optimizer": local_state if first_equal == axis.rank else None,
        "shared_with": numbers[first_equal],
        "shapes": _shapes(optimizer),
        "random": _random_states(mesh.device),
        "state": dict(state or {}),
    }
    name, context = _file_name(mesh, numbers[axis.rank]), _context_size(optimizer, mesh)
    with replace_atomically(target, world, nbytes, OPTIMIZER) as staging:
        record = None
        with agree(world, f"writing {name}"), explain_write_errors(staging / name, nbytes, world.rank):
            if mesh.cp.rank == 0 or context > 1:
                torch.save(content, staging / name)
                try:
                    torch.load(staging / name, weights_only=True, mmap=True)
                except pickle.UnpicklingError as error:
                    names = ", ".join(content["state"])
                    raise ValueError(f"the state ({names}) holds values that cannot be read back: {error}") from error
                record = sync_and_record(staging / name)
        records = {each: found for each, found in gather_objects(world, (name, record)) if found is not None}
        with agree(world, f"writing the manifest of {target}"):
            if world.rank == 0:
                sizes: dict[str, Any] = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
                sizes["ep"] = mesh.expert_parallel_size
                if context > 1:
                    sizes["cp"] = context
                if mesh.tp.shares:
                    sizes["tp_shares"] = mesh.tp.shares
                what = {"kind": "optimizer", "variant": OPTIMIZER, "optimizer": kind}
                manifest = {**what, **sizes, "model": _model_checksum(target), "files": records}
                write_manifest(staging / with_variant(MANIFEST, OPTIMIZER), manifest)


def load_optimizer(directory: str | os.PathLike[str], optimizer: Optimizer, mesh: ParallelMesh) -> dict[str, Any]:
    """Restore the optimizer and the random number generators of all ranks. A collective of all ranks.

    Args:
        directory: the directory passed to `save_optimizer`.
        optimizer: an optimizer of the same parameters, in the same groups and order.
        mesh: a mesh of the same sizes.

    Returns:
        The ``state`` passed to `save_optimizer`.

    Raises:
        FileNotFoundError: the directory has no optimizer state.
        ValueError: the state was saved with other parallel sizes, another optimizer class or other parameter shapes.
        CheckpointError: a file is damaged, or the model in the directory was saved again without its optimizer.
    """
    target = Path(directory)
    with agree(mesh.world, f"loading the optimizer of {target}"):
        manifest = _read_manifest(target)
        _check_compatible(target, manifest, optimizer, mesh)
        axis, numbers = _sharing_ranks(optimizer, mesh)
        content = _read(target, manifest, _file_name(mesh, numbers[axis.rank]))
        given, optimizer = optimizer, _local_optimizer(optimizer)
        if content["shapes"] != _shapes(optimizer):
            raise ValueError(
                f"the optimizer state in {target} is of parameters of the shapes {content['shapes']}, and this "
                f"optimizer has {_shapes(optimizer)}: give it the parameters in the same groups and order"
            )
        local_state = content["optimizer"]
        if local_state is None:
            local_state = _read(target, manifest, _file_name(mesh, content["shared_with"]))["optimizer"]
        optimizer.load_state_dict(_to_dtensors(local_state, optimizer))
        for group, local in zip(given.param_groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in local.items() if key != "params"})
        _set_random_states(content["random"], mesh.device)
    return dict(content["state"])


# The state of the optimizer -------------------------------------------------------------------------------------------


def _zero_redundancy(optimizer: Optimizer) -> Any:
    """Return a ``ZeroRedundancyOptimizer`` itself, ``None`` for other classes. Avoids the slow import of its module."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None


def _local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer to save: the local optimizer inside a ``ZeroRedundancyOptimizer``, else the argument.

    Raises:
        ValueError: a ``ZeroRedundancyOptimizer`` has not assigned parameters to ranks yet.
    """
    zero = _zero_redundancy(optimizer)
    if zero is None:
        return optimizer
    if not hasattr(zero, "optim"):
        raise ValueError(
            "with overlap_with_ddp=True, a ZeroRedundancyOptimizer assigns parameters to ranks once DDP has rebuilt "
            "its buckets: save or load its state after that, or leave overlap_with_ddp out"
        )
    local: Optimizer = zero.optim
    return local


def _kind(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer, as recorded in the manifest."""
    name = type(optimizer).__name__
    return name if _zero_redundancy(optimizer) is None else f"{name} of {type(_local_optimizer(optimizer)).__name__}"


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all leaves of nested lists, tuples and dictionaries, including dictionary keys."""
    if isinstance(value, (dict, list, tuple)):
        for inner in value.items() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _to_local(value: Any) -> Any:
    """Replace tensors that FSDP shards over the replicas by their local shards."""
    if isinstance(value, dict):
        return {key: _to_local(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_local(inner) for inner in value)
    return value.to_local() if isinstance(value, DTensor) else value


def _to_dtensors(local_state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Invert `_to_local`: tensors of parameters that FSDP shards become `DTensor`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {}
    for index, entry in local_state["state"].items():
        param = params[index] if isinstance(index, int) and index < len(params) else None
        if isinstance(param, DTensor):
            local_shape = param.to_local().shape
            entry = {
                key: DTensor.from_local(
                    value.to(param.device),
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                if isinstance(value, Tensor) and value.dim() and value.shape == local_shape
                else value
                for key, value in entry.items()
            }
        state[index] = entry
    return {**local_state, "state": state}


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """Return the local shapes of the parameters, by group."""
    return [
        [list((param.to_local() if isinstance(param, DTensor) else param).shape) for param in group["params"]]
        for group in optimizer.param_groups
    ]


def _state_checksum(state: Any) -> int:
    """Return a checksum of all tensors and values of a state."""
    checksum = 0
    for leaf in _leaves(state):
        is_tensor = isinstance(leaf, Tensor)
        checksum = tensor_checksum(leaf, checksum) if is_tensor else zlib.crc32(repr(leaf).encode(), checksum)
    return checksum


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


def _is_over_context(optimizer: Optimizer, mesh: ParallelMesh) -> bool:
    """Return whether FSDP2 shards optimizer states over the ranks that divide tokens."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    ranks = (param.device_mesh.mesh for param in params if isinstance(param, DTensor))
    return mesh.cp.size > 1 and any(is_over_context(each, "the parameters", mesh) for each in ranks)


def _context_size(optimizer: Optimizer, mesh: ParallelMesh) -> int:
    """Return the number of ranks that divide tokens, if their states differ, and one otherwise."""
    return mesh.cp.size if mesh.has_experts_over_replicas or _is_over_context(optimizer, mesh) else 1


def _sharing_ranks(optimizer: Optimizer, mesh: ParallelMesh) -> tuple[Axis, list[int]]:
    """Return the ranks that may have equal states, and the number of each one's file."""
    if _is_over_context(optimizer, mesh):
        return Axis.alone("optimizer"), [mesh.copy_rank]
    if (context := _context_size(optimizer, mesh)) == 1:
        return mesh.dp, list(range(mesh.dp.size))
    axis = mesh.expert_replicas
    return axis, [rank // mesh.tp.size % (mesh.dp.size * context) for rank in axis.ranks]


def _file_name(mesh: ParallelMesh, number: int) -> str:
    return optimizer_name(mesh.tp.rank, mesh.pp.rank, number)


def _model_checksum(directory: Path) -> int | None:
    """Return a checksum of the manifest of the model's checkpoint in the directory; ``None`` without one."""
    manifest = current_files(directory).get(MANIFEST)
    return None if manifest is None else zlib.crc32(manifest.read_bytes())


def _read_manifest(directory: Path) -> dict[str, Any]:
    name = with_variant(MANIFEST, OPTIMIZER)
    path = current_files(directory).get(name)
    if path is None:
        raise FileNotFoundError(f"{directory} holds no optimizer state ({name}): save_optimizer writes it")
    return read_manifest(path)


def _check_compatible(directory: Path, manifest: Mapping[str, Any], optimizer: Optimizer, mesh: ParallelMesh) -> None:
    """Raise an error unless the saved state fits this optimizer class, these parallel sizes and the model beside it."""
    own = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
    saved = {axis: manifest[axis] for axis in own}
    experts = manifest.get("ep", mesh.expert_parallel_size)  # older versions did not record it
    if experts != mesh.expert_parallel_size:
        raise ValueError(
            f"the optimizer state in {directory} was saved with expert_parallel_size={experts}, and this run has "
            f"{mesh.expert_parallel_size}: optimizer states are not resharded, so keep the earlier size, or load only "
            "the model and start with a new optimizer"
        )
    context, own_context = manifest.get("cp", 1), _context_size(optimizer, mesh)
    if context != own_context and mesh.has_experts_over_replicas:
        raise ValueError(
            f"the optimizer state in {directory} is of experts over {context} ranks that divide tokens, and this run "
            f"has context_parallel_size={mesh.cp.size} and expert_parallel_size={mesh.expert_parallel_size}: "
            "optimizer states are not resharded, so keep the earlier sizes, or load only the model and start with a "
            "new optimizer"
        )
    if saved != own:
        raise ValueError(
            f"the optimizer state in {directory} was saved with tensor_parallel_size={saved['tp']}, "
            f"pipeline_parallel_size={saved['pp']} and {saved['dp']} replicas, and this run has {own['tp']}, "
            f"{own['pp']} and {own['dp']}: optimizer states are not resharded, so keep the earlier sizes, or load only "
            "the model and start with a new optimizer"
        )
    if context != own_context:
        raise ValueError(
            f"the optimizer state in {directory} was sharded by FSDP2 over {context} ranks that divide tokens, and "
            f"this one over {own_context}: optimizer states are not resharded, so call fully_shard with the earlier "
            "mesh, or load only the model and start with a new optimizer"
        )
    shares = tuple(manifest.get("tp_shares", ()))
    if shares != mesh.tp.shares:
        raise ValueError(
            f"the optimizer state in {directory} was saved with tensor_parallel_shares={_shown(shares)}, and this run "
            f"has {_shown(mesh.tp.shares)}: optimizer states are not resharded, so keep the earlier shares, or load "
            "only the model and start with a new optimizer"
        )
    kind = _kind(optimizer)
    if manifest["optimizer"] != kind:
        raise ValueError(f"the optimizer state in {directory} is one of {manifest['optimizer']}, not of {kind}")
    if manifest["model"] is not None and manifest["model"] != _model_checksum(directory):
        raise CheckpointError(
            f"the optimizer state in {directory} belongs to another checkpoint of the model; save the model, then the "
            "optimizer, into a new directory each time"
        )


def _shown(shares: tuple[int, ...]) -> list[int] | None:
    return list(shares) or None


def _read(directory: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Load one file. Raise ``CheckpointError`` if it is missing or differs from its record in the manifest."""
    path, record = current_files(directory).get(name), manifest["files"].get(name)
    if path is None or record is None:
        raise CheckpointError(f"{directory / name} is missing: copy it there, or resume from another checkpoint")
    with open(path, "rb") as file:
        size, crc32 = os.fstat(file.fileno()).st_size, file_checksum(file.fileno())
        if (size, crc32) != (record["size"], record["crc32"]):
            raise CheckpointError(
                f"{path}: expected {record['size']} bytes with CRC-32 {record['crc32']:08x}, found {size} bytes with "
                f"CRC-32 {crc32:08x}: the file is damaged or belongs to another save; resume from another checkpoint"
            )
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content
