"""CUDA graphs of the running batch's decoding steps: which models have them, and how they are captured."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.static_step import Capture, Compute
from oslo_models.distributed.object_exchange import agree
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION
from oslo_models.pipeline.sharded_model import ShardedModel

GRAPHED = frozenset(("gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"))
"""Model types with tested static steps."""
WARM_UPS = 2
"""Eager runs before a capture. The first one may compile and time kernels, which is not possible in a capture."""
OVER_RANKS = False
"""Whether tensor-parallel ranks capture their steps. Off until several GPUs verify it: the rehearsal sets it."""


class CaptureError(RuntimeError):
    """A computation runs eagerly, but cannot be captured."""


def capture_of(model: ShardedModel) -> tuple[Capture | None, str]:
    """Return the capture for a model's decoding steps on this rank; or ``None`` and the reason for eager decoding."""
    reason = reason_against(model)
    if reason is not None:
        return None, reason
    return CudaGraphs(model.device, model.mesh.model if model.is_tensor_parallelized() else None), ""


def reason_against(model: ShardedModel) -> str | None:
    """Return why no step of a model is captured; ``None`` if steps are captured."""
    if model.device.type != "cuda":
        return f"its device is {model.device}, not a GPU"
    return reason_of_model(model)


def reason_of_model(model: ShardedModel) -> str | None:
    """Return the reason on a GPU, see `reason_against`."""
    config = model.config
    if config.model_type not in GRAPHED:
        return f"steps of model_type={config.model_type!r} were not tested in CUDA graphs"
    if model.pipeline is not None:
        return "pipeline stages compute in turn"
    attention = config.get_text_config(decoder=True)._attn_implementation
    if attention not in (*TORCH_ATTENTION, "eager"):
        return f"attn_implementation={attention!r}: CUDA graphs need 'sdpa' or 'eager'"
    if any(parameter.device != model.device for parameter in model.parameters()):
        return "its weights are on several devices"
    if model.is_tensor_parallelized() and not OVER_RANKS:
        return "tensor parallelism: collectives in CUDA graphs were not tested on several GPUs"
    return None


class CudaGraphs:
    """Captures computations as CUDA graphs, which share the memory of their temporaries.

    At most one graph runs at a time. Its result is read before the next one runs.

    Args:
        axis: the ranks that capture and replay the same computations, with collectives among them; ``None`` if each
            rank computes alone. A graph ends with a mark, so the watchdog names a rank that dies during a replay.
    """

    def __init__(self, device: torch.device, axis: Any = None) -> None:
        self._device, self._axis = device, axis
        self._stream: torch.cuda.Stream | None = None
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # the graphs own the memory: the last one frees it
        self._progress: Any = None

    def __call__(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            return self._captured(compute)

    def _captured(self, compute: Compute) -> Compute:
        axis, device = self._axis, self._device
        if axis is not None and self._progress is None:
            self._progress = axis.watchdog.in_flight.progress_type(device)
        # warm up on the capture stream, so that libraries allocate their workspaces for it
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(stream)
        # if one rank replayed the graph and another computed eagerly, their collectives would differ
        with nullcontext() if axis is None else agree(axis, "the capture of a CUDA graph"):
            graph, result = self._graph_of(compute, stream, current)
        self._graphs.add(graph)
        progress = self._progress

        def replay() -> Tensor:
            if axis is None:
                graph.replay()
            else:
                axis.watchdog.in_flight.replay(axis, "a decoding step in a CUDA graph", progress, graph.replay)
            return result

        return replay

    def _graph_of(self, compute: Compute, stream: Any, current: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return the captured graph and its result."""
        graph, pool = torch.cuda.CUDAGraph(), next((each.pool() for each in self._graphs), None)
        try:
            # other threads, such as torch's watchdog, may query events during the capture
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = compute()
                if self._axis is not None:
                    self._progress.write()
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its stream current
        return graph, result
