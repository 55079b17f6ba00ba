"""`SavableModel`: the methods that save a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models import checkpoint
from oslo_models.distributed.collectives import agree, require_equal
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


class SavableModel(PreTrainedModel):
    """The methods of `ParallelModel` that save it."""

    mesh: ParallelMesh | None = None
    stage: Stage | None = None
    layouts: dict[str, Layout]

    def save_pretrained_with_parallel(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        save_with_merging: bool = False,
        safe_serialization: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Any = None,
        **kwargs: Any,
    ) -> None:
        """Save the model. A collective: every rank calls it, and it returns when all data are on disk.

        A previous checkpoint in ``save_directory`` is replaced atomically once everything is written: a killed process
        or a full disk leaves the old checkpoint or the new one. Other files in the directory stay.

        Args:
            save_config: write ``config.json`` and ``generation_config.json`` too.
            save_with_merging: write a checkpoint for transformers' own ``from_pretrained``, instead of one file per
                rank, ``pytorch_model_tp=?_pp=?.bin``. ``save_with_merge`` is an alias. Tensors are merged one at a
                time.
            safe_serialization: ``True``: safetensors; ``False``: ``.bin``; ``None``: ``.bin`` when split, and when
                merged as transformers does, safetensors.
            state_dict: this rank's tensors; default: ``self.state_dict()``.
            save_function: writes one ``.bin`` file, as ``torch.save`` does.
            **kwargs: ``max_shard_size`` and ``variant`` of merged files.

        Raises:
            ValueError: arguments contradict each other, or differ between ranks.
            OSError: the directory cannot be written (no permission, no space, a file of that name); raised on every
                rank, with the old checkpoint intact.
        """
        merging = kwargs.pop("save_with_merge", save_with_merging)
        options = {"save_config": save_config, "safe_serialization": safe_serialization, **kwargs}
        self._save(save_directory, merging, state_dict, save_function, "=", **options)

    def _save(
        self,
        save_directory: str | Path,
        merging: bool,
        state_dict: Mapping[str, Tensor] | None,
        save_function: Any,
        sign: str,
        save_config: bool = True,
        safe_serialization: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """`save_pretrained_with_parallel`; ``sign`` separates name and number in the names of split files."""
        mesh = self.mesh or ParallelMesh()
        mesh.world.at(f"saving to {save_directory}")
        with agree(mesh.world, "checking arguments of saving"):
            if unknown := kwargs.keys() - {"max_shard_size", "variant"}:
                raise ValueError(f"unknown arguments {sorted(unknown)}; beside the named ones: max_shard_size, variant")
            if kwargs and not merging:
                raise ValueError(f"{sorted(kwargs)} are for save_with_merging=True; split files are one per rank")
        what = {"save_directory": str(save_directory), "save_with_merging": merging, "save_config": save_config}
        require_equal(mesh.world, {**what, "safe_serialization": safe_serialization, **kwargs}, "save arguments")
        aliases = {} if self.stage is None else self.stage.aliases
        given = self.state_dict() if state_dict is None else state_dict
        tensors = {aliases.get(name, name): tensor for name, tensor in given.items()}
        for name in self._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        known_layouts = {aliases.get(name, name): layout for name, layout in self.layouts.items()}
        layouts = {name: known_layouts.get(name, Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}
        checkpoint.save_checkpoint(
            Path(save_directory),
            tensors,
            layouts,
            mesh,
            merging=merging,
            tied=dict(self.all_tied_weights_keys if self.stage is None else self.stage.tied),
            files=self._write_config if save_config else None,
            metadata={"model_type": self.config.model_type, "architectures": [type(self).__name__]},
            safe_serialization=safe_serialization,
            save_function=save_function,
            sign=sign,
            **kwargs,
        )
        mesh.world.at("after saving")

    def full_config(self) -> PreTrainedConfig:
        """The configuration of the full model; that of a stage counts its own blocks."""
        full = {} if self.stage is None else self.stage.config
        return type(self.config).from_dict({**self.config.to_dict(), **full})

    def _write_config(self, directory: Path) -> None:
        config = self.full_config()
        config.dtype, config.architectures = self.dtype, [type(self).__name__]
        config.save_pretrained(directory)
        if self.can_generate() and self.generation_config is not None:
            self.generation_config.save_pretrained(directory)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method. Raises ``RuntimeError`` for a part of a model, whose checkpoint would be incomplete."""
        if self.is_model_parallelized():
            raise RuntimeError(
                "this rank holds a part of the model only: call save_pretrained_with_parallel(directory) on every "
                "rank, with save_with_merging=True for a checkpoint that transformers loads"
            )
        return super().save_pretrained(*args, **kwargs)
