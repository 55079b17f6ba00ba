"""Verify a fusion on the model itself: compare the first module of each replaced kind with the original.

The model computes a few random tokens three times: with gradients, with an empty cache and left padding, and with one
more token and that cache. It stops after the last module to compare. The inputs and outputs of the originals are
recorded. Then the fused modules compute with the same inputs. All ranks of a model run the same modules in the same
order, and take the same decision.

Legend:
    B: rows.
    L: tokens of a row.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.lazy_logits import LazyHead, LazyLogits
from oslo_models.fusion.swap import Fusion, FusionCandidate

BOUNDS = {
    # transformers' norms, softmax and positions round to float32 (2^-24) inside, and kernels in float64 do not. Without
    # these inner roundings, as in the tests, both agree to 1e-10.
    torch.float64: 1e-5,
    # Sums of up to ten thousand products in another order differ by at most 2^-24 times the number of products, and
    # typically by 2^-24 times its square root. The bound is between the two.
    torch.float32: 1e-4,
    # A block rounds its hidden states some eight times, by half a unit in the last place (2^-9, 2^-12) of a number.
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
}
"""The maximum rounding difference, relative to the largest element of the original's output."""
_COARSER = {"high": 2**-8, "medium": 2**-5}
"""The bounds in float32 under other values of ``torch.set_float32_matmul_precision``: TF32 and bfloat16 products."""
_NARROW = {"bfloat16": 2**-5, "int8": 2**-3}
"""The bounds with narrow weights: their rounding errors pass through attention and MLP."""
_FLOAT8 = 2**-3
"""The bound of modules around linear layers in float8, with a rounding error of 2^-4 per element."""
_ROWS, _LENGTH, _OUTPUTS = 2, 5, 256
_CACHES = ("cache", "past_key_values")


def kind_of(candidate: FusionCandidate, cls: type) -> str:
    """Return the kind of a candidate. All modules of a kind stay unfused if one computes something else.

    Args:
        cls: the original class of the module.
    """
    return f"{candidate.operation} ({cls.__name__})"


def apply_checked(
    model: Any, fusion: Fusion, candidates: Iterable[FusionCandidate], selected: set[type] | None
) -> list[FusionCandidate]:
    """Apply a fusion and undo it for the kinds that differ from the originals. A collective of the ranks of the model.

    Returns:
        The candidates. For undone kinds, the reason names the difference, and a warning reports them.
    """
    candidates = list(candidates)
    new = [c for c in candidates if _is_checked(c, selected) and c.module not in fusion.swapped()]
    kinds = {c.module: kind_of(c, type(model.get_submodule(c.module))) for c in new}
    first = {kind: name for name, kind in reversed(kinds.items())}
    names, failed = _agreed_names(model, sorted(first.values()))
    with _undisturbed(model):
        runs, failed = ([], failed) if failed else _recorded(model, names, fusion.weights is None)
        fusion.apply(model, candidates, selected)
        in_float8 = any("float8" in candidate.attributes for candidate in candidates)
        bound = _FLOAT8 if in_float8 else _NARROW.get(fusion.weights or "", 0.0)
        wrong = _differing(model, fusion, kinds, names, runs, bound)
    checked = {kinds[call.name] for call in runs if call.name in kinds}
    unchecked = {kind: failed or "no small input reaches it" for kind in first if kind not in checked}
    fusion.fusion_candidates = [_decided(c, kinds.get(c.module), wrong, unchecked) for c in candidates]
    if wrong:
        told = "; ".join(f"{kind}: {why}" for kind, why in wrong.items())
        warnings.warn(f"fuse() leaves modules unfused because they differ from transformers: {told}", stacklevel=4)
    return fusion.fusion_candidates


def _is_checked(candidate: FusionCandidate, selected: set[type] | None) -> bool:
    is_swapped = candidate.cls is not None and candidate.module != "" and candidate.is_selected(selected)
    return is_swapped and "float8" not in candidate.attributes  # the float8 rounding hides other differences


def _decided(
    candidate: FusionCandidate, kind: str | None, wrong: dict[str, str], unchecked: dict[str, str]
) -> FusionCandidate:
    if kind in wrong:
        return replace(candidate, cls=None, reason=f"left unfused: {wrong[kind]}", attributes={})
    if kind in unchecked:
        return replace(candidate, reason=f"{candidate.reason}; not checked: {unchecked[kind]}")
    return candidate


def _agreed_names(model: Any, names: list[str]) -> tuple[list[str], str | None]:
    """Return the modules to compare on every tensor-parallel rank, and the reason if none can be compared."""
    found = [(names, _unchecked_reason(model))]
    if model.mesh is not None:
        found = gather_objects(model.mesh.tp, found[0])
    unchecked = next((why for _, why in found if why), None)
    return sorted({name for each, _ in found for name in each}), unchecked


