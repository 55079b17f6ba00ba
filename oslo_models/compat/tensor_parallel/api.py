"""tensor_parallel's API: `tensor_parallel` shards a model over the devices of one process, such as a notebook."""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.compat.oslo2 import initialize
from oslo_models.compat.tensor_parallel.adapters import AdaptableThreads, shard_with_adapters
from oslo_models.compat.tensor_parallel.any_model import class_for, default_plan, untried_copy
from oslo_models.compat.tensor_parallel.autograd import ThreadShards
from oslo_models.compat.tensor_parallel.wrapper import ThreadedModule, move_part
from oslo_models.compat.tensor_parallel.zero3 import shard_shared
from oslo_models.config.arguments import Arguments
from oslo_models.distributed.devices import require_gpus, visible_gpus
from oslo_models.distributed.mesh import ParallelMesh, start_process_group, world_axis
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.modeling.full_model import plain_view
from oslo_models.modeling.original_class import original_class
from oslo_models.modeling.quantizing import check_not_quantized, copy_to_device, refuse_layers_of_libraries
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.plan import Plan

Device = torch.device | str | int

_REFUSED = {
    "tensor_parallel_config": "the sharding plan of the architecture is used: `oslo-models list`",
}
"""Arguments of the original that are not supported, and what to do instead."""


