"""Derives a plan and tests it on a small random model before it shards the real model."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.modeling.derived.derivation import Call, DerivedPlan, Findings, derive_plan, observe
from oslo_models.modeling.derived.probe import (
    CannotProbeError,
    calls_of,
    calls_of_transformers,
    calls_with,
    copy_of_model,
    same_structure,
    small_model,
)
from oslo_models.modeling.derived.verification import Sharding, differences
from oslo_models.sharding.plan import Plan

_SEED, _SHOWN = 1234, 8
_NOT_OF_THE_STRUCTURE = ("dtype", "torch_dtype", "_name_or_path", "architectures", "transformers_version", "auto_map")
"""Fields that loading changes in a configuration. They are left out of the cache key of derived plans."""


@dataclass
class DerivedFromConfig:
    """Maps a configuration to the derived plan of a model class, for ``plan=``.

    Attributes:
        cls: the transformers model class.
        inputs: see `derive_for_model`.
    """

    cls: type[Any]
    inputs: Any = None
    _known: dict[str, DerivedPlan] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"derive({self.cls.__name__})"

    def __call__(self, config: PreTrainedConfig) -> DerivedPlan:
        values = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_THE_STRUCTURE}
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._known:
            with torch.device("meta"):
                model = self.cls._from_config(copy.deepcopy(config))
            self._known[key] = derive_for_model(model, self.inputs)
        return self._known[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"cls": self.cls, "inputs": self.inputs, "_known": {}}


def derive_for_model(model: nn.Module, inputs: Any = None, ranks: Sequence[int] = (2, 3)) -> DerivedPlan:
    """Derive the plan of a model and test it on a small random model.

    The test compares outputs, gradients and buffers with the unsharded model. It preserves this process's random
    states.

    Args:
        model: the model, with weights or on the meta device. It is not changed.
        inputs: a tensor, a tuple of positional arguments or a dictionary of keyword arguments. Only the shapes and the
            zeros of floating-point tensors matter. By default, transformers models get inputs that fit their
            configuration.
        ranks: the tensor-parallel sizes to test.

    Raises:
        CannotProbeError: the model cannot be called with such inputs, or no inputs are known.
        ValueError: the sharded model differs from the full model; the message lists the differences.
    """
    with _own_random_numbers():
        probe, calls = _probe(model, inputs)
        seen: list[str] = []
        for findings in _observe(probe, calls):
            plan = derive_plan(probe, findings)
            seen = [line for n in ranks for line in differences(probe, plan, calls, n, _SEED)]
            if not seen:
                return derive_plan(model, findings)
    lines = "\n  ".join(seen[:_SHOWN])
    raise ValueError(
        f"no plan could be derived for this {type(model).__name__}: a small random one, sharded, differs from the full "
        f"one. Pass plan= with a plan of your own. Differences:\n  {lines}"
    )


def verify(model: nn.Module, plan: Plan | Sharding, args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> None:
    """Test a plan on a random model of the same structure, with the arguments of a call.

    Raises:
        ValueError: the sharded model differs from the full model.
    """
    with _own_random_numbers():
        seen = differences(copy_of_model(model), plan, calls_of(args, kwargs), n, _SEED)
    if seen:
        lines = "\n  ".join(seen[:_SHOWN])
        raise ValueError(
            f"a random {type(model).__name__}, sharded over {n} ranks, differs from the full one:\n  {lines}"
        )


def _observe(probe: nn.Module, calls: Sequence[Call]) -> list[Findings]:
    """Trace the calls in both modes. Return the findings to try, the best first; the last gather every output.

    The first are left out if the model uses activations in a way that only plain tensors support.
    """
    calls = [partial(_in_mode, call, training) for call in calls for training in (True, False)]
    gathering = observe(copy.deepcopy(probe), calls, gather=True)
    try:
        return [observe(copy.deepcopy(probe), calls), gathering]
    except (TypeError, AttributeError, RuntimeError, IndexError, KeyError, ValueError):
        return [gathering]


def _in_mode(call: Call, training: bool, model: nn.Module) -> Any:
    return call(model.train(training))


def _small_model_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a small random model; ``None`` if a small one has another structure."""
    try:
        probe = small_model(type(model), model.config)
    except CannotProbeError:
        raise
    except Exception as error:
        raise CannotProbeError(
            f"a small random {type(model).__name__} cannot be constructed to try its plan ({type(error).__name__}: "
            f"{str(error)[:300]}): pass plan= with a plan of your own"
        ) from error
    return probe if same_structure(probe, model) else None


def _probe(model: nn.Module, inputs: Any) -> tuple[nn.Module, list[Call]]:
    """Return a small random model and functions that call it."""
    is_transformers = isinstance(model, PreTrainedModel)
    if inputs is None and not is_transformers:
        raise CannotProbeError(
            f"pass inputs= of a call of this {type(model).__name__}, such as inputs=torch.randn(2, 3, 32, 32)"
        )
    probe: Any = None
    if isinstance(model, PreTrainedModel) and inputs is None:
        probe = _small_model_of(model)
    if probe is None:
        probe = copy_of_model(model)
    calls = calls_with(inputs) if inputs is not None else calls_of_transformers(probe)
    working, errors = [], []
    for call in calls:
        try:
            for training in (False, True):
                call(copy.deepcopy(probe).train(training))
            working.append(call)
        except Exception as error:  # noqa: BLE001  reported below, if no call works
            errors.append(error)
    if not working or (inputs is not None and working[0] is not calls[0]):
        first = errors[0]
        raise CannotProbeError(
            f"a small random {type(model).__name__} cannot be called to try its plan ({type(first).__name__}: "
            f"{str(first)[:300]}): pass inputs= of a call that works"
        ) from first
    return probe, working


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Draw the same random numbers on all ranks within the block, then restore this process's random states."""
    states = random.getstate(), np.random.get_state()
    default = torch.get_default_dtype()
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), on_cpu:
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            random.setstate(states[0])
            np.random.set_state(states[1])
