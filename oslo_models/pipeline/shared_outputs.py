"""`SharedOutputs`: the last stage sends the loss and the logits of each micro-batch to the stages before it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import PendingMessage, receive, start_receive, start_send
from oslo_models.distributed.mesh import ParallelMesh

_DESCRIPTION = 1024
"""Size in bytes of the message that describes the following tensors."""


class SharedOutputs:
    """Exchange of outputs in one loop over micro-batches, from the view of one stage.

    The messages of a micro-batch have this order: its loss, a description of its logits, the logits. The last stage
    sends them directly to every earlier stage, in the process group of the gradients. The stage before the last also
    receives gradients from it, so it must call `receive` before it receives the gradients of the same micro-batch.

    Args:
        mesh: mesh of the model.
        with_logits: whether logits are sent, too.

    Attributes:
        count: number of micro-batches with sent or received outputs.
        with_logits: whether logits are sent, too.
    """

    def __init__(self, mesh: ParallelMesh, with_logits: bool) -> None:
        self._axis, self._device, self.with_logits = mesh.pp_back, mesh.device, with_logits
        self._last = mesh.pp.size - 1
        self._started: list[PendingMessage] = []
        self.count = 0

    def send(self, loss: Tensor | None, output: Mapping[str, Any]) -> list[PendingMessage]:
        """Send the loss (``None``: nan) and the logits in ``output`` of the next micro-batch, on the last stage."""
        value = torch.full((1,), float("nan"), dtype=torch.float64, device=self._device)
        messages = [value if loss is None else value.copy_(loss.detach())]
        if self.with_logits:
            logits = {name: x.detach() for name, x in output.items() if "logits" in name and isinstance(x, Tensor)}
            fields = [[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in logits.items()]
            text = json.dumps(fields).encode().ljust(_DESCRIPTION)
            messages += [torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)]
            messages += [x.contiguous() for x in logits.values()]
        self.count += 1
        return [start_send(self._axis, message, stage) for stage in range(self._last) for message in messages]

    def start_receive(self) -> None:
        """Start to receive all messages of the next micro-batch with known sizes: all but the logits."""
        if self._started:
            return
        sizes: list[tuple[int, torch.dtype]] = [(1, torch.float64)]
        if self.with_logits:
            sizes.append((_DESCRIPTION, torch.uint8))
        self._started = [start_receive(self._axis, self._empty(size, dtype), self._last) for size, dtype in sizes]

    def receive(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Receive the loss and the logits of the next micro-batch, on a stage before the last."""
        self.start_receive()
        started, self._started = self._started, []
        loss, *description = [message.wait() for message in started]
        logits = {}
        for text in description:
            for name, shape, dtype in json.loads(text.cpu().numpy().tobytes()):
                logits[name] = receive(self._axis, self._empty(shape, getattr(torch, dtype)), self._last)
        self.count += 1
        return loss[0], logits

    def _empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
