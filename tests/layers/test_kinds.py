"""Kinds of layers: an entry and its layer in one file, joined by ``@shards``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from oslo_models import registry
from oslo_models.layers import kinds, multihead_attention  # noqa: F401  defines an entry
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shard_module, shards
from oslo_models.layers.linear import ColumnParallel
from oslo_models.sharding import plan
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.plan import Plan


@dataclass(frozen=True)
class Doubled(Replicated):
    factor: int = 2


@dataclass(frozen=True)
class Noted(Replicated):
    pass


@pytest.fixture(autouse=True)
def own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Define kinds for one test only."""
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))

    @shards(Doubled)
    class DoubledLayer(ShardedModule):
        factor: int

        def configure(self, entry: Doubled, context: ShardingContext) -> None:
            super().configure(entry, context)
            self.factor = entry.factor

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x) * self.factor
            return output

    @shards(Noted)
    def note(module: Any, entry: Noted, context: ShardingContext) -> None:
        module.note = context.name


def context(name: str) -> ShardingContext:
    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=2, rank=0))
    return ShardingContext(name, nn.Module(), mesh, None, {}, {})


def test_layer_comes_before_the_class_of_the_module_and_reads_its_entry() -> None:
    module: Any = nn.ReLU()
    shard_module(module, Doubled(3), context("mlp.act"))
    assert (type(module).__name__, module.tp.size, module(Tensor([1.0, -1.0])).tolist()) == ("ReLU", 2, [3.0, 0.0])


def test_subclass_of_an_entry_has_its_layer_and_a_function_keeps_the_class() -> None:
    class Tripled(Doubled):
        pass

    module: Any = nn.ReLU()
    shard_module(module, Tripled(3), context("mlp.act"))
    assert module.factor == 3
    kept: Any = nn.ReLU()
    shard_module(kept, Noted(), context("mlp.act"))
    assert type(kept) is nn.ReLU and kept.note == "mlp.act"


def test_entry_without_a_layer_changes_nothing_and_unknown_layers_of_torch_are_refused() -> None:
    module = nn.ReLU()
    shard_module(module, Replicated(), context("act"))
    assert vars(module).keys() == vars(nn.ReLU()).keys() and type(module) is nn.ReLU
    registry.load("resnet")  # the layers of a kind are known once their module is imported
    with pytest.raises(
        ValueError, match="conv is a Conv1d; ColumnParallel knows BatchNorm2d, Conv1D, Conv2d, Embedding"
    ):
        shard_module(nn.Conv1d(2, 2, 1), ColumnParallel(), context("conv"))


def entries(cls: type[Replicated] = Replicated) -> Iterator[type[Replicated]]:
    yield cls
    for each in cls.__subclasses__():
        yield from entries(each)


def test_vocabulary_of_plans_stays_small() -> None:
    for model_type in registry.ARCHITECTURES:
        registry.load(model_type)
    found = {entry for entry in entries() if entry.__module__.startswith("oslo_models.")}
    shared = {entry.__name__ for entry in found if not entry.__module__.startswith("oslo_models.models.")}
    shared.remove("DividedTower")  # no plan states it: `with_divided_images` puts it in place of towers
    assert len(shared) <= 20, sorted(shared)
    assert len(fields(Plan)) <= 8


def test_entries_are_imported_from_the_module_of_plans_too() -> None:
    assert plan.ColumnParallel is ColumnParallel
    with pytest.raises(ImportError, match="Missing"):
        from oslo_models.sharding.plan import Missing  # noqa: F401
