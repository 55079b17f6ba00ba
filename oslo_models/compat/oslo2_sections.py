"""The sections of OSLO 2's configuration beside ``model_parallelism``: activation checkpointing and kernel fusion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from oslo_models.config.arguments import Arguments
from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.mesh import Axis
from oslo_models.modeling.internals import ParallelModelInternals
from oslo_models.modeling.training import enable_checkpointing
from oslo_models.sharding.layout import even_ranges

PARALLELISM, CHECKPOINTING, FUSION = "model_parallelism", "activation_checkpointing", "kernel_fusion"
_KEYS = {
    CHECKPOINTING: ("enable", "partitioned_checkpointing", "contiguous_checkpointing", "cpu_checkpointing"),
    FUSION: ("enable", "memory_efficient_fusion", "custom_cuda_kernels"),
}
_KERNELS = ("FusedNoRepeatNGram", "FusedRMSNorm")


def read_sections(config: Mapping[str, Any] | str | Path) -> dict[str, Mapping[str, Any]]:
    """Return the sections of a configuration, or of the JSON file at a path, by name. Leave out disabled sections.

    Raises:
        ValueError: a section or a key of one is unknown, or a value has the wrong type.
        OSError: the file cannot be read.
    """
    given = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else config
    if not isinstance(given, Mapping) or not all(isinstance(section, Mapping) for section in given.values()):
        raise ValueError(f'config must be like {{"{PARALLELISM}": {{"tensor_parallel_size": 2}}}}, got {config!r}')
    if unknown := sorted(given.keys() - {PARALLELISM, *_KEYS}):
        raise ValueError(f"config has unknown keys {unknown}; it may have {[PARALLELISM, *_KEYS]}")
    for name, keys in _KEYS.items():
        section = given.get(name, {})
        if unknown := sorted(section.keys() - set(keys)):
            raise ValueError(
                f"config has unknown keys {[f'{name}.{key}' for key in unknown]}; {name} may have {[*keys]}"
            )
        for key in section.keys() - {"custom_cuda_kernels"}:
            if not isinstance(section[key], bool):
                raise ValueError(f"{name}.{key} must be true or false, got {section[key]!r}")
    kernels = given.get(FUSION, {}).get("custom_cuda_kernels") or []
    if not isinstance(kernels, list) or set(kernels) - set(_KERNELS):
        raise ValueError(f"{FUSION}.custom_cuda_kernels must be a list of {[*_KERNELS]}, got {kernels!r}")
    return {name: section for name, section in given.items() if name == PARALLELISM or section.get("enable", True)}


def check_sections(
    sections: Mapping[str, Mapping[str, Any]], model: ParallelModelInternals, arguments: Arguments
) -> None:
    """Raise ``ValueError`` if a section cannot be applied to this model with these arguments."""
    options = sections.get(CHECKPOINTING)
    if options is not None:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"{CHECKPOINTING}: {type(model).__name__} does not support it")
        partitioned = options.get("partitioned_checkpointing", False)
        if partitioned and arguments.tensor_parallel_size == 1:
            raise ValueError("partitioned_checkpointing needs a tensor_parallel_size of at least 2")
        if partitioned and arguments.sequence_parallel:
            raise ValueError(
                "partitioned_checkpointing cannot be used together with sequence_parallel, with which each rank keeps "
                "its tokens of the block inputs already: leave it out"
            )
        if options.get("contiguous_checkpointing", False) and not partitioned:
            raise ValueError("contiguous_checkpointing needs partitioned_checkpointing")
    if FUSION in sections and (option := arguments.token_division) is not None:
        raise ValueError(f"{FUSION} does not support {option}: leave one of them out")
    kernels = sections.get(FUSION, {}).get("custom_cuda_kernels") or []
    if "FusedRMSNorm" in kernels and not any("RMSNorm" in name or "T5LayerNorm" in name for name in _layers(model)):
        raise ValueError(f"custom_cuda_kernels has 'FusedRMSNorm', but a {type(model).__name__} has no RMS norm")


def _layers(model: ParallelModelInternals) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def apply_sections(sections: Mapping[str, Mapping[str, Any]], model: ParallelModelInternals) -> None:
    """Apply the sections to this rank's part of a model."""
    if (options := sections.get(CHECKPOINTING)) is not None:
        offloads = options.get("cpu_checkpointing", False)
        enable_checkpointing(model, offload=offloads and model.device.type != "cpu")
        if options.get("partitioned_checkpointing", False):
            partitioned = _PartitionedCheckpoint(model.mesh.tp, offloads)
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partitioned)
        model.train()
    if (options := sections.get(FUSION)) is not None:
        model.fuse()
        if "FusedNoRepeatNGram" in (options.get("custom_cuda_kernels") or []):
            model._fuses_ngrams_by_default = True


class _PartitionedCheckpoint:
    """Partitioned activation checkpointing: each tensor-parallel rank keeps a shard of the input of a block.

    The hidden states are equal on all ranks. An all-gather restores them for the backward pass.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section
    6.1 (partitioned activation checkpointing).

    Args:
        tp: the axis of the ranks.
        on_cpu: keep the parts in host memory.
    """

    def __init__(self, tp: Axis, on_cpu: bool = False) -> None:
        self._tp, self._on_cpu = tp, on_cpu

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        entering = args[0].data_ptr() if args and isinstance(args[0], Tensor) else None

        def pack(tensor: Tensor) -> Any:
            if tensor.data_ptr() != entering or tensor.shape != args[0].shape:
                return tensor
            return self._keep(tensor)

        with saved_tensors_hooks(pack, self._gather):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _keep(self, tensor: Tensor) -> Any:
        sizes = [stop - start for start, stop in even_ranges(tensor.numel(), self._tp.size)]
        own = tensor.detach().flatten().split(sizes)[self._tp.rank].clone()
        return own.cpu() if self._on_cpu else own, tensor.shape, tensor.device, sizes

    def _gather(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, shape, device, sizes = kept
        with torch.no_grad():
            return all_gather(self._tp, own.to(device), 0, sizes).view(shape)
