"""The manifest lists the files and tensors of a checkpoint, with checksums. It is written last and read first."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from oslo_models.checkpoint.checksum import file_checksum
from oslo_models.checkpoint.filenames import CheckpointError

FORMAT_VERSION = 3
"""Latest version. 1: no ``first_ranges``; 2: tensors may have ``first_ranges``; 3: files of several replicas."""


def sync_and_record(path: Path) -> dict[str, int]:
    """Sync a finished file to disk and return its record for the manifest: size and checksum."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        return {"size": os.fstat(fd).st_size, "crc32": file_checksum(fd)}
    finally:
        os.close(fd)


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` with the format version, the library versions and a checksum over everything."""
    versions = {
        name: import_module(name).__version__ for name in ("oslo_models", "torch", "transformers", "safetensors")
    }
    has_first_ranges = any("first_ranges" in entry for entry in content.get("tensors", {}).values())
    version = FORMAT_VERSION if content.get("expert_replicas", 1) > 1 else 2 if has_first_ranges else 1
    manifest = {"format_version": version, "versions": versions, **content}
    manifest["checksum"] = _content_checksum(manifest)
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check a manifest.

    Raises:
        CheckpointError: the manifest is damaged or has an unsupported format version.
    """
    return parse_manifest(path, path.read_bytes())


def parse_manifest(path: Path, data: bytes) -> dict[str, Any]:
    """Check the content of a manifest, as `read_manifest` does.

    Args:
        path: its path, for messages.
    """
    try:
        manifest = json.loads(data)
        found = manifest["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a manifest in JSON, but {error!r}; copy the file again") from error
    if found not in range(1, FORMAT_VERSION + 1):
        raise CheckpointError(
            f"{path}: format version {found} (written with {manifest.get('versions')}), but this version of "
            f"oslo_models reads versions 1 to {FORMAT_VERSION}; install the version that wrote it, or a later one"
        )
    expected, actual = manifest.pop("checksum", None), _content_checksum(manifest)
    if expected != actual:
        raise CheckpointError(f"{path}: expected checksum {expected}, found {actual}; the file was damaged or edited")
    _check_files(path, manifest.get("files"))
    return dict(manifest)


def _check_files(path: Path, files: Any) -> None:
    """Raise ``CheckpointError`` unless all recorded files are in the folder of the manifest."""
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: expected the record of its files, found {type(files).__name__}")
    for name, record in files.items():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{path}: {name!r} leads out of its folder; no save wrote this manifest")
        numbers = [record.get(key) for key in ("size", "crc32")] if isinstance(record, dict) else [None]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise CheckpointError(f"{path}: the record of {name!r} is {record!r:.80}, not its size and checksum")


def _content_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
