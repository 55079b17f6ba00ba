"""Micro-batch losses that add up to the loss of the full batch, and loss objects that take part in the schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import ModelOutput

from oslo_models.pipeline.sharded_model import ShardedModel

_MEAN_LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.ctc_loss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


def asks_for_loss(batch: Mapping[str, Any], more: Collection[str] = ()) -> bool:
    """Return whether a forward with these arguments computes a loss.

    Args:
        more: names of further arguments that make the forward compute a loss.
    """
    positions = ("start_positions", "end_positions")
    names = (name for name in batch if "label" in name or name in positions or name in more)
    return any(batch[name] is not None and batch[name] is not False for name in names)


def computes_loss(model: ShardedModel) -> bool:
    """Return whether the forward of a model can compute a loss. Some base models accept labels and ignore them."""
    if getattr(model, "base_model", None) is not model:
        return True
    output = inspect.unwrap(type(model).forward).__annotations__.get("return")
    kinds = [each for each in get_args(output) or (output,) if isinstance(each, type) and issubclass(each, ModelOutput)]
    return not kinds or any("loss" in {each.name for each in fields(kind)} for kind in kinds)


class _FullBatchReplay:
    """Replays the label operations of a micro-batch forward on the full batch.

    A forward shifts, pads, flattens and masks labels before its loss reads them. Each of these calls is recorded with
    its arguments, and replayed on the full batch for the target of a loss. A call is recorded only if all its tensors
    derive from the batch, since hidden states of the full batch are unknown.

    Args:
        pairs: tensors of the micro-batch, each with the corresponding tensor of the full batch.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # Keep the tensor of the micro-batch alive, so that no other tensor gets its id.
        self._recorded: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        for part, full in pairs:
            self._recorded[id(part)] = (part, partial(_identity, full))

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._recorded

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record that ``func`` returned ``result`` or modified its first argument, if the call can be replayed."""
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x in self for x in inputs):
            return
        modified = inputs[0] if func is Tensor.__setitem__ or result is inputs[0] else None
        target = result if modified is None else modified
        if not isinstance(target, Tensor):
            return
        if not all(x in self or x.dim() == 0 for x in inputs):
            self._recorded.pop(id(target), None)  # it now depends on other tensors
            return
        # Look up the entries now, as a later in-place modification replaces them.
        replays = {id(x): self._recorded[id(x)][1] for x in inputs if x in self}

        def replay() -> Tensor:
            full_args, full_kwargs = tree_map_only(
                Tensor, lambda x: replays[id(x)]() if id(x) in replays else x, (args, kwargs)
            )
            if modified is not None:
                first = full_args[0].clone()
                func(first, *full_args[1:], **full_kwargs)
                return first
            if func in _VIEWS:
                full_args = (full_args[0], *_full_batch_sizes(full_args[1:]))
            full: Tensor = func(*full_args, **full_kwargs)
            return full

        self._recorded[id(target)] = (target, replay)

    def __getitem__(self, x: Tensor) -> Tensor:
        return self._recorded[id(x)][1]()


def _identity(x: Tensor) -> Tensor:
    return x


def _full_batch_sizes(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adapt the view sizes of a micro-batch to the full batch. The first size counts rows and becomes -1."""
    flat = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return flat if not flat or -1 in flat or not all(isinstance(size, int) for size in flat) else (-1, *flat[1:])


class GlobalMeanLoss(TorchFunctionMode):
    """Mode that divides mean losses by the number of targets of the full batch instead of the micro-batch.

    transformers' losses average over the labels that are not ignored. Micro-batches may have different numbers of such
    labels, so the mean of their means is not the mean over the batch. Sums divided by the count of the full batch add
    up to it. `_FullBatchReplay` replays the label operations of the forward to find the count. So no model class has to
    state whether it shifts its labels, or in which order it computes several losses.

    Args:
        batch: arguments of the forward for the full batch.
        name: name of the model class, for messages.
    """

    def __init__(self, batch: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self._batch, self._name = batch, name
        self._counts: list[Tensor] = []
        self._has_counts = False
        self._next_loss = 0
        self._replay = _FullBatchReplay(())

    def for_micro_batch(self, micro_batch: Mapping[str, Any]) -> GlobalMeanLoss:
        """Prepare this mode for the forward of one micro-batch. The first micro-batch counts the targets."""
        self._has_counts, self._next_loss = bool(self._counts), 0
        pairs = [(part, self._batch[key]) for key, part in micro_batch.items() if isinstance(part, Tensor)]
        self._replay = _FullBatchReplay(() if self._has_counts else pairs)
        return self

    def __exit__(self, *args: Any) -> None:
        self._replay = _FullBatchReplay(())
        super().__exit__(*args)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MEAN_LOSSES and kwargs.get("reduction", "mean") == "mean":
            return self._loss_share(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self._has_counts:
            self._replay.record(func, args, kwargs, result)
        return result

    def _loss_share(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if not self._has_counts:
            self._counts.append(self._count_targets(func, *args, **kwargs))
        count = self._counts[self._next_loss]
        self._next_loss += 1
        if func is F.ctc_loss:
            return _sum_of_means(*args, **kwargs) / count
        summed: Tensor = func(*args, **{**kwargs, "reduction": "sum"})
        return summed / count

    def _count_targets(
        self,
        func: Any,
        input: Tensor,
        target: Tensor,
        *lengths: Any,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Tensor:
        """Return the number of targets over which ``func`` would average on the full batch."""
        counted: Tensor = (
            kwargs.get("target_lengths", lengths[-1] if lengths else target) if func is F.ctc_loss else target
        )
        if counted not in self._replay or weight is not None or (lengths and func is not F.ctc_loss):
            raise ValueError(
                f"{self._name} computes {func.__name__} of targets that depend on more than its labels, so the share "
                "of a micro-batch in the loss of the batch is unknown: call model.set_micro_batch_size with the "
                "rows of the batch"
            )
        full = self._replay[counted]
        if full.is_floating_point() or func is F.ctc_loss:
            classes = full.shape[1] if func is F.cross_entropy else 1
            return torch.tensor(full.numel() // classes, device=full.device)
        return (full != ignore_index).sum()


def _sum_of_means(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0, **kwargs: Any
) -> Tensor:
    """Return the sum over rows of the loss per target. ``F.ctc_loss`` averages these losses."""
    options = {**kwargs, "reduction": "none"}
    losses = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, **options)
    return (losses / target_lengths.clamp(min=1)).sum()


class _LossObject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.run = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.run(grad)
        return None, None, None


def loss_object(value: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
    """Return a scalar tensor with ``value``. Its backward pass calls ``backward(gradient of the scalar)``.

    The user may compute with the scalar before calling ``backward`` (scale it, add to it). The gradient accounts for
    that.
    """
    return _LossObject.apply(torch.zeros((), device=value.device, requires_grad=True), value.detach(), backward)
