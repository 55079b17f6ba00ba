"""Progress bars of workers that load, shown by the application."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers.utils.logging import is_progress_bar_enabled, tqdm

from oslo_models.deploy.messages import Loading


class Bars:
    """One for each rank, where transformers would show one. A terminal that is gone is no reason to stop."""

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}
        self._enabled = is_progress_bar_enabled()

    def show(self, rank: int, message: Loading) -> None:
        if not self._enabled:
            return
        try:
            if rank not in self._bars:
                desc = f"Loading weights of rank {rank}"
                self._bars[rank] = tqdm(total=message.total, desc=desc, position=rank, leave=True)
            self._bars[rank].update(message.done - self._bars[rank].n)
        except (OSError, ValueError):
            self._enabled = False

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError, ValueError):
            for bar in self._bars.values():
                bar.close()
