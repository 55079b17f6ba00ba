"""Quantises the linear layers of a loaded model with torchao. A shard is a slice of the quantised full weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from oslo_models.checkpoint.quantized import PackedWeight
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree
from oslo_models.distributed.sharded_tensor import Sharding, local_tensor, mark_parameter
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import Layout


def skipped_modules(model: ShardedModel, config: Any) -> list[str]:
    """Return the modules that transformers would not quantise: LM heads, and modules that the user excludes."""
    fp32 = model._keep_in_fp32_modules
    given = getattr(config, "modules_to_not_convert", None) or getattr(config, "llm_int8_skip_modules", None)
    names: list[str] = HfQuantizer.get_modules_to_not_convert(model, given, fp32)
    return names


def quantize_linear_layers(model: ShardedModel, config: Any, skipped: Collection[str]) -> None:
    """Quantise this rank's linear layers in place. This is a collective of all ranks.

    Each rank gathers the full weights one after another, quantises each with torchao and keeps its shard. The scales
    therefore equal single-process scales, and a rank holds at most one full weight at a time.

    Args:
        model: a model with loaded weights.
        config: a ``TorchAoConfig``.
        skipped: names in the full model of modules that are not quantised.

    Raises:
        ValueError: a scale applies to elements on several ranks, and the format cannot be split there.
    """
    mesh: ParallelMesh = model.mesh
    problems = []
    for module, sharding in _layers(model, skipped):
        weight: Any = module.weight
        if sharding.layout.dim is not None and mesh.tp.size > 1:
            mark_parameter(weight, sharding)
            weight = weight.full_tensor()
        shard = _quantized_shard(local_tensor(weight), local_tensor(module.weight), sharding, config.quant_type)
        if shard is None:
            problems.append(str(sharding))
        else:
            module.weight = nn.Parameter(shard, requires_grad=False)
    with agree(mesh.world, "quantising weights"):
        if problems:
            raise ValueError(
                f"{config.quant_type!r} has scales for elements that are on several ranks: {problems[0]} cannot be a "
                "part of the quantised full weight. Use a granularity of rows (PerRow()) or a group size that divides "
                "the shards, leave such layers out (modules_to_not_convert=['.*down_proj', 'lm_head']), or choose "
                "another tensor_parallel_size"
            )


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is a `PackedWeight` or a quantised tensor of torchao."""
    return isinstance(tensor, PackedWeight) or type(tensor).__module__.startswith("torchao.")


def shard_of(full: Tensor, layout: Layout, rank: int, name: str) -> Tensor:
    """Return a copy of this rank's shard of a full tensor, which torchao may have quantised.

    Raises:
        ValueError: the shard's values would differ from the full quantised tensor.
    """
    if not is_quantized(full):
        return full.new_empty(layout.local_shape(rank)) if full.is_meta else layout.shard(full, rank).clone()
    expected = layout.shard(_values(full), rank)
    with suppress(AssertionError, NotImplementedError, RuntimeError, ValueError):  # torchao's errors if unsupported
        part = layout.shard(full, rank).clone()
        if torch.equal(_values(part), expected):
            return part
    raise ValueError(
        f"{name} is quantised ({type(full).__name__}), and has scales for elements that are on several ranks, or "
        "cannot be cut there: quantise with scales of rows or with a group size that divides the shards, leave such "
        "layers out, or choose another number of devices"
    )


def copy_to_device(tensor: Tensor, device: torch.device, copy: bool) -> Tensor:
    """Return ``tensor.to(device, copy=copy)``. Some quantised tensors do not support ``copy``."""
    if is_quantized(tensor):
        return tensor.clone().to(device) if copy else tensor.to(device)
    return tensor.to(device, copy=copy)


def refuse_layers_of_libraries(model: nn.Module) -> None:
    """Raise ``ValueError`` if a library has replaced layers of a full model by its own quantised layers."""
    libraries = ("bitsandbytes", "gptqmodel", "auto_gptq", "awq", "optimum", "compressed_tensors", "hqq", "eetq")
    for name, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library in libraries:
            raise ValueError(
                f"{name} is a layer of {library} ({type(module).__name__}), and its weights are not sharded: "
                "model.dequantize() makes plain weights of them, which torchao's quantize_() can quantise again "
                "before or after sharding; or load the checkpoint with from_pretrained_with_parallel(dequantize=True)"
            )


def check_not_quantized(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise ``ValueError`` if any tensor is a `PackedWeight` or a quantised tensor of torchao.

    Args:
        tensors: tensors of a model, by name.
        what: the end of the message: the unsupported operation and an alternative.
    """
    for name, tensor in tensors.items():
        if is_quantized(tensor):
            raise ValueError(f"{name} is quantised ({type(tensor).__name__}), and {what}")


def _layers(model: ShardedModel, skipped: Collection[str]) -> Iterator[tuple[nn.Linear, Sharding]]:
    """Yield the linear layers to quantise and their weights' sharding, in the same order on all ranks of a stage."""
    full_names = {} if model.stage is None else model.stage.full_names
    for path, module in model.named_modules():
        name = f"{path}.weight"
        full_name = full_names.get(name, name)
        if isinstance(module, nn.Linear) and name in model.layouts and should_convert_module(full_name, skipped):
            yield module, Sharding(full_name, model.layouts[name], model.mesh)


def _quantized_shard(full: Tensor, local: Tensor, sharding: Sharding, config: Any) -> Tensor | None:
    """Return this rank's shard of a quantised weight, or ``None`` if its values would differ from the full weight."""
    quantized, layout, rank = _quantize(full, config), sharding.layout, sharding.mesh.tp.rank
    if layout.dim is None or sharding.mesh.tp.size == 1:
        return quantized
    expected = layout.shard(_values(quantized), rank)
    for attempt in (_cut, _quantize_part):
        try:
            part = attempt(quantized, local, layout, rank, config)
            if part is not None and torch.equal(_values(part), expected):
                return part
        except (AssertionError, NotImplementedError, RuntimeError, ValueError):
            continue  # torchao's classes raise these for unsupported operations
    return None


def _cut(quantized: Any, local: Tensor, layout: Layout, rank: int, config: Any) -> Tensor | None:
    places = list(layout.shard_indices(rank))
    return quantized[places[0][0]].clone() if len(places) == 1 else None


def _quantize_part(quantized: Any, local: Tensor, layout: Layout, rank: int, config: Any) -> Tensor:
    """Quantise the local shard. This suits scales per row, and shards that consist of several ranges."""
    return _quantize(local, config)


def _quantize(weight: Tensor, config: Any) -> Tensor:
    from torchao.quantization import quantize_

    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, config)
    return layer.weight.detach()


def _values(quantized: Any) -> Tensor:
    values: Tensor = quantized.dequantize()
    return values
