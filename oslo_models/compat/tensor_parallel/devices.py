"""The devices of the ranks of `tensor_parallel`, and of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oslo_models.distributed.devices import require_gpus, visible_gpus

Device = torch.device | str | int


def _device(device: Device) -> torch.device:
    """Return the device, with its index."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    is_current = found == torch.device("cuda") and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found


def device_of_outputs(devices: Sequence[torch.device], device: Device | None, index: int | None) -> torch.device:
    """Return the output device, given as a device or as an index into the devices of the ranks."""
    if device is not None and index is not None:
        raise ValueError(f"output_device={device!r} and output_device_index={index!r}: pass one of them")
    if index is None:
        output = devices[0] if device is None else _device(device)
        require_gpus("output_device", [output], "leave it out for the first of device_ids")
        return output
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(devices):
        raise ValueError(f"output_device_index must be from 0 to {len(devices) - 1}, got {index!r}")
    return devices[index]


def devices_of_ranks(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """Return the device of each rank."""
    devices = [_device(device) for device in (range(torch.cuda.device_count()) if device_ids is None else device_ids)]
    if not devices:
        raise ValueError(f'there is no GPU: {visible_gpus()}; pass device_ids, such as ["cpu", "cpu"]')
    if {device.type for device in devices} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"device_ids must be GPUs only or CPUs only, got {[*map(str, devices)]}")
    if devices[0].type == "cuda" and len(set(devices)) < len(devices):
        raise ValueError(f"device_ids names a GPU twice, which would hold two shares: {[*map(str, devices)]}")
    require_gpus("device_ids", devices, 'pass CPUs, such as ["cpu", "cpu"], or devices that are there')
    return devices