def _unchecked_reason(model: nn.Module) -> str | None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "the model is wrapped by FSDP already"
    for param in model.parameters():
        if param.is_meta:
            return "weights are on the meta device"
        if hasattr(param, "ds_id"):
            return "DeepSpeed keeps the weights elsewhere"
    return None


# Recording ------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
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

    def __init__(self, model: nn.Module, names: Iterable[str], visible: Tensor | None) -> None:
        self._model, self._visible = model, visible
        self._missing = dict.fromkeys(names)
        self._inputs: dict[str, Any] = {}
        self.calls: list[_Call] = []
        self.cache: Any = None
        self.failed: str | None = None

    def run(self, forward: Callable[[], Any]) -> None:
        """Call ``forward`` with hooks on the modules."""
        handles: list[Any] = []
        for name in self._missing:
            module = self._model.get_submodule(name)
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
            self._inputs[name] = _copied((args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name not in self._missing:
            return
        del self._missing[name]
        inputs, options = self._inputs[name]
        has_grad = torch.is_grad_enabled()
        self.calls.append(_Call(name, inputs, options, _copied(output), self._visible, has_grad))
        if not self._missing:
            raise _Recorded


def _copied(value: Any) -> Any:
    """Return a copy of arguments or outputs, unaffected by later in-place changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value) if isinstance(value, Cache) else value


def _recorded(model: Any, names: list[str], trains: bool) -> tuple[list[_Call], str | None]:
    """Return the calls of the originals in a few small runs of the model, and the reason if a run failed.

    Linear layers are called separately, so that the head needs no run of the whole model.

    Args:
        trains: whether the fused model computes with gradients.
    """
    base = model.base_model
    calls: list[_Call] = []
    inside = {id(module) for module in base.modules()}
    alone = [name for name in names if _width(model.get_submodule(name)) is not None]
    in_model = [name for name in names if name not in alone and id(model.get_submodule(name)) in inside]
    generator = torch.Generator().manual_seed(0)
    for name in alone:
        calls += _alone(name, model.get_submodule(name), model.dtype, generator)
    if not in_model:
        return calls, None
    if model.main_input_name != "input_ids":
        return calls, f"no small {model.main_input_name} are known"
    recorders = _in_runs(model, base, in_model, trains, generator)
    calls += [call for recorder in recorders for call in recorder.calls]
    return calls, next((recorder.failed for recorder in recorders if recorder.failed), None)


def _in_runs(model: Any, base: Any, names: list[str], trains: bool, generator: torch.Generator) -> list[_Recorder]:
    # transformers' forward: the forward of this library gathers outputs and runs pipeline stages
    defining = (cls for cls in type(base).__mro__ if cls.__module__.startswith("transformers."))
    forward = partial(next(vars(cls)["forward"] for cls in defining if "forward" in vars(cls)), base)
    accepted = signature(forward).parameters
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
        recorder = _Recorder(model, names, None if mask is None else mask[:, -ids.shape[1] :].bool())
        recorder.run(partial(forward, **{name: value for name, value in given.items() if name in accepted}))
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


def _width(module: Any) -> int | None:
    """Return the input width of a linear layer, which can be called separately, or ``None`` for other modules."""
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0])
    return int(module.weight.shape[1]) if isinstance(module, nn.Linear) else None


def _alone(name: str, module: Any, dtype: torch.dtype, generator: torch.Generator) -> Iterator[_Call]:
    with without_override():
        width, device = _width(module) or 1, module.weight.device
    x = torch.randn(1, 1, width, generator=generator).to(device, dtype)
    with torch.no_grad():
        yield _Call(name, (x,), {}, _copied(_with_few_outputs(module)(x.clone())), None, False)


def _with_few_outputs(module: Any) -> Any:
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


# Comparing ------------------------------------------------------------------------------------------------------------


def _differing(
    model: Any, fusion: Fusion, kinds: dict[str, str], names: list[str], runs: list[_Call], bound: float
) -> dict[str, str]:
    """Undo the kinds that differ from the originals. Return them with the differences.

    If a module inside another module differs, the outer module is compared again after the inner one is undone.
    """
    wrong: dict[str, str] = {}
    todo = names
    while True:
        found: dict[str, str] = {}
        for call in runs:
            if call.name in todo and call.name not in found:
                difference = _difference(model.get_submodule(call.name), call, bound)
                if difference is not None:
                    found[call.name] = difference
        if model.mesh is not None:  # these ranks have the same modules, so they continue with the same set
            found = _merged(gather_objects(model.mesh.tp, found))
        inner = {n: why for n, why in found.items() if not any(o.startswith(f"{n}.") for o in found)}
        told = {kinds[name]: why for name, why in inner.items() if name in kinds}
        if model.mesh is not None:  # other stages follow
            told = _merged(gather_objects(model.mesh.model, told))
        if not told:
            return wrong
        wrong.update(told)
        fusion.undo([name for name, kind in kinds.items() if kind in told and name in fusion.swapped()])
        todo = [name for name in found if name not in inner]


def _merged(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """Merge the findings of all ranks. The first rank wins."""
    return {key: value for each in reversed(of_ranks) for key, value in sorted(each.items())}


def _difference(module: Any, call: _Call, bound: float) -> str | None:
    """Return the difference between the outputs of fused and original module, or ``None`` if only by rounding."""
    try:
        with torch.set_grad_enabled(call.has_grad):
            if _width(module) is not None:
                module = _with_few_outputs(module)
            output = module(*_copied(call.args), **_copied(call.kwargs))
            if isinstance(module, LazyHead):
                output = _lazily(module, _copied(call.args))
    except Exception as error:  # noqa: BLE001  the original did not raise
        return f"it raises {type(error).__name__}: {error}"
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return _compared(call.output, output, call.visible, bound)


def _lazily(head: LazyHead, args: Any) -> Any:
    """Return the logits of a lazy head."""
    head.lazy = True
    try:
        logits = head(*args)
    finally:
        head.lazy = False
    return logits.compute() if isinstance(logits, LazyLogits) else logits


def _compared(expected: Any, output: Any, visible: Tensor | None, bound: float) -> str | None:
    if isinstance(expected, Tensor):
        return _compared_tensors(expected, output, visible, bound)
    if isinstance(expected, dict):
        expected, output = tuple(expected.values()), tuple(output.values()) if isinstance(output, dict) else output
    if not isinstance(expected, (tuple, list)):
        return None
    if not isinstance(output, (tuple, list)) or len(output) != len(expected):
        return "its output has another form"
    for index, (one, other) in enumerate(zip(expected, output, strict=True)):
        if index and other is None:  # attention weights that were not requested
            continue
        if (difference := _compared(one, other, visible, bound)) is not None:
            return difference
    return None


def _compared_tensors(expected: Tensor, output: Any, visible: Tensor | None, bound: float) -> str | None:
    if not isinstance(output, Tensor) or output.shape != expected.shape or output.dtype != expected.dtype:
        return "its output has another form"
    expected, output = _visible(expected, visible), _visible(output, visible)
    if not expected.numel() or not expected.dtype.is_floating_point:
        return None
    bound = max(bound, _bound(expected.dtype))
    largest = expected.abs().amax().double()
    error = (output.double() - expected.double()).abs().amax()
    if not largest.isfinite() or error <= bound * largest:
        return None
    relative = (error / largest).item()
    return f"its output differs from transformers' by {relative:.1e} of the largest value, and rounding by {bound:.1e}"


def _bound(dtype: torch.dtype) -> float:
    precision = torch.get_float32_matmul_precision() if dtype is torch.float32 else "highest"
    return _COARSER.get(precision, BOUNDS.get(dtype, BOUNDS[torch.bfloat16]))


def _visible(x: Tensor, visible: Tensor | None) -> Tensor:
    """Select the positions without padding. Padded queries see no key, so their outputs are arbitrary."""
    if visible is None:
        return x
    if x.shape[:2] == visible.shape:
        return x[visible]
    if x.dim() == 4 and (x.shape[0], x.shape[2]) == visible.shape:
        return x.transpose(1, 2)[visible]
    return x[visible.flatten()] if x.shape[0] == visible.numel() else x


# The model stays as it was --------------------------------------------------------------------------------------------


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode without foreign hooks; restore attributes, buffers and random states after."""
    modules = list(model.modules())
    kept = [(m.__dict__, dict(m.__dict__), m._buffers, dict(m._buffers)) for m in modules]
    buffers = [buffer for _, _, _, own in kept for buffer in own.values() if buffer is not None]
    values = [(buffer, buffer._version, buffer.clone()) for buffer in buffers if _may_change(buffer)]
    hooks = [(each, dict(each)) for m in modules for each in (m._forward_hooks, m._forward_pre_hooks) if each]
    for module in modules:
        module.training = False
    for each, _ in hooks:
        for key in [key for key, hook in each.items() if not _is_own(hook)]:
            del each[key]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for attributes, own, held, own_buffers in kept:
            attributes.update(own)
            held.update(own_buffers)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)
        for each, own_hooks in hooks:
            each.clear()
            each.update(own_hooks)


def _may_change(buffer: Tensor) -> bool:
    """Return whether to copy a buffer because a forward may change it. Large buffers are constant tables."""
    return not buffer.is_meta and not buffer.is_inference() and buffer.numel() <= 1 << 12


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("oslo_models.")
