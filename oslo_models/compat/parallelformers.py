"""parallelformers' API: `parallelize` serves an existing model from worker processes."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.compat.oslo2 import initialize, zoo_class
from oslo_models.compat.policy_plan import PlanOfPolicies, policies_of, replace_methods
from oslo_models.config.arguments import Arguments
from oslo_models.deploy.proxy import Deployment, deploy
from oslo_models.deploy.remote_module import deployed_class
from oslo_models.distributed.devices import visible_gpus
from oslo_models.distributed.mesh import check_size
from oslo_models.sharding.plan import Plan

_ARGUMENTS = ("pipeline_parallel_size", "blocks_per_stage", "timeout", "check_inputs")
_SERVING = ("max_batch_size", "batch_wait_ms")


def parallelize(
    model: PreTrainedModel,
    num_gpus: int,
    fp16: bool = False,
    verbose: str | bool | None = None,
    seed: int | None = None,
    plan: Plan | Callable[[Any], Plan] | None = None,
    custom_policies: Any = None,
    **options: Any,
) -> Any:
    """Serve a transformers model from worker processes of this host, each with its part of the weights.

    In place: the object becomes like one that ``deploy=True`` returns. Its weights move to host memory, from which the
    workers read their parts; ``model.cpu()``, ``.cuda()`` and ``.to()`` end the workers and restore the weights.

    Args:
        model: a full model with weights, of a class that the zoo has, preferably on the CPU.
        num_gpus: the number of workers over which each layer is sharded, ``tensor_parallel_size``; without any GPU they
            compute on the CPU, with a warning.
        fp16: compute in float16.
        verbose: ``"simple"`` or ``"detail"`` prints memory by device.
        seed: as with ``deploy=True``.
        plan: as with `initialize`.
        custom_policies: in place of a plan, classes derived from `oslo_models.Policy`: one, or several in a list. They
            have to be importable by name.
        **options: as with ``deploy=True``: ``pipeline_parallel_size``, ``timeout``, ``max_batch_size``, ...

    Returns:
        The same object.

    Raises:
        ValueError: an argument is invalid, or the zoo has no such class; the model is unchanged.
        EngineError: a worker died while loading; the model is unchanged.
    """
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
        raise ValueError(f"parallelize has no arguments {sorted(unknown)}; it may be given {[*_ARGUMENTS, *_SERVING]}")
    given = {name: options.pop(name) for name in _ARGUMENTS if name in options}
    arguments = Arguments(tensor_parallel_size=num_gpus, seed=seed, plan=plan, **given)
    dtype = torch.float16 if fp16 else model.dtype
    arguments.check_config(cls, model.config)
    if not torch.cuda.is_available():
        warnings.warn(f"num_gpus={num_gpus}: {visible_gpus()}, so the workers compute on the CPU", stacklevel=2)
    options |= {"deploy_backend": "process", "verbose": verbose, "dtype": dtype}
    served = deploy(cls, "load", model.config, arguments, options, Weights(model, policies))
    served._finalizer.detach()
    generation_config = model.generation_config if model.can_generate() else None
    model.__class__ = deployed_class(ServedInPlace, cls)
    model.__dict__ = vars(served)
    model.generation_config = generation_config
    model._finalizer = weakref.finalize(model, served._engine.close)
    return model


class Weights:
    """The weights of a model in an anonymous memory file, which processes of the same user can open."""

    def __init__(self, model: PreTrainedModel, policies: tuple[type, ...] = ()) -> None:
        self.cls, self.policies = type(model), policies
        fd = os.memfd_create("oslo_models")
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._finalizer = weakref.finalize(self, os.close, fd)
        with open(os.dup(fd), "wb") as file:
            torch.save(model.state_dict(), file)

    def __getstate__(self) -> dict[str, Any]:
        return {"cls": self.cls, "path": self.path, "policies": self.policies}

    def load(self, config: PreTrainedConfig, dtype: torch.dtype, **arguments: Any) -> Any:
        """This rank's part of the model."""
        weights = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        full = self.cls.from_pretrained(None, config=copy.deepcopy(config), state_dict=weights, dtype=dtype)
        known = {key: value for key, value in arguments.items() if value is not None and key != "deploy"}
        replaced = replace_methods(full, self.policies) if arguments["tensor_parallel_size"] > 1 else []
        model = initialize(full, {"model_parallelism": known})
        for module in replaced:
            module.mp_group = model.mesh.tp.group
        return model


class ServedInPlace(Deployment):
    """A deployed model that was a transformers model before, and can become one again."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `Deployment.to`, but this object becomes the full model."""
        full = super().to(*args, **kwargs)
        self.__class__ = type(full)
        self.__dict__ = vars(full)
        return self
