"""One-forward-one-backward (1F1B) and zero-bubble (ZB-H1) schedules, driven by the user's training loop.

``for micro_output in model(**batch): micro_output.loss.backward()`` runs on every stage. Each iteration runs the next
forward of the stage, and ``loss.backward()`` in the body runs its next backward. At most ``stages - stage``
micro-batches are in flight on a stage. With shared losses, each iteration waits for the loss of its micro-batch. The
gradient of the same micro-batch, for which the stage waits anyway, follows shortly after.

Before each forward or backward, a stage starts to receive the messages that it reads next, so that their transfer
overlaps with the computation. It starts no message that depends on this computation: a synchronisation of the whole
GPU in there would wait for it forever.

The schedule ``"zb-h1"`` has the same order, except that a stage defers the weight gradients of its blocks. It sends the
gradient of its input earlier, and computes weight gradients while it would otherwise wait. Stage ``s`` is ``s``
micro-batches behind. With the ``stages - s`` in flight, no stage holds more micro-batches than the first one.

Sources: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021. Qi et al., "Zero
Bubble Pipeline Parallelism", 2023 (ZB-H1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

from oslo_models.distributed.collectives import MAX, PendingMessage, all_reduce, start_receive, start_send
from oslo_models.distributed.grad_overflow import propagate_overflow
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.deferred_gradients import DeferredGradients, deferrable_weights
from oslo_models.pipeline.deepspeed import DeepSpeedAdapter
from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, loss_object
from oslo_models.pipeline.sent_tokens import SentTokens
from oslo_models.pipeline.shared_outputs import SharedOutputs
from oslo_models.pipeline.stage_runner import Batch, OtherStageError, StageRunner


@dataclass
class StageOutput(ModelOutput):
    """Output of a micro-batch on stages before the last: a loss object, and ``None`` for fields that are not shared."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@dataclass
class _InFlight:
    """Micro-batch between its forward and its backward: sent tensors, received tensors and loss."""

    outgoing: dict[int, Tensor]
    arrived: dict[int, Tensor]
    loss: Tensor | None


class TiedPipeline(Protocol):
    """Interface of a `Pipeline` for its schedule: the local stage, and the weights that are tied across stages."""

    runner: StageRunner

    def tied_parameters(self) -> list[tuple[nn.Parameter, Axis]]: ...

    def has_doubtful_ties(self) -> bool: ...

    def update_ties(self) -> None: ...


