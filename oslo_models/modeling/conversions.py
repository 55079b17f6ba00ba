"""Reads checkpoints in which transformers stacks, joins, splits, interleaves, merges or pads weights.

`saved_tensors` converts in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from oslo_models.checkpoint import CheckpointError, CheckpointReader
from oslo_models.checkpoint.converted import (
    Merge,
    Piece,
    with_alternations,
    with_chunks,
    with_concatenations,
    with_halves,
    with_merges,
    with_pairs,
    with_stacks,
    with_transposes,
)
from oslo_models.modeling.original_class import original_class
from oslo_models.pipeline.sharded_model import ShardedModel


def conversion_mapping(model: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return transformers' renamings and conversions of a model, so that each name is renamed by itself.

    transformers renames the later names of a group, such as the second norm of Kimi K2.5, only after the first. Modules
    that a parallel class adds have renamings of their own.
    """
    found = [] if (own := getattr(model, "own_renamings", None)) is None else own()
    for each in get_model_conversion_mapping(model, *args, **kwargs):
        if type(each).__name__ == "GroupWeightRename":  # the later names first, since they become the earlier ones
            pairs = zip(each._original_source_patterns, each._original_target_patterns, strict=True)
            found += [WeightRenaming(source, target) for source, target in reversed([*pairs])]
        else:
            found.append(each)
    return found


@dataclass(frozen=True)
class Conversions:
    """transformers' checkpoint conversions of a model, without conversions for old checkpoints only.

    The fields have the names of the model attributes that transformers reads to convert tensors for saving.
    """

    _weight_conversions: Sequence[Any]
    config: Any
    transposing: Sequence[WeightConverter] = ()
    """Conversions of stacked experts that apply to loading only: transformers saves experts as the model has them."""

    @classmethod
    def of(cls, model: ShardedModel) -> Conversions:
        """Return the conversions of a model, or of a stage of it."""
        found = conversion_mapping(model, add_legacy=False)
        kept = [each for each in found if not isinstance(each, PrefixChange) and not transposes_experts(each)]
        return cls(kept, model.config, [each for each in found if transposes_experts(each)])

    def converters(self, is_kind: Callable[[WeightConverter], bool]) -> list[WeightConverter]:
        """Return the conversions of one kind that change tensors, not only their names."""
        return [each for each in self._weight_conversions if isinstance(each, WeightConverter) and is_kind(each)]

    def converted(
        self, names: Iterable[str], is_kind: Callable[[WeightConverter], bool]
    ) -> Iterator[tuple[str, WeightConverter]]:
        """Yield the names of the tensors that a conversion of one kind makes, each with the first such conversion."""
        if converters := self.converters(is_kind):
            for name in names:
                if (converter := _converter_of(name, converters)) is not None:
                    yield name, converter

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that transformers saves for tensors of the model."""
        saved: dict[str, Tensor] = revert_weight_conversion(self, dict(tensors))
        return saved

    def __bool__(self) -> bool:
        return bool(self._weight_conversions)


def _converter_of(name: str, converters: Iterable[WeightConverter]) -> WeightConverter | None:
    """Return the first conversion that makes the tensor of this name."""
    return next((each for each in converters if _target_pattern(name, each) is not None), None)


def _target_pattern(name: str, converter: WeightConverter) -> str | None:
    """Return the target pattern that transformers finds in the name, perhaps before ``.weight`` or ``.bias``."""
    pattern: str | None = _reversed(converter).rename_source_key(name)[1]
    return pattern


@lru_cache(maxsize=256)
def _reversed(converter: WeightConverter) -> Any:
    return converter.reverse_transform()


def expert_pieces(conversions: Conversions, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Piece]]:
    """Return the checkpoint's matrices of each stack of experts, by the name of the stack. Other models have none.

    The names come from transformers' own reverse conversion of a small stack with numbered elements.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    stacks: dict[str, list[Piece]] = {}
    for name, converter in conversions.converted(shapes, _stacks):
        first, *others = converter.target_patterns
        if others and first not in name:
            continue  # a later stack of several that continue the numbers of the first
        together, parts = [name, *(name.replace(first, other, 1) for other in others)], len(converter.source_patterns)
        size = shapes[name][0] * parts
        marks = torch.arange(len(together) * size).view(len(together), -1, parts, 1)
        for piece, mark in conversions.revert(dict(zip(together, marks, strict=True))).items():
            stack, place = divmod(int(mark), size)
            stacks.setdefault(together[stack], []).append(Piece(piece, *divmod(place, parts)))
    return stacks


