"""Imports of torch and transformers without the collections of garbage that they would cause."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Within the block no garbage is collected, if it is to import transformers' models for the first time.

    They make four hundred thousand objects that stay. Going through them again and again takes 0.4 s of 2.8 s, and
    afterwards would take 0.3 s once more: so they become old objects at once, which are looked at last.
    """
    if not gc.isenabled() or "transformers.modeling_utils" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the application has some, which `unfreeze` would return too
            gc.freeze()
            gc.unfreeze()
        gc.enable()
