"""Micro-batch losses that add up to the loss of the full batch, and loss objects that take part in the schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_MEANS = {
    *(F.cross_entropy, F.nll_loss, F.ctc_loss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


def asks_for_loss(batch: Mapping[str, Any], more: Collection[str] = ()) -> bool:
    """Whether a forward with these arguments computes a loss.

    Args:
        more: arguments that ask for one beside those that transformers calls labels.
    """
    positions = ("start_positions", "end_positions")
    names = (name for name in batch if "label" in name or name in positions or name in more)
    return any(batch[name] is not None and batch[name] is not False for name in names)


class _FullBatch:
    """What a forward makes of the labels of a micro-batch, made again of those of the full batch.

    A forward shifts, pads, flattens and masks labels before its loss reads them. Each of these functions is noted
    with its arguments, and repeated on the full batch only for the tensor that a loss is given. Only functions whose
    tensors all come from the arguments are noted: what depends on hidden states is not known for the full batch.

    Args:
        pairs: tensors of the micro-batch, each with the same tensor of the full batch.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # The micro-batch's tensor is kept, so that no other one gets its id.
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        for part, full in pairs:
            self._made[id(part)] = (part, partial(_itself, full))

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._made

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember that ``func`` made ``result``, or changed its first argument, if it can be repeated."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x in self for x in given):
            return
        changed = given[0] if func is Tensor.__setitem__ or result is given[0] else None
        target = result if changed is None else changed
        if not isinstance(target, Tensor):
            return
        if not all(x in self or x.dim() == 0 for x in given):
            self._made.pop(id(target), None)  # from here on it depends on something else
            return
        made = {id(x): self._made[id(x)][1] for x in given if x in self}  # a change in place is noted anew

        def again() -> Tensor:
            full_args, full_kwargs = tree_map_only(
                Tensor, lambda x: made[id(x)]() if id(x) in made else x, (args, kwargs)
            )
            if changed is not None:
                first = full_args[0].clone()
                func(first, *full_args[1:], **full_kwargs)
                return first
            if func in _VIEWS:
                full_args = (full_args[0], *_folded(full_args[1:]))
            full: Tensor = func(*full_args, **full_kwargs)
            return full

        self._made[id(target)] = (target, again)

    def __getitem__(self, x: Tensor) -> Tensor:
        return self._made[id(x)][1]()


def _itself(x: Tensor) -> Tensor:
    return x


def _folded(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes of a view of a micro-batch, as those of a view of the full batch: the first one counts rows."""
    flat = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return flat if not flat or -1 in flat or not all(isinstance(size, int) for size in flat) else (-1, *flat[1:])


class GlobalMeanLoss(TorchFunctionMode):
    """While active, a loss that would average over its own targets is its share of the average over the full batch.

    transformers' losses average over the labels that are not ignored. Micro-batches may have different numbers of them,
    so the mean of their means is not the mean of the batch; sums divided by the count of the full batch are. Over how
    many targets a loss averages is found by following the labels to it, see `_FullBatch`; no class has to state
    whether it shifts its labels or in which order it computes several losses.

    Args:
        batch: the arguments of the forward, for the full batch.
        name: the class of the model, for messages.
    """

    def __init__(self, batch: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self._batch, self._name = batch, name
        self._counts: list[Tensor] = []
        self._known = False
        self._next = 0
        self._full = _FullBatch(())

    def of(self, micro_batch: Mapping[str, Any]) -> GlobalMeanLoss:
        """The mode for the forward of one micro-batch. Targets are counted in that of the first."""
        self._known, self._next = bool(self._counts), 0
        pairs = [(part, self._batch[key]) for key, part in micro_batch.items() if isinstance(part, Tensor)]
        self._full = _FullBatch(() if self._known else pairs)
        return self

    def __exit__(self, *args: Any) -> None:
        self._full = _FullBatch(())
        super().__exit__(*args)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MEANS and kwargs.get("reduction", "mean") == "mean":
            return self._share(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self._known:
            self._full.note(func, args, kwargs, result)
        return result

    def _share(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if not self._known:
            self._counts.append(self._count(func, *args, **kwargs))
        count = self._counts[self._next]
        self._next += 1
        if func is F.ctc_loss:
            return _sum_of_means(*args, **kwargs) / count
        summed: Tensor = func(*args, **{**kwargs, "reduction": "sum"})
        return summed / count

    def _count(
        self,
        func: Any,
        input: Tensor,
        target: Tensor,
        *lengths: Any,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Tensor:
        """Over how many targets ``func`` would average in the full batch."""
        counted: Tensor = (
            kwargs.get("target_lengths", lengths[-1] if lengths else target) if func is F.ctc_loss else target
        )
        if counted not in self._full or weight is not None or (lengths and func is not F.ctc_loss):
            raise ValueError(
                f"{self._name} computes {func.__name__} of targets that are not made of its labels alone, so the share "
                "of a micro-batch in the loss of the batch is not known: call model.set_micro_batch_size with the "
                "rows of the batch"
            )
        full = self._full[counted]
        if full.is_floating_point() or func is F.ctc_loss:
            classes = full.shape[1] if func is F.cross_entropy else 1
            return torch.tensor(full.numel() // classes, device=full.device)
        return (full != ignore_index).sum()


def _sum_of_means(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0, **kwargs: Any
) -> Tensor:
    """The sum over rows of what ``F.ctc_loss`` averages over them: the loss of each for one of its targets."""
    given = {**kwargs, "reduction": "none"}
    losses = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, **given)
    return (losses / target_lengths.clamp(min=1)).sum()


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.run = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.run(grad)
        return None, None, None


def loss_object(value: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
    """A scalar with ``value`` whose ``backward`` calls ``backward(gradient of the scalar)``.

    Whatever the user computes from it before calling ``backward`` (a scale, a sum) reaches the function too.
    """
    return _Turn.apply(torch.zeros((), device=value.device, requires_grad=True), value.detach(), backward)
