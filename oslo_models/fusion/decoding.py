"""Static caches and compiled decoding steps, kept from one ``generate`` to the next.

A CUDA graph contains the addresses of the cache, so a new cache would have the step compiled again. Lengths are rounded
up, so that few are compiled.
"""

from __future__ import annotations

import copy
import importlib
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

SHORTEST = 256
"""Positions of the shortest cache."""
MULTIPLE = 1024
"""Longer caches have a multiple of these positions."""
_numbers = count()


def rounded_length(length: int) -> int:
    """The positions of a cache for ``length`` tokens: the next power of two up to `MULTIPLE`, then its multiples."""
    if length > MULTIPLE:
        return -(-length // MULTIPLE) * MULTIPLE
    return max(SHORTEST, 1 << max(0, length - 1).bit_length())


def with_own_code(function: Callable[..., Any], name: str) -> Any:
    """A copy of a function with a code object of its own.

    Dynamo keeps its compilations, their number and what it knows of their shapes by code object: functions made by one
    decorator, for several models, would share its limit of eight compilations, and run without any beyond.
    """
    original: Any = function
    code = original.__code__.replace(co_name=name)
    made = FunctionType(code, original.__globals__, name, original.__defaults__, original.__closure__)
    made.__kwdefaults__ = original.__kwdefaults__
    return made


STOPS_LATE_ON = ("cuda",)
"""Devices that compute while the host prepares the next token, unless it waits for them."""


def without_waiting(sample: Any, device: torch.device, config: Any, streamer: Any) -> Any:
    """transformers' greedy search, on a GPU without waiting for each token to learn whether all rows are finished.

    transformers can read this one token late, and drops the token that was too many, but does so on Apple's GPUs only.
    This is its method with another answer to where it may. Sampling waits, since a token too many would take random
    numbers, and so does what returns the cache, which would contain that token, or streams the tokens.

    Args:
        sample: the method ``_sample`` of a model; it is returned as it is where it is not transformers' own, or of a
            release that cannot read late.
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
    """Whether Inductor replays CUDA graphs here: in torch 2.11 only threads of autograd and the main thread can."""
    name = "torch._inductor.cudagraph_trees"
    is_main = threading.current_thread() is threading.main_thread()
    if name not in sys.modules and not is_main and torch.__version__ < "2.13":
        return False  # graphs would belong to the first thread that imports the module
    trees = importlib.import_module(name)
    if not hasattr(trees, "get_obj"):  # a later release, in which graphs belong to no thread, or by another function
        return is_main
    try:
        trees.get_obj(trees.local, "tree_manager_containers")
    except AssertionError:  # https://github.com/pytorch/pytorch/issues/123177
        return False
    return True


class Decoder:
    """A static cache, and the steps that were compiled for it.

    Attributes:
        runs: whether a ``generate`` is using it.
    """

    def __init__(self, rows: int, cache: Any) -> None:
        self.rows, self.cache, self.runs = rows, cache, False
        self._compiled: list[tuple[Any, Callable[..., Any]]] = []

    def step(self, model: Any, config: Any) -> Callable[..., Any]:
        """The compiled forward of a model for this cache; ``config``: a ``CompileConfig``, ``None`` for the default."""
        for known, compiled in self._compiled:
            if known == config:
                return compiled

        def step(**inputs: Any) -> Any:
            return model(**inputs)

        options = (config or self._config(model)).to_dict()
        compiled = torch.compile(with_own_code(step, f"decoding_step_{next(_numbers)}"), **options)
        self._compiled.append((config, compiled))
        return compiled

    def _config(self, model: Any) -> Any:
        """transformers' configuration; products of one row are also tuned, with which they become kernels of Triton."""
        config = copy.copy(model._default_compile_config())
        from torch._inductor import list_mode_options  # takes a second

        if self.rows == 1 and config.mode == "reduce-overhead" and config.options is None:
            config.options = {**list_mode_options(config.mode), "coordinate_descent_tuning": True}
            config.mode = None  # torch.compile takes either
        return config


class Decoders:
    """The decoders of a model, by what their caches depend on; those used last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Decoder] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoders:
        return Decoders()

    def __reduce__(self) -> Any:
        return Decoders, ()

    def cache(self, model: Any, rows: int, length: int, new: Any, limit: int) -> Any:
        """An empty cache for these rows and positions: one that is kept, or ``new``, which is kept from now on.

        Args:
            limit: the positions that all caches may have together; those used longest ago are given up.
        """
        kind = model.device.type
        casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (rows, length, model.device, model.dtype, casts, torch.is_inference_mode_enabled())
        decoder = self._kept.get(key)
        if decoder is not None and decoder.runs:  # generate inside generate
            return new
        if decoder is None:
            decoder = self._kept[key] = Decoder(rows, new)
            while len(self._kept) > 1 and sum(rows * length for rows, length, *_ in self._kept) > limit:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        decoder.cache.reset()
        return decoder.cache

    def of(self, cache: Any) -> Decoder | None:
        """The decoder with this cache, if it is kept."""
        return next((decoder for decoder in self._kept.values() if decoder.cache is cache), None)

    def running(self) -> Decoder | None:
        """The decoder that is in use."""
        return next((decoder for decoder in reversed(self._kept.values()) if decoder.runs), None)

    def run(self, sample: Callable[[], Any], cache: Any) -> Any:
        """Call ``sample``, which decodes with this cache. An output gets a copy of a cache that is kept."""
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
