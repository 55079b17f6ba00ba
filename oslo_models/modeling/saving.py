"""`SavableModel`: the methods of a model that write it to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models import checkpoint
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


class SavableModel(PreTrainedModel):
    """What `ParallelModel` does in place of transformers' ``save_pretrained``."""

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
        """Save the model; collective: every rank calls it, and it returns when all data are on the disk.

        What ``save_directory`` held before stays until everything is written, and is then replaced at once: a process
        killed, or a disk full, at any point leaves the old checkpoint or the new one. Other files in it stay.

        Args:
            save_config: write ``config.json`` and ``generation_config.json`` too.
            save_with_merging: write what transformers' own ``from_pretrained`` loads, instead of one file per rank,
                ``pytorch_model_tp=?_pp=?.bin``. ``save_with_merge`` is another name of it. Tensors are merged one at a
                time.
            safe_serialization: ``True``: safetensors; ``False``: ``.bin``; ``None``: ``.bin`` when split, and when
                merged as transformers does, safetensors.
            state_dict: this rank's tensors, if not those of ``self.state_dict()``.
            save_function: writes one ``.bin`` file, as ``torch.save`` does.
            **kwargs: ``max_shard_size`` and ``variant`` of merged files.

        Raises:
            ValueError: contradictory arguments, or ranks that were given different ones.
            OSError: the directory cannot be written (no permission, no space, a file in its place); on every rank, and
                the old checkpoint is intact.
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
        """`save_pretrained_with_parallel`; ``sign`` is that of the names of split files."""
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
            tied=dict(self.all_tied_weights_keys if self.stage is None else self.stage.tied_names),
            files=self._write_config if save_config else None,
            metadata={"model_type": self.config.model_type, "architectures": [type(self).__name__]},
            safe_serialization=safe_serialization,
            save_function=save_function,
            sign=sign,
            **kwargs,
        )
        mesh.world.at("after saving")

    def full_config(self) -> PreTrainedConfig:
        """The configuration of the whole model, of which a stage has another."""
        whole = {} if self.stage is None else self.stage.full_config
        return type(self.config).from_dict({**self.config.to_dict(), **whole})

    def _write_config(self, directory: Path) -> None:
        config = self.full_config()
        config.dtype, config.architectures = self.dtype, [type(self).__name__]
        config.save_pretrained(directory)
        if self.can_generate() and self.generation_config is not None:
            self.generation_config.save_pretrained(directory)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; refused for a part of a model, of which it would write a broken checkpoint."""
        if self.is_model_parallelized():
            raise RuntimeError(
                "this rank holds a part of the model only: call save_pretrained_with_parallel(directory) on every "
                "rank, with save_with_merging=True for a checkpoint that transformers loads"
            )
        return super().save_pretrained(*args, **kwargs)
