"""Reads and writes sharded checkpoints from tensor names, layouts and a mesh. Independent of models."""

from oslo_models.checkpoint.filenames import MANIFEST, CheckpointError
from oslo_models.checkpoint.journal import current_files, current_folder, recover
from oslo_models.checkpoint.open import open_checkpoint, verify_checkpoint
from oslo_models.checkpoint.pinned_buffers import pinned_buffers
from oslo_models.checkpoint.reader import CheckpointReader, LazySlice
from oslo_models.checkpoint.writer import save_checkpoint

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "CheckpointReader",
    "LazySlice",
    "current_files",
    "current_folder",
    "open_checkpoint",
    "pinned_buffers",
    "recover",
    "save_checkpoint",
    "verify_checkpoint",
]
