"""tensor_parallel's API: `tensor_parallel` shards a model over the devices of one process, such as a notebook."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_models.compat.oslo2 import initialize
from oslo_models.compat.tensor_parallel.adapters import AdaptableThreads, shard_with_adapters
from oslo_models.compat.tensor_parallel.any_model import (
    check_rules,
    class_for,
    default_plan,
    initialize_ruled,
    untried_copy,
)
from oslo_models.compat.tensor_parallel.autograd import ThreadShards
from oslo_models.compat.tensor_parallel.config import Config
from oslo_models.compat.tensor_parallel.devices import Device, device_of_outputs, devices_of_ranks
from oslo_models.compat.tensor_parallel.parts import has_numpy, make_part
from oslo_models.compat.tensor_parallel.state import merge_state, shard_state
from oslo_models.compat.tensor_parallel.wrapper import ThreadedModule
from oslo_models.compat.tensor_parallel.zero3 import shard_shared
from oslo_models.config.arguments import Arguments
from oslo_models.distributed.mesh import start_process_group, world_axis
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.modeling.full_model import plain_view
from oslo_models.modeling.original_class import original_class
from oslo_models.modeling.quantizing import refuse_layers_of_libraries
from oslo_models.registry import did_you_mean
from oslo_models.sharding.plan import Plan

_OPTIONS = ("device_ids", "tensor_parallel_config", "distributed", "sharded", "output_device", "delay_init", "inputs")


def tensor_parallel(
    model: nn.Module,
    device_ids: Sequence[Device] | None = None,
    tensor_parallel_config: Config | None = None,
    distributed: bool | None = None,
    sharded: bool | None = None,
    sharded_param_names: Sequence[str] | None = None,
    *,
    output_device: Device | None = None,
    output_device_index: int | None = None,
    delay_init: bool = False,
    gather_logits: bool | None = None,
    plan: Plan | Callable[[Any], Plan] | str | None = None,
    inputs: Any = None,
    **options: Any,
) -> Any:
    """Shard a model over devices of this process, without a launcher, for training and generation.

    A model without a plan in the zoo gets a derived plan; ``sharding_report()`` of the result shows it. The plan is
    verified first: a small random model must compute the same outputs sharded and unsharded. If this check needs
    ``inputs``, it runs at the first call.

    The returned model has the same class, and the shards of all devices as its parameters. Its ``state_dict`` and
    ``save_pretrained`` return and write full weights. Ranks are threads of this process, which take turns
    (`oslo_models.distributed.thread_group`).

    Args:
        model: a full model of any class, preferably on the CPU, with or without adapters of ``peft``. It is not
            changed. If it was made under
            ``accelerate.init_empty_weights()``, load the weights of the result with ``load_state_dict(...,
            assign=True)``, or `convert_state_dict` and accelerate; then call ``tie_weights()``.
        device_ids: the device of each rank: ``["cuda:0", "cuda:1"]``, ``[0, 1]``, ``["cpu", "cpu"]``; default: all
            GPUs.
        tensor_parallel_config: sharding rules, for a model of any class. They are verified on a random copy of the
            model: with ``inputs``, or at the first call, up to 50 million parameters.
        distributed: ``True``: each process, started by ``torchrun``, is a rank, as with `initialize`.
        sharded: also shard trained parameters that several devices need, such as norms and shared key-value heads, and
            gather them for use (ZeRO stage 3). Each parameter, gradient and optimizer state is then stored once. On by
            default for the classes of the zoo; ``False`` replicates these parameters, which is faster.
        sharded_param_names: the parameters to shard with ZeRO stage 3; default: all.
        output_device: the device of the outputs; default: the first device. ``output_device_index``: its index among
            the devices.
        delay_init: keep the shards on the CPU until the first call, which moves them to their devices. Use it to load
            or change weights before.
        gather_logits: as with `ParallelModel.from_pretrained_with_parallel`.
        plan: as with `initialize`; ``"derive"`` is the default for models without a plan in the zoo.
        inputs: for a derived plan, arguments of a call: a tensor, a tuple or a dictionary of arguments by name. With
            them, consecutive layers pass shards to each other where they can.

    Raises:
        ValueError: an argument is invalid, or no plan could be derived.
        RuntimeError: the model is already sharded.
    """
    for name in options:
        raise ValueError(f"tensor_parallel has no argument {name}{did_you_mean(name, _OPTIONS)}")
    rules = tensor_parallel_config
    if rules is not None:
        check_rules(rules, plan, sharded or sharded_param_names)
    if distributed:
        if device_ids is not None or output_device is not None:
            raise ValueError("with distributed=True each process has the device of its rank: leave out device_ids")
        if sharded or sharded_param_names:
            raise ValueError("sharded=True is for threads: with distributed=True, FSDP2 shards the other parameters")
        return _over_processes(model, rules, plan, gather_logits, inputs)
    if os.environ.get("TENSOR_PARALLEL_USE_NATIVE"):
        warnings.warn(
            "TENSOR_PARALLEL_USE_NATIVE is set and changes nothing: the devices of one process always exchange tensors "
            "by torch's own copies and sums, not by NCCL",
            stacklevel=2,
        )
    devices = devices_of_ranks(device_ids)
    output = device_of_outputs(devices, output_device, output_device_index)
    arguments = Arguments(tensor_parallel_size=len(devices), gather_logits=gather_logits, plan=plan)
    arguments.check({})
    if getattr(model, "peft_config", None):
        same = functools.partial(
            tensor_parallel,
            device_ids=device_ids,
            tensor_parallel_config=rules,
            sharded=sharded,
            sharded_param_names=sharded_param_names,
            output_device=output,
            delay_init=delay_init,
            gather_logits=gather_logits,
            plan=plan,
            inputs=inputs,
        )
        return shard_with_adapters(model, same)
    cls, is_tried = class_for(model, plan if rules is None else rules, inputs, len(devices))
    original, model = model, plain_view(model)
    _check_buffers(model)
    refuse_layers_of_libraries(model)
    config = None
    if isinstance(model, PreTrainedModel):
        if rules is None:
            arguments.check_config(cls, model.config)
        config = copy.deepcopy(model.config)  # shared by all parts
    threads = ThreadGroup(devices, has_numpy(model))
    places = [torch.device("cpu")] * len(devices) if delay_init else devices
    parts = [make_part(model, cls, config, threads, rank, places[rank]) for rank in range(threads.size)]
    for part in parts:
        part.gather_logits = gather_logits
    if sharded is None:  # the plans of the zoo say which layers use which parameters
        sharded = bool(sharded_param_names) or (plan is None and rules is None and default_plan(original) is None)
    if (sharded or sharded_param_names) and threads.size > 1:
        shard_shared(parts, sharded_param_names)
    sharded_model = _join_parts(model, cls, parts, threads, output)
    if config is not None:
        sharded_model.config = config
    sharded_model.waits_for_call = delay_init
    sharded_model._untried = () if is_tried else (untried_copy(model),)  # no module of it: a tuple
    return sharded_model


def _over_processes(model: Any, rules: Config | None, plan: Any, gather_logits: bool | None, inputs: Any) -> Any:
    """Implement ``distributed=True``: return this rank's part of the model. A collective."""
    start_process_group()
    if rules is not None:
        return initialize_ruled(model, rules, inputs)
    sizes = {"tensor_parallel_size": world_axis().size, "gather_logits": gather_logits}
    return initialize(model, {"model_parallelism": sizes}, plan=plan or default_plan(model), inputs=inputs)