def tensor_parallel(
    model: nn.Module,
    device_ids: Sequence[Device] | None = None,
    tensor_parallel_config: None = None,
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

    A model that the zoo has no plan for gets a derived one: ``sharding_report()`` of the result says which. A small
    random model is compared with its unsharded self first; if that needs ``inputs``, at the first call.

    The returned model has the same class, and the shards of all devices as its parameters. Its ``state_dict`` and
    ``save_pretrained`` are those of the full model. Ranks are threads of this process, which take turns
    (`oslo_models.distributed.thread_group`).

    Args:
        model: a full model of any class, preferably on the CPU, with or without adapters of ``peft``. It is not
            changed. If it was made under
            ``accelerate.init_empty_weights()``, load the weights of the result with ``load_state_dict(...,
            assign=True)``, or `convert_state_dict` and accelerate; then call ``tie_weights()``.
        device_ids: the device of each rank: ``["cuda:0", "cuda:1"]``, ``[0, 1]``, ``["cpu", "cpu"]``; default: all
            GPUs.
        distributed: ``True``: each process, started by ``torchrun``, is a rank, as with `initialize`.
        sharded: also shard trained parameters that several devices need, such as norms and shared key-value heads, and
            gather them for their use (ZeRO stage 3): each parameter, gradient and optimizer state is stored once. On by
            default for the classes of the zoo; ``False`` replicates them, which is faster.
        sharded_param_names: the parameters to shard so; default: all.
        output_device: the device of the outputs; default: the first device. ``output_device_index``: its index among
            the devices.
        delay_init: leave the shards where the model is until the first call, which moves them to their devices: for
            weights that are loaded or changed before.
        gather_logits: as with `ParallelModel.from_pretrained_with_parallel`.
        plan: as with `initialize`; ``"derive"`` is the default for what the zoo has no plan for.
        inputs: where a plan is derived, arguments of a call: a tensor, a tuple or a dictionary of arguments by name.
            With them, layers that can compute with shards of each other do so.

    Raises:
        ValueError: an argument is invalid, or no plan could be derived.
        RuntimeError: the model is already sharded.
    """
    given = {"tensor_parallel_config": tensor_parallel_config, **options}
    for name, value in given.items():
        if name not in _REFUSED:
            raise ValueError(f"tensor_parallel has no argument {name}")
        if value is not None and value is not False:
            raise ValueError(f"{name}={value!r}: {_REFUSED[name]}")
    if distributed:
        if device_ids is not None or output_device is not None:
            raise ValueError("with distributed=True each process has the device of its rank: leave out device_ids")
        if sharded or sharded_param_names:
            raise ValueError("sharded=True is for threads: with distributed=True, FSDP2 shards the rest")
        start_process_group()
        sizes = {"tensor_parallel_size": world_axis().size, "gather_logits": gather_logits}
        return initialize(model, {"model_parallelism": sizes}, plan=plan or default_plan(model), inputs=inputs)
    if os.environ.get("TENSOR_PARALLEL_USE_NATIVE"):
        warnings.warn(
            "TENSOR_PARALLEL_USE_NATIVE is set and changes nothing: the devices of one process always exchange tensors "
            "by torch's own copies and sums, not by NCCL",
            stacklevel=2,
        )
    devices = _devices(device_ids)
    output = _output_device(devices, output_device, output_device_index)
    arguments = Arguments(tensor_parallel_size=len(devices), gather_logits=gather_logits, plan=plan)
    arguments.check({})
    if getattr(model, "peft_config", None):
        return shard_with_adapters(
            model,
            lambda full: tensor_parallel(
                full,
                device_ids,
                sharded=sharded,
                sharded_param_names=sharded_param_names,
                output_device=output,
                delay_init=delay_init,
                gather_logits=gather_logits,
                plan=plan,
                inputs=inputs,
            ),
        )
    cls, is_tried = class_for(model, plan, inputs)
    original, model = model, plain_view(model)
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"buffers of the model are on the meta device, such as {empty[0]}, and no checkpoint has them all: make it "
            "under accelerate.init_empty_weights(), which leaves them out"
        )
    refuse_layers_of_libraries(model)
    config = None
    if isinstance(model, PreTrainedModel):
        arguments.check_config(cls, model.config)
        config = copy.deepcopy(model.config)  # shared by all parts
    threads = ThreadGroup(devices, _has_numpy(model))
    places = [torch.device("cpu")] * len(devices) if delay_init else devices
    parts = [_part(model, cls, config, threads, rank, places[rank]) for rank in range(threads.size)]
    for part in parts:
        part.gather_logits = gather_logits
    if sharded is None:  # the plans of the zoo say which layers use which parameters
        sharded = bool(sharded_param_names) or (plan is None and default_plan(original) is None)
    if (sharded or sharded_param_names) and threads.size > 1:
        shard_shared(parts, sharded_param_names)
    sharded_model = _join_parts(model, cls, parts, threads, output)
    if config is not None:
        sharded_model.config = config
    sharded_model.waits_for_call = delay_init
    sharded_model._untried = () if is_tried else (untried_copy(model),)  # no module of it: a tuple
    return sharded_model


def _device(device: Device) -> torch.device:
    """The device, with its index."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    is_current = found == torch.device("cuda") and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found


def _output_device(devices: Sequence[torch.device], device: Device | None, index: int | None) -> torch.device:
    if device is not None and index is not None:
        raise ValueError(f"output_device={device!r} and output_device_index={index!r}: pass one of them")
    if index is None:
        output = devices[0] if device is None else _device(device)
        require_gpus("output_device", [output], "leave it out for the first of device_ids")
        return output
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(devices):
        raise ValueError(f"output_device_index must be from 0 to {len(devices) - 1}, got {index!r}")
    return devices[index]


def _devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """The device of each rank."""
    devices = [_device(device) for device in (range(torch.cuda.device_count()) if device_ids is None else device_ids)]
    if not devices:
        raise ValueError(f'there is no GPU: {visible_gpus()}; pass device_ids, such as ["cpu", "cpu"]')
    if {device.type for device in devices} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"device_ids must be GPUs only or CPUs only, got {[*map(str, devices)]}")
    if devices[0].type == "cuda" and len(set(devices)) < len(devices):
        raise ValueError(f"device_ids names a GPU twice, which would hold two shares: {[*map(str, devices)]}")
    require_gpus("device_ids", devices, 'pass CPUs, such as ["cpu", "cpu"], or devices that are there')
    return devices


