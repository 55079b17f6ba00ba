"""Checks that requested GPUs exist, and reads the free memory of devices."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate, or ``None`` where the system does not tell.

    The processes of a host share the memory of its CPUs.
    """
    if device.type == "cuda":
        try:
            free: int = torch.cuda.mem_get_info(device)[0]
        except (AssertionError, RuntimeError):  # no driver answers
            return None
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return found.get("MemAvailable")


def visible_gpus() -> str:
    """Return the number of visible GPUs and a possible reason for missing ones, as text for messages."""
    count = torch.cuda.device_count()
    found = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{found} (torch {torch.__version__} is built without CUDA)"
    return f"{found} (CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