def concatenated_parts(
    conversions: Conversions, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, list[str]]]:
    """Map each tensor that transformers concatenates from checkpoint tensors to the dimension and the parts' names.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    found = {}
    for name, converter in conversions.converted(shapes, _concatenates):
        dim = converter.operations[0].dim
        marks = torch.arange(_number_of_parts(converter, conversions.config, shapes[name][dim]))
        named = conversions.revert({name: marks.view(*[1] * dim, -1, 1)})
        found[name] = dim, sorted(named, key=lambda part, named=named: int(named[part]))  # type: ignore[misc]
    return found


def _number_of_parts(converter: WeightConverter, config: Any, rows: int) -> int:
    """Return the number of checkpoint parts of a tensor with this number of rows."""
    attribute = converter.operations[0].num_shards_attribute
    if attribute is None:
        return len(converter.source_patterns)
    size = -(-rows // getattr(config.get_text_config(), attribute))
    return -(-rows // size)  # parts of equal size, and a smaller last part


def _concatenates(converter: WeightConverter) -> bool:
    """Whether a conversion concatenates tensors along their first dimension, or along the second (Step 3.7)."""
    operations, targets = converter.operations, converter.target_patterns
    known = [type(operation) for operation in operations] == [Concatenate] and len(targets) == 1
    return known and operations[0].dim in (0, 1)


def chunked_names(conversions: Conversions, shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    """Map each checkpoint tensor that transformers splits into several to the model's names of these parts.

    A part has a number: half of the rows of a head if the checkpoint holds the rows of a head in rotary pairs, else 0.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    return {
        saved: {
            part: _half_of_pairs(converter, target, shapes[part][0], conversions.config)
            for part, target in zip(parts, converter.target_patterns, strict=True)
        }
        for saved, converter, parts in _divided(conversions, shapes, _chunks)
    }


def _divided(
    conversions: Conversions, shapes: Mapping[str, Sequence[int]], is_kind: Callable[[WeightConverter], bool]
) -> Iterator[tuple[str, WeightConverter, list[str]]]:
    """Yield each checkpoint tensor that conversions of one kind divide, the conversion, and the names of the parts."""
    converters = conversions.converters(is_kind)
    names = set(shapes) if converters else set()
    for name in sorted(names):
        for converter in converters:
            first, *others = converter.target_patterns
            parts = [name, *(name.replace(first, other, 1) for other in others)]
            is_first = first in name and _target_pattern(name, converter) == _reversed(converter).source_patterns[0]
            if is_first and names.issuperset(parts):
                empty = {part: torch.empty(tuple(shapes[part]), device="meta") for part in parts}
                (saved,) = conversions.revert(empty)
                yield str(saved), converter, parts


def _half_of_pairs(converter: WeightConverter, target: str, rows: int, config: Any) -> int:
    """Return half of the rows of a head, or 0 if transformers does not permute the rows of this part."""
    for operation in converter.operations:
        if type(operation).__name__ == _PERMUTE and any(name in target for name in operation.permute_layer_names):
            heads: int = getattr(config, operation.subconfig_key, config).num_attention_heads
            return rows // heads // 2
    return 0


_PERMUTE = "PermuteForRope"


def _chunks(converter: WeightConverter) -> bool:
    """Whether a conversion splits a tensor along its first dimension.

    ``Chunk`` makes parts of equal size. ``Split``, since transformers 5.24, makes parts of the sizes in the model.
    Kimi K2.5 permutes the rows of some parts, too.
    """
    operations = [type(operation).__name__ for operation in converter.operations]
    known = operations in (["Chunk"], ["Split"], ["Chunk", _PERMUTE]) and len(converter.target_patterns) > 1
    return known and converter.operations[0].dim == 0 and len(converter.source_patterns) == 1