def _has_numpy(model: nn.Module) -> bool:
    """Whether transformers' code of the model may draw from numpy's generator: few import it at all."""
    return any("np" in vars(sys.modules[type(module).__module__]) for module in model.modules())


@torch.no_grad()
def _part(
    model: Any, cls: type, config: PreTrainedConfig | None, threads: ThreadGroup, rank: int, device: torch.device
) -> Any:
    """The part of one rank, on a device, created without a copy of the full model."""
    shared = {} if config is None else {id(model.config): config}
    part: Any = copy.deepcopy(model, {**shared, **{id(param): param for param in model.parameters()}})
    part.__class__ = cls
    before = dict(part.named_parameters(remove_duplicate=False))
    part._shard(ParallelMesh.of_thread(threads, rank), None)
    made: dict[int, nn.Parameter] = {}
    for name, param in list(part.named_parameters(remove_duplicate=False)):
        full = before[name]
        if id(full) not in made:  # tied parameters are one object
            own = param.detach() if param.is_meta else copy_to_device(param, device, copy=param is full)
            made[id(full)] = nn.Parameter(own, full.requires_grad)
        owner, _, leaf = name.rpartition(".")
        part.get_submodule(owner)._parameters[leaf] = made[id(full)]
    return move_part(part, device)


def _join_parts(
    model: nn.Module, cls: type, parts: list[Any], threads: ThreadGroup, output_device: torch.device
) -> Any:
    """A model of the transformers class, with these parts as its modules and the other attributes of ``model``."""
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
    sharded.register_state_dict_post_hook(_merge_state)
    sharded.register_load_state_dict_pre_hook(_shard_state)
    return sharded.train(model.training)


class _Constructor(type):
    """Calling `TensorParallel` itself calls `tensor_parallel`, whose arguments its constructor takes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return tensor_parallel(*args, **kwargs) if cls is TensorParallel else super().__call__(*args, **kwargs)


class TensorParallel(ThreadedModule, metaclass=_Constructor):
    """The base class, beside the class of the full model, of the models that `tensor_parallel` returns.

    ``TensorParallel(model, device_ids, ...)`` is ``tensor_parallel(model, device_ids, ...)``.
    """


class TensorParallelModel(TensorParallel, AdaptableThreads):
    """The base class of those of transformers' kind."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of the full model, as `ParallelModel.num_parameters`."""
        part: Any = self.parts[0]
        count: int = part.num_parameters(only_trainable, exclude_embeddings)
        return count

    def deparallelize(self) -> Any:
        """A full model of the transformers class on the CPU, with copies of the weights; this one stays as it is.

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
        for name, tensor in full.state_dict(keep_vars=True).items():  # each in its own type
            tensor.data = state[name].clone()
            tensor.requires_grad_(trained.get(name, False))
        if full.can_generate():
            full.generation_config = copy.deepcopy(self.generation_config)
        return full.train(self.training)

    @property
    def device(self) -> torch.device:
        return self.output_device

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the weights in each part again: needed after weights were loaded one by one."""
        parts: Any = self.parts
        for part in parts:
            for names in part.all_tied_weights_keys.items():
                places = [(part.get_submodule(owner), leaf) for owner, _, leaf in (n.rpartition(".") for n in names)]
                params = [module._parameters[leaf] for module, leaf in places]
                loaded = min(params[::-1], key=lambda param: param.is_meta)  # the source, if both are loaded
                for module, leaf in places:
                    module._parameters[leaf] = loaded

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoders of all parts as one module."""
        self._move_parts()
        parts: Any = self.parts
        return ThreadShards([part.get_encoder(*args, **kwargs) for part in parts], self.threads, self.output_device)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ``RuntimeError``: the vocabulary is sharded."""
        raise RuntimeError("the vocabulary is sharded: resize it before tensor_parallel")

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # a CUDA graph is captured by one thread

    def _get_static_cache_init_shape(self) -> None:
        return None  # ranks have different numbers of heads


