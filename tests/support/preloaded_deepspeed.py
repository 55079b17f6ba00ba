"""DeepSpeed, imported once for all workers of the pool, since accelerate imports it in every trainer."""

from __future__ import annotations

import warnings
from contextlib import suppress

from support.pipelines import import_deepspeed
from support.pool_worker import environment

with environment({}), warnings.catch_warnings(), suppress(Exception):  # the test that needs it reports the error
    import_deepspeed()
    import setuptools  # noqa: F401  with which DeepSpeed looks for what it could compile
