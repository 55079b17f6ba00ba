"""The first import of a class disables the garbage collector, and restores its state."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

import oslo_models
from oslo_models.importing import without_collections


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if transformers' models were not imported yet."""
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)


SCRIPT = """
import gc
from oslo_models.importing import without_collections

collected, frozen = [], gc.get_freeze_count()
gc.callbacks.append(lambda phase, info: collected.append(phase))
with without_collections():
    made = [[] for _ in range(100_000)]
    assert not collected and not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() == frozen
others = [[] for _ in range(10_000)]
assert collected, "it goes on afterwards"
assert not set(map(id, made)) & {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
"""


def test_no_garbage_is_collected_and_made_objects_are_old() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=600)


def test_collector_that_the_application_has_changed_stays_as_it_is(
    first: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    returned = list[bool]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 5)
    monkeypatch.setattr(gc, "unfreeze", lambda: returned.append(True))
    with without_collections():
        pass
    assert gc.isenabled() and not returned


def test_classes_are_imported_so_for_the_first_time(first: None, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = list[bool]()

    def find(name: str, others: Any) -> Any:
        enabled.append(gc.isenabled())
        if name == "GPT2Lost":
            raise AttributeError(name)

    monkeypatch.setattr(oslo_models, "find", find)
    assert oslo_models.GPT2Found is None
    del oslo_models.GPT2Found
    with pytest.raises(AttributeError):
        _ = oslo_models.GPT2Lost
    assert enabled == [False, False] and gc.isenabled()
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", oslo_models)
    with pytest.raises(AttributeError):
        _ = oslo_models.GPT2Lost
    assert enabled == [False, False, True]
