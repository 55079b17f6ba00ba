"""`LazyMask`: attention mask on a CPU, evaluated block by block instead of for all queries and keys at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import sdpa_mask

BLOCK = 512
"""Queries and keys of one block."""
_MASKED_KEYS = 8 * BLOCK
"""Keys of a run with a mask, at most: bounds the memory of one block's mask."""
_SAME = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))


class Run(NamedTuple):
    """Consecutive keys that some query of a block sees.

    Attributes:
        keys: the range of keys.
        kind: ``"full"`` if each query sees each key, ``"causal"`` if query ``i`` sees the keys up to ``i`` of the
            range, ``"masked"`` otherwise.
    """

    keys: slice
    kind: Literal["full", "causal", "masked"]


@dataclass(eq=False)
class MaskRule:
    """Arguments of transformers' ``sdpa_mask``, evaluated for any range of queries and keys.

    Attributes:
        shape: ``(rows, 1, queries, keys)``.
        function: transformers' mask function of row, head, query and key.
        padding: boolean mask ``[rows, keys]`` of tokens that are no padding, or ``None``.
        offsets: positions of the first query and the first key.
        uses_vmap: whether ``function`` takes single indices only.
        runs: runs of keys by row and block of queries. Blocks without visible keys are in no run.
        changed: whether the tensor of the whole mask may differ from the rule: someone changed it or holds a view.
    """

    shape: tuple[int, int, int, int]
    function: Callable[..., Tensor]
    padding: Tensor | None
    offsets: tuple[int, int]
    uses_vmap: bool
    runs: list[list[list[Run]]] = field(init=False)
    changed: bool = False
    _whole: Tensor | None = None
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        read = {id(each): each for each in _tensors_of((self.function, self.padding))}
        self._versions = [(each, each._version) for each in read.values() if not each.is_inference()]
        self.runs = self._find_runs()

    def part(self, rows: slice, queries: slice, keys: slice) -> Tensor:
        """Return the boolean mask of some rows, queries and keys: ``[rows, queries, keys]``."""
        self._check()
        mask = sdpa_mask(
            batch_size=rows.stop - rows.start,
            q_length=queries.stop - queries.start,
            kv_length=keys.stop - keys.start,
            q_offset=self.offsets[0] + queries.start,
            kv_offset=self.offsets[1] + keys.start,
            mask_function=partial(_of_later_rows, self.function, rows.start) if rows.start else self.function,
            attention_mask=None if self.padding is None else self.padding[rows],
            allow_is_causal_skip=False,
            use_vmap=self.uses_vmap,
        )
        return mask[:, 0]

    def whole(self) -> Tensor:
        """Return the tensor of the whole mask. It is kept for other readers."""
        if self._whole is None:
            rows, _, queries, keys = self.shape
            self._whole = self.part(slice(0, rows), slice(0, queries), slice(0, keys))[:, None]
        return self._whole

    def _find_runs(self) -> list[list[list[Run]]]:
        rows, _, queries, keys = self.shape
        triangle = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device="cpu").tril()
        found: list[list[list[Run]]] = [[] for _ in range(rows)]
        for block_of_queries in blocks(queries):
            seen = self.part(slice(0, rows), block_of_queries, slice(0, keys))
            by_key = zip(seen.any(1).split(BLOCK, 1), seen.all(1).split(BLOCK, 1), strict=True)
            some_full = [(some.any(1).tolist(), full.all(1).tolist()) for some, full in by_key]
            for row in range(rows):
                runs: list[Run] = []
                for block, (some, full) in zip(blocks(keys), some_full, strict=True):
                    if full[row]:
                        _extend(runs, Run(block, "full"))
                    elif some[row]:
                        own = seen[row, :, block]
                        size = len(own)
                        is_causal = own.shape == (size, size) and torch.equal(own, triangle[:size, :size])
                        _extend(runs, Run(block, "causal" if is_causal else "masked"))
                found[row].append(runs)
        return found

    def _check(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "the attention mask or the positions of a batch were changed in place before its backward pass, which "
                "evaluates the mask again: pass a copy, or load the model with attn_implementation='sdpa'"
            )


def blocks(length: int) -> Iterator[slice]:
    """Yield the ranges of the blocks of a sequence."""
    return (slice(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK))


def _extend(runs: list[Run], run: Run) -> None:
    """Add a run, joined with the last one where one call computes both."""
    last = runs[-1] if runs else None
    joins = last is not None and last.kind == run.kind != "causal" and last.keys.stop == run.keys.start
    if last is None or not joins or (run.kind == "masked" and run.keys.stop - last.keys.start > _MASKED_KEYS):
        runs.append(run)
    else:
        runs[-1] = Run(slice(last.keys.start, run.keys.stop), run.kind)


def _of_later_rows(function: Callable[..., Tensor], first: int, row: Any, head: Any, query: Any, key: Any) -> Tensor:
    return function(row + first, head, query, key)


def _tensors_of(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors that a mask function reads: transformers keeps them in closures."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inner: Iterable[Any] = ()
        if isinstance(value, (tuple, list)):
            inner = value
        elif isinstance(value, partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif (closure := getattr(value, "__closure__", None)) is not None:
            inner = [cell.cell_contents for cell in closure]
        for each in inner:
            yield from _tensors_of(each, depth - 1)


class LazyMask(Tensor):
    """Boolean mask ``[rows, 1, queries, keys]`` without memory. Operations on it compute with the whole tensor.

    Attributes:
        rule: evaluates the mask.
    """

    rule: MaskRule
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rule: MaskRule) -> LazyMask:
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, rule.shape, dtype=torch.bool)
        mask.rule = rule
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({', '.join(map(str, self.shape))})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SAME:
            return cls(args[0].rule)
        # a view may be written to later
        may_change = any(each.alias_info is not None for each in func._schema.arguments)

        def whole(value: Any) -> Any:
            if not isinstance(value, LazyMask):
                return value
            value.rule.changed |= may_change
            return value.rule.whole()

        return func(*tree_map(whole, args), **tree_map(whole, dict(kwargs or {})))
