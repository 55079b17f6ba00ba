"""Maps the tensors of a checkpoint to the parameters on this rank: names, layouts and slices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from oslo_models import checkpoint
from oslo_models.checkpoint.quantized import check_not_quantized
from oslo_models.config.sources import checking
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree
from oslo_models.modeling.apply_plan import layouts_of, plan_over
from oslo_models.modeling.conversions import (
    conversion_mapping,
    is_renaming,
    is_unpadding,
    stacking_reader,
    transposes_experts,
)
from oslo_models.modeling.meta_device import meta_device
from oslo_models.modeling.original_class import original_class
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.shares import shares_of


@contextmanager
def open_with_mapping(
    cls: type[Any],
    config: PreTrainedConfig,
    mesh: ParallelMesh,
    directory: Path,
    *,
    options: dict[str, Any] | None = None,
    blocks_per_stage: Sequence[int] | None = None,
    variant: str | None = None,
) -> Iterator[tuple[WeightMapping, checkpoint.CheckpointReader]]:
    """Open and verify a model's checkpoint, and close it after the block. This is a collective of all ranks.

    Args:
        cls: the class of the model.
        config: the model's configuration.
        options: further keyword arguments of the model's constructor.
        blocks_per_stage: as in the constructors.
        variant: transformers' ``variant``.

    Raises:
        FileNotFoundError: there is no checkpoint in ``directory``, or files of it are missing.
        CheckpointError: a file is damaged, missing or belongs to another checkpoint.
    """
    with agree(mesh.world, f"opening {directory}"):
        mapping = WeightMapping(cls, config, options or {}, mesh, blocks_per_stage)
        reader = checkpoint.open_checkpoint(
            directory, variant=variant, fallback_layout=mapping.infer_layout, owner_stage=mapping.owner_stage
        )
        _require_real(reader, mapping)
    try:
        checkpoint.verify_checkpoint(reader, mesh.world)
        yield mapping, reader
    finally:
        reader.close()


def _require_real(reader: checkpoint.CheckpointReader, mapping: WeightMapping) -> None:
    """Raise ``CheckpointError`` for complex tensors if the model is real: their imaginary parts would be lost."""
    wrong = [name for name, stored in reader.tensors.items() if stored.dtype.is_complex]
    if wrong and not any(tensor.is_complex() for tensor in mapping.state.values()):
        file = reader.tensors[wrong[0]].files[0].path
        raise checkpoint.CheckpointError(f"{file}: the entry {wrong[0]!r} has complex numbers, which the model has not")


class WeightMapping:
    """Maps tensors of a checkpoint to the parameters on this rank.

    Constructs the full model and this rank's part on the meta device, and derives names and layouts from them.

    Attributes:
        model: the full model, on the meta device.
        state: the full model's ``state_dict``.
        layouts: the layout of each parameter of the full model over the tensor-parallel ranks.
        names: maps each name in this rank's ``state_dict`` to the name in the full model. They differ because each
            pipeline stage numbers its blocks from zero.
    """

    def __init__(
        self,
        cls: type[Any],
        config: PreTrainedConfig,
        options: dict[str, Any],
        mesh: ParallelMesh,
        blocks_per_stage: Sequence[int] | None = None,
    ) -> None:
        options = {**options, "dtype": config.dtype}
        with meta_device(), checking(config.name_or_path or cls.__name__):
            local = self.model = model = cls._from_config(copy.deepcopy(config), **options)
            if mesh.pp.size > 1:
                local = cls._from_config(copy.deepcopy(config), mesh=mesh, blocks_per_stage=blocks_per_stage, **options)
        self.state = model.state_dict()
        self._layouts: dict[tuple[int, tuple[int, ...]], dict[str, Layout]] = {}
        self._mesh = mesh
        self.layouts = self.layouts_over(mesh.tp.size)
        full_names = {} if local.stage is None else local.stage.full_names
        self.names = {name: full_names.get(name, name) for name in local.state_dict()}

    def target_names(self, sources: Iterable[str], key_mapping: dict[str, str] | None) -> Iterator[tuple[str, str]]:
        """Yield pairs of a tensor name in the checkpoint and the name of the parameter in the full model."""
        for source, target, _ in self._targets(sources, key_mapping):
            yield source, target

    def _targets(
        self, sources: Iterable[str], key_mapping: dict[str, str] | None
    ) -> Iterator[tuple[str, str, WeightConverter | None]]:
        """Yield the pairs of `target_names`, each with transformers' conversion from tensor to parameter, if any."""
        mapping = conversion_mapping(self.model, key_mapping)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefixes = dict.fromkeys((self.model.base_model_prefix, original_class(type(self.model)).base_model_prefix))
        for source in sources:
            for prefix in prefixes:
                target, pattern = rename_source_key(source, renamings, converters, prefix, self.state)
                if target in self.state:
                    break
            if target not in self.state and source in self.state:
                yield source, source, None
            else:
                yield source, target, next((each for each in converters if pattern in each.source_patterns), None)

    def slices(
        self,
        reader: checkpoint.CheckpointReader,
        *,
        old_vocab: int | None = None,
        ignore_mismatched_sizes: bool = False,
        key_mapping: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return lazy slices of the tensors that this rank needs, by their names on this rank.

        Unexpected tensors are included in full, so that transformers' loader can report them.

        Args:
            old_vocab: the vocabulary size of the checkpoint. The model's vocabulary may be larger.
            ignore_mismatched_sizes: leave out tensors with mismatched shapes instead of raising an error.
            key_mapping: as in transformers' ``from_pretrained``.

        Raises:
            ValueError: checkpoint and model have different shapes, or the checkpoint's weights are quantised.
            CheckpointError: shapes differ and the checkpoint consists of split files without a manifest, or
                transformers converts tensors in a way that this library does not support.
        """
        reader = stacking_reader(reader, self.model)
        check_not_quantized(reader.directory, reader.tensors, self.state)
        targets: list[tuple[str, str]] = []
        for stored, target, converter in self._targets(reader.tensors, key_mapping):
            # UnpaddedSlice handles unpadding
            read = converter is None or is_unpadding(converter) or transposes_experts(converter)
            read = read or (is_renaming(converter) and target not in (target for _, target in targets))
            if target in self.state and not read:
                raise _unknown_conversion(reader, stored, target, converter)
            targets.append((stored, target))
        slices: dict[str, Any] = {
            source: reader.slice(source, Layout(reader.tensors[source].shape), 0)
            for source, target in targets
            if target not in self.state
        }
        sources = {target: source for source, target in targets}
        mismatched = []
        for local, name in self.names.items():
            source = self._find_source(name, sources)
            if source is None:
                continue
            layout = self.layouts.get(name, Layout(tuple(self.state[name].shape)))
            part = self._slice(reader, source, layout, old_vocab)
            if part is None:
                mismatched.append((name, source, layout))
            else:
                slices[local] = part
        if mismatched and not ignore_mismatched_sizes:
            raise self._shape_error(reader, mismatched)
        return slices

    def is_transposed(self, key_mapping: dict[str, str] | None, source: str) -> bool:
        """Whether a weight belongs to a ``Conv1D`` layer and has the shape ``[in, out]``.

        Args:
            key_mapping: as in transformers' ``from_pretrained``.
            source: the name of the weight in the checkpoint.
        """
        target = next(target for _, target in self.target_names([source], key_mapping))
        return target in self.state and isinstance(self.model.get_submodule(target.rpartition(".")[0]), Conv1D)

    def _find_source(self, name: str, sources: dict[str, str]) -> str | None:
        """Find the checkpoint tensor of a parameter. Return ``None`` if it is missing, or tied to a local parameter.

        Args:
            name: the parameter's name in the full model.
            sources: maps each parameter to the name of its tensor in the checkpoint.
        """
        tied = self.model.all_tied_weights_keys
        root = tied.get(name, name)
        if name not in sources and root in self.names:
            return None
        # The source parameter is on another stage: read the tied weight under any of its names.
        names = (name, root, *(other for other, source in tied.items() if source == root))
        return next((sources[other] for other in names if other in sources), None)

    def _slice(
        self, reader: checkpoint.CheckpointReader, source: str, layout: Layout, old_vocab: int | None
    ) -> checkpoint.LazySlice | None:
        """Return this rank's slice of a tensor, padded if the vocabulary grew, or ``None`` if the shapes differ."""
        shape, rank = reader.tensors[source].shape, self._mesh.rank_in(layout)
        if shape == layout.shape:
            return reader.slice(source, layout, rank)
        new_vocab = getattr(self.model.config.get_text_config(), "vocab_size", None)
        if (old_vocab, *layout.shape[1:]) == shape and layout.shape[0] == new_vocab and layout.dim == 0:
            return ResizedSlice(reader, source, layout, rank)
        unpadded = getattr(self.model.config.get_text_config(), "unpadded_vocab_size", None)  # Inkling 2, since 5.24
        if (new_vocab, *layout.shape[1:]) == shape and layout.shape[0] == unpadded:
            return UnpaddedSlice(reader, source, layout, rank)
        if (*layout.shape[:-1], old_vocab) == shape and layout.shape[-1] == new_vocab and layout.dim is None:
            return PaddedSlice(reader, source, layout, rank)
        return None

    def _shape_error(
        self, reader: checkpoint.CheckpointReader, mismatched: Sequence[tuple[str, str, Layout]]
    ) -> Exception:
        """Return the error for parameters with other shapes than their tensors in the checkpoint.

        For split files without a manifest, the message does not suggest new initial weights: the full shapes were
        inferred from the configuration, so the configuration is wrong.

        Args:
            mismatched: the parameter name, tensor name and parameter layout of each mismatch.
        """
        if reader.grid and reader.manifest is None:
            lines = [self._describe_split_mismatch(reader, source, name) for name, source, _ in mismatched]
            return checkpoint.CheckpointError(
                f"the split files in {reader.directory} do not fit the configuration of the model. Without "
                f"{checkpoint.MANIFEST}, only the configuration says how they were sharded: load them with the "
                "config.json that they were saved with, or save the model again where it can be loaded:\n  "
                + "\n  ".join(lines)
            )
        lines = [
            f"{name}: {reader.tensors[source].shape} in the checkpoint, {layout.shape} in the model"
            for name, source, layout in mismatched
        ]
        return ValueError(
            "shapes differ; pass ignore_mismatched_sizes=True to initialise these anew:\n  " + "\n  ".join(lines)
        )

    def _describe_split_mismatch(self, reader: checkpoint.CheckpointReader, source: str, name: str) -> str:
        """Describe a parameter's local shapes in split files without a manifest, and the shapes that the plan gives."""
        files, n, shape = reader.tensors[source].files, (reader.split or (1, 1))[0], tuple(self.state[name].shape)
        found = ", ".join(f"{tuple(file.views[source].shape)} in {file.path.name}" for file in files)
        expected = f"it cannot be sharded over {n} ranks"
        if layouts := self.layouts_over(n):
            layout = layouts.get(name, Layout(shape))
            expected = f"over {n} ranks it is {', '.join(str(layout.local_shape(rank)) for rank in range(n))}"
        return f"{name}: {found}; in the model its shape is {shape}, and {expected}"

    def infer_layout(self, name: str, local_shapes: list[tuple[int, ...]]) -> Layout | None:
        """Infer how split files without a manifest shard a tensor.

        If the shapes match the plan over the same number of ranks, with the shares of this model or with equal ones,
        use the plan's layout: only the plan knows which key-value heads were replicated and how fused heads are
        interleaved. Otherwise assume that the files hold consecutive rows or columns: OSLO 1.x split uneven sizes in
        another way, and the vocabulary may have been larger or smaller.

        Args:
            name: the name of the tensor in the files.
            local_shapes: the tensor's shape in the file of each tensor-parallel rank.

        Returns:
            The layout, or ``None`` if the shapes fit neither rule.
        """
        target = next(target for _, target in self.target_names([name], None))
        n, full = len(local_shapes), self.layouts.get(target)
        with_shares = [self._mesh.tp.size] if n == self._mesh.tp.size else []
        for ranks in (*with_shares, n):
            planned = self.layouts_over(ranks).get(target)
            if planned is not None and local_shapes == [planned.local_shape(rank) for rank in range(n)]:
                return planned
        if full is None or full.dim is None or all(shape == full.shape for shape in local_shapes):
            return Layout(local_shapes[0])
        pieces = self.layouts_over(1)[target].ranges[0]
        parts = len(pieces)  # fused matrices, such as query, key and value
        same_size = len({stop - start for start, stop in pieces}) == 1
        if parts > 1 and not (same_size and planned is not None and all(len(own) == parts for own in planned.ranges)):
            return None
        edges = [0, *accumulate(shape[full.dim] // parts for shape in local_shapes)]
        starts = [part * edges[-1] for part in range(parts)]
        ranges = tuple(tuple((start + a, start + b) for start in starts) for a, b in pairwise(edges))
        first = local_shapes[0]
        return Layout((*first[: full.dim], edges[-1] * parts, *first[full.dim + 1 :]), full.dim, ranges)

    def layouts_over(self, n: int) -> dict[str, Layout]:
        """Return the layouts over ``n`` ranks, or no layouts if the model cannot be sharded over ``n`` ranks."""
        key = n, shares_of(n)
        if key not in self._layouts:
            model = self.model
            plan = plan_over(model, self._mesh) if n == self._mesh.tp.size else model.plan(model.config)
            limit = 1 if plan.single_rank_reason else plan.max_ranks()
            fits = limit is None or n <= limit
            self._layouts[key] = (
                layouts_of(model, plan, model._prefix(), model.head_entries(model.config), n) if fits else {}
            )
        return self._layouts[key]

    def owner_stage(self, name: str, pp: int) -> int:
        """Return the pipeline stage that trained a tensor, for split files of OSLO 1.x.

        These files hold every layer on every stage, but each stage trained its own layers only. All stages had the same
        number of blocks, and the last stage had the remainder too.

        Args:
            name: the name of the tensor in the files.
            pp: the number of stages.
        """
        target = next(target for _, target in self.target_names([name], None))
        plan, prefix = self.model.plan(self.model.config), self.model._prefix()
        for stack in plan.blocks:
            if target.startswith(f"{prefix}{stack}."):
                block = int(target.removeprefix(f"{prefix}{stack}.").partition(".")[0])
                blocks = len(self.model.get_submodule(prefix + stack))
                return min(block // max(blocks // pp, 1), pp - 1)
        return 0 if target.rpartition(".")[0].removeprefix(prefix) in plan.embed else pp - 1


def _unknown_conversion(
    reader: checkpoint.CheckpointReader, source: str, target: str, converter: WeightConverter
) -> checkpoint.CheckpointError:
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    return checkpoint.CheckpointError(
        f"{reader.directory}: transformers computes {target} from {source} by {operations}, which cannot be done on "
        "shards here. Load the checkpoint with transformers on one process, save it with "
        "save_pretrained(..., save_original_format=False), and load that"
    )


class ResizedSlice(checkpoint.LazySlice):
    """Local rows of an embedding for a larger vocabulary. New tokens get the mean of the old embeddings.

    Source: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021.
    """

    def read(self) -> Tensor:
        shape = self.reader.tensors[self.name].shape
        clipped = tuple(tuple((min(a, shape[0]), min(b, shape[0])) for a, b in own) for own in self.layout.ranges)
        old = self.reader.read(self.name, Layout(shape, 0, clipped), self.rank)
        new = self.shape[0] - old.shape[0]
        if not new:
            return old
        chunks = Layout.sharded(shape, 0, (EvenSplit(shape[0]),), min(shape[0], 64))
        total = torch.stack(
            [self.reader.read(self.name, chunks, chunk).double().sum(0) for chunk in range(len(chunks.ranges))]
        ).sum(0)
        return torch.cat((old, (total / shape[0]).to(old.dtype).expand(new, *shape[1:])))


class UnpaddedSlice(checkpoint.LazySlice):
    """Local rows of an LM head. The checkpoint pads its vocabulary with rows at the end."""

    def read(self) -> Tensor:
        rows = torch.empty(self.shape, dtype=self.dtype)
        for wanted, local in self.layout.shard_indices(self.rank):
            rows[local] = self.reader.read_region(self.name, wanted)
        return rows


class PaddedSlice(checkpoint.LazySlice):
    """Replicated logits bias (``final_logits_bias``) for a larger vocabulary. New tokens get zeros."""

    def read(self) -> Tensor:
        old = self.reader.read(self.name, Layout(self.reader.tensors[self.name].shape), 0)
        return torch.nn.functional.pad(old, (0, self.shape[-1] - old.shape[-1]))
