"""`SavableModel`: methods that save a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models import checkpoint
from oslo_models.distributed.mesh import NOT_PICKLABLE, ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects, require_equal
from oslo_models.modeling.quantizing import check_not_quantized
from oslo_models.modeling.save_options import SaveOptions
from oslo_models.modeling.saved_tensors import as_saved
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


class SavableModel(PreTrainedModel):
    """Adds `save_pretrained_with_parallel`, in place of transformers' ``save_pretrained``."""

    mesh: ParallelMesh | None = None
    stage: Stage | None = None
    layouts: dict[str, Layout]

    def save_pretrained_with_parallel(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        save_with_merging: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Any = None,
        safe_serialization: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model. This is a collective of all ranks. It returns when all data are on disk.

        An existing checkpoint in ``save_directory`` is replaced atomically: if a process is killed or the disk is full,
        the directory holds either the complete old or the complete new checkpoint. Other files in it are kept.

        Args:
            save_directory: the directory of the checkpoint. It is created if needed.
            save_config: write ``config.json`` and ``generation_config.json`` too.
            save_with_merging: write a checkpoint for transformers' own ``from_pretrained``, instead of one file per
                rank, ``pytorch_model_tp=?_pp=?.bin``. Tensors are gathered one at a time. Models that are not sharded
                are always merged. Alias: ``save_with_merge``.
            state_dict: this rank's tensors, ``self.state_dict()`` by default.
            save_function: a function that writes one ``.bin`` file, like ``torch.save``.
            safe_serialization: ``True`` for safetensors, ``False`` for ``.bin``. By default, split files are ``.bin``.
                Merged files are safetensors, as in transformers, unless there is a ``save_function``.
            **kwargs: arguments of transformers' ``save_pretrained``. ``push_to_hub=True`` uploads merged or split files
                from rank 0, with ``repo_id``, ``token``, ``private``, ``create_pr``, ``revision``, ``commit_message``
                and ``commit_description``. ``is_main_process=False`` on all ranks saves no configuration.
                ``max_shard_size`` and ``variant`` apply to merged files.

        Raises:
            ValueError: the arguments contradict each other, or differ between ranks.
            OSError: the directory cannot be written (no permission, no space, a file of that name), and the old
                checkpoint is intact. Or the upload failed, and the new checkpoint is complete. Raised on every rank.
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
        separator: str,
        save_config: bool = True,
        safe_serialization: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Implement `save_pretrained_with_parallel`. ``separator`` is used in the names of split files."""
        mesh = self.mesh or ParallelMesh()
        mesh.world.set_phase(f"saving to {save_directory}")
        with agree(mesh.world, "checking arguments of saving"):
            if adapters := list(getattr(self, "peft_config", ())):
                raise ValueError(
                    f"the model has the adapters {adapters}: merge them (`merge_and_unload()` of the PeftModel) to "
                    "save it with them, or save them alone with `save_pretrained`"
                )
            merging = merging or not mesh.is_sharded
            options = SaveOptions.of(kwargs, merging, save_function, safe_serialization)
            check_not_quantized(
                self.state_dict() if state_dict is None else state_dict,
                "quantised weights are not saved: save the model before, and pass quantization_config when loading it",
            )
        arguments = {"save_directory": str(save_directory), "save_with_merging": merging, "save_config": save_config}
        require_equal(mesh.world, {**arguments, **options.to_compare()}, "save arguments")
        with_config = save_config and any(gather_objects(mesh.world, options.is_main_process))
        own, layouts = self._full_names(self.state_dict() if state_dict is None else state_dict)
        tensors: Mapping[str, Tensor] = own
        tied = self._tied_names()
        if merging:
            tensors, layouts, tied = as_saved(self, own, layouts, tied)
        checkpoint.save_checkpoint(
            Path(save_directory),
            tensors,
            layouts,
            mesh,
            merging=merging,
            tied=tied,
            files=self._write_config if with_config else None,
            metadata={"model_type": self.config.model_type, "architectures": [type(self).__name__]},
            safe_serialization=options.safe_serialization,
            save_function=options.save_function,
            separator=separator,
            max_shard_size=options.max_shard_size,
            variant=options.variant,
        )
        with agree(mesh.world, "uploading"):
            if options.upload is not None and mesh.world.rank == 0:
                options.upload.push(Path(save_directory), options.variant, with_config)
        mesh.world.set_phase("after saving")

    def _full_names(self, state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Layout]]:
        """Return the tensors to save and their layouts, by their names in the full model."""
        full_names = {} if self.stage is None else self.stage.full_names
        tensors = {full_names.get(name, name): tensor for name, tensor in state_dict.items()}
        for name in self._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        sharded = {full_names.get(name, name): layout for name, layout in self.layouts.items()}
        return tensors, {name: sharded.get(name, Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}

    def _tied_names(self) -> dict[str, str]:
        """Map each tied weight to its source, by their names in the full model. This is a collective of all ranks.

        Weights count as tied while all stages hold equal values. Once the values differ, each weight is saved
        separately, as readers expect it without ``tie_word_embeddings``.
        """
        if self.stage is None:
            return dict(self.all_tied_weights_keys)
        if self.pipeline is not None:
            self.pipeline.update_ties()
        return {} if self.stage.is_untied else dict(self.stage.tied_names)

    def _copied_config(self) -> PreTrainedConfig:
        return copy.deepcopy(self.config)

    def _write_config(self, directory: Path) -> None:
        config = self._copied_config()
        config.dtype, config.architectures = self.dtype, [type(self).__name__]
        config.save_pretrained(directory)
        if self.can_generate() and self.generation_config is not None:
            self.generation_config.save_pretrained(directory)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.mesh is not None and self.mesh.world.group is not None:
            raise pickle.PicklingError(NOT_PICKLABLE)
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        copied: Any = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save a model that is not sharded, or the active adapter of any model, like transformers.

        An adapter of a sharded model is saved in full. This is a collective of all ranks.

        Raises:
            RuntimeError: this rank holds only a part of the model, which would make a broken checkpoint.
        """
        if self._hf_peft_config_loaded and self.mesh is not None and self.mesh.world.size > 1:
            from oslo_models.modeling.adapters.saving import save_injected

            save_injected(self, *args, **kwargs)
            return None
        if self.is_model_parallelized():
            raise RuntimeError(
                "this rank holds only a part of the model: call save_pretrained_with_parallel(directory) on every "
                "rank, with save_with_merging=True for a checkpoint that transformers loads"
            )
        return super().save_pretrained(*args, **kwargs)
