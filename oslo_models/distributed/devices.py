"""Checks that requested GPUs exist."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch


def require_gpus(argument: str, devices: Iterable[torch.device], instead: str) -> None:
    """Raise ``ValueError`` if torch does not see one of these GPUs.

    Args:
        argument: the origin of the devices, for the message.
        instead: the remedy on a machine without GPUs, for the message.
    """
    count = torch.cuda.device_count()
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ValueError(f"{argument} asks for {device}, and {visible_gpus()}: {instead}")


def visible_gpus() -> str:
    """Return the number of visible GPUs and a possible reason for missing ones, as text for messages."""
    count = torch.cuda.device_count()
    found = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{found} (torch {torch.__version__} is built without CUDA)"
    return f"{found} (CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
