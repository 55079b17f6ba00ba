"""Runs one stage on one micro-batch: transformers' forward from received hidden states to the end of the stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import MoEModelOutput
from transformers.utils import ModelOutput

from oslo_models.distributed.stopping import OtherRankError
from oslo_models.pipeline.placeholders import BoundaryDropout
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.pipeline.stage import Stage, hidden_size

Batch = Mapping[str, Any]
EMBEDS = "inputs_embeds"


class OtherStageError(OtherRankError):
    """Raised on a stage because another stage has raised. The exception of the other stage gives the reason."""


class _StageEnd(Exception):
    """Raised to leave a forward at the end of the stage. Carries the output of the stage's last stack."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class StageRunner:
    """One stage of a model, as a function of a micro-batch and the received hidden states.

    Each tensor that is sent between stages has a number. Hidden states have the number of their stack. Further outputs
    of the model (`Stage.early_outputs`) and the router logits of each stage have the next numbers.

    Args:
        model: local stage of the model.
        forward: transformers' forward of the model class.

    Attributes:
        abandoned: whether the last loop over micro-batches was left before its end.
        is_running: whether the current call of the model is for one micro-batch.
    """

    def __init__(self, model: ShardedModel, stage: Stage, forward: Callable[..., Any]) -> None:
        self.model, self.stage, self._forward = model, stage, forward
        self._boundary_dropouts = [module for module in model.modules() if isinstance(module, BoundaryDropout)]
        self._blocks = {stack.blocks: [*model.get_submodule(stack.blocks)._modules] for stack in stage.stacks}
        self.abandoned = self.is_running = False
        self._outputs: dict[int, Tensor] = {}
        self._router_logits: list[Tensor] = []
        local = [i for i, stack in enumerate(stage.stacks) if stack.is_local]
        for i in local:
            if stage.stacks[i].name:
                ends_stage = i == local[-1] and not stage.is_last
                # Use a partial of a method. When the model is copied, the hook then refers to the copy of this runner.
                model.get_submodule(stage.stacks[i].name).register_forward_hook(
                    partial(self._record_stack, i, ends_stage)
                )
        self._returned = dict(enumerate(stage.early_outputs, len(stage.stacks)))
        first = len(stage.stacks) + len(stage.early_outputs)
        self._routers = {first + i: count for i, count in enumerate(stage.routers) if count and stage.records_routers}
        self._own_routers = first + stage.index
        if stage.index == 0:
            for number, path in self._returned.items():
                model.get_submodule(path).register_forward_hook(partial(self._record_returned, number))

    def _record_stack(self, stack: int, ends_stage: bool, module: nn.Module, args: Any, output: Any) -> None:
        """Hook that keeps the output of a stack, and leaves the forward if the stage ends there."""
        self._outputs[stack] = output[0]
        self._exchange_router_logits(output)
        if ends_stage:
            raise _StageEnd(output)

    def _exchange_router_logits(self, output: Any) -> None:
        """Keep the router logits of the base model. On the last stage, add the logits of other stages to the output."""
        own = output.get("router_logits") if isinstance(output, ModelOutput) else None
        if own and not self.stage.is_last:
            rows, length, _ = output[0].shape
            self._outputs[self._own_routers] = torch.stack(own, 1).view(rows, length, -1)
        elif self._router_logits:
            output["router_logits"] = (*self._router_logits, *(own or ()))

    def _record_returned(self, number: int, module: nn.Module, args: Any, output: Tensor) -> None:
        """Hook that keeps a further output of the model."""
        self._outputs[number] = output

    def incoming(self, batch: Batch) -> list[int]:
        """Return the numbers of the tensors received from the previous stage, in the order of the sends."""
        return self._sent_by(self.stage.index - 1, batch) if self.stage.index else []

    def outgoing(self, batch: Batch) -> list[int]:
        """Return the numbers of the tensors sent to the next stage, in this order."""
        return [] if self.stage.is_last else self._sent_by(self.stage.index, batch)

    def check(self, batch: Batch) -> None:
        """Raise ``ValueError`` on every stage if this batch does not determine the sizes of the exchanged tensors."""
        sent = {number for stage in range(self.stage.count - 1) for number in self._sent_by(stage, batch)}
        for number in sorted(sent | {len(self.stage.stacks) - 1}):
            self.shape(batch, number)

    def _is_given(self, stack: int, batch: Batch) -> bool:
        """Return whether the batch contains the output of an encoder, so that the encoder does not run."""
        is_encoder = self.model.config.is_encoder_decoder and stack < len(self.stage.stacks) - 1
        return is_encoder and batch.get("encoder_outputs") is not None

    def _sent_by(self, stage: int, batch: Batch) -> list[int]:
        given = [i for i in range(len(self.stage.stacks)) if self._is_given(i, batch)]
        started = [i for i, stack in enumerate(self.stage.stacks) if stack.first <= stage and i not in given]
        wanted = batch.get("output_router_logits")
        if wanted is None:
            wanted = getattr(self.model.config, "output_router_logits", False)
        if wanted and not self.stage.records_routers:
            raise ValueError(
                f"output_router_logits=True: the auxiliary loss of {type(self.model).__name__} would leave out the "
                "routers of the other pipeline stages; use pipeline_parallel_size=1, or leave it out"
            )
        if wanted and not self._routers:
            raise ValueError(
                f"output_router_logits=True: no block of this {type(self.model).__name__} has a router; leave it out"
            )
        if wanted and given:
            raise ValueError(
                "output_router_logits=True with encoder_outputs: on pipeline stages, the auxiliary loss would leave "
                "out the routers of the encoder; leave one of them out"
            )
        last = len(self.stage.stacks) + len(self._returned) + stage
        return [*started, *self._returned, *(number for number in self._routers if wanted and number <= last)]

    def shape(self, batch: Batch, number: int) -> tuple[int, int, int]:
        """Return ``(rows, length, width)`` of the tensor with this number. Every rank derives it from the batch."""
        if number in self._returned:
            return (*self.shape(batch, 0)[:2], self.stage.early_outputs[self._returned[number]])
        if number in self._routers:
            return (*self.shape(batch, 0)[:2], self._routers[number] * self.stage.num_experts)
        stack = self.stage.stacks[number]
        width = hidden_size(self.model, stack.blocks)
        if stack.input_positions is not None:
            return (*stack.input_positions(batch), width)
        is_decoder = number == len(self.stage.stacks) - 1 and len(self.stage.stacks) > 1
        labels = batch.get("labels")
        has_token_labels = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
        # Without decoder_input_ids, transformers derives them from the labels or from the encoder's input_ids.
        names = (
            ("decoder_input_ids", *(("labels",) if has_token_labels else ()), "input_ids")
            if is_decoder
            else ("input_ids",)
        )
        embeds = batch.get("decoder_inputs_embeds" if is_decoder else "inputs_embeds")
        if embeds is not None:
            return embeds[..., 0].numel() // embeds.shape[-2], embeds.shape[-2], width
        ids = next((batch[name] for name in names if batch.get(name) is not None), None)
        if ids is None:
            raise ValueError(
                f"pipeline stages need {' or '.join(names)} to know the sizes of hidden states; the batch of "
                f"{type(self.model).__name__} has {', '.join(sorted(batch))}"
            )
        return ids.numel() // ids.shape[-1], ids.shape[-1], width

    def __call__(self, batch: Batch, arrived: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Any]:
        """Run the stage.

        Args:
            arrived: received tensors by the numbers of `incoming`.

        Returns:
            The tensors to send, by the numbers of `outgoing`, and the output of the forward. Tensors may be
            `ShardedActivation`. On the last stage, the output is that of the model. On other stages, it is that of
            the stack in which the stage ends.
        """
        self._require_blocks()
        expected = {i: self.shape(batch, i) for i in self.outgoing(batch)}  # received tensors change the batch below
        batch, self._router_logits = dict(batch), []
        if not any(stack.is_local and not self._is_given(i, batch) for i, stack in enumerate(self.stage.stacks)):
            return {}, None
        for i, hidden in arrived.items():
            if i in self._routers:
                self._router_logits += hidden.flatten(0, 1).split(self.stage.num_experts, -1)
            elif i in self._returned:
                self.model.get_submodule(self._returned[i]).arrived = hidden
            elif self.stage.stacks[i].last < self.stage.index and self.model.config.is_encoder_decoder:
                batch["encoder_outputs"] = MoEModelOutput(last_hidden_state=hidden)  # all that decoders may read
            else:
                self._insert_hidden(i, batch, hidden)
        for dropout in self._boundary_dropouts:
            dropout.calls = 0
        outputs, output = self._call_model(batch) if isinstance(self.model, FSDPModule) else self.forward(batch)
        self._require_received(arrived)
        tensors = {**arrived, **outputs}
        for i, shape in expected.items():
            if i not in tensors or tuple(tensors[i].shape) != shape:
                found = "is missing" if i not in tensors else f"has shape {tuple(tensors[i].shape)}"
                raise ValueError(
                    f"{type(self.model).__name__} on pipeline stages: tensor {i} {found}, and the other stages expect "
                    f"the shape {shape}. Please report it, and use pipeline_parallel_size=1"
                )
        return {i: tensors[i] for i in expected}, output

    def _require_blocks(self) -> None:
        """Raise ``RuntimeError`` if blocks were removed or added: the other stages would not know of it."""
        for path, names in self._blocks.items():
            if [*(found := self.model.get_submodule(path)._modules)] != names:
                raise RuntimeError(
                    f"{path} of {type(self.model).__name__} has the blocks {', '.join(found) or 'none'}, and stage "
                    f"{self.stage.index} was created with {', '.join(names) or 'none'}: change the number of blocks in "
                    "the configuration before the model is created, or use pipeline_parallel_size=1"
                )

    def _require_received(self, arrived: Mapping[int, Tensor]) -> None:
        """Raise ``RuntimeError`` if the forward did not read the hidden states of the previous stage."""
        for number in arrived.keys() & set(range(len(self.stage.stacks))):
            receiver = self.stage.stacks[number].receiver
            if receiver is not None and receiver.arrived is not None:
                receiver.arrived = None
                raise RuntimeError(
                    f"the hidden states of the previous pipeline stage were not read on stage {self.stage.index}: the "
                    f"{type(receiver).__name__} that receives them was replaced; replace embeddings on the "
                    "first stage only, if model.stage.index == 0"
                )

    def _call_model(self, batch: dict[str, Any]) -> Any:
        """Run `forward` by calling the model, so that FSDP hooks gather and free the parameters around it."""
        self.is_running = True
        try:
            return self.model(**batch)
        finally:
            self.is_running = False

    def forward(self, batch: dict[str, Any]) -> tuple[dict[int, Tensor], Any]:
        """Run the model's forward for one micro-batch. Returns the tensors by number, and the output."""
        self._outputs = {}
        try:
            output = self._forward(self.model, **batch)
        except _StageEnd as end:
            output = end.output
        if not self.stage.stacks[0].name:  # the model is its only stack
            if not self.stage.is_last:
                self._outputs[0] = output[0]
            self._exchange_router_logits(output)
        outputs, self._outputs, self._router_logits = self._outputs, {}, []
        return {i: hidden.flatten(0, -3) for i, hidden in outputs.items()}, output

    def _insert_hidden(self, stack: int, batch: dict[str, Any], hidden: Tensor) -> None:
        """Pass the received hidden states to the stack in place of its embeddings."""
        embeds = f"decoder_{EMBEDS}" if stack == len(self.stage.stacks) - 1 > 0 else EMBEDS
        receiver = self.stage.stacks[stack].receiver
        if batch.get(embeds) is not None:
            batch[embeds] = hidden
        elif receiver is not None:
            receiver.arrived = hidden

    def run_stack(self, stack: int, batch: dict[str, Any], arrived: Tensor | None) -> Tensor:
        """Run one stack alone (the encoder, before generation) and return its hidden states."""
        batch = dict(batch)
        if arrived is not None:
            self._insert_hidden(stack, batch, arrived)
        for dropout in self._boundary_dropouts:
            dropout.calls = 0
        try:
            with self.stage.reading_own_layers(self.model):
                output = self.model.get_submodule(self.stage.stacks[stack].name)(**batch)
        except _StageEnd as end:
            output = end.output
        return output[0]
