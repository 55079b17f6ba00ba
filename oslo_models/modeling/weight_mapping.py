"""Maps the tensors of a checkpoint to the parameters of this rank's part of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from oslo_models import checkpoint
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.modeling.apply_plan import layouts_of
from oslo_models.sharding.layout import EvenSplit, Layout

if TYPE_CHECKING:
    from oslo_models.modeling.base import ParallelModel


class WeightMapping:
    """Which tensor of a checkpoint is loaded into which parameter, by the full model and this rank's part on meta."""

    def __init__(
        self,
        cls: type[ParallelModel],
        config: PreTrainedConfig,
        options: dict[str, Any],
        mesh: ParallelMesh,
        blocks_per_stage: Sequence[int] | None = None,
    ) -> None:
        options = {**options, "dtype": config.dtype}
        with torch.device("meta"):
            part = self.model = model = cls._from_config(copy.deepcopy(config), **options)
            if mesh.pp.size > 1:
                part = cls._from_config(copy.deepcopy(config), mesh=mesh, blocks_per_stage=blocks_per_stage, **options)
        self.state = model.state_dict()
        self.rank = mesh.tp.rank
        self._layouts: dict[int, dict[str, Layout]] = {}
        self.layouts = self._layouts_over(mesh.tp.size)
        aliases = {} if part.stage is None else part.stage.aliases
        self.names = {name: aliases.get(name, name) for name in part.state_dict()}

    def target_names(self, sources: Iterable[str], key_mapping: dict[str, str] | None) -> Iterator[tuple[str, str]]:
        """Pairs of a name in the checkpoint and the name of the parameter that it is read into."""
        mapping = get_model_conversion_mapping(self.model, key_mapping)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        for source in sources:
            prefix = self.model.base_model_prefix
            target, pattern = rename_source_key(source, renamings, converters, prefix, self.state)
            if pattern is not None and source not in self.state:
                raise ValueError(f"{source} would have to be converted into {target}, which is not supported yet")
            if target not in self.state and source in self.state:
                target = source
            yield source, target

    def slices(
        self,
        reader: checkpoint.CheckpointReader,
        old_vocab: int | None,
        ignore_mismatched_sizes: bool,
        key_mapping: dict[str, str] | None,
    ) -> dict[str, Any]:
        """This rank's slice of every tensor that it needs, read when transformers' loader requests it.

        Names unknown to the model are included, so that the loader can report them.

        Raises:
            ValueError: shapes in the checkpoint differ from those of the model.
            CheckpointError: the same for sharded tensors in split files without a manifest.
        """
        targets = list(self.target_names(reader.tensors, key_mapping))
        slices: dict[str, Any] = {
            source: reader.slice(source, Layout(reader.tensors[source].shape), 0)
            for source, target in targets
            if target not in self.state
        }
        found = {target: source for source, target in targets}
        tied, mismatched, misfits = self.model.all_tied_weights_keys, list[str](), list[str]()
        new_vocab = getattr(self.model.config, "vocab_size", None)
        for local, name in self.names.items():
            root = tied.get(name, name)
            if name not in found and root in self.names:
                continue  # tied to a loaded parameter, or missing
            # On a stage without the parameter that this one is tied to, any of its names is as good.
            names = (name, root, *(other for other, source in tied.items() if source == root))
            source = next((found[other] for other in names if other in found), None)
            if source is None:
                continue
            shape = reader.tensors[source].shape
            layout = self.layouts.get(name, Layout(tuple(self.state[name].shape)))
            if shape == layout.shape:
                slices[local] = reader.slice(source, layout, self.rank)
            elif (old_vocab, *layout.shape[1:]) == shape and layout.shape[0] == new_vocab and layout.dim == 0:
                slices[local] = ResizedSlice(reader, source, layout, self.rank)
            elif (*layout.shape[:-1], old_vocab) == shape and layout.shape[-1] == new_vocab and layout.dim is None:
                slices[local] = LengthenedSlice(reader, source, layout, self.rank)
            elif reader.grid and reader.manifest is None and layout.dim is not None:
                misfits.append(self._misfit(reader, source, name))
            else:
                mismatched.append(f"{name}: {shape} in the checkpoint, {layout.shape} in the model")
        if misfits and not ignore_mismatched_sizes:
            raise checkpoint.CheckpointError(
                f"the split files in {reader.where} do not fit the configuration of the model. Without "
                f"{checkpoint.MANIFEST}, nothing but the configuration says how they were sharded: load them with the "
                "config.json that they were saved with, or save the model again where it can be loaded:\n  "
                + "\n  ".join(misfits)
            )
        if mismatched and not ignore_mismatched_sizes:
            raise ValueError(
                "shapes differ; pass ignore_mismatched_sizes=True to initialise these anew:\n  "
                + "\n  ".join(mismatched)
            )
        return slices

    def layout_of_old_files(self, name: str, local_shapes: list[tuple[int, ...]]) -> Layout | None:
        """The layout of the tensor ``name`` in split files without a manifest, where its shapes are ``local_shapes``.

        If the shapes fit, it is the layout of the plan, which knows the replicated key-value heads and interleaved
        matrices. Otherwise the files hold consecutive rows or columns: OSLO 1.x split uneven sizes differently, and
        the vocabulary may have been resized since.

        Returns:
            The layout; ``None`` if the shapes fit neither.
        """
        target = next(target for _, target in self.target_names([name], None))
        n, full = len(local_shapes), self.layouts.get(target)
        planned = self._layouts_over(n).get(target)
        if planned is not None and local_shapes == [planned.local_shape(rank) for rank in range(n)]:
            return planned
        if full is None or full.dim is None or all(shape == full.shape for shape in local_shapes):
            return Layout(local_shapes[0])
        pieces = self._layouts_over(1)[target].ranges[0]
        parts = len(pieces)  # concatenated matrices, such as query, key and value
        equal_sizes = len({stop - start for start, stop in pieces}) == 1
        if parts > 1 and not (equal_sizes and planned is not None and all(len(own) == parts for own in planned.ranges)):
            return None
        edges = [0, *accumulate(shape[full.dim] // parts for shape in local_shapes)]
        starts = [part * edges[-1] for part in range(parts)]
        ranges = tuple(tuple((start + a, start + b) for start in starts) for a, b in pairwise(edges))
        first = local_shapes[0]
        return Layout((*first[: full.dim], edges[-1] * parts, *first[full.dim + 1 :]), full.dim, ranges)

    def _misfit(self, reader: checkpoint.CheckpointReader, source: str, name: str) -> str:
        """The shapes of a sharded parameter in split files without a manifest, and those expected."""
        holders, n = reader.tensors[source].files, (reader.split or (1, 1))[0]
        found = ", ".join(f"{tuple(file.views[source].shape)} in {file.path.name}" for file in holders)
        planned = self._layouts_over(n).get(name)
        over = f"it cannot be sharded over {n} ranks"
        if planned is not None:
            over = f"over {n} ranks it is {', '.join(str(planned.local_shape(rank)) for rank in range(n))}"
        return f"{name}: {found}; in the model its shape is {tuple(self.state[name].shape)}, and {over}"

    def _layouts_over(self, n: int) -> dict[str, Layout]:
        """The layouts over ``n`` ranks; empty if the model cannot be sharded over that many."""
        if n not in self._layouts:
            model, plan = self.model, self.model.plan(self.model.config)
            limit = 1 if plan.single_rank_reason else plan.limit()
            fits = limit is None or n <= limit
            self._layouts[n] = layouts_of(model, plan, model._prefix(), type(model).head_plan, n) if fits else {}
        return self._layouts[n]

    def stage_of_old_files(self, name: str, pp: int) -> int:
        """The stage of ``pp`` whose file holds the trained ``name``, in files of OSLO 1.x, which hold all layers.

        There, all stages had the same number of blocks, and the last one also the remainder.
        """
        target = next(target for _, target in self.target_names([name], None))
        plan, prefix = self.model.plan(self.model.config), self.model._prefix()
        for stack in plan.blocks:
            if target.startswith(f"{prefix}{stack}."):
                block = int(target.removeprefix(f"{prefix}{stack}.").partition(".")[0])
                blocks = len(self.model.get_submodule(prefix + stack))
                return min(block // max(blocks // pp, 1), pp - 1)
        return 0 if target.rpartition(".")[0].removeprefix(prefix) in plan.embed else pp - 1


class ResizedSlice(checkpoint.LazySlice):
    """A slice of a vocabulary larger than in the checkpoint; new rows are the mean of the old ones.

    Source: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021.
    """

    def read(self) -> Tensor:
        shape = self.reader.tensors[self.name].shape
        clipped = tuple(tuple((min(a, shape[0]), min(b, shape[0])) for a, b in own) for own in self.layout.ranges)
        old = self.reader.read(self.name, Layout(shape, 0, clipped), self.rank)
        new = self.shape[0] - old.shape[0]
        if not new:
            return old
        chunks = Layout.divided(shape, 0, (EvenSplit(shape[0]),), min(shape[0], 64))
        total = torch.stack(
            [self.reader.read(self.name, chunks, chunk).double().sum(0) for chunk in range(len(chunks.ranges))]
        ).sum(0)
        return torch.cat((old, (total / shape[0]).to(old.dtype).expand(new, *shape[1:])))


class LengthenedSlice(checkpoint.LazySlice):
    """A bias of the logits of a vocabulary larger than in the checkpoint; it is zero for new tokens."""

    def read(self) -> Tensor:
        old = self.reader.read(self.name, Layout(self.reader.tensors[self.name].shape), 0)
        return torch.nn.functional.pad(old, (0, self.shape[-1] - old.shape[-1]))
