"""What the files of a checkpoint are called."""

from __future__ import annotations

import re

MANIFEST = "oslo_manifest.json"
MERGED = ("model.safetensors", "pytorch_model.bin")
"""Names of a merged checkpoint, in the order in which transformers prefers them."""
OPTIMIZER = "optimizer"
"""What stands for an optimizer's state where a model's checkpoint has its variant."""

_SPLIT = re.compile(r"pytorch_model_tp([=_])(\d+)_pp\1(\d+)\.(?:bin|safetensors)")
_OPTIMIZER = re.compile(r"optimizer_tp=\d+_pp=\d+_dp=\d+\.bin")


class CheckpointError(OSError):
    """A checkpoint is incomplete, damaged or mixed: names the file, what was expected and found, and the way out."""


def with_variant(name: str, variant: str | None) -> str:
    """The name as transformers spells it for a variant: ``model.fp16.safetensors``."""
    if variant is None:
        return name
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.{variant}.{suffix}"


def index_name(name: str, variant: str | None) -> str:
    return with_variant(f"{name}.index.json", variant)


def split_name(tp_rank: int, pp_rank: int, safe: bool, sign: str = "=") -> str:
    return f"pytorch_model_tp{sign}{tp_rank}_pp{sign}{pp_rank}.{'safetensors' if safe else 'bin'}"


def split_position(name: str) -> tuple[int, int] | None:
    """``(tp_rank, pp_rank)`` of a split file, in either spelling; ``None`` for any other name."""
    match = _SPLIT.fullmatch(name)
    return (int(match[2]), int(match[3])) if match else None


def optimizer_name(tp_rank: int, pp_rank: int, dp_rank: int) -> str:
    return f"optimizer_tp={tp_rank}_pp={pp_rank}_dp={dp_rank}.bin"


def is_replaced_by_save(name: str, variant: str | None) -> bool:
    """Whether the file belongs to the checkpoint that a save of this variant replaces."""
    if variant is None and split_position(name):
        return True
    if variant == OPTIMIZER and _OPTIMIZER.fullmatch(name):
        return True
    whole = re.sub(r"-\d{5}-of-\d{5}(?=\.\w+$)", "", name)
    own = [name for merged in MERGED for name in (with_variant(merged, variant), index_name(merged, variant))]
    return whole in [with_variant(MANIFEST, variant), *own]
