"""Verify a fusion on the model itself: compare the first module of each replaced kind with the original.

The model computes a few random tokens three times: with gradients, with an empty cache and left padding, and with one
more token and that cache. It stops after the last module to compare. The inputs and outputs of the originals are
recorded. Then the fused modules compute with the same inputs. All ranks of a model run the same modules in the same
order, and take the same decision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.fusion import verdicts
from oslo_models.fusion.lazy_logits import LazyHead, LazyLogits
from oslo_models.fusion.recorded_calls import RecordedCall, copied, recorded, width, with_few_outputs
from oslo_models.fusion.small_blocks import small
from oslo_models.fusion.swap import Fusion, FusionCandidate
from oslo_models.pipeline.sharded_model import ShardedModel

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


def kind_of(candidate: FusionCandidate, cls: type) -> str:
    """Return the kind of a candidate. All modules of a kind stay unfused if one computes something else.

    Args:
        cls: the original class of the module.
    """
    return f"{candidate.operation} ({cls.__name__})"


def apply_checked(
    model: ShardedModel, fusion: Fusion, candidates: Iterable[FusionCandidate], selected: set[type] | None
) -> list[FusionCandidate]:
    """Apply a fusion and undo it for the kinds that differ from the originals. A collective of the ranks of the model.

    Returns:
        The candidates. For undone kinds, the reason names the difference, and a warning reports them.
    """
    candidates, modules, swapped = list(candidates), dict(model.named_modules()), fusion.swapped()
    new = [c for c in candidates if _is_checked(c, selected) and c.module not in swapped]
    kinds = {c.module: kind_of(c, type(modules[c.module])) for c in new}
    first = {kind: name for name, kind in reversed(kinds.items())}
    key = verdicts.key_of(model, fusion, modules, first.values(), candidates)
    wrong: dict[str, str] = {}
    if _all_agree(model, verdicts.is_known(key)):
        fusion.apply(model, candidates, selected)
        unchecked = verdicts.unchecked(key)
    else:
        wrong, unchecked = _compare(model, fusion, modules, kinds, list(first.values()), candidates, selected)
        if not wrong:
            verdicts.remember(key, unchecked)
    fusion.fusion_candidates = [_decided(c, kinds.get(c.module), wrong, unchecked) for c in candidates]
    if wrong:
        told = "; ".join(f"{kind}: {why}" for kind, why in wrong.items())
        warnings.warn(f"fuse() leaves modules unfused because they differ from transformers: {told}", stacklevel=4)
    return fusion.fusion_candidates


def _all_agree(model: ShardedModel, is_known: bool) -> bool:
    return is_known if model.mesh is None else all(gather_objects(model.mesh.model, is_known))


def _compare(
    model: ShardedModel,
    fusion: Fusion,
    modules: Mapping[str, nn.Module],
    kinds: Mapping[str, str],
    first: list[str],
    candidates: list[FusionCandidate],
    selected: set[type] | None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Apply a fusion and undo the kinds that differ. Return the differences, and the reasons for unchecked kinds.

    Args:
        modules: all modules of the model, by name.
        kinds: the kinds of the modules to fuse.
        first: the first module of each kind.
    """
    names, failed = _agreed_names(model, sorted(first), modules.values())
    compared = [] if failed else [c for c in candidates if c.module in names and c.module in kinds]
    blocks = [(modules[c.module], c.attributes["decoding"].form) for c in compared if "decoding" in c.attributes]
    if fusion.weights is not None:  # copies in fewer bits refuse another weight
        blocks = []
    with _undisturbed(model, list(modules.values())), small(blocks):
        runs, failed = ([], failed) if failed else recorded(model, modules, names, fusion.weights is None)
        fusion.apply(model, candidates, selected)
        in_float8 = any("float8" in candidate.attributes for candidate in candidates)
        bound = _FLOAT8 if in_float8 else _NARROW.get(fusion.weights or "", 0.0)
        wrong = _differing(model, fusion, kinds, names, runs, bound)
    checked = {call.name for call in runs}
    unchecked = {kinds[name]: failed or "no small input reaches it" for name in first if name not in checked}
    return wrong, unchecked


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


def _agreed_names(model: ShardedModel, names: list[str], modules: Iterable[nn.Module]) -> tuple[list[str], str | None]:
    """Return the modules to compare on every tensor-parallel rank, and the reason if none can be compared."""
    found = [(names, _unchecked_reason(modules))]
    if model.mesh is not None:
        found = gather_objects(model.mesh.tp, found[0])
    unchecked = next((why for _, why in found if why), None)
    return sorted({name for each, _ in found for name in each}), unchecked


def _unchecked_reason(modules: Iterable[nn.Module]) -> str | None:
    for module in modules:
        if isinstance(module, FSDPModule):
            return "the model is wrapped by FSDP already"
        for param in module._parameters.values():
            if param is not None and param.is_meta:
                return "weights are on the meta device"
            if hasattr(param, "ds_id"):
                return "DeepSpeed keeps the weights elsewhere"
    return None


# Comparing ------------------------------------------------------------------------------------------------------------


def _differing(
    model: ShardedModel,
    fusion: Fusion,
    kinds: Mapping[str, str],
    names: list[str],
    runs: list[RecordedCall],
    bound: float,
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


def _difference(module: Any, call: RecordedCall, bound: float) -> str | None:
    """Return the difference between the outputs of fused and original module, or ``None`` if only by rounding."""
    try:
        with torch.set_grad_enabled(call.has_grad):
            if width(module) is not None:
                module = with_few_outputs(module)
            output = module(*copied(call.args), **copied(call.kwargs))
            if isinstance(module, LazyHead):
                output = _lazily(module, copied(call.args))
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
    expected, output = expected.double(), output.double()
    largest = float(torch.linalg.vector_norm(expected, math.inf))
    error = float(torch.linalg.vector_norm(output - expected, math.inf))
    if not math.isfinite(largest) or error <= bound * largest:
        return None
    relative = error / largest if largest else math.inf
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
def _undisturbed(model: ShardedModel, modules: list[nn.Module]) -> Iterator[None]:
    """Set the model to evaluation mode without foreign hooks; restore attributes, buffers and random states after."""
    kept = [(each, dict(each)) for m in modules for each in (m.__dict__, m._buffers) if each]
    buffers = [buffer for m in modules for buffer in m._buffers.values() if buffer is not None]
    values = [(buffer, buffer._version, buffer.clone()) for buffer in buffers if _may_change(buffer)]
    hooks = [(each, dict(each)) for m in modules for each in (m._forward_hooks, m._forward_pre_hooks) if each]
    for module in modules:
        module.__dict__["training"] = False
    for each, _ in hooks:
        for key in [key for key, hook in each.items() if not _is_own(hook)]:
            del each[key]
    devices = [model.device.index] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for now, before in kept:
            now.update(before)
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
