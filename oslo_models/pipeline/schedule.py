"""One-forward-one-backward behind the user's own loop.

``for micro_output in model(**batch): micro_output.loss.backward()`` runs on every stage. Between two turns of the loop
a stage does its next forward; in the loop's body the loss object's ``backward`` does the stage's next backward. At most
``stages - stage`` micro-batches are alive on a stage. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training" (PipeDream-Flush), 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

from oslo_models.distributed.collectives import PendingSend, all_reduce, receive, start_send
from oslo_models.distributed.grad_overflow import propagate_overflow
from oslo_models.distributed.mesh import Axis
from oslo_models.pipeline.deepspeed import Engine
from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, loss_object
from oslo_models.pipeline.stage_runner import OtherStageError, StageRunner


@dataclass
class StageOutput(ModelOutput):
    """The output of a micro-batch on a stage that is not the last: a loss object, and ``None`` for all else."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward: what left the stage, what had arrived, and the loss."""

    leaving: dict[int, Tensor]
    arrived: dict[int, Tensor]
    loss: Tensor | None


class Schedule:
    """The loop over the micro-batches of one batch, on one stage.

    Args:
        runner: the stage.
        tied: each parameter here that other stages hold too, with the axis of those stages; in one order everywhere.
        micro_batches: the arguments of the forward for each micro-batch.
        has_loss: whether the batch asks for a loss.
        loss: what makes the losses of several micro-batches add up to that of the batch.
        engine: the DeepSpeed engine that wraps the model, if one does.
    """

    def __init__(
        self,
        runner: StageRunner,
        tied: list[tuple[nn.Parameter, Axis]],
        micro_batches: list[dict[str, Any]],
        has_loss: bool,
        loss: GlobalMeanLoss | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.runner, self.tied, self.micro_batches = runner, tied, micro_batches
        self.has_loss, self.loss = has_loss, loss
        self.stage, self.mesh = runner.stage, runner.model.mesh
        self.number = len(micro_batches)
        parameters = [param for param in runner.model.parameters() if param.requires_grad]
        self.trains = torch.is_grad_enabled() and has_loss  # as on all stages, whether this one's parameters do
        self.ahead = min(self.number, self.stage.count - 1 - self.stage.index) if self.trains else 0
        self.arrivals = self.forwards = self.returns = self.backwards = 0
        self.alive: dict[int, _InFlight] = {}
        self._losses: list[Tensor] = []
        self._sends: deque[PendingSend] = deque()
        # DDP sums over the replicas when the gradients of its parameters arrive. Only those of the last micro-batch go
        # that way; the ones before are added up without its notice.
        by_fsdp = any(isinstance(param, DTensor) for param in parameters)
        self._quietly = parameters if self.mesh.dp.size > 1 and not by_fsdp and engine is None else None
        self.engine = engine if self.trains else None
        self._finished = False

    def __iter__(self) -> Iterator[Any]:
        outputs: deque[Any] = deque()
        if self.trains:
            for param, axis in self.tied:
                if axis.rank > 0:  # every copy has the gradient of loops before; the sum over the stages counts it once
                    param.grad = None
        try:
            for turn in range(self.number):
                while self.forwards < min(self.number, turn + self.ahead + 1):
                    outputs.append(self._forward(self.forwards))
                yield outputs.popleft()
                if self.trains and self.backwards <= turn:
                    raise RuntimeError(
                        f"loss.backward() of micro-batch {turn} was not called in the body of the loop; to evaluate, "
                        "run the loop under torch.no_grad()"
                    )
        except BaseException as error:
            if self.mesh.world.failed:  # there is nobody to go on with
                raise
            if isinstance(error, GeneratorExit) and self._is_through():
                self._finish()
                return
            self._drain()
            self._finish(abandoned=True)
            raise
        self._finish()

    def _at(self, phase: str) -> None:
        self.mesh.world.at(f"{phase}, stage {self.stage.index}")

    def _is_through(self) -> bool:
        return self.forwards == self.number and (not self.trains or self.backwards == self.number)

    # One micro-batch --------------------------------------------------------------------------------------------------

    def _forward(self, i: int) -> Any:
        batch = self.micro_batches[i]
        self._at(f"forward of micro-batch {i}")
        arrived = self._take(i)
        with self.loss.of(batch) if self.loss is not None and self.stage.is_last else nullcontext():
            leaving, output = self.runner(batch, arrived)
        loss = output.get("loss") if self.stage.is_last else None
        if self.trains and self.stage.is_last and loss is None:
            raise ValueError(
                f"{type(self.runner.model).__name__} computed no loss of {sorted(batch)}: pass all its labels"
            )
        self._pass_on(self.mesh.pp, self.stage.index + 1, [hidden.detach() for hidden in leaving.values()])
        self.forwards += 1
        if self.trains:
            self.alive[i] = _InFlight(leaving, arrived, loss)
        value = self._unknown() if loss is None else loss.detach()
        if self.trains:
            value = loss_object(value, lambda grad: self._backward(i, grad))
        self._losses.append(value)
        if not self.stage.is_last:
            return StageOutput(loss=value if self.has_loss else None)
        if loss is not None:
            output.loss = value
        return output

    def _backward(self, i: int, grad: Tensor) -> None:
        if i != self.backwards:
            raise RuntimeError(f"backward of micro-batch {i} was called, and that of {self.backwards} is next")
        self._at(f"backward of micro-batch {i}")
        alive = self.alive.pop(i)
        outputs: list[Tensor] = list(alive.leaving.values())
        grads = [grad]
        if alive.loss is not None:
            outputs = [alive.loss]
        else:
            grads = self._take_back(i)
        if self.engine is not None:
            self.engine.wait_for_last(is_last=i == self.number - 1)
        leaves = list(alive.arrived.values())
        returning: list[Tensor | None] = []
        trained = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        outputs, grads = [x for x, _ in trained], [g for _, g in trained]
        if not trained:  # the first stage, frozen
            pass
        elif self._quietly is not None and i < self.number - 1:
            found = torch.autograd.grad(outputs, [*leaves, *self._quietly], grads, allow_unused=True)
            for param, more in zip(self._quietly, found[len(leaves) :], strict=True):
                if more is not None:
                    param.grad = more if param.grad is None else param.grad.add_(more)
            returning = list(found[: len(leaves)])
        else:
            torch.autograd.backward(outputs, grads)
            returning = [leaf.grad for leaf in leaves]
        back = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, returning, strict=True)]
        self._pass_on(self.mesh.pp_back, self.stage.index - 1, back)
        self.backwards += 1
        if self.engine is not None and self.backwards == self.number:
            self._finish()  # at once: when this backward ends, the engine sums gradients over the replicas

    def _unknown(self) -> Tensor:
        """The loss of a micro-batch until the last stage tells it, in the precision that losses have."""
        dtype = torch.promote_types(self.runner.model.dtype, torch.float32)
        return torch.full((), float("nan"), dtype=dtype, device=self.mesh.device)

    # What travels; shapes are known from the batch, so nothing but numbers does ---------------------------------------

    def _take(self, i: int) -> dict[int, Tensor]:
        arrived = {}
        for stack in self.runner.arriving():
            x = self._empty(i, stack)
            arrived[stack] = receive(self.mesh.pp, x, self.stage.index - 1).requires_grad_(self.trains)
        self.arrivals += 1
        return arrived

    def _take_back(self, i: int) -> list[Tensor]:
        grads = [
            receive(self.mesh.pp_back, self._empty(i, stack), self.stage.index + 1) for stack in self.runner.leaving()
        ]
        self.returns += 1
        return grads

    def _empty(self, i: int, stack: int) -> Tensor:
        shape = self.runner.shape(self.micro_batches[i], stack)
        return torch.empty(shape, dtype=self.runner.model.dtype, device=self.mesh.device)

    def _pass_on(self, axis: Axis, to: int, tensors: list[Tensor]) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()
        for tensor in tensors:
            self._sends.append(start_send(axis, tensor.to(self.runner.model.dtype).contiguous(), to))

    # The end ----------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Go through what is left without computing, so that no other stage waits for this one."""
        self.alive.clear()
        for turn in range(self.number):
            while self.forwards < min(self.number, turn + self.ahead + 1):
                i = self.forwards
                if self.arrivals <= i:
                    self._take(i)
                self._pass_on(self.mesh.pp, self.stage.index + 1, self._zeros(i, self.runner.leaving()))
                self.forwards += 1
            if self.trains and self.backwards <= turn:
                if self.returns <= turn and not self.stage.is_last:
                    self._take_back(turn)
                self._pass_on(self.mesh.pp_back, self.stage.index - 1, self._zeros(turn, self.runner.arriving()))
                self.backwards += 1

    def _zeros(self, i: int, stacks: list[int]) -> list[Tensor]:
        return [self._empty(i, stack).zero_() for stack in stacks]

    def _finish(self, abandoned: bool = False) -> None:
        """Sum the gradients of what several stages hold, and let every stage know the losses and who gave up. Once."""
        if self._finished:
            return
        self._finished = True
        self._at("end of the loop over micro-batches")
        if self.engine is not None:
            self.engine.wait_for_last(is_last=True)
        while self._sends:
            self._sends.popleft().wait()
        report = torch.zeros(self.number + self.stage.count, dtype=torch.float64, device=self.mesh.device)
        if self.stage.is_last and len(self._losses) == self.number:
            report[: self.number] = torch.stack([loss.detach().double() for loss in self._losses])
        report[self.number + self.stage.index] = float(abandoned)
        all_reduce(self.mesh.pp, report)
        left = report[self.number :].nonzero().flatten().tolist()
        if self.trains and not left:
            self._at("sum of tied gradients")
            for param, axis in self.tied:
                self._sum_over_stages(param, axis)
            propagate_overflow(self.runner.model.parameters, self.mesh.model)
        if not self.stage.is_last and not left:
            for loss, value in zip(self._losses, report, strict=False):
                loss.data.copy_(value)
        self._at("after the loop over micro-batches")
        # The next call raises on every rank, those too that raise now: so all go on with the same batch after it.
        self.runner.abandoned = bool(left)
        if left and not abandoned:
            raise OtherStageError(
                f"stage {left} left the loop over micro-batches before its end; the gradients of this batch are of no "
                "use: set them to zero and go on with another batch"
            )

    @staticmethod
    def _sum_over_stages(param: nn.Parameter, axis: Axis) -> None:
        stages_with_grad = torch.tensor(float(param.grad is not None), device=param.device)
        if not all_reduce(axis, stages_with_grad):  # stays without one, so that weight decay leaves it alone
            return
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if param.requires_grad:
            param.grad = grad
        all_reduce(axis, grad.to_local() if isinstance(grad, DTensor) else grad)