@contextmanager
def save_tensor_parallel(model: nn.Module) -> Iterator[nn.Module]:
    """For compatibility with the original: models are always saved in full here."""
    yield model


def _merge_state(model: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Merge the state of the parts into that of the full model, in host memory; tied tensors share memory."""
    parts = [_pop_prefixed(state, f"{prefix}parts.{rank}.") for rank in range(len(model.parts))]
    check_not_quantized(parts[0], "full weights are not put together from such shards: the original model has them")
    params = dict(model.parts[0].named_parameters(remove_duplicate=False))
    made: dict[int, Tensor] = {}
    for name, first in parts[0].items():
        layout, key = model.parts[0].layouts.get(name), id(params.get(name, first))
        if layout is None or layout.dim is None:
            state[prefix + name] = first.cpu()
            continue
        if key not in made:
            made[key] = first.new_empty(layout.shape, device="cpu")
            for rank, part in enumerate(parts):
                layout.write_shard(made[key], part[name], rank)
        state[prefix + name] = made[key]


def _shard_state(model: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Shard the state of a full model for the parts; that of `convert_state_dict` is sharded already."""
    layouts, given = model.tensor_parallel_config, _pop_prefixed(state, prefix)
    fits = [name for name, tensor in given.items() if name in layouts and layouts[name].shape == tensor.shape]
    fitting = {name: given.pop(name) for name in fits}
    for name in [name for name in given if not name.startswith("parts.")]:  # torch reports unexpected names
        tensor = given.pop(name)
        given |= {f"parts.{rank}.{name}": tensor for rank in range(len(model.parts))}
    for name, tensor in {**given, **_shards_of(fitting, layouts, len(model.parts))}.items():
        if metadata.get("assign_to_params_buffers"):  # it becomes the parameter
            tensor = tensor.to(model.devices[int(name.split(".")[1])], copy=True)
        state[prefix + name] = tensor


def convert_state_dict(
    input_state_dict: Mapping[str, Tensor],
    tensor_parallel_config: Mapping[str, Layout],
    world_size: int,
    for_pretrained: bool = False,
) -> dict[str, Tensor]:
    """The shards of all ranks, named as in a model that `tensor_parallel` returns.

    For models too large to be read at once: file by file, each shard goes to the device that
    `infer_sharded_device_map` names.

    Args:
        input_state_dict: weights of the full model, or some of them.
        tensor_parallel_config: ``model.tensor_parallel_config``.
        world_size: the number of devices over which the model is sharded.
        for_pretrained: accepted for compatibility, without effect.

    Raises:
        ValueError: a weight has another shape, or the model is sharded over another number of devices.
    """
    shards = _shards_of(input_state_dict, tensor_parallel_config, world_size)
    return {name: tensor.clone() for name, tensor in shards.items()}  # views would keep the full weights in memory


def _shards_of(state: Mapping[str, Tensor], layouts: Mapping[str, Layout], ranks: int) -> dict[str, Tensor]:
    shards = {}
    for name, tensor in state.items():
        layout = layouts.get(name)
        if layout is not None and layout.dim is not None:
            if len(layout.ranges) != ranks:
                raise ValueError(f"world_size={ranks}, but the model is sharded over {len(layout.ranges)} devices")
            if tuple(tensor.shape) != layout.shape:
                raise ValueError(f"{name} has the shape {list(tensor.shape)} instead of {list(layout.shape)}")
        for rank in range(ranks):
            shards[f"parts.{rank}.{name}"] = tensor if layout is None else layout.shard(tensor, rank)
    return shards


def infer_sharded_device_map(model: Any) -> dict[str, torch.device]:
    """The device of each part of a model that `tensor_parallel` returned, by the name of the part."""
    return {f"parts.{rank}": device for rank, device in enumerate(model.devices)}


def _pop_prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove the entries with this prefix from the state; returned without it."""
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state.pop(name) for name in names}
