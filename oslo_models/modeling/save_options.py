"""Arguments of transformers' ``save_pretrained`` that the saving methods of sharded models accept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from oslo_models.checkpoint.upload import Upload

_DEFAULTS = {"save_peft_format": True, "save_original_format": True, "distributed_checkpoint": False}
"""Further arguments of transformers' ``save_pretrained``. Only these values are supported."""
_UPLOAD = tuple(field.name for field in fields(Upload))
_SHARD_SIZE = "50GB"


@dataclass(frozen=True)
class SaveOptions:
    """Options for saving a model, in addition to the named arguments of the saving methods.

    Attributes:
        safe_serialization, save_function, max_shard_size, variant: see `save_checkpoint`.
        is_main_process: whether transformers would save the configuration on this rank.
        upload: where to upload the checkpoint.
    """

    safe_serialization: bool | None
    save_function: Any
    max_shard_size: int | str = _SHARD_SIZE
    variant: str | None = None
    is_main_process: bool = True
    upload: Upload | None = None

    @classmethod
    def of(
        cls, kwargs: Mapping[str, Any], merging: bool, save_function: Any, safe_serialization: bool | None
    ) -> SaveOptions:
        """Parse the options from a method's keyword arguments.

        Raises:
            ValueError: an option is unknown, unsupported or contradicts another option.
        """
        known = ("max_shard_size", "variant", "is_main_process", "push_to_hub", *_UPLOAD)
        if unknown := kwargs.keys() - {*known, *_DEFAULTS}:
            raise ValueError(f"unknown arguments {sorted(unknown)}; beside the named ones: {', '.join(known)}")
        for name, default in _DEFAULTS.items():
            if kwargs.get(name, default) is not default:
                raise ValueError(f"{name}={kwargs[name]!r} is not supported: leave it out")
        for name in ("is_main_process", "push_to_hub"):
            if not isinstance(kwargs.get(name, False), bool):
                raise ValueError(f"{name} must be True or False, got {kwargs[name]!r}")
        size, variant = kwargs.get("max_shard_size", _SHARD_SIZE), kwargs.get("variant")
        if not merging and (variant is not None or size not in (None, _SHARD_SIZE)):
            given = {"max_shard_size": size} if variant is None else {"variant": variant}
            raise ValueError(f"{given} is for save_with_merging=True; split files are one per rank")
        if save_function is torch.save:  # transformers' default
            save_function = None
        if save_function is not None and safe_serialization:
            raise ValueError("save_function writes .bin files: leave out safe_serialization=True")
        uploading = {name: kwargs[name] for name in _UPLOAD if kwargs.get(name) is not None}
        if not kwargs.get("push_to_hub", False):
            if misplaced := [name for name in uploading if name != "token" and uploading[name] is not False]:
                raise ValueError(f"{misplaced} are for push_to_hub=True")
            uploading = {}
        return cls(
            safe_serialization=False if save_function is not None else safe_serialization,
            save_function=save_function,
            max_shard_size=_SHARD_SIZE if size is None else size,
            variant=variant,
            is_main_process=kwargs.get("is_main_process", True),
            upload=Upload(**uploading) if kwargs.get("push_to_hub", False) else None,
        )

    def to_compare(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name, without secrets."""
        own = {name: getattr(self, name) for name in ("safe_serialization", "max_shard_size", "variant")}
        upload = {} if self.upload is None else asdict(self.upload) | {"push_to_hub": True}
        return {**own, **{name: value for name, value in upload.items() if name != "token"}}
