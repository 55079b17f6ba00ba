"""parallelformers' API: `parallelize` serves an existing model from worker processes."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.compat.oslo2 import initialize, zoo_class
from oslo_models.compat.policy_plan import PlanOfPolicies, policies_of, replace_methods
from oslo_models.config.arguments import Arguments
from oslo_models.deploy.proxy import Deployment, deploy
from oslo_models.deploy.remote_module import deployed_class
from oslo_models.distributed.devices import visible_gpus
from oslo_models.distributed.mesh import check_size
from oslo_models.modeling.quantizing import check_not_quantized, refuse_layers_of_libraries
from oslo_models.sharding.plan import Plan

_ARGUMENTS = ("pipeline_parallel_size", "blocks_per_stage", "timeout", "check_inputs")
_SERVING = (
    *("max_batch_size", "max_batch_length", "prefill_chunk_size", "reuse_prefixes", "threads_per_worker"),
    *("speculative_tokens", "speculative_model"),
)


def parallelize(
    model: PreTrainedModel,
    fp16: bool = False,
    num_gpus: int | None = None,
    custom_policies: Any = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str | None = None,
    verbose: str | bool | None = None,
    init_method: str = "spawn",
    daemon: bool = True,
    seed: int | None = None,
    plan: Plan | Callable[[Any], Plan] | None = None,
    **options: Any,
) -> Any:
    """Serve a transformers model from worker processes of this host, each with its shard of the weights. In place.

    The object then behaves like a model from ``deploy=True``. Its weights move to host memory, and the workers read
    their shards from there. ``model.cpu()``, ``.cuda()`` and ``.to()`` end the workers and restore the original class
    and parameter objects (in float16 after ``fp16=True``). You can repeat this any number of times.

    Without ``num_gpus`` it is ``oslo.parallelize`` of OSLO 1, which is `initialize` by another name:
    ``parallelize(model, tensor_parallel_size=2)`` on each process of a launcher.

    Args:
        model: a full model with weights, of a class that the zoo has, preferably on the CPU.
        fp16: compute in float16.
        num_gpus: the number of workers that shard each layer, as ``tensor_parallel_size``. Without a GPU they compute
            on the CPU, with a warning.
        custom_policies: in place of a plan, subclasses of `oslo_models.Policy`: one, or several in a list. They have to
            be importable by name.
        master_addr: the address of this host at which the workers meet; by default they meet in a private directory.
        master_port: the port at which they meet.
        backend: accepts only the default: ``"nccl"`` on GPUs, ``"gloo"`` on CPUs.
        verbose: ``"simple"`` or ``"detail"`` prints memory by device.
        init_method: ``"spawn"``: workers are fresh processes.
        daemon: ``True``: workers end with the application.
        seed: as with ``deploy=True``.
        plan: as with `initialize`.
        **options: as with ``deploy=True``: ``pipeline_parallel_size``, ``timeout``, ``max_batch_size``, ...

    Returns:
        The same object.

    Raises:
        ValueError: an argument is invalid, or the zoo has no such class; the model is unchanged.
        RuntimeError: the model is sharded or served already.
        EngineError: a worker died while loading; the model is unchanged.
    """
    if num_gpus is None:
        if plan is not None or custom_policies is not None:
            raise ValueError("plan= and custom_policies= need num_gpus=, which selects parallelformers' function")
        return _parallelize_as_oslo(model, seed=seed, **options)
    policies: tuple[type, ...] = ()
    if custom_policies is not None:
        if plan is not None:
            raise ValueError("plan= and custom_policies= both say how the model is sharded; pass one of them")
        check_size("num_gpus", num_gpus)
        policies = policies_of(custom_policies)
        plan = PlanOfPolicies(type(model), policies)
        plan.check_ranks(model.config, num_gpus)
    cls = zoo_class(model, plan=plan)
    if unknown := options.keys() - {*_ARGUMENTS, *_SERVING}:
        raise ValueError(f"parallelize has no argument {sorted(unknown)}; it may be given {[*_ARGUMENTS, *_SERVING]}")
    _check_processes(fp16, backend, init_method, daemon)
    refuse_layers_of_libraries(model)
    check_not_quantized(
        model.state_dict(), "is not sent to workers: deploy its checkpoint with quantization_config and deploy=True"
    )
    given = {name: options.pop(name) for name in _ARGUMENTS if name in options}
    arguments = Arguments(tensor_parallel_size=num_gpus, seed=seed, plan=plan, **given)
    dtype = torch.float16 if fp16 else model.dtype
    arguments.check_config(cls, model.config)
    if not torch.cuda.is_available():
        warnings.warn(f"num_gpus={num_gpus}: {visible_gpus()}, so the workers compute on the CPU", stacklevel=2)
    options |= {"deploy_backend": "process", "verbose": verbose, "dtype": dtype}
    options |= {"master_addr": master_addr, "master_port": master_port}
    weights = Weights(model, policies)
    original = _Original(model, weights, dtype)  # before the workers load, which need the memory
    try:
        served = deploy(cls, "load", model.config, arguments, options, weights)
    except BaseException:
        original.refill()
        raise
    original.forget_gradients()
    served._finalizer.detach()
    generation_config = model.generation_config if model.can_generate() else None
    model.__class__ = deployed_class(ServedInPlace, cls)
    model.__dict__ = vars(served)
    model.generation_config = generation_config
    model._original = original
    model._finalizer = weakref.finalize(model, served._engine.close)
    return model


def _parallelize_as_oslo(model: PreTrainedModel, deployment: bool | None = None, **options: Any) -> Any:
    """Implement ``oslo.parallelize`` of OSLO 1, which takes the arguments of OSLO 1's constructors."""
    if not options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
        raise ValueError(
            "parallelize needs num_gpus=, the number of workers that serve the model; or tensor_parallel_size= (and "
            "pipeline_parallel_size=) in each process of a launcher, to shard it there. In order, its arguments are "
            "parallelize(model, fp16, num_gpus)"
        )
    if deployment not in (None, False):
        raise ValueError(
            f"deployment={deployment!r}: pass num_gpus= instead of tensor_parallel_size= to serve an existing model"
        )
    section = {name: value for name, value in options.items() if value is not None}
    size = section.pop("resize_token_embeddings", None)
    if size is not None:
        Arguments(resize_token_embeddings=size).check_config(zoo_class(model), model.config)
        model.resize_token_embeddings(size)
    return initialize(model, {"model_parallelism": section})