class Schedule:
    """Loop over the micro-batches of one batch, on one stage.

    Args:
        pipeline: pipeline of the model on this stage.
        micro_batches: arguments of the forward for each micro-batch.
        has_loss: whether the batch asks for a loss.
        loss: scales the losses of micro-batches so that they add up to the loss of the batch.
        deepspeed: the DeepSpeed engine that wraps the model, if there is one.
        shared: sends outputs of the last stage to the other stages, if requested.
        defers: whether to defer weight gradients (``"zb-h1"``).
    """

    def __init__(
        self,
        pipeline: TiedPipeline,
        micro_batches: list[dict[str, Any]],
        has_loss: bool,
        loss: GlobalMeanLoss | None = None,
        deepspeed: DeepSpeedAdapter | None = None,
        shared: SharedOutputs | None = None,
        defers: bool = False,
    ) -> None:
        self.pipeline, self.runner, self.micro_batches = pipeline, pipeline.runner, micro_batches
        runner = pipeline.runner
        self.has_loss, self.loss, self.shared = has_loss, loss, shared
        self.stage, self.mesh = runner.stage, runner.model.mesh
        self.num_micro_batches = len(micro_batches)
        parameters = [param for param in runner.model.parameters() if param.requires_grad]
        self.trains = torch.is_grad_enabled() and has_loss  # equal on all stages, even if this stage is frozen
        # Without gradients, stages also run ahead if outputs are shared. So no stage idles while it waits for outputs.
        ahead = self.stage.count - 1 - self.stage.index if self.trains or shared is not None else 0
        self.num_warmup = min(self.num_micro_batches, ahead)
        # Counters of micro-batches: received hidden states, forwards, received gradients and backwards.
        self.arrivals = self.forwards = self.grad_arrivals = self.backwards = 0
        self.in_flight: dict[int, _InFlight] = {}
        self._tokens = SentTokens(runner)
        self._losses: list[Tensor] = []
        self._sends: deque[PendingMessage] = deque()
        # Started receives of hidden states and gradients, by micro-batch.
        self._hidden: dict[int, dict[int, PendingMessage]] = {}
        self._grads: dict[int, list[PendingMessage]] = {}
        # DDP all-reduces over the replicas when autograd accumulates into its parameters. Only the last micro-batch
        # does so. Gradients of earlier micro-batches are added without triggering DDP.
        by_fsdp = any(isinstance(param, DTensor) for param in parameters)
        self._bypass_ddp = parameters if self.mesh.dp.size > 1 and not by_fsdp and deepspeed is None else None
        self._towers = self._parameters_of_towers() if self.trains and self._bypass_ddp is not None else []
        self._grads_before = {param: param.grad for param in self._towers}
        self._read: set[Tensor] = set()
        self.deepspeed = deepspeed if self.trains else None
        self._defers = defers and self.trains
        # The first stage defers nothing, since no stage waits for its input gradients.
        self._deferred = self._defer_gradients() if self._defers and self.stage.index > 0 else None
        self._finished = False

    def __iter__(self) -> Iterator[Any]:
        outputs: deque[Any] = deque()
        if self.trains and not self.pipeline.has_doubtful_ties():
            for param, axis in self.pipeline.tied_parameters():
                if axis.rank > 0:  # every stage has the gradient of earlier loops; count it once in the sum
                    param.grad = None
        try:
            for iteration in range(self.num_micro_batches):
                if self._finished:
                    raise RuntimeError("this loop over micro-batches has been left: start another one")
                while self.forwards < min(self.num_micro_batches, iteration + self.num_warmup + 1):
                    outputs.append(self._forward(self.forwards))
                yield self._with_shared(iteration, outputs.popleft())
                if self.trains and self.backwards <= iteration:
                    raise RuntimeError(
                        f"loss.backward() of micro-batch {iteration} was not called in the body of the loop; to "
                        "evaluate, run the loop under torch.no_grad()"
                    )
        except BaseException as error:
            if self.mesh.world.failed:  # communication is no longer possible
                raise
            if isinstance(error, GeneratorExit) and self._is_complete():
                self._finish()
                return
            self._complete_communication()
            self._finish(abandoned=True)
            raise
        self._finish()

    def leave(self) -> None:
        """End the loop from outside. No stage waits for another stage, and the next iteration raises."""
        self._complete_communication()
        self._finish(abandoned=True)

    def _set_phase(self, phase: str) -> None:
        self.mesh.world.set_phase(f"{phase}, stage {self.stage.index}")

    def _is_complete(self) -> bool:
        done = {self.forwards} | ({self.backwards} if self.trains else set())
        done |= {self.shared.count} if self.shared is not None else set()
        return done == {self.num_micro_batches} and not self._deferred

    # One micro-batch --------------------------------------------------------------------------------------------------

    def _forward(self, i: int) -> Any:
        """Receive, run and send the forward of micro-batch ``i``. Returns the output for the user."""
        batch = self.micro_batches[i]
        self._set_phase(f"forward of micro-batch {i}")
        arrived = self._receive_hidden(i)
        if i < self.num_warmup:  # the last forward of the warmup has no successor that does not depend on it
            self._start_hidden(i + 1)
        else:
            self._start_outputs_and_grads(i - self.num_warmup)
            if not self.trains:
                self._start_hidden(i + 1)
        with ExitStack() as modes:
            if self.loss is not None and self.stage.is_last:
                modes.enter_context(self.loss.for_micro_batch(batch))
            if self._deferred is not None:
                modes.enter_context(self._deferred.recording(i))
            tensors, output = self.runner(batch, self._tokens.received(batch, arrived))
            outgoing = self._tokens.sent(batch, tensors)
        loss = output.get("loss") if self.stage.is_last else None
        if loss is not None and output.get("aux_loss") is not None:  # every micro-batch loss includes the full aux loss
            others = 1 - 1 / self.num_micro_batches
            model = self.runner.model
            coefficients = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
            coefficient = next(each for each in coefficients if each is not None)  # JetMoE uses the second name
            loss = loss - others * coefficient * output["aux_loss"]
        if self.trains and self.stage.is_last and loss is None:
            raise ValueError(
                f"{type(self.runner.model).__name__} computed no loss of {sorted(batch)}: pass all its labels"
            )
        if loss is not None:
            if loss.numel() != 1:
                raise ValueError(
                    f"{type(self.runner.model).__name__} computed a loss of shape {tuple(loss.shape)}: stages need one "
                    "number for each micro-batch"
                )
            loss = loss.reshape(())  # num_items_in_batch may be a tensor of shape [1]
        self._send(self.mesh.pp, self.stage.index + 1, [hidden.detach() for hidden in outgoing.values()])
        self.forwards += 1
        if self.trains:
            self.in_flight[i] = _InFlight(outgoing, arrived, loss)
        value = self._pending_loss() if loss is None else loss.detach()
        if self.trains:
            value = loss_object(value, lambda grad: self._backward(i, grad))
        self._losses.append(value)
        if not self.stage.is_last:
            return StageOutput(loss=value if self.has_loss else None)
        if self.shared is not None:
            self._sends.extend(self.shared.send(loss, output))
        if loss is not None:
            output.loss = value
        return output

    def _with_shared(self, i: int, output: Any) -> Any:
        """Return the output of micro-batch ``i`` with the shared outputs of the last stage."""
        if self.shared is not None and not self.stage.is_last:
            self._set_phase(f"outputs of micro-batch {i}")
            loss, logits = self.shared.receive()
            if self.has_loss:
                self._losses[i].data.copy_(loss)
            for name, x in logits.items():
                output[name] = x
        return output

    def _backward(self, i: int, grad: Tensor) -> None:
        """Receive, run and send the backward of micro-batch ``i``. ``grad`` is the gradient of its loss."""
        if i != self.backwards:
            raise RuntimeError(f"backward of micro-batch {i} was called, but micro-batch {self.backwards} is next")
        if self._defers and torch.is_grad_enabled():
            raise RuntimeError(
                'backward(create_graph=True) is not supported with schedule="zb-h1", which computes weight gradients '
                "after the backward pass: leave it out"
            )
        self._set_phase(f"backward of micro-batch {i}")
        is_last = i == self.num_micro_batches - 1
        micro_batch = self.in_flight.pop(i)
        outputs: list[Tensor] = list(micro_batch.outgoing.values())
        grads = [grad]
        if micro_batch.loss is not None:
            outputs = [micro_batch.loss]
        else:
            grads = self._receive_grads(i)
        if i + 1 + self.num_warmup < self.num_micro_batches:
            self._start_hidden(i + 1 + self.num_warmup)
        else:
            self._start_outputs_and_grads(i + 1)
        if self.deepspeed is not None:
            self.deepspeed.set_boundary(is_last=is_last)
        leaves = list(micro_batch.arrived.values())
        input_grads: list[Tensor | None] = []
        differentiable = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        if is_last and self._towers:
            self._read |= parameters_in_graph([x for x, _ in differentiable])
            with torch.enable_grad():  # DDP waits for all parameters, also for those without a gradient
                first = torch.stack([param.flatten()[0] for param in self._towers])
            differentiable.append((first, torch.zeros_like(first)))
        outputs, grads = [x for x, _ in differentiable], [g for _, g in differentiable]
        if self._deferred is not None:
            # DDP reduces a gradient as soon as this backward pass accumulates it.
            reduced = parameters_in_graph(outputs) if is_last and self._bypass_ddp is not None else ()
            self._deferred.before_backward(i, reduced)
        if not differentiable:  # the first stage is frozen
            pass
        elif self._bypass_ddp is not None and not is_last:
            found = torch.autograd.grad(outputs, [*leaves, *self._bypass_ddp], grads, allow_unused=True)
            for param, more in zip(self._bypass_ddp, found[len(leaves) :], strict=True):
                if more is not None:
                    self._read.add(param)
                    _add_gradient(param, more)
            input_grads = list(found[: len(leaves)])
        else:
            torch.autograd.backward(outputs, grads)
            input_grads = [leaf.grad for leaf in leaves]
        sent = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, input_grads, strict=True)]
        self._send(self.mesh.pp_back, self.stage.index - 1, sent)
        self.backwards += 1
        if self._deferred is not None:
            self._deferred.after_backward(i)
            self._set_phase(f"weight gradients after micro-batch {i}")
            self._deferred.compute(keep=0 if is_last else self.stage.index)
        if self.deepspeed is not None and self.backwards == self.num_micro_batches:
            self._finish()  # the engine reduces gradients over the replicas at the end of this backward

    def _defer_gradients(self) -> DeferredGradients:
        """Prepare to defer the weight gradients of the blocks on this stage.

        The weight gradient of a task head is not deferred, since it would keep the gradient of the logits.
        """
        model = self.runner.model
        blocks = [model.get_submodule(stack.blocks) for stack in self.stage.stacks if stack.is_local]
        return DeferredGradients(deferrable_weights(blocks, model.modules()), self._accumulate)

    def _accumulate(self, i: int, param: nn.Parameter, grad: Tensor) -> None:
        """Add a deferred gradient of micro-batch ``i``. The last one passes through autograd, which triggers DDP."""
        if self._bypass_ddp is not None and i < self.num_micro_batches - 1:
            _add_gradient(param, grad)
            return
        with without_override():
            torch.autograd.backward([param], [grad])

    def _parameters_of_towers(self) -> list[nn.Parameter]:
        """Return the trained parameters of towers on this stage. A batch without images does not use them."""
        inside = tuple(f"{path}." for path in self.stage.towers) if self.stage.index == 0 else ()
        named = self.runner.model.named_parameters()
        return [param for name, param in named if param.requires_grad and f"{name}.".startswith(inside)]

    def _drop_gradients_of_unused_towers(self) -> None:
        """Remove the gradients of parameters of towers that no replica has used, as on one process."""
        flags = torch.tensor([param in self._read for param in self._towers], dtype=torch.float32)
        used = all_reduce(self.mesh.dp, flags.to(self.mesh.device), MAX).tolist()
        for param, is_used in zip(self._towers, used, strict=True):
            if not is_used:
                param.grad = self._grads_before.get(param)

    def _pending_loss(self) -> Tensor:
        """Return NaN, in float32 at least, as the loss of a micro-batch until the last stage sends it."""
        dtype = torch.promote_types(self.runner.model.dtype, torch.float32)
        return torch.full((), float("nan"), dtype=dtype, device=self.mesh.device)

    # Communication; shapes are derived from the batch, so only tensors are sent ---------------------------------------

    def _receive_hidden(self, i: int) -> dict[int, Tensor]:
        self._start_hidden(i)
        started = self._hidden.pop(i)
        arrived = {number: message.wait().requires_grad_(self.trains) for number, message in started.items()}
        self.arrivals += 1
        return arrived

    def _receive_grads(self, i: int) -> list[Tensor]:
        self._start_grads(i)
        grads = [message.wait() for message in self._grads.pop(i)]
        self.grad_arrivals += 1
        return grads

    def _start_hidden(self, i: int) -> None:
        """Start to receive the hidden states of micro-batch ``i``, if it exists."""
        if i < self.num_micro_batches and i not in self._hidden:
            numbers, axis, src = self.runner.incoming(self.micro_batches[i]), self.mesh.pp, self.stage.index - 1
            self._hidden[i] = {number: start_receive(axis, self._empty(i, number), src) for number in numbers}

    def _start_grads(self, i: int) -> None:
        """Start to receive the gradients of micro-batch ``i``."""
        if i not in self._grads:
            numbers, axis, src = self.runner.outgoing(self.micro_batches[i]), self.mesh.pp_back, self.stage.index + 1
            self._grads[i] = [start_receive(axis, self._empty(i, number), src) for number in numbers]

    def _start_outputs_and_grads(self, i: int) -> None:
        """Start to receive the shared outputs and the gradients of micro-batch ``i``, if it exists."""
        if self.stage.is_last or i >= self.num_micro_batches:
            return
        if self.shared is not None:
            self.shared.start_receive()
        # The stage before the last receives logits, of unknown sizes, before the gradients, through the same group.
        after_logits = self.shared is not None and self.shared.with_logits
        if self.trains and not (after_logits and self.stage.index == self.stage.count - 2):
            self._start_grads(i)

    def _empty(self, i: int, number: int) -> Tensor:
        shape = self._tokens.shape(self.micro_batches[i], number)
        return torch.empty(shape, dtype=self.runner.model.dtype, device=self.mesh.device)

    def _send(self, axis: Axis, to: int, tensors: list[Tensor]) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()
        for tensor in tensors:
            self._sends.append(start_send(axis, tensor.to(self.runner.model.dtype).contiguous(), to))

    # The end ----------------------------------------------------------------------------------------------------------

    def _complete_communication(self) -> None:
        """Complete the remaining communication with zeros, so that no other stage waits for this stage."""
        self.in_flight.clear()
        for iteration in range(self.num_micro_batches):
            while self.forwards < min(self.num_micro_batches, iteration + self.num_warmup + 1):
                i = self.forwards
                if self.arrivals <= i:
                    self._receive_hidden(i)
                self._send(self.mesh.pp, self.stage.index + 1, self._zeros(i, self.runner.outgoing))
                self.forwards += 1
            if self.shared is not None and self.shared.count <= iteration:
                self._sends.extend(self.shared.send(None, {})) if self.stage.is_last else self.shared.receive()
            if self.trains and self.backwards <= iteration:
                if self.grad_arrivals <= iteration and not self.stage.is_last:
                    self._receive_grads(iteration)
                self._send(self.mesh.pp_back, self.stage.index - 1, self._zeros(iteration, self.runner.incoming))
                self.backwards += 1

    def _zeros(self, i: int, numbers: Callable[[Batch], list[int]]) -> list[Tensor]:
        return [self._empty(i, number).zero_() for number in numbers(self.micro_batches[i])]

    def _finish(self, abandoned: bool = False) -> None:
        """All-reduce gradients of tied weights over stages. Share the losses and the stages that gave up. Runs once."""
        if self._finished:
            return
        self._finished = True
        if self._deferred is not None:
            self._deferred.clear()
        self._set_phase("end of the loop over micro-batches")
        if self.deepspeed is not None:
            self.deepspeed.set_boundary(is_last=True)
        while self._sends:
            self._sends.popleft().wait()
        # losses, a flag for each stage that gave up, and a flag for doubtful ties
        report = torch.zeros(
            self.num_micro_batches + self.stage.count + 1, dtype=torch.float64, device=self.mesh.device
        )
        if self.stage.is_last and len(self._losses) == self.num_micro_batches:
            report[: self.num_micro_batches] = torch.stack([loss.detach().double() for loss in self._losses])
        report[self.num_micro_batches + self.stage.index] = float(abandoned)
        report[-1] = float(self.trains and self.pipeline.has_doubtful_ties())
        all_reduce(self.mesh.pp, report)
        gave_up = report[self.num_micro_batches : -1].nonzero().flatten().tolist()
        if self.trains and not gave_up:
            if self._towers:
                self._drop_gradients_of_unused_towers()
            self._set_phase("sum of tied gradients")
            if report[-1]:
                self.pipeline.update_ties()
            for param, axis in self.pipeline.tied_parameters():
                self._sum_over_stages(param, axis)
            propagate_overflow(self.runner.model.parameters, self.mesh.model)
        if not self.stage.is_last and not gave_up:
            for loss, value in zip(self._losses, report, strict=False):
                loss.data.copy_(value)
        self._set_phase("after the loop over micro-batches")
        # The next call raises on every rank, also on ranks that raise now. Then all ranks continue with the same batch.
        self.runner.abandoned = bool(gave_up)
        if gave_up and not abandoned:
            raise OtherStageError(
                f"stage {gave_up} left the loop over micro-batches before its end; the gradients of this batch are "
                "incomplete: set them to zero and continue with another batch"
            )

    @staticmethod
    def _sum_over_stages(param: nn.Parameter, axis: Axis) -> None:
        """All-reduce the gradient of a tied parameter over its stages. It is frozen if one stage has frozen it."""
        has_grad, is_frozen = float(param.grad is not None), float(not param.requires_grad)
        counts = all_reduce(axis, torch.tensor([has_grad, is_frozen], device=param.device))
        if not counts[0] or counts[1]:  # no gradient: the optimizer skips the parameter
            param.grad = None
            return
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad = grad
        all_reduce(axis, grad.to_local() if isinstance(grad, DTensor) else grad)


def _add_gradient(param: nn.Parameter, grad: Tensor) -> None:
    """Accumulate a gradient without triggering DDP."""
    param.grad = grad if param.grad is None else param.grad.add_(grad)


def parameters_in_graph(outputs: Sequence[Tensor]) -> set[Tensor]:
    """Return the leaves that the gradients of these outputs reach."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, found = {*nodes}, set[Tensor]()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
    return found
