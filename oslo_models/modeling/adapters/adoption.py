"""Converts the adapters that ``peft`` added to a parallel model to parallel adapters, in place.

Optimizers may already hold an adapter's parameters, so the parameter objects stay: values are copied into them, and
their modules change to parallel classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners import ia3, lora
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from oslo_models.distributed.callers import object_under_construction
from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.linear import (
    ColumnParallelLinear,
    GroupRowParallelLinear,
    InnerRowParallelLinear,
    KeyValueParallelLinear,
    KeyValueRowLinear,
    RowParallelLinear,
    SharesOutput,
)
from oslo_models.layers.replicated_grads import sum_replicated
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.modeling.adapters.experts import ParallelParamWrapper, parameter_layout
from oslo_models.modeling.adapters.initial_values import draw, use_type_of_adapters
from oslo_models.modeling.adapters.layers import (
    FeatureParallelLoraEmbedding,
    InnerLoraLinear,
    LatentLoraLinear,
    ParallelDoraEmbedding,
    ParallelDoraLinear,
    ParallelLoraLinear,
    ReplicatedDropout,
    ReplicatedLoraLinear,
    ShardedDropout,
    SharingIA3Linear,
    VocabParallelLoraEmbedding,
)
from oslo_models.modeling.adapters.layouts import (
    adapter_layouts,
    shards_outputs,
    takes_full_tensors,
    weight_layout,
)
from oslo_models.modeling.adapters.peft_model import become_sharded
from oslo_models.modeling.adapters.state import register_state_hooks
from oslo_models.modeling.adapters.support import check_config, check_layer
from oslo_models.pipeline.placeholders import Placeholder, Receiver
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import Layout


def adopt(model: Any, names: Sequence[str], rng_state: Tensor | None) -> None:
    """Make the adapters ``names`` parallel. This is a collective of all ranks.

    Args:
        model: a parallel model after ``peft`` has wrapped its layers.
        rng_state: the default generator's state before ``peft`` drew the initial values. The values are drawn again,
            equal to the full model's. If ``None``, the values are kept.

    Raises:
        ValueError: an adapter is not supported, or its values differ between ranks. Raised on every rank.
    """
    mesh = model.mesh
    require_equal(mesh.world, {"names": sorted(model.peft_config)}, "adapters")
    _restore_placeholders(model)
    tuners = dict(wrapped_layers(model))
    with agree(mesh.world, f"adding the adapters {names}"):
        for name in names:
            check_config(name, model.peft_config[name])
        for path, tuner in tuners.items():
            check_layer(path, tuner, names)
        _refuse_copies(model)
    for name in names:
        if rng_state is not None:
            for tuner in tuners.values():
                use_type_of_adapters(tuner)
            draw(model, name, tuners, rng_state)
        stream = ShardedRngStream(mesh.tp, mesh.device)
        for tuner in tuners.values():
            if isinstance(tuner, lora.LoraLayer) and name in tuner.r:
                _adopt_lora(tuner, name, stream)
                if rng_state is not None and name in tuner.lora_magnitude_vector:
                    _compute_magnitudes(tuner, name)
            elif isinstance(tuner, ia3.IA3Layer) and name in tuner.ia3_l:
                _adopt_ia3(tuner, name)
        if rng_state is None:
            _check_replicated(model, name, tuners)
    _name_parameters(model)
    if mesh.world.threads is not None:
        return  # a single model represents all threads and gathers their states
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            register_state_hooks(module)  # type: ignore[arg-type]
    model._mark_parameters()
    if (peft_model := object_under_construction("PeftModel")) is not None:
        become_sharded(peft_model)


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that ``peft`` has wrapped, with their paths, in model order."""
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield path, module


def _restore_placeholders(model: nn.Module) -> None:
    """Unwrap placeholders. The stage with the actual layer holds its adapter."""
    for module in list(model.modules()):
        for leaf, child in module.named_children():
            inner = unwrapped(child)
            if inner is not child and isinstance(inner, Placeholder):
                setattr(module, leaf, inner)


