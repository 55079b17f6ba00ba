"""Runs one stage on one micro-batch: transformers' forward, fed with what was received, left where the stage ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oslo_models.pipeline.placeholders import BoundaryDropout
from oslo_models.pipeline.stage import Stack, Stage

Batch = Mapping[str, Any]
EMBEDS = "inputs_embeds"


class OtherStageError(RuntimeError):
    """What a stage raises because another one has: that one's exception says why."""


class _StageEnd(Exception):
    """Leaves a forward where the stage ends."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class StageRunner:
    """One stage of a model, as a function of a micro-batch and of the hidden states that arrive.

    Args:
        model: the stage's part of the model.
        forward: transformers' forward of the model's class.

    Attributes:
        abandoned: whether the last loop was left before its end.
        inside: whether a call of the model is one for a micro-batch.
    """

    def __init__(self, model: Any, stage: Stage, forward: Callable[..., Any]) -> None:
        self.model, self.stage, self._forward = model, stage, forward
        self._ends = [module for module in model.modules() if isinstance(module, BoundaryDropout)]
        self.abandoned = self.inside = False
        self._made: dict[int, Tensor] = {}
        here = [i for i, stack in enumerate(stage.stacks) if stack.here]
        for i in here:
            if stage.stacks[i].name:
                leaves = i == here[-1] and not stage.is_last
                # A partial of a method, so that in a copy of the model it is one of the copy of this runner.
                model.get_submodule(stage.stacks[i].name).register_forward_hook(partial(self._watch, i, leaves))
        self._returned = dict(enumerate(stage.returned, len(stage.stacks)))
        if stage.index == 0:
            for number, path in self._returned.items():
                model.get_submodule(path).register_forward_hook(partial(self._note, number))

    def _watch(self, stack: int, leaves: bool, module: nn.Module, args: Any, output: Any) -> None:
        """A hook that notes what a stack made, and leaves the forward if the stage ends there."""
        self._made[stack] = output[0]
        if leaves:
            raise _StageEnd(output)

    def _note(self, number: int, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook that notes what the model returns beside what its blocks make."""
        self._made[number] = output

    # What travels has a number: that of its stack, or, after these, what the model returns beside.

    def arriving(self) -> list[int]:
        """Whose hidden states arrive from the stage before, in the order in which they travel."""
        begun = [i for i, stack in enumerate(self.stage.stacks) if stack.first < self.stage.index]
        return [*begun, *self._returned] if self.stage.index else []

    def leaving(self) -> list[int]:
        """Whose hidden states go on to the stage after."""
        if self.stage.is_last:
            return []
        begun = [i for i, stack in enumerate(self.stage.stacks) if stack.first <= self.stage.index]
        return [*begun, *self._returned]

    def shape(self, batch: Batch, stack: int) -> tuple[int, int, int]:
        """``(rows, length, width)`` of what has the number ``stack``; every rank knows it from the batch."""
        if stack in self._returned:
            return (*self.shape(batch, 0)[:2], self.stage.returned[self._returned[stack]])
        stack_of, hidden = self.stage.stacks[stack], self._width(self.stage.stacks[stack])
        if stack_of.positions is not None:
            return (*stack_of.positions(batch), hidden)
        decoder = stack == len(self.stage.stacks) - 1 and len(self.stage.stacks) > 1
        labels = batch.get("labels")
        tokens = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
        # Without tokens of its own, transformers makes those of a decoder from the labels, or from the encoder's.
        names = ("decoder_input_ids", *(("labels",) if tokens else ()), "input_ids") if decoder else ("input_ids",)
        embeds = batch.get("decoder_inputs_embeds" if decoder else "inputs_embeds")
        if embeds is not None:
            return embeds[..., 0].numel() // embeds.shape[-2], embeds.shape[-2], hidden
        ids = next(batch[name] for name in names if batch.get(name) is not None)
        return ids.numel() // ids.shape[-1], ids.shape[-1], hidden

    def _width(self, stack: Stack) -> int:
        """The hidden size of the innermost model around the blocks that knows one."""
        path, found = stack.blocks, None
        while found is None:
            path = path.rpartition(".")[0]
            found = getattr(getattr(self.model.get_submodule(path), "config", None), "hidden_size", None)
        return int(found)

    def __call__(self, batch: Batch, arrived: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Any]:
        """Run the stage.

        Args:
            arrived: for each number of `arriving` the hidden states.

        Returns:
            For each number of `leaving` the hidden states, and what the forward returned: the output of the model on
            the last stage, elsewhere that of the stack in which the stage ends.
        """
        batch = dict(batch)
        for i, hidden in arrived.items():
            if i in self._returned:
                self.model.get_submodule(self._returned[i]).arrived = hidden
            elif self.stage.stacks[i].last < self.stage.index and self.model.config.is_encoder_decoder:
                batch["encoder_outputs"] = (hidden,)
            else:
                self._feed(i, batch, hidden)
        for dropout in self._ends:
            dropout.calls = 0
        made, output = self._through_hooks(batch) if isinstance(self.model, FSDPModule) else self.forward(batch)
        known = {**arrived, **made}
        return {i: known[i] for i in self.leaving() if i in known}, output

    def _through_hooks(self, batch: dict[str, Any]) -> Any:
        """`forward` by way of a call of the model, around which FSDP gathers parameters and gives them away."""
        self.inside = True
        try:
            return self.model(**batch)
        finally:
            self.inside = False

    def forward(self, batch: dict[str, Any]) -> tuple[dict[int, Tensor], Any]:
        """What the model's forward does for one micro-batch: the hidden states of each stack here, and the output."""
        self._made = {}
        try:
            output = self._forward(self.model, **batch)
        except _StageEnd as done:
            output = done.output
        made, self._made = self._made, {}
        if not self.stage.is_last and not self.stage.stacks[0].name:  # the model is its only stack
            made[0] = output[0]
        return {i: hidden.flatten(0, -3) for i, hidden in made.items()}, output

    def _feed(self, stack: int, batch: dict[str, Any], hidden: Tensor) -> None:
        """Put what arrived where the stack looks for its embedded tokens."""
        embeds = f"decoder_{EMBEDS}" if stack == len(self.stage.stacks) - 1 > 0 else EMBEDS
        received = self.stage.stacks[stack].received
        if batch.get(embeds) is not None:
            batch[embeds] = hidden
        elif received is not None:
            received.arrived = hidden

    def run_stack(self, stack: int, batch: dict[str, Any], arrived: Tensor | None) -> Tensor:
        """Run one stack by itself (the encoder, before tokens are generated) and return its hidden states."""
        batch = dict(batch)
        if arrived is not None:
            self._feed(stack, batch, arrived)
        for dropout in self._ends:
            dropout.calls = 0
        try:
            output = self.model.get_submodule(self.stage.stacks[stack].name)(**batch)
        except _StageEnd as done:
            output = done.output
        return output[0]
