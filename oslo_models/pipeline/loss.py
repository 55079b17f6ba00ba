"""Micro-batch losses that add up to the loss of the whole batch, and loss objects that take part in the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MEANS = {F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits, F.ctc_loss}


class ShareOfBatch(TorchFunctionMode):
    """While active, a loss that would average over its own targets is its share of the average over the whole batch.

    transformers' losses average over the labels that are not ignored. Micro-batches may have different numbers of them,
    so the mean of their means is not the mean of the batch; sums divided by the count of the whole batch are.

    Args:
        counts: for each loss that a forward computes, in order, over how many targets the whole batch averages; zero
            leaves it as it is.
    """

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self._counts = counts
        self._next = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _MEANS or kwargs.get("reduction", "mean") != "mean":
            return func(*args, **kwargs)
        count = self._counts[min(self._next, len(self._counts) - 1)]
        self._next += 1
        if not count:
            return func(*args, **kwargs)
        if func is F.ctc_loss:
            return _sum_of_means(*args, **kwargs) / count
        summed = func(*args, **{**kwargs, "reduction": "sum"})
        return summed / count


def _sum_of_means(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0, **kwargs: Any
) -> Tensor:
    """The sum over rows of what ``F.ctc_loss`` averages over them: the loss of each for one of its targets."""
    given = {**kwargs, "reduction": "none"}
    losses = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, **given)
    return (losses / target_lengths.clamp(min=1)).sum()


def label_counts(batch: Mapping[str, Any], order: tuple[str, ...], shifted: bool, ignore: int = -100) -> list[int]:
    """Over how many targets each loss of a forward averages.

    Args:
        batch: the arguments of the forward, for the whole batch.
        order: the arguments that are labels, in the order in which the forward computes their losses; or
            ``"attention_mask"`` for all that it covers, ``"rows"`` for the rows that have labels.
        shifted: whether ``labels`` of a position are the next token (causal language models).
    """
    counts = []
    for name in order:
        labels = batch.get(name)
        if name == "attention_mask":  # every label that it covers
            counts.append(int(labels.sum()) if labels is not None else batch["input_ids"].numel())
            continue
        if name == "rows":
            counts += [len(batch["labels"])] if batch.get("labels") is not None else []
            continue
        if labels is None or labels is False:
            continue
        if labels is True:  # asks for the loss of what has no labels
            counts.append(1)
            continue
        if name in ("start_positions", "end_positions"):  # a position outside the sequence is ignored
            sides = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
            tokens = next(batch[side] for side in sides if batch.get(side) is not None)
            counts.append(int((labels < tokens.shape[1]).sum()))
        elif labels.is_floating_point():
            counts.append(labels.numel())
        else:
            counted = labels[..., 1:] if shifted and name == "labels" else labels
            counts.append(int((counted != ignore).sum()))
    return counts


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
