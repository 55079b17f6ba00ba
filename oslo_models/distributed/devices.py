"""Checks that the GPUs that a caller names are there."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch


def require_gpus(argument: str, devices: Iterable[torch.device], instead: str) -> None:
    """Raise ``ValueError`` if one of these devices is a GPU that torch does not see.

    Args:
        argument: where the devices come from, for the message.
        instead: what to pass on a machine without GPUs.
    """
    count = torch.cuda.device_count()
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ValueError(f"{argument} asks for {device}, and {visible_gpus()}: {instead}")


def visible_gpus() -> str:
    """How many GPUs torch sees, and why they may be fewer than expected; for messages."""
    count = torch.cuda.device_count()
    found = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{found} (torch {torch.__version__} is built without CUDA)"
    return f"{found} (CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
