"""The model types of transformers that the zoo lacks: a derived plan is exact, or the type is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import oslo_models
from oslo_models.cli.support_table import MAPPINGS
from oslo_models.modeling.derived.deriving import derive_for_model


def missing() -> Iterator[tuple[str, str]]:
    """Yield the names of classes that the zoo lacks, with their model types."""
    for names in MAPPINGS.values():
        for kind, classes in names.items():
            for name in (classes,) if isinstance(classes, str) else classes:
                if not hasattr(oslo_models, name) and hasattr(transformers, name):
                    yield name, kind


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "kind"), sorted({*missing()}))
def test_type_is_derived_or_refused(name: str, kind: str) -> None:
    """The derivation itself compares a small model with one process in float64: outputs, gradients and buffers."""
    cls = getattr(transformers, name)
    try:
        with torch.device("meta"):
            model = cls._from_config(CONFIG_MAPPING[kind]())
    except Exception as error:  # noqa: BLE001  another package is missing, or the default configuration has no model
        pytest.skip(f"transformers does not construct it: {type(error).__name__}: {error}"[:200])
    try:
        plan = derive_for_model(model, ranks=(2,))
    except ValueError as error:
        assert name in str(error), error
    else:
        assert plan.report.rows
