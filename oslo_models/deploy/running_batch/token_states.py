"""Steps with drafted tokens for models with states: the states after each token, until wrong drafts are dropped.

A state covers all computed tokens of a row, so it cannot be cut. In a step with drafts, the mixers with states compute
the new tokens one after the other, and the layers of the cache keep the states before each token. All other modules
compute the tokens together.

Legend:
    B: rows.
    L: new positions of each row.
    D: hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oslo_models.cache_argument import named_arguments
from oslo_models.deploy.running_batch.slot_states import StateLayer, number_of_states
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.pipeline.sharded_model import ShardedModel

_UPDATES = frozenset(("update_conv_state", "update_recurrent_state"))
"""Methods of transformers' cache that a mixer with states calls."""


def mixers(model: ShardedModel, layers: Sequence[Any]) -> list[Any]:
    """Return the modules that update states of the cache.

    Args:
        model: the model, or a stage of it.
        layers: see `layers_with_states`.

    Raises:
        ValueError: the blocks do not have one such module each, with an attention mask as an argument.
    """
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and _updates_states(type(module))]
    if None in map(_forward, found) or len(found) != sum(map(bool, map(number_of_states, layers))):
        raise ValueError(
            f"speculative_tokens is not possible for {type(model).__name__}: in this release of transformers, blocks "
            "with states have several mixers, or mixers with other arguments. Leave speculative_tokens out"
        )
    return found


def _forward(module: Any) -> Callable[..., Any] | None:
    """Return transformers' forward of a mixer, which classes of shards wrap; ``None`` if it takes no attention mask."""
    found: Iterator[Any] = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    return next((each for each in found if "attention_mask" in inspect.signature(each).parameters), None)


def _updates_states(cls: type) -> bool:
    """Return whether a method of a class updates states of the cache."""
    methods = (inspect.unwrap(value) for base in cls.__mro__ for value in vars(base).values() if callable(value))
    return any(_UPDATES & {*each.__code__.co_names} for each in methods if hasattr(each, "__code__"))


@contextmanager
def computing_by_tokens(modules: list[Any], cache: Any) -> Iterator[None]:
    """Context of a step with drafts.

    Args:
        modules: see `mixers`.
        cache: the `SlotCache`. Its layers keep their states before each token.
    """
    with ExitStack() as stack:
        for module in modules:
            forward = partial(_by_tokens, module, module.forward, cache.layers[module.layer_idx])
            stack.enter_context(override_attributes(module, {"forward": forward}))
        yield


def _by_tokens(module: Any, forward: Callable[..., Tensor], layer: StateLayer, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output [B, L, D] of a mixer that computes one token after the other.

    Args:
        args, kwargs: hidden states [B, L, D], and further arguments of the mixer.
    """
    hidden_BLD, *more = args or (kwargs.pop("hidden_states"),)
    original: Any = _forward(module)
    given = named_arguments(original, tuple(more), kwargs)
    given["attention_mask"] = None  # it hides padding, which is not among new tokens
    tokens, outputs = _Tokens(hidden_BLD), []
    with ExitStack() as stack:
        for child in module.children():
            stack.enter_context(override_attributes(child, {"forward": partial(tokens.project, child.forward)}))
        for hidden_B1D in tokens:
            layer.remember_token()
            outputs.append(forward(hidden_B1D, **given))
    return torch.cat(outputs, 1)


class _Tokens:
    """The hidden states of tokens, one after the other, and their projections by the layers of a mixer.

    The first token computes the projections of all tokens, so weights are read once.

    Args:
        hidden_BLD: the hidden states.
    """

    def __init__(self, hidden_BLD: Tensor) -> None:
        self._hidden_BLD = self._token_B1D = hidden_BLD
        self._place = 0
        self._projected: dict[Callable[..., Tensor], Sequence[Tensor]] = {}

    def __iter__(self) -> Iterator[Tensor]:
        for place, token_B1D in enumerate(self._hidden_BLD.split(1, 1)):
            self._place, self._token_B1D = place, token_B1D
            yield token_B1D

    def project(self, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of a layer. Inputs other than the hidden states of the present token are computed."""
        if x is not self._token_B1D or args or kwargs:
            return forward(x, *args, **kwargs)
        if forward not in self._projected:
            self._projected[forward] = forward(self._hidden_BLD).split(1, 1)
        return self._projected[forward][self._place]
