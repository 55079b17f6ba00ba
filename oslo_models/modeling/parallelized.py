"""`ParallelizedModel`: OSLO 2's methods to save and load checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from oslo_models.checkpoint import LazySlice
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree
from oslo_models.modeling.full_model import make_full
from oslo_models.modeling.quantizing import check_not_quantized
from oslo_models.modeling.saving import SavableModel
from oslo_models.modeling.weight_mapping import open_with_mapping


class ParallelizedModel(SavableModel):
    """Adds OSLO 2's `save_parallelized` and `from_parallelized`, and `deparallelize`."""

    _full_class: type

    def save_parallelized(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Any = None,
        merge_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call `save_pretrained_with_parallel` with OSLO 2's names of split files, ``pytorch_model_tp_?_pp_?.bin``."""
        options = {"save_config": save_config, **kwargs}
        self._save(save_directory, merge_checkpoints, state_dict, save_function, "_", **options)

    def deparallelize(self) -> Self:
        """Convert to the full model in place, in host memory of every rank. This is a collective of all ranks.

        The model gets back the class that it had before `oslo_models.initialize`, or keeps its parallel class without
        process groups. It can be sharded again. Local parameters stay the same objects, without gradients. `fuse` is
        undone.

        Returns:
            The model itself.

        Raises:
            ValueError: the model has adapters, or quantised weights.
        """
        make_full(self)
        return self

    @torch.no_grad()
    def from_parallelized(self, directory: str | Path) -> Self:
        """Load a checkpoint, merged or split at any sizes, into this model. This is a collective of all ranks.

        Returns:
            The model itself.

        Raises:
            ValueError: the checkpoint lacks weights of this model, or their shapes differ.
            OSError: the checkpoint does not exist or is damaged (``CheckpointError``, which names the file).
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.set_phase(f"loading {directory}")
        with agree(mesh.world, "checking the model"):
            check_not_quantized(
                self.state_dict(), "takes no other values: call from_pretrained_with_parallel with quantization_config"
            )
        blocks = None if self.stage is None else [stop - first for first, stop in self.stage.ranges]
        source = open_with_mapping(type(self), self._copied_config(), mesh, Path(directory), blocks_per_stage=blocks)
        with source as (mapping, reader), agree(mesh.world, f"reading {directory}"):
            self._copy_from(mapping.slices(reader), directory)
        mesh.world.set_phase("after loading")
        return self

    def _copy_from(self, slices: Mapping[str, LazySlice], directory: str | Path) -> None:
        """Copy slices of a checkpoint into the model's tensors.

        Raises:
            ValueError: weights of this model are missing in ``slices``.
        """
        state = self.state_dict(keep_vars=True)
        loaded = {id(state[name]) for name in slices.keys() & state.keys()}  # checkpoints store tied weights once
        missing = [name for name, tensor in state.items() if id(tensor) not in loaded]
        # Constructors compute some weights that are never saved (Marian's positions).
        computed = [*(self._keys_to_ignore_on_save or ()), *(self._keys_to_ignore_on_load_missing or ())]
        if missing := [name for name in missing if not any(re.search(key, name) for key in computed)]:
            raise ValueError(f"{directory} lacks {missing} of this {type(self).__name__}")
        for name in slices.keys() & state.keys():
            state[name].copy_(slices[name].read())
