"""The file names of a checkpoint."""

from __future__ import annotations

import re

MANIFEST = "oslo_manifest.json"
MERGED = ("model.safetensors", "pytorch_model.bin")
"""Names of the weights file of a merged checkpoint, in the search order of transformers."""
OPTIMIZER = "optimizer"
"""Variant of optimizer state files."""

_SPLIT = re.compile(r"pytorch_model_tp([=_])(\d+)_pp\1(\d+)(?:_dp\1(\d+))?\.(?:bin|safetensors)")
_OPTIMIZER = re.compile(r"optimizer_tp=\d+_pp=\d+_dp=\d+\.bin")


class CheckpointError(OSError):
    """A checkpoint is incomplete, damaged or mixed from several saves.

    The message names the file, the expected and the actual content, and the remedy.
    """


def with_variant(name: str, variant: str | None) -> str:
    """Add a variant to a file name as transformers does: ``model.fp16.safetensors``."""
    if variant is None:
        return name
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.{variant}.{suffix}"


def index_name(name: str, variant: str | None) -> str:
    """Return the index name of a merged checkpoint in several files: ``model.safetensors.index.fp16.json``."""
    return with_variant(f"{name}.index.json", variant)


def split_name(tp_rank: int, pp_rank: int, safe: bool, separator: str = "=", replica: int = 0) -> str:
    """Return the file name of one rank: ``pytorch_model_tp=0_pp=0.bin``.

    Args:
        replica: the data-parallel replica, or the rank that divides tokens, in their order. Those after the first save
            only the experts that the first does not hold, in a separate file: ``pytorch_model_tp=0_pp=0_dp=1.bin``.
    """
    of_replica = f"_dp{separator}{replica}" if replica else ""
    suffix = "safetensors" if safe else "bin"
    return f"pytorch_model_tp{separator}{tp_rank}_pp{separator}{pp_rank}{of_replica}.{suffix}"


def split_position(name: str) -> tuple[int, int, int] | None:
    """Parse ``(tp_rank, pp_rank, replica)`` from the name of a split file; ``None`` for other names.

    Accepts ``=`` and ``_`` as separator.
    """
    match = _SPLIT.fullmatch(name)
    return (int(match[2]), int(match[3]), int(match[4] or 0)) if match else None


def optimizer_name(tp_rank: int, pp_rank: int, dp_rank: int) -> str:
    return f"optimizer_tp={tp_rank}_pp={pp_rank}_dp={dp_rank}.bin"


def is_replaced_by_save(name: str, variant: str | None) -> bool:
    """Return whether a save of this variant replaces the file ``name`` of an existing checkpoint."""
    if variant is None and split_position(name):
        return True
    if variant == OPTIMIZER and _OPTIMIZER.fullmatch(name):
        return True
    unnumbered = re.sub(r"-\d{5}-of-\d{5}(?=\.\w+$)", "", name)
    merged = [name for base in MERGED for name in (with_variant(base, variant), index_name(base, variant))]
    return unnumbered in [with_variant(MANIFEST, variant), *merged]