def _check_processes(fp16: object, backend: object, init_method: object, daemon: object) -> None:
    """Raise ``ValueError`` unless the arguments match the processes that are started."""
    if not isinstance(fp16, bool):
        raise ValueError(
            f"fp16 must be True or False, got {fp16!r}; in order, the arguments are parallelize(model, fp16, num_gpus)"
        )
    usual = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in (None, usual):
        raise ValueError(f"backend={backend!r}: {visible_gpus()}, where workers use {usual!r}; leave it out")
    if init_method != "spawn":
        raise ValueError(f"init_method={init_method!r}: workers are fresh processes, as with 'spawn'; leave it out")
    if daemon is not True:
        raise ValueError(f"daemon={daemon!r}: workers hold a part of the model and end with the application")


class Weights:
    """The weights of a model in an anonymous memory file. Processes of the same user can open it."""

    def __init__(self, model: PreTrainedModel, policies: tuple[type, ...] = ()) -> None:
        self.cls, self.policies = type(model), policies
        fd = os.memfd_create("oslo_models")
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._finalizer = weakref.finalize(self, os.close, fd)
        with open(os.dup(fd), "wb") as file:
            torch.save(model.state_dict(), file)

    def __getstate__(self) -> dict[str, Any]:
        return {"cls": self.cls, "path": self.path, "policies": self.policies}

    def read(self) -> dict[str, Any]:
        """Return the tensors, in copy-on-write memory shared by the processes."""
        tensors: dict[str, Any] = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        return tensors

    def load(self, config: PreTrainedConfig, dtype: torch.dtype, **arguments: Any) -> Any:
        """Return this rank's part of the model."""
        weights = self.read()
        full = self.cls.from_pretrained(None, config=copy.deepcopy(config), state_dict=weights, dtype=dtype)
        known = {key: value for key, value in arguments.items() if value is not None and key != "deploy"}
        replaced = replace_methods(full, self.policies) if arguments["tensor_parallel_size"] > 1 else []
        model = initialize(full, {"model_parallelism": known})
        for module in replaced:
            module.mp_group = model.mesh.tp.group
        return model


class _Original:
    """The state of a served model before serving: its class, modules and attributes, with emptied parameters."""

    def __init__(self, model: Any, weights: Weights, dtype: torch.dtype) -> None:
        self.cls, self.attributes, self.weights, self.dtype = type(model), vars(model), weights, dtype
        self._gradients: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, param in model.named_parameters():
            grad = None if param.grad is None else param.grad.cpu()
            self._gradients[name] = param, grad
            param.data, param.grad = param.data.new_empty(0), None

    def refill(self) -> None:
        """Give the parameters their values and gradients again, on their devices."""
        tensors = self.weights.read()
        for name, (param, grad) in self._gradients.items():
            param.data = tensors[name].to(param.device, copy=True)
            param.grad = None if grad is None else grad.to(param.device)

    def forget_gradients(self) -> None:
        """Release what `refill` needs."""
        self._gradients = {}

    def restore(self, model: Any) -> None:
        """Restore the original model in place, with its weights in host memory."""
        model.__class__, model.__dict__ = self.cls, self.attributes
        tensors = self.weights.read()
        for name, param in model.named_parameters():
            param.data = tensors[name]
        model._apply(lambda tensor: tensor.cpu())
        if model.dtype != self.dtype:
            full = self.cls.from_pretrained(
                None, config=copy.deepcopy(model.config), state_dict=tensors, dtype=self.dtype
            )
            values = {**dict(full.named_parameters()), **dict(full.named_buffers())}
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.data = values[name].data
            model.config.dtype = self.dtype


class ServedInPlace(Deployment):
    """A deployed model that can become the original transformers model again."""

    _original: _Original

    def _make_full(self) -> Any:
        self._finalizer.detach()
        self._original.restore(self)
        return self

    def deparallelize(self) -> Any:
        """End the workers. This object becomes the full model on the CPU."""
        return self.cpu()
