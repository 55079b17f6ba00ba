"""Static caches and compiled decoding steps, kept from one ``generate`` to the next.

A CUDA graph contains the addresses of the cache, so a new cache would need a new compilation. Lengths are rounded up to
limit the number of compilations.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any

import torch

from oslo_models.cache_argument import generation_name
from oslo_models.contracts import holds
from oslo_models.pipeline.sharded_model import ShardedModel

SHORTEST = 256
"""The number of positions of the shortest cache."""
TUNING = (
    "generate compiles the decoding step of one row and tunes its products now: about a minute for a billion "
    "parameters, once per cache length. cache_implementation='dynamic' avoids this"
)
MULTIPLE = 1024
"""Caches up to this length have a multiple of `SHORTEST` positions, longer ones a multiple of this number."""
_numbers = count()
log = logging.getLogger(__name__)


def rounded_length(length: int) -> int:
    """Return the number of positions of a cache for ``length`` tokens."""
    multiple = SHORTEST if length <= MULTIPLE else MULTIPLE
    return max(1, -(-length // multiple)) * multiple


def with_own_code(function: Callable[..., Any], name: str) -> Any:
    """Return a copy of a function with a separate code object.

    Dynamo keys its compilations, their limit and the dynamic shapes by code object. Functions made by one decorator for
    several models would share the limit of eight compilations, and run uncompiled beyond it.
    """
    original: Any = function
    code = original.__code__.replace(co_name=name)
    made = FunctionType(code, original.__globals__, name, original.__defaults__, original.__closure__)
    made.__kwdefaults__ = original.__kwdefaults__
    return made


STOPS_LATE_ON = ("cuda",)
"""Devices that compute asynchronously while the host prepares the next token."""


def without_waiting(sample: Any, device: torch.device, config: Any, streamer: Any) -> Any:
    """Return transformers' greedy search without the wait after each token on a GPU for the check for finished rows.

    transformers can read this check one token late and drop the surplus token, but only does so on Apple's GPUs. The
    returned function is transformers' method with a different device check. Sampling waits, since a surplus token would
    consume random numbers. Calls that return the cache wait too, since it would contain the token, and so do calls that
    stream tokens.

    Args:
        sample: the method ``_sample`` of a model. It is returned unchanged if it is not transformers' method, or if the
            release cannot read late.
    """
    from transformers.generation import utils

    late = getattr(utils, "DeferredStopCheck", None)
    method = getattr(sample, "__func__", None)
    if late is None or method is not utils.GenerationMixin._sample or late.__name__ not in method.__code__.co_names:
        return sample
    if device.type not in STOPS_LATE_ON or config is None or config.do_sample or streamer is not None:
        return sample
    if not holds("transformers.generation.utils.GenerationMixin._sample", "each token waits for the one before"):
        return sample

    class StopCheckOnGPUs(late):  # type: ignore[misc, valid-type]
        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            return not is_assistant and not (cache is not None and cache_is_returned)

    known = {**method.__globals__, late.__name__: StopCheckOnGPUs}
    own = FunctionType(method.__code__, known, method.__name__, method.__defaults__, method.__closure__)
    own.__kwdefaults__ = method.__kwdefaults__
    return own.__get__(sample.__self__)


def graphs_run_in_this_thread() -> bool:
    """Return whether Inductor replays CUDA graphs in this thread. In torch 2.11 only main and autograd threads can."""
    name = "torch._inductor.cudagraph_trees"
    is_main = threading.current_thread() is threading.main_thread()
    if name not in sys.modules and not is_main and torch.__version__ < "2.13":
        return False  # graphs would belong to the first thread that imports the module
    trees = importlib.import_module(name)
    if not hasattr(trees, "get_obj"):  # a later release: graphs belong to no thread, or the function has changed
        return is_main
    try:
        trees.get_obj(trees.local, "tree_manager_containers")
    except AssertionError:  # https://github.com/pytorch/pytorch/issues/123177
        return False
    return True


class Decoder:
    """A static cache and the steps compiled for it.

    Attributes:
        runs: whether a ``generate`` is using the cache.
    """

    def __init__(self, rows: int, cache: Any) -> None:
        self.rows, self.cache, self.runs = rows, cache, False
        self._compiled: list[tuple[Any, Callable[..., Any]]] = []

    def step(self, model: ShardedModel, config: Any) -> Callable[..., Any]:
        """Return the model's compiled forward for this cache. ``config``: a ``CompileConfig``, ``None`` for default."""
        for known, compiled in self._compiled:
            if known == config:
                return compiled

        def step(**inputs: Any) -> Any:
            return model(**inputs)

        options = (config or self._config(model)).to_dict()
        compiled = torch.compile(with_own_code(step, f"decoding_step_{next(_numbers)}"), **options)
        self._compiled.append((config, compiled))
        return compiled

    def _config(self, model: ShardedModel) -> Any:
        """Return transformers' configuration. With one row, also tune products, which then become Triton kernels."""
        config = copy.copy(model._default_compile_config())
        from torch._inductor import list_mode_options  # takes a second

        if self.rows == 1 and config.mode == "reduce-overhead" and config.options is None:
            config.options = {**list_mode_options(config.mode), "coordinate_descent_tuning": True}
            config.mode = None  # torch.compile takes either
            if model.mesh is None or model.mesh.world.rank == 0:
                log.warning(TUNING)
        return config


class Decoders:
    """The decoders of a model, keyed by the properties of their caches. Recently used decoders are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Decoder] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoders:
        return Decoders()

    def __reduce__(self) -> Any:
        return Decoders, ()

    def cache(self, model: ShardedModel, rows: int, length: int, new: Any, limit: int) -> Any:
        """Return an empty cache for these rows and positions: a kept cache, or ``new``, which is kept from now on.

        Args:
            limit: the maximum total positions of all caches. The least recently used caches are dropped.
        """
        key = _key(model, rows, length)
        decoder = self._kept.get(key)
        if decoder is not None and decoder.runs:  # generate inside generate
            return new
        if decoder is None:
            self.make_room(model, rows, length, limit)
            decoder = self._kept[key] = Decoder(rows, new)
        self._kept.move_to_end(key)
        decoder.cache.reset()
        return decoder.cache

    def make_room(self, model: ShardedModel, rows: int, length: int, limit: int) -> None:
        """Drop the least recently used caches until such a cache fits. Call this before it takes memory."""
        if _key(model, rows, length) in self._kept:
            return
        while self._kept and rows * length + sum(rows * length for rows, length, *_ in self._kept) > limit:
            self._kept.popitem(last=False)

    def of(self, cache: Any) -> Decoder | None:
        """Return the decoder with this cache if it is kept, else ``None``."""
        return next((decoder for decoder in self._kept.values() if decoder.cache is cache), None)

    def running(self) -> Decoder | None:
        """Return the decoder in use, or ``None``."""
        return next((decoder for decoder in reversed(self._kept.values()) if decoder.runs), None)

    def run(self, sample: Callable[[], Any], cache: Any) -> Any:
        """Call ``sample``, which decodes with this cache. The output gets a copy of a kept cache."""
        decoder = self.of(cache)
        if decoder is None:
            return sample()
        decoder.runs = True
        try:
            output = sample()
            if getattr(output, generation_name(), None) is cache:
                setattr(output, generation_name(), copy.deepcopy(cache))
            return output
        finally:
            decoder.runs = False


def _key(model: ShardedModel, rows: int, length: int) -> tuple[Any, ...]:
    """Return the properties of a cache for the current autocast and inference modes."""
    kind = model.device.type
    casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return rows, length, model.device, model.dtype, casts, torch.is_inference_mode_enabled()
