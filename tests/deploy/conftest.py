"""The deployed model of `stand` and the full model that it was made from."""

from __future__ import annotations

from typing import Any

import pytest

from support import faults


@pytest.fixture
def whole(stand: faults.Stand) -> Any:
    return stand.whole


@pytest.fixture
def model(stand: faults.Stand) -> Any:
    stand.answers()
    return stand.model
