"""Imports of torch and transformers without garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection within the block, if transformers' models are not imported yet.

    Their import creates 400,000 permanent objects. Repeated collections take 0.4 s of 2.8 s, and a later collection
    would take another 0.3 s. So the objects move to the oldest generation at once, which is collected last.
    """
    if not gc.isenabled() or "transformers.modeling_utils" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # otherwise `unfreeze` would also release the application's frozen objects
            gc.freeze()
            gc.unfreeze()
        gc.enable()
