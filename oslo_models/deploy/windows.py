"""Whisper's `generate` in the application, with windows that are computed in the running batch.

Whisper's `generate` in transformers cuts a sound into windows, prepares the first tokens of each, calls the `generate`
of all models, and seeks the next window by the times in the answer. Here it runs without weights, and its inner calls
join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from oslo_models.contracts import broken
from oslo_models.deploy.running_batch.admission import Admission

_GENERATION = "transformers.models.whisper.generation_whisper.WhisperGenerationMixin"
_KNOWN_PACKAGES = ("oslo_models", "transformers", "torch", "builtins")
_OPTIONAL = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "synced_gpus")
"""Arguments that transformers passes to each inner call, also without a value."""
_STRIDES = (1, 2)
"""Strides of the two convolutions of the encoder."""


class LeavesBatchError(Exception):
    """An inner call cannot join. The whole call is computed by itself."""


def reason_against_windows(cls: type[Any]) -> str | None:
    """Return why the windows of a class cannot join; ``None`` if its `generate` is the one of transformers."""
    if not all(base.__module__.partition(".")[0] in _KNOWN_PACKAGES for base in cls.__mro__):
        return f"{cls.__name__} is a class of the application, which may change the windows of Whisper"
    if not issubclass(cls, WhisperGenerationMixin):
        return f"{cls.__name__} does not transcribe"
    return broken(f"{_GENERATION}.generate") or broken(f"{_GENERATION}.generate_with_fallback")


class _Window(GenerationMixin):
    """The next base, whose `generate` computes one window."""

    compute: Callable[[dict[str, Any]], Tensor]

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        return self.compute({"input_features": inputs, **kwargs})


class Windows(WhisperGenerationMixin, _Window):
    """One call of Whisper's `generate`.

    Args:
        config, generation_config: of the model.
        compute: computes the tokens of a window from the arguments of the inner call.
        forward: computes the model's `forward`, by which transformers detects the language.
    """

    def __init__(
        self,
        config: Any,
        generation_config: Any,
        compute: Callable[[dict[str, Any]], Tensor],
        forward: Callable[..., Any],
    ) -> None:
        first, second = (SimpleNamespace(stride=(stride,)) for stride in _STRIDES)
        self.model = SimpleNamespace(encoder=SimpleNamespace(conv1=first, conv2=second), config=config)
        self.config, self.generation_config, self.device = config, generation_config, torch.device("cpu")
        self.compute, self._forward = compute, forward

    def __call__(self, **kwargs: Any) -> Any:
        return self._forward(**kwargs)


def generate_by_windows(
    call: Callable[..., Any],
    forward: Callable[..., Any],
    config: Any,
    generation_config: Any,
    admission: Admission,
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """Return the result of Whisper's `generate`.

    Args:
        call: `Engine.call`.
        forward: the model's `forward`.
        config, generation_config: of the model.
        kwargs: arguments of `generate`.
        options: arguments of `call`, for each window.

    Raises:
        LeavesBatchError: a window cannot join.
        TimeoutError: the windows have taken longer than ``timeout`` of ``options``.
    """
    timeout, random = options["timeout"], options["seed"]
    ends = None if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        if ends is None:
            return None
        if (seconds := ends - time.monotonic()) <= 0:
            raise TimeoutError
        return seconds

    def compute(given: dict[str, Any]) -> Tensor:
        nonlocal random
        # settings stay, also `None`: the workers would take the ones of their own generation configuration
        given = {name: value for name, value in given.items() if name not in _OPTIONAL or value}
        if not admission.joins_window(given, generation_config):
            raise LeavesBatchError
        rest, sounds = admission.separate_images(given)
        own = {**options, "seed": random, "timeout": left(), "images": sounds}
        tokens_BL, state = call("generate", (), rest, **own, joins=True, goes_on=True)
        random = random if state is None else state
        found: Tensor = tokens_BL
        return found

    def detect(**given: Any) -> Any:
        return forward(**given, timeout=left())

    try:
        return Windows(config, generation_config, compute, detect).generate(**kwargs)
    except TimeoutError:
        if timeout is None:
            raise
        raise TimeoutError(f"no answer within timeout={timeout:g} s; the call was cancelled") from None