def _refuse_copies(model: nn.Module) -> None:
    """Raise ``ValueError`` if an adapter wraps the copy of an embedding, which receives hidden states on a stage."""
    for path, module in model.named_modules():
        inner = unwrapped(module)
        if inner is not module and isinstance(inner, Receiver):
            raise ValueError(
                f"adapters of {path} do not work on pipeline stages with mtp_heads=True, since the last stage has a "
                "copy of it: leave it out of target_modules and modules_to_save, or use pipeline_parallel_size=1"
            )


def unwrapped(module: Any) -> Any:
    """Return a module without its ``peft`` wrappers."""
    inner: Any = module
    while isinstance(inner, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        wrapper: Any = inner
        inner = wrapper.base_layer if isinstance(inner, BaseTunerLayer) else wrapper.original_module
    return inner


# LoRA -----------------------------------------------------------------------------------------------------------------


def _adopt_lora(tuner: Any, name: str, stream: ShardedRngStream) -> None:
    """Make a LoRA adapter parallel if its layer is sharded."""
    base = tuner.get_base_layer()
    if isinstance(tuner, ParamWrapper):
        if parameter_layout(tuner) is not None:
            tuner.__class__ = ParallelParamWrapper
        return
    if isinstance(base, SharesOutput) and not isinstance(base, InnerRowParallelLinear):
        tuner.__class__ = LatentLoraLinear
    if takes_full_tensors(base):
        tuner.__class__ = ReplicatedLoraLinear
        _adopt_dropout(tuner.lora_dropout[name], True, base.stream, stream)
    if weight_layout(base) is None:
        return
    outputs = shards_outputs(base)
    if isinstance(tuner, lora.Embedding):
        tuner.__class__ = FeatureParallelLoraEmbedding if outputs else VocabParallelLoraEmbedding
    else:
        tuner.__class__ = InnerLoraLinear if isinstance(base, InnerRowParallelLinear) else ParallelLoraLinear
        _adopt_dropout(tuner.lora_dropout[name], outputs, base.stream, stream)
        _adopt_linear(tuner, name, outputs)
    if name in tuner.lora_magnitude_vector:
        _adopt_dora(tuner, name)


def _adopt_linear(tuner: Any, name: str, outputs: bool) -> None:
    base = tuner.get_base_layer()
    layer: Any = (tuner.lora_B if outputs else tuner.lora_A)[name]
    prefix = f"lora_{'B' if outputs else 'A'}.{name}."
    own = adapter_layouts(tuner)
    layer.layouts = {leaf: own.get(prefix + leaf) for leaf, _ in layer.named_parameters()}
    layer.tp, layer.stream = base.tp, base.stream
    if not outputs:
        overlapping = KeyValueRowLinear if isinstance(base, KeyValueRowLinear) else GroupRowParallelLinear
        layer.__class__ = overlapping if layer.layouts["weight"].overlaps else RowParallelLinear
    elif isinstance(base, VocabParallelHead) and name not in tuner.lora_magnitude_vector:
        layer.__class__ = VocabParallelHead
    else:
        layer.__class__ = KeyValueParallelLinear if layer.layouts["weight"].overlaps else ColumnParallelLinear


def _adopt_dropout(dropout: Any, outputs: bool, models: ShardedRngStream | None, own: ShardedRngStream) -> None:
    """Make an adapter's input dropout draw from the right random stream.

    Args:
        models: the stream of the model's dropouts, or ``None``: without dropout, the model enters no sharded region.
        own: the stream of the adapters, for models without dropout.
    """
    if not isinstance(dropout, nn.Dropout):
        return
    if not outputs:
        dropout.__class__, dropout.stream = ShardedDropout, models or own  # type: ignore[assignment]
    elif models is not None:
        dropout.__class__, dropout.stream = ReplicatedDropout, models  # type: ignore[assignment]


def _adopt_dora(tuner: Any, name: str) -> None:
    base, dora = tuner.get_base_layer(), tuner.lora_magnitude_vector[name]
    dora.__class__ = ParallelDoraEmbedding if isinstance(tuner, lora.Embedding) else ParallelDoraLinear
    dora.tp, dora.layout = base.tp, adapter_layouts(tuner).get(f"lora_magnitude_vector.{name}.weight")


@torch.no_grad()
def _compute_magnitudes(tuner: Any, name: str) -> None:
    """Recompute DoRA's initial magnitudes after A and B were redrawn. For sharded inputs, this is a collective."""
    dora: Any = tuner.lora_magnitude_vector[name]
    magnitude = dora.weight
    if magnitude.is_meta:
        return
    if isinstance(tuner, lora.Embedding):
        factors = {"lora_A": tuner.lora_embedding_A[name], "lora_B": tuner.lora_embedding_B[name]}
    else:
        factors = {"lora_A": tuner.lora_A[name].weight, "lora_B": tuner.lora_B[name].weight}
    dora.update_layer(base_layer=tuner.get_base_layer(), **factors, scaling=tuner.scaling[name])
    magnitude.copy_(dora.weight)
    dora.weight = magnitude


# IA3 ------------------------------------------------------------------------------------------------------------------


def _adopt_ia3(tuner: Any, name: str) -> None:
    """Sum the gradients of factors that several ranks share. The gradients of other factors are already correct."""
    if isinstance(tuner.get_base_layer(), SharesOutput):
        tuner.__class__ = SharingIA3Linear
    layout = adapter_layouts(tuner).get(f"ia3_l.{name}")
    if layout is not None and layout.overlaps:
        factors, trained = tuner.ia3_l[name], tuner.ia3_l[name].requires_grad
        factors.requires_grad_(True)  # an inference adapter may be trained later, which needs the hook
        factors.register_hook(partial(sum_replicated, axis=tuner.get_base_layer().tp, layout=layout))
        factors.requires_grad_(trained)


# Names and checks -----------------------------------------------------------------------------------------------------


def _check_replicated(model: ShardedModel, name: str, tuners: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a replicated parameter differs between ranks."""
    tp, differing = model.mesh.tp, []
    for path, tuner in tuners.items():
        sharded = adapter_layouts(tuner)
        for leaf, param in tuner.named_parameters():
            if not leaf.startswith("base_layer.") and f".{name}" in leaf and leaf not in sharded and not param.is_meta:
                values = param.detach().reshape(1, -1)
                ranks = all_gather(tp, values, 0, [1] * tp.size) if tp.size > 1 else values
                if not bool((ranks == values).all()):
                    differing.append(f"{path}.{leaf}")
    with agree(model.mesh.world, f"adding the adapter {name}"):
        if differing:
            raise ValueError(
                f"the adapter {name!r} was made from this rank's shards: {differing[0]} differs between ranks. Combine "
                'adapters with combination_type="cat" or "linear", or on one process, and load the result'
            )


def _name_parameters(model: ShardedModel) -> None:
    """Update the layouts, and a pipeline stage's full names, to ``peft``'s parameter names."""
    before, stage = dict(model.layouts), model.stage
    sharded = {
        f"{path}.{leaf}": layout
        for path, module in model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for leaf, layout in adapter_layouts(module).items()
    }
    for name, param in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name, model.peft_config)
        own = before.get(plain) if plain != name else None  # may differ from the layer's layout if ranks are threads
        model.layouts[name] = own or sharded.get(name) or before.get(name) or Layout(tuple(param.shape))
        if stage is not None and plain != name and "modules_to_save" not in name:
            stage.full_names[name] = stage.full_names.get(plain, plain)


def plain_name(name: str, adapters: Any) -> str:
    """Return a parameter's name without adapters. Copies in ``modules_to_save`` get the original parameter's name."""
    name = re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")
    for adapter in adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    return name
