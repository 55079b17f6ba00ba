"""`ParallelizedModel`: OSLO 2's methods for saving and loading split files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models import checkpoint
from oslo_models.distributed.collectives import agree
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.modeling.saving import SavableModel
from oslo_models.modeling.weight_mapping import WeightMapping


class ParallelizedModel(SavableModel):
    """OSLO 2's methods for saving and loading split files."""

    def save_parallelized(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Any = None,
        merge_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        """`save_pretrained_with_parallel` with OSLO 2's file names: ``pytorch_model_tp_?_pp_?.bin``."""
        options = {"save_config": save_config, **kwargs}
        self._save(save_directory, merge_checkpoints, state_dict, save_function, "_", **options)

    @torch.no_grad()
    def from_parallelized(self, directory: str | Path) -> Any:
        """Load the weights of a checkpoint, split at any sizes or merged, into this model; a collective.

        Returns:
            The model itself.

        Raises:
            ValueError: weights of this model are missing in the checkpoint, or have other shapes.
            OSError: the checkpoint does not exist, or is damaged (``CheckpointError``, which names the file).
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.at(f"loading {directory}")
        blocks = None if self.stage is None else [stop - first for first, stop in self.stage.ranges]
        own = self.state_dict(keep_vars=True)
        with agree(mesh.world, f"opening {directory}"):
            mapping = WeightMapping(type(self), self.full_config(), {}, mesh, blocks)
            reader = checkpoint.open_checkpoint(
                Path(directory), fallback_layout=mapping.layout_of_old_files, owner_stage=mapping.stage_of_old_files
            )
        try:
            checkpoint.verify_checkpoint(reader, mesh.world)
            with agree(mesh.world, f"reading {directory}"):
                slices = mapping.slices(reader, None, False, None)
                given = {id(own[name]) for name in slices.keys() & own.keys()}  # tied weights are saved once
                missing = [name for name, tensor in own.items() if id(tensor) not in given]
                # Some weights are computed by constructors (Marian's positions), and never saved.
                computed = [*(self._keys_to_ignore_on_save or ()), *(self._keys_to_ignore_on_load_missing or ())]
                if missing := [name for name in missing if not any(re.search(key, name) for key in computed)]:
                    raise ValueError(f"{directory} lacks {missing} of this {type(self).__name__}")
                for name in slices.keys() & own.keys():
                    own[name].copy_(slices[name].read())
        finally:
            reader.close()
        mesh.world.at("after loading")
        return self
