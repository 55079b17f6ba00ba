"""Instruments for one process: its peak memory (Linux only) and its collectives."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory:
    """Peaks of this process in MB (10^6 bytes), above its memory when this object was made.

    ``peak memory`` is the growth of VmHWM: all pages, including pages of mapped files, which the system may reclaim.
    ``peak anonymous memory`` is the peak of RssAnon, sampled every 2 ms: pages that only the process itself can free.
    """

    def __init__(self) -> None:
        gc.collect()
        self._before = {name: _status(name) for name in ("VmRSS", "RssAnon")}
        self.growth: dict[str, float] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the peaks of a block."""
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
        peak, done = _status("RssAnon"), threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, _status("RssAnon"))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            done.set()
            sampler.join()
        peak = max(peak, _status("RssAnon"))
        self.growth["peak memory"] = _status("VmHWM") - self._before["VmRSS"]
        self.growth["peak anonymous memory"] = peak - self._before["RssAnon"]


def _status(name: str) -> float:
    """A line of ``/proc/self/status``, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {name}: memory is measured on Linux only")


class Collectives(TorchDispatchMode):
    """Counts collectives within the context: DTensor's, functional collectives and ours.

    Within it, ours do not use shared memory, because torch could not see them there.

    Attributes:
        all_reduces, others: Numbers of collectives.
        megabytes: Size of this rank's inputs to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all_reduces, self.others, self.megabytes = 0, 0, 0.0
        self._through_torch = mock.patch("oslo_models.distributed.collectives.shared_memory_of", lambda axis: None)

    def __enter__(self) -> Collectives:
        self._through_torch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._through_torch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # decomposed into operations on plain tensors, which are dispatched here again
        name = func.__name__.split(".")[0].strip("_")
        ours = func.namespace == "oslo" and name in ("all_reduce", "all_gather", "reduce_scatter")
        if ours or ("c10d" in func.namespace and name not in ("wait_tensor", "wrap_tensor_autograd")):
            if name.replace("_", "").startswith("allreduce"):
                self.all_reduces += 1
            else:
                self.others += 1
            tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.megabytes += sum(tensor.nbytes for tensor in tensors) / 1e6
        return func(*args, **(kwargs or {}))


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_in_second_block(blocks: Iterable[nn.Module], compute: Callable[[], Any]) -> int:
    """Bytes that the second block of a model saves for its backward pass.

    Parameters do not count, and neither do tensors that the first block has saved, such as masks and positions.

    Args:
        compute: runs the forward pass of the model once.
    """
    of_block: list[dict[int, int]] = [{}]

    def storage(x: Tensor) -> torch.UntypedStorage:
        x = x._local_tensor if isinstance(x, DTensor) else x
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        with torch._C.DisableTorchFunctionSubclass():
            return x.untyped_storage()

    def pack(x: Tensor) -> Tensor:
        saved = storage(x)
        of_block[-1][saved.data_ptr()] = saved.nbytes()
        return x

    modules = list(blocks)
    weights = {storage(param).data_ptr() for block in modules for param in block.parameters()}
    hooks = [block.register_forward_hook(lambda *_: of_block.append({})) for block in modules]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    known = weights | of_block[0].keys()
    return sum(size for pointer, size in of_block[1].items() if pointer not in known)