def _check_buffers(model: nn.Module) -> None:
    """Raise ``ValueError`` for buffers on the meta device: non-persistent ones would never get values."""
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"buffers of the model are on the meta device, such as {empty[0]}, and no checkpoint holds all of them: "
            "construct the model under accelerate.init_empty_weights(), which leaves buffers out"
        )


def _join_parts(
    model: nn.Module, cls: type, parts: list[Any], threads: ThreadGroup, output_device: torch.device
) -> Any:
    """Return a model of the original class, with these parts as modules and the other attributes of ``model``."""
    is_transformers = isinstance(model, PreTrainedModel)
    original: Any = original_class(cls) if is_transformers else type(model)
    base = TensorParallelModel if is_transformers else TensorParallel
    metaclass: Any = type(TensorParallel)
    joined: Any = metaclass(original.__name__, (base, original), {"__module__": original.__module__})
    joined.forward = functools.wraps(original.forward)(TensorParallel.forward)
    sharded = joined.__new__(joined)
    nn.Module.__init__(sharded)
    own = vars(sharded).keys()
    vars(sharded).update({name: copy.copy(value) for name, value in vars(model).items() if name not in own})
    sharded.parts, sharded.threads, sharded.output_device = nn.ModuleList(parts), threads, output_device
    if threads.devices[0].type == "cuda":  # tells transformers' Trainer not to move it
        sharded.hf_device_map = {f"parts.{rank}": device.index for rank, device in enumerate(threads.devices)}
    sharded.register_state_dict_post_hook(merge_state)
    sharded.register_load_state_dict_pre_hook(shard_state)
    return sharded.train(model.training)