def alternating_names(
    conversions: Conversions, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, list[str]]]:
    """Map each checkpoint tensor with alternating rows of two tensors of the model to the dimension and their names.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    divided = _divided(conversions, shapes, _alternates)
    return {saved: (converter.operations[0].dim, parts) for saved, converter, parts in divided}


def _alternates(converter: WeightConverter) -> bool:
    """Whether a conversion de-interleaves a tensor and splits it into its halves (Inkling)."""
    known = [type(operation) for operation in converter.operations] == [Interleave, Chunk]
    return known and len(converter.target_patterns) == 2 and len({each.dim for each in converter.operations}) == 1


def interleaved_names(conversions: Conversions, names: Iterable[str]) -> dict[str, str]:
    """Map the model's names of stacked experts with interleaved rows in checkpoints to the checkpoint names.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        names: the names of tensors in the full model.
    """
    found = {}
    for name, _ in conversions.converted(names, _interleaves):
        (found[name],) = map(str, conversions.revert({name: torch.empty(1, 2, 1)}))
    return found


def _interleaves(converter: WeightConverter) -> bool:
    """Whether a conversion de-interleaves the rows of the two halves of stacked experts."""
    operations = [operation for operation in converter.operations if not _dequantizes(operation)]
    known = [type(operation) for operation in operations] == [Interleave] and len(converter.target_patterns) == 1
    return known and operations[0].dim == 1 and not operations[0].inverse


def _dequantizes(operation: Any) -> bool:
    """Whether an operation returns weights without scales as they are (Inkling 2 Loop, since transformers 5.24)."""
    return type(operation).__name__ == "Inkling2LoopDequantizeExperts"


def is_renaming(converter: WeightConverter) -> bool:
    """Whether a conversion only renames a tensor, if its other source tensors, the scales, are missing."""
    return all(map(_dequantizes, converter.operations))


def merged_parts(
    conversions: Conversions, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Merge, dict[str, Tensor]]]:
    """Map each tensor that transformers merges from several to the function, and to empty tensors by saved name.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    found: dict[str, tuple[Merge, dict[str, Tensor]]] = {}
    for name, converter in conversions.converted(shapes, _merges):
        saved = conversions.revert({name: torch.empty(tuple(shapes[name]), device="meta")})
        found[name] = partial(_merge, converter), saved
    return found


def _merge(converter: WeightConverter, parts: Sequence[Tensor]) -> Tensor:
    by_pattern = dict(zip(converter.source_patterns, parts, strict=True))
    names = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
    merged: Mapping[str, Tensor] = converter.operations[0].convert(by_pattern, **names)
    return merged[converter.target_patterns[0]]


def _merges(converter: WeightConverter) -> bool:
    """Whether a conversion computes a replicated tensor as a whole.

    It merges the queries of messages (Inkling 2 Loop, since transformers 5.24), or transposes a router (ERNIE 4.5 VL).
    """
    (operation, *others), (target, *_) = converter.operations, converter.target_patterns
    if isinstance(operation, Transpose) and not others:
        return not operation.check_dims and target.endswith("gate.weight")
    return type(operation).__name__ == "Inkling2LoopMergeMessageQueries" and not others


def transposes_experts(converter: Any) -> bool:
    """Whether a conversion transposes the matrices of stacked experts where the model has the other shape."""
    if not isinstance(converter, WeightConverter) or [type(each) for each in converter.operations] != [Transpose]:
        return False
    (operation,) = converter.operations
    return operation.check_dims and {operation.dim0, operation.dim1} == {1, 2}


