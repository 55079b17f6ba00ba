"""Checks that a sharded model supports an adapter, and rejects all other adapters by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft import PeftType
from peft.tuners import ia3, lora
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from torch import nn
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.callers import PeftCall
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.distributed.sharded_tensor import ShardedParameter
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.linear import GroupRowParallelLinear
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.modeling.adapters.experts import parameter_layout
from oslo_models.modeling.adapters.layouts import takes_full_tensors, weight_layout

INJECTED = {PeftType.LORA: "LoRA (with rsLoRA and DoRA)", PeftType.IA3: "IA3"}
"""The adapter types that wrap layers."""
_WAY_OUT = "add it to the model on one process, or use one of these kinds"
_DATA_FREE = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that do not read the model's weights."""
_REFUSED_OPTIONS = {
    "layer_replication": "replicate the layers in the configuration of the model",
    "megatron_config": "leave it out: the layers are parallel already",
    "trainable_token_indices": "train all tokens, with the embedding in modules_to_save",
    "ensure_weight_tying": "leave it out",
    "use_qalora": "leave it out",
}


def check_config(name: str, config: Any) -> None:
    """Raise ``ValueError`` if a sharded model does not support an adapter's type or one of its options."""
    if config.peft_type not in INJECTED:
        raise ValueError(
            f"the adapter {name!r} has the type {config.peft_type.value}, which does not work on a sharded model; "
            f"supported: {', '.join(INJECTED.values())}, prompt tuning, p-tuning, prefix tuning, modules_to_save. "
            f"For others, {_WAY_OUT}"
        )
    for option, instead in _REFUSED_OPTIONS.items():
        if value := getattr(config, option, None):
            raise ValueError(f"{option}={value!r} of the adapter {name!r} does not work on a sharded model: {instead}")
    initial = getattr(config, "init_lora_weights", True)
    if initial not in _DATA_FREE:
        raise ValueError(
            f"init_lora_weights={initial!r} of the adapter {name!r} is computed from full weights, but each rank has a "
            f"shard only; use one of {_DATA_FREE}, or initialise the adapter on one process and load it"
        )


def check_combination(call: PeftCall) -> None:
    """Check the combination type of ``add_weighted_adapter`` before it injects the result.

    Args:
        call: the call of ``inject_adapter``.

    Raises:
        ValueError: combining shards would differ from combining the full adapters. No adapter is added.
    """
    if call.caller != "add_weighted_adapter":
        return
    given = call.arguments_of_caller
    kind = given["combination_type"]
    if kind not in ("cat", "linear"):
        given["self"].peft_config.pop(given["adapter_name"], None)
        raise ValueError(
            f"combination_type={kind!r} needs whole adapters, but a rank has parts only: use "
            'combination_type="cat" or "linear", or combine them on one process, and load the result'
        )


def check_stages(model: Any, tuner: Any, config: Any) -> None:
    """Check that an adapter has layers on all pipeline stages, or on none. This is a collective of the stages.

    Args:
        model: a pipeline stage before ``peft`` adds the adapter.
        tuner: the ``peft`` object that adds the adapter.

    Raises:
        ValueError: the adapter has layers on some stages only. Raised on every rank, since ``peft`` would raise only on
            the stages without a layer.
    """
    names = [name for name, _ in nn.Module.named_modules(model) if name]
    everywhere = getattr(config, "target_modules", None) in (None, INCLUDE_LINEAR_LAYERS_SHORTHAND)
    found = everywhere or any(tuner._check_target_module_exists(config, name) for name in names)
    stages = gather_objects(model.mesh.pp, found)
    if any(stages) and not all(stages):
        given = {name: getattr(config, name, None) for name in ("target_modules", "layers_to_transform")}
        said = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        without = [stage for stage, has in enumerate(stages) if not has]
        raise ValueError(
            f"the adapter ({said}) has no layer on the pipeline stages {without} of {len(stages)}, and each needs one: "
            "add a layer of theirs, or load the model with pipeline_parallel_size=1"
        )


def check_magnitudes(model: nn.Module, tuner: Any, config: Any) -> None:
    """Check that ``peft`` can compute DoRA's magnitudes for all target layers.

    Args:
        model: a sharded model before ``peft`` adds the adapter.
        tuner: the ``peft`` object that adds the adapter.

    Raises:
        ValueError: a target layer takes full tensors.
    """
    if not getattr(config, "use_dora", False):
        return
    everywhere = config.target_modules == INCLUDE_LINEAR_LAYERS_SHORTHAND
    for name, module in nn.Module.named_modules(model):
        if takes_full_tensors(module) and (everywhere or tuner._check_target_module_exists(config, name)):
            raise ValueError(_of_full_tensors(name))


def _of_full_tensors(path: str) -> str:
    return (
        f"{path} is sharded, and takes and returns full tensors: of adapters, LoRA works there, without magnitudes "
        "(DoRA); leave it out of target_modules"
    )


def check_layer(path: str, tuner: Any, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if an adapter does not support the sharded layer at ``path``."""
    base = tuner.get_base_layer()
    variants = getattr(tuner, "lora_variant", {})
    for name in names:
        variant = variants.get(name)
        if variant is not None and not isinstance(variant, (DoraLinearVariant, DoraEmbeddingVariant)):
            raise ValueError(
                f"the adapter {name!r} uses {type(variant).__name__}, which does not work on a sharded model; rsLoRA "
                "and DoRA do"
            )
    if isinstance(tuner, ParamWrapper):
        layout = weight_layout(base) or parameter_layout(tuner)
        if isinstance(base, ParallelExperts) and tuner.get_param().dim() != 3:
            raise ValueError(
                f"{tuner.parameter_name} of {path} is not a stack of matrices, and adapters of biases of sharded "
                "experts are not supported: leave it out of target_parameters"
            )
        if layout is not None and not isinstance(base, ParallelExperts):
            raise ValueError(
                f"target_parameters of a sharded model name stacked experts, but {path} is a "
                f"{type(base).__name__}: name it in target_modules"
            )
        return
    if takes_full_tensors(base):
        if not isinstance(tuner, lora.Linear):
            raise ValueError(_of_full_tensors(path))
        return
    if weight_layout(base) is None:
        if isinstance(getattr(base, "weight", None), ShardedParameter):
            raise ValueError(
                f"{path} is sharded with the module around it, which uses its weight without calling the layer: leave "
                "it out of target_modules"
            )
        return
    known = (lora.Linear, lora.Embedding) if isinstance(tuner, lora.LoraLayer) else (ia3.Linear,)
    if not isinstance(tuner, known) or not isinstance(base, (nn.Linear, Conv1D, nn.Embedding)):
        raise ValueError(
            f"{path} is sharded, and {type(tuner).__name__} does not support a sharded {type(base).__name__}"
        )
    with_magnitudes = getattr(tuner, "lora_magnitude_vector", ())
    if isinstance(base, GroupRowParallelLinear) and any(name in with_magnitudes for name in names):
        raise ValueError(
            f"DoRA does not work on {path}, since several ranks hold some of its inputs: use LoRA, leave it out of "
            "target_modules, or use fewer ranks"
        )
    if isinstance(tuner, ia3.IA3Layer) and isinstance(base, VocabParallelHead):
        raise ValueError(
            f"IA3 does not work on {path}, since its vocabulary is sharded: leave it out of target_modules"
        )