class _Constructor(type):
    """Makes ``TensorParallel(...)`` and ``TensorParallelModel(...)`` call `tensor_parallel`, with equal arguments."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_public = cls in (TensorParallel, TensorParallelModel)
        return tensor_parallel(*args, **kwargs) if is_public else super().__call__(*args, **kwargs)


class TensorParallel(ThreadedModule, metaclass=_Constructor):
    """First base class of the models that `tensor_parallel` returns. The second base is the full model's class.

    ``TensorParallel(model, device_ids, ...)`` is ``tensor_parallel(model, device_ids, ...)``.
    """


class TensorParallelModel(TensorParallel, AdaptableThreads):
    """First base class of transformers models that `tensor_parallel` returns."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the full model, as `ParallelModel.num_parameters` does."""
        part: Any = self.parts[0]
        count: int = part.num_parameters(only_trainable, exclude_embeddings)
        return count

    def deparallelize(self) -> Any:
        """Return a full transformers model on the CPU, with copies of the weights. This model does not change.

        Raises:
            ValueError: the model has adapters.
        """
        if adapters := list(self._peft_config or ()):
            raise ValueError(
                f"the model has the adapters {adapters}: remove them (`unload()` of the PeftModel) or merge them "
                "(`merge_and_unload()`) before deparallelize"
            )
        original: Any = next(
            base for base in type(self).__mro__[1:] if base.__module__.startswith("transformers.models.")
        )
        config: Any = self.config
        part, state = self.parts[0], self.state_dict()
        trained = {name: param.requires_grad for name, param in part.named_parameters(remove_duplicate=False)}
        full = original.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=state,
            dtype=self.dtype,
            attn_implementation=config._attn_implementation,
        )
        for name, tensor in full.state_dict(keep_vars=True).items():  # keep the dtype of each tensor
            tensor.data = state[name].clone()
            tensor.requires_grad_(trained.get(name, False))
        if full.can_generate():
            full.generation_config = copy.deepcopy(self.generation_config)
        return full.train(self.training)

    @property
    def device(self) -> torch.device:
        return self.output_device

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the weights in each part again. Needed after weights were loaded one by one."""
        parts: Any = self.parts
        for part in parts:
            for names in part.all_tied_weights_keys.items():
                places = [(part.get_submodule(owner), leaf) for owner, _, leaf in (n.rpartition(".") for n in names)]
                params = [module._parameters[leaf] for module, leaf in places]
                loaded = min(params[::-1], key=lambda param: param.is_meta)  # the source, if both are loaded
                for module, leaf in places:
                    module._parameters[leaf] = loaded

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoders of all parts as one module."""
        self._move_parts()
        parts: Any = self.parts
        return ThreadShards([part.get_encoder(*args, **kwargs) for part in parts], self.threads, self.output_device)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``RuntimeError``: the vocabulary is sharded."""
        raise RuntimeError("the vocabulary is sharded: resize it before tensor_parallel")

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # a CUDA graph is captured by one thread

    def _get_static_cache_init_shape(self) -> None:
        return None  # ranks have different numbers of heads


TensorParallelPreTrainedModel = TensorParallelModel
"""Alias from tensor_parallel."""