def _transposed_names(
    reader: CheckpointReader,
    conversions: Conversions,
    shapes: Mapping[str, Sequence[int]],
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Map stacked experts whose matrices the checkpoint stores transposed to their names in the checkpoint."""
    found, converters = {}, conversions.transposing
    for name, shape in shapes.items() if converters else ():
        stored = reader.tensors.get(saved := rename(name))
        if stored is None or _converter_of(name, converters) is None or tuple(stored.shape) == tuple(shape):
            continue
        if tuple(stored.shape) == (shape[0], shape[2], shape[1]):
            found[name] = saved
    return found


def padded_names(conversions: Conversions, names: Iterable[str]) -> set[str]:
    """Return the names of LM heads that transformers pads to ``config.vocab_size`` rows for saving.

    Args:
        conversions: the conversions of the model, or of a stage of it.
        names: the names of tensors in the full model.
    """
    return {name for name, _ in conversions.converted(names, is_unpadding)}


def is_unpadding(converter: WeightConverter) -> bool:
    """Whether a conversion removes vocabulary padding. transformers 5.24 added it for Inkling 2."""
    return [type(operation).__name__ for operation in converter.operations] == ["Inkling2UnpadVocab"]


def _stacks(converter: WeightConverter) -> bool:
    """Whether a conversion stacks matrices into one parameter, or into one for each kind of token (ERNIE 4.5 VL)."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    if kinds == ["ErnieFuseAndSplitTextVisionExperts"]:
        return True
    return kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and len(converter.target_patterns) == 1


def stacking_reader(reader: CheckpointReader, model: ShardedModel) -> CheckpointReader:
    """Wrap a reader so that it returns the model's tensors where the checkpoint has single experts or other parts.

    Args:
        reader: the checkpoint. Its names may lack the base model's prefix or add it.
        model: the full model, on the meta device.

    Raises:
        CheckpointError: some matrices of a stack are missing.
    """
    rename, conversions, found = _names_in(reader, model), Conversions.of(model), {}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, pieces in expert_pieces(conversions, shapes).items():
        if name in reader.tensors:
            continue
        own = [replace(piece, name=rename(piece.name)) for piece in pieces]
        missing = [piece.name for piece in own if piece.name not in reader.tensors]
        if not missing:
            found[name] = own
        elif len(missing) < len(own):
            raise CheckpointError(
                f"{reader.directory} lacks {len(missing)} of the {len(own)} matrices of {name}, such as "
                f"{missing[0]}: copy or save the checkpoint again"
            )
    reader = with_stacks(reader, found)
    parts: dict[str, tuple[int, list[str]]] = {}
    for name, (dim, split) in concatenated_parts(conversions, shapes).items():
        there = [*map(rename, split)]
        if reader.tensors.keys() >= {*there} and name not in reader.tensors:
            parts[name] = dim, there
    reader = with_concatenations(reader, parts)
    chunks: dict[str, dict[str, int]] = {}
    paired: dict[str, int] = {}
    for name, halves in chunked_names(conversions, shapes).items():
        if (saved := rename(name)) in reader.tensors:
            chunks[saved] = {rename(part): shapes[part][0] for part in halves}
            paired |= {rename(part): half for part, half in halves.items() if half}
    reader = with_pairs(with_chunks(reader, chunks), paired)
    dealt = {
        saved: (dim, [*map(rename, names)])
        for source, (dim, names) in alternating_names(conversions, shapes).items()
        if (saved := rename(source)) in reader.tensors
    }
    reader = with_alternations(reader, dealt)
    alternating = {
        name: saved
        for name, source in interleaved_names(conversions, shapes).items()
        if (saved := rename(source)) in reader.tensors and name not in reader.tensors
    }
    reader = with_halves(reader, alternating)
    reader = with_transposes(reader, _transposed_names(reader, conversions, shapes, rename))
    merges = {
        name: (sources, merge)
        for name, (merge, empty) in merged_parts(conversions, shapes).items()
        if reader.tensors.keys() >= {*(sources := [*map(rename, empty)])}
    }
    return with_merges(reader, merges, shapes)


def _names_in(reader: CheckpointReader, model: ShardedModel) -> Callable[[str], str]:
    """Return a function from the name of a tensor, as the model is saved, to its name in this checkpoint.

    Checkpoints of other classes and older releases have other prefixes. Names are the same if transformers renames them
    to the same name.
    """
    prefixes = {f"{of.base_model_prefix}." for of in (model, original_class(type(model)))}

    # Most types convert no tensors and ask for no name.
    @cache
    def renamings() -> list[WeightRenaming]:
        return [entry for entry in conversion_mapping(model) if isinstance(entry, WeightRenaming)]

    def renamed(name: str) -> str:
        target = str(rename_source_key(name, renamings(), [])[0])
        return next((target.removeprefix(prefix) for prefix in prefixes if target.startswith(prefix)), target)

    @cache
    def stored() -> dict[str, str]:
        return {renamed(name): name for name in reversed([*reader.tensors])}

    return lambda name: stored().get(renamed(name), name)
