"""Models on the meta device skip initialisation; later initialisation works as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Conv1D

from oslo_models.modeling.meta_device import meta_device, uninitialized_on_meta


class Random(TorchDispatchMode):
    """Collects operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def layers() -> nn.Module:
    return nn.ModuleList([nn.Linear(3, 5), nn.Embedding(7, 3, padding_idx=1), Conv1D(4, 3), nn.Conv1d(2, 4, 3)])


def test_layers_on_the_meta_device_are_made_without_initial_values() -> None:
    with torch.device("meta"), Random() as plain:
        expected = layers().state_dict()
    with meta_device(), Random() as random:
        found = layers().state_dict()
    assert plain.found and not random.found
    assert all(tensor.is_meta for tensor in found.values())
    assert {name: (x.shape, x.stride(), x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.stride(), x.dtype) for name, x in expected.items()
    }


def test_tensors_with_values_are_initialised_all_the_same() -> None:
    torch.manual_seed(3)
    expected = layers().state_dict()
    torch.manual_seed(3)
    with uninitialized_on_meta():
        found = layers().state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
