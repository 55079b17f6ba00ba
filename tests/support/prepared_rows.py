"""Rows that `PlainSettings` prepares, compared with the rows that `generate` prepares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oslo_models.deploy.messages import Request
from oslo_models.deploy.running_batch.plain_settings import PlainSettings
from oslo_models.deploy.running_batch.preparation import prepare
from oslo_models.deploy.running_batch.row import Row

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 7}


class Prepared:
    """Prepares calls with `PlainSettings`, and compares the rows with the rows that `generate` prepares.

    Attributes:
        count: number of rows that `generate` has prepared.
    """

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.known, self.count = model, PlainSettings(model), 0
        own = model.generate

        def generate(**options: Any) -> Any:
            self.count += 1
            return own(**options)

        monkeypatch.setattr(model, "generate", generate)

    def __call__(self, ids: list[list[int]], mask: list[list[int]] | None = None, **options: Any) -> int:
        """Return the number of rows of the call that `generate` prepared."""
        given = {"input_ids": torch.tensor(ids), **GREEDY, **options}
        if mask is not None:
            given["attention_mask"] = torch.tensor(mask)
        request, before = Request(3, "generate", (), given, 11, joins=True), self.count
        rows = prepare(self.model, request, self.known).rows
        prepared = self.count - before
        assert list(map(describe, rows)) == list(map(describe, prepare(self.model, request).rows))
        return prepared


def describe(row: Row) -> list[Any]:
    """Return the attributes of a row for a comparison."""
    ends = [row._ends.length, row._ends._tokens, len(row._ends._others)]
    return [row.number, row.seed, row.prompt, row.ids_BL.tolist(), row.pad, row.is_plain, len(row._processors), *ends]
