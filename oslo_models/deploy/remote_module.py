"""`RemoteModule`: the module interface of a deployed model, without weights in this process."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.deploy.engine import Engine
from oslo_models.deploy.full_state import FullState
from oslo_models.locking import locked_property
from oslo_models.registry import did_you_mean

_ELSEWHERE = "the workers hold the weights of a deployed model"
_FULL_MODEL = "cpu() ends the workers and loads the full model in this process"
_REFUSED = {
    f"{_ELSEWHERE}, which cannot be changed here; dtype=, resize_token_embeddings= and similar options are for the "
    f"constructor, and {_FULL_MODEL}": (
        *("load_state_dict", "from_parallelized", "resize_token_embeddings", "resize_position_embeddings"),
        *("half", "float", "double", "bfloat16", "type", "to_empty", "set_input_embeddings", "set_output_embeddings"),
        *("set_encoder", "set_decoder", "set_attn_implementation", "set_experts_implementation", "init_weights"),
        *("initialize_weights", "tie_weights", "dequantize", "apply", "add_adapter"),
        *("add_module", "register_module", "set_submodule"),
        *("register_parameter", "register_buffer"),
    ),
    f"a deployed model cannot be trained; construct it without deploy=True, under torchrun, or {_FULL_MODEL}": (
        *("gradient_checkpointing_enable", "gradient_checkpointing_disable", "enable_input_require_grads"),
        *("requires_grad_", "zero_grad", "clip_grad_norm_", "gpu_parameters", "gpu_modules"),
    ),
    f"the workers run the modules of a deployed model, which are not in this process; {_FULL_MODEL}": (
        *("modules", "named_modules", "children", "named_children", "buffers", "named_buffers", "get_submodule"),
        *("get_parameter", "get_buffer", "get_parameter_or_buffer", "compile", "register_forward_hook"),
        *("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
    ),
}
"""Module methods that a deployed model refuses, by reason. The inherited methods would see an empty module."""


def _refusal(name: str, reason: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name}: {reason}")

    return refuse


class RemoteModule:
    """The part of a deployed model that behaves like a module.

    Weights are copied only on request, with ``gather=True``.
    """

    config: Any
    _engine: Engine
    _make_skeleton: Callable[[], Any]

    for _reason, _names in _REFUSED.items():
        for _name in _names:
            locals()[_name] = _refusal(_name, _reason)
    del _reason, _names, _name

    is_gradient_checkpointing = False

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.devices[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype or self._engine.call("get_dtype")

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise RuntimeError("a deployed model cannot be trained; construct it without deploy=True, under torchrun")
        return self

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> Any:
        """Count the parameters of the full model, as `ParallelModel.num_parameters`. No parameter is trainable."""
        return 0 if only_trainable else self._engine.call("num_parameters", (False, exclude_embeddings))

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of the full model. See `Deployment.memory_allocated` for the memory of each device."""
        return FullState(self._engine).bytes(return_buffers)

    # Copies of weights ------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, gather: bool = False, **kwargs: Any) -> dict[str, Tensor]:
        """Return copies of all full weights in host memory. Raise ``RuntimeError`` without ``gather=True``."""
        _require(gather, "state_dict")
        if args or kwargs:
            raise TypeError("state_dict of a deployed model takes only the argument gather")
        state = FullState(self._engine)
        return dict(state.gather(name for name, held in state.tensors.items() if held.is_saved))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True, *, gather: bool = False
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield copies of the full parameters, one at a time. Raise ``RuntimeError`` without ``gather=True``."""
        _require(gather, "named_parameters")
        return self._copies(f"{prefix}." if prefix else "", remove_duplicate)

    def parameters(self, recurse: bool = True, *, gather: bool = False) -> Iterator[nn.Parameter]:
        """Yield copies of the full parameters, one at a time. Raise ``RuntimeError`` without ``gather=True``."""
        _require(gather, "parameters")
        return (param for _, param in self._copies("", True))

    def _copies(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        state = FullState(self._engine)
        names = [name for name, held in state.tensors.items() if held.is_parameter]
        if remove_duplicate:
            first = {state.tensors[name].source: name for name in reversed(names)}
            names = [name for name in names if name == first[state.tensors[name].source]]
        for name, tensor in state.gather(names):
            yield prefix + name, nn.Parameter(tensor, requires_grad=False)

    def get_input_embeddings(self, *, gather: bool = False) -> Any:
        """Return a copy of the full module. Raise ``RuntimeError`` without ``gather=True``."""
        return self._module_copy("get_input_embeddings", gather)

    def get_output_embeddings(self, *, gather: bool = False) -> Any:
        """As `get_input_embeddings`."""
        return self._module_copy("get_output_embeddings", gather)

    def get_encoder(self, modality: str | None = None, *, gather: bool = False) -> Any:
        """As `get_input_embeddings`: a full encoder in this process."""
        return self._module_copy("get_encoder", gather, *([modality] if modality else []))

    def get_decoder(self, *, gather: bool = False) -> Any:
        """As `get_input_embeddings`: a full decoder in this process."""
        return self._module_copy("get_decoder", gather)

    @property
    def base_model(self) -> Any:
        raise RuntimeError(f"base_model: {_ELSEWHERE}; call the model itself, or deploy the class of the base model")

    def _module_copy(self, getter: str, gather: bool, *args: Any) -> Any:
        """Return a copy, with weights, of the module that a getter of the full model returns."""
        _require(gather, getter)
        found = getattr(self._skeleton, getter)(*args)
        names = [name for name, module in self._skeleton.named_modules() if module is found]
        if found is None or not names:
            return None
        prefix, module, state = f"{names[0]}.".removeprefix("."), copy.deepcopy(found), FullState(self._engine)
        for name, tensor in state.gather(name for name in state.tensors if name.startswith(prefix)):
            owner, _, leaf = name.removeprefix(prefix).rpartition(".")
            if state.tensors[name].is_parameter:
                module.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                module.get_submodule(owner)._buffers[leaf] = tensor
        return module.eval()

    # Everything else --------------------------------------------------------------------------------------------------

    @locked_property
    def _skeleton(self) -> Any:
        """The full model on the meta device, without memory. Attribute lookups read it."""
        with torch.device("meta"):
            return self._make_skeleton().eval()

    def __getattr__(self, name: str) -> Any:
        """Return a plain attribute of the model, such as ``num_labels``.

        Raises:
            AttributeError: the attribute is a module or tensor, which only the workers hold; or it does not exist.
        """
        kind = type(self).__name__
        if name.startswith("_") or "_engine" not in vars(self):
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        value = getattr(self._skeleton, name, inspect.Parameter.empty)
        if value is inspect.Parameter.empty:
            known = [each for each in {*dir(type(self)), *dir(self._skeleton)} if not each.startswith("_")]
            hint = did_you_mean(name, known)
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}")
        if isinstance(value, (nn.Module, Tensor)):
            what = "module" if isinstance(value, nn.Module) else "tensor"
            raise AttributeError(
                f"{name} is a {what} of this {kind}, which the workers hold: state_dict(gather=True) copies the "
                f"weights, methods of the model run on all workers, and {_FULL_MODEL}"
            )
        return value


def _require(gather: bool, name: str) -> None:
    if not gather:
        raise RuntimeError(
            f"{name}: {_ELSEWHERE}; {name}(gather=True) copies them in full into the memory of this process, "
            f"save_pretrained_with_parallel writes them, and {_FULL_MODEL}"
        )


def deployed_class(base: Any, cls: type[Any]) -> Any:
    """Return the class of a deployed model: a subclass of ``base`` and ``cls`` that forwards the model's own methods.

    The own methods are public methods defined in ``transformers.models`` or in the user's code. Inherited methods
    (``generate``, ``prepare_inputs_for_generation``, ...) come from ``base``, or need only the configuration.
    """

    @functools.wraps(cls.forward)  # libraries look at its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, "forward": forward}
    seen = set(dir(base))
    for each in cls.__mro__:
        if _is_model_code(each.__module__):
            for name, value in vars(each).items():
                if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in seen:
                    namespace[name] = _forwarded(name, value)
                seen.add(name)
    return type(cls.__name__, (base, cls), namespace)


def _is_model_code(module: str) -> bool:
    package = module.partition(".")[0]
    if package == "transformers":
        return module.startswith("transformers.models.")
    return package not in ("oslo_models", "torch", "builtins", "abc", "typing")


def _forwarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs on all workers. It also takes ``timeout`` and ``seed``, as ``forward`` does."""
    own = inspect.signature(method).parameters

    @functools.wraps(method)
    def forward_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = {key: kwargs.pop(key) for key in ("timeout", "seed") if key in kwargs and key not in own}
        return self._call_method(name, args, kwargs, **options)

    return forward_call
