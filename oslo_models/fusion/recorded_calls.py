"""Record the calls of a few modules while a model computes a few random tokens, for `self_check`.

Legend:
    B: rows.
    L: tokens of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.sharding.model_protocol import TransformersModel

_ROWS, _LENGTH, _OUTPUTS = 2, 5, 256
_CACHES = ("cache", "past_key_values")


@dataclass
class RecordedCall:
    """A call of an original module.

    Attributes:
        visible: the positions without padding, [B, L]; ``None``: all.
        has_grad: whether gradients were on.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    visible: Tensor | None
    has_grad: bool


class _Recorded(Exception):
    pass


class _Recorder:
    """Records the first call of each module in a forward, and ends the forward after the last module.

    Attributes:
        cache: the cache that the forward has filled.
        failed: the reason if the forward ended before all modules were called.
    """

    def __init__(self, modules: Mapping[str, nn.Module], visible: Tensor | None) -> None:
        self._modules, self._visible = modules, visible
        self._missing = dict.fromkeys(modules)
        self._inputs: dict[str, Any] = {}
        self.calls: list[RecordedCall] = []
        self.cache: Any = None
        self.failed: str | None = None

    def run(self, forward: Callable[[], Any]) -> None:
        """Call ``forward`` with hooks on the modules."""
        handles: list[Any] = []
        for name, module in self._modules.items():
            before, after = partial(self._enter, name), partial(self._leave, name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after))
        try:
            forward()
        except _Recorded:
            pass
        except Exception as error:  # noqa: BLE001  not every model runs on any tokens, or in any dtype
            self.failed = f"the model does not run on a few random tokens ({type(error).__name__}: {error})"
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self._missing and name not in self._inputs:
            self.cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), self.cache)
            self._inputs[name] = copied((args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name not in self._missing:
            return
        del self._missing[name]
        inputs, options = self._inputs[name]
        self.calls.append(RecordedCall(name, inputs, options, copied(output), self._visible, torch.is_grad_enabled()))
        if not self._missing:
            raise _Recorded


def copied(value: Any) -> Any:
    """Return a copy of arguments or outputs, unaffected by later in-place changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(map(copied, value))
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return _copied_cache(value) if isinstance(value, Cache) else value


def _copied_cache(cache: Any) -> Any:
    """Return a copy of a cache, or of one of its layers. ``copy.deepcopy`` takes longer than the block."""
    made = object.__new__(type(cache))
    for name, value in vars(cache).items():
        made.__dict__[name] = list(map(_copied_cache, value)) if name == "layers" else copied(value)
    return made


def recorded(
    model: TransformersModel, modules: Mapping[str, nn.Module], names: list[str], trains: bool
) -> tuple[list[RecordedCall], str | None]:
    """Return the calls of the originals in a few small runs of the model, and the reason if a run failed.

    Linear layers are called separately, so that the head needs no run of the whole model.

    Args:
        modules: all modules of the model, by name.
        trains: whether the fused model computes with gradients.
    """
    base = model.base_model
    around = next(f"{name}." if name else "" for name, module in modules.items() if module is base)
    calls: list[RecordedCall] = []
    alone = [name for name in names if width(modules[name]) is not None]
    in_model = {name: modules[name] for name in names if name not in alone and name.startswith(around)}
    generator = torch.Generator().manual_seed(0)
    for name in alone:
        calls += _alone(name, modules[name], model.dtype, generator)
    if not in_model:
        return calls, None
    if model.main_input_name != "input_ids":
        return calls, f"no small {model.main_input_name} are known"
    recorders = _in_runs(model, base, in_model, trains, generator)
    calls += [call for recorder in recorders for call in recorder.calls]
    return calls, next((recorder.failed for recorder in recorders if recorder.failed), None)


def _in_runs(
    model: TransformersModel, base: Any, modules: Mapping[str, nn.Module], trains: bool, generator: torch.Generator
) -> list[_Recorder]:
    # transformers' forward: the forward of this library gathers outputs and runs pipeline stages
    defining = (cls for cls in type(base).__mro__ if cls.__module__.startswith("transformers."))
    original = next(vars(cls)["forward"] for cls in defining if "forward" in vars(cls))
    accepted = signature(original).parameters
    words = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(3, words - 1), words, (_ROWS, _LENGTH), generator=generator).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache_name = next((name for name in _CACHES if name in accepted), None)
    caches = "use_cache" in accepted

    def run(ids: Tensor, mask: Tensor | None, **given: Any) -> _Recorder:
        given |= {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = ids
        recorder = _Recorder(modules, None if mask is None else mask[:, -ids.shape[1] :].bool())
        recorder.run(partial(original, base, **{name: value for name, value in given.items() if name in accepted}))
        return recorder

    with torch.set_grad_enabled(trains):
        recorders = [run(ids, None, use_cache=False)]
    with torch.no_grad():
        filled = run(ids, mask, use_cache=True)
        recorders.append(filled)
        if caches and cache_name is not None and filled.cache is not None:
            longer = torch.cat((mask, mask[:, -1:]), 1)
            recorders.append(run(ids[:, :1], longer, use_cache=True, **{cache_name: filled.cache}))
    return recorders


def width(module: Any) -> int | None:
    """Return the input width of a linear layer, which can be called separately, or ``None`` for other modules."""
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0])
    return int(module.weight.shape[1]) if isinstance(module, nn.Linear) else None


def _alone(name: str, module: Any, dtype: torch.dtype, generator: torch.Generator) -> Iterator[RecordedCall]:
    with without_override():
        inputs, device = width(module) or 1, module.weight.device
    x = torch.randn(1, 1, inputs, generator=generator).to(device, dtype)
    with torch.no_grad():
        yield RecordedCall(name, (x,), {}, copied(with_few_outputs(module)(x.clone())), None, False)


def with_few_outputs(module: Any) -> Any:
    """Return a linear layer with the first outputs of ``module``.

    A head may have more weights than all blocks of a small model.
    """
    few, is_conv = copy.copy(module), isinstance(module, Conv1D)
    with without_override(), torch.no_grad():
        weight = module.weight[:, :_OUTPUTS].contiguous() if is_conv else module.weight[:_OUTPUTS]
        bias = None if module.bias is None else module.bias[:_OUTPUTS]
    own = {"weight": weight, "bias": bias}
    few.__dict__["_parameters"] = {key: None if x is None else nn.Parameter(x, False) for key, x in own.items()}
    if is_conv:
        few.nf = weight.shape[1]
    return few
