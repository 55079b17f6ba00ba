"""Towers of images with whole weights on every rank. Each rank encodes some images of a call.

No collective is inside of the tower. Its features are gathered when the model reads them, and its gradients are summed
over the ranks, once for each block.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import ModelOutput

from oslo_models.distributed.autograd_collectives import gather_from, reduce_from, scatter_to
from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree
from oslo_models.layers.kinds import ShardedModule, ShardingContext, own_class, shards
from oslo_models.media.division import IMAGES, WEIGHTS, TowerCall, divide_by_work
from oslo_models.sharding.entry import DividedTower

_BLOCK = re.compile(r".*?\.\d+(?=\.)")
_OPTION = f'tower_parallel="{IMAGES}"'


class _SumGradients(torch.autograd.Function):
    """Identity of several parameters. The backward pass sums their gradients over the axis, in one message."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        return tuple(Tensor.detach(param) for param in params)  # not the method of marked parameters, which is slow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]  # the same ones on every rank: each encodes an image
        if not given:
            return None, *grads
        summed = reduce_from(ctx.axis, torch.cat([grad.reshape(-1) for grad in given]))
        parts = iter(summed.split([grad.numel() for grad in given]))
        return None, *(None if grad is None else next(parts).view(grad.shape) for grad in grads)


@shards(DividedTower)
class DividedTowerModule(ShardedModule):
    """Tower that encodes some of the images of a call, and returns the features of all."""

    def configure(self, entry: DividedTower, context: ShardingContext) -> None:
        super().configure(entry, context)
        base: Any = context.model.base_model
        base.register_forward_hook(_drop_pending)
        for name, module in self.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"{_OPTION} does not support {type(self).__name__}: {context.name}.{name} takes statistics over "
                    f'all images of a batch; use tower_parallel="{WEIGHTS}"'
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tower like its own class."""
        names = _argument_names(own_class(self))  # type: ignore[arg-type]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        call = TowerCall.of(given, names[0], type(self).__name__)
        ranges = divide_by_work(call.work, self.tp.size)
        with self._summing_gradients(), agree(self.tp, type(self).__name__, slow=False) as shapes:
            with self._own_random_stream():
                output = super().forward(**self._own_arguments(call, ranges))
            features = _features(output)
            shapes += [tuple(leaf.shape) for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
        joins = "grid_thw" in call.arguments or own_class(self).__name__ in _JOINING
        of_ranks = iter(zip(*shapes, strict=True))
        gather = partial(_gathered, self.tp, [start < stop for start, stop in ranges], joins)
        pending = tree_map_only(Tensor, lambda local: _Pending(partial(gather, local, next(of_ranks))), features)
        return _with_pending(output, pending)

    def _own_arguments(self, call: TowerCall, ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the arguments of this rank's images.

        A rank without images encodes the one with the least work, and drops its features: the backward passes of all
        ranks are then alike.
        """
        pixels = call.arguments[call.name]
        own = scatter_to(self.tp, pixels, call.dim, call.entries(ranges))
        start, stop = ranges[self.tp.rank]
        if start == stop:
            start = call.work.index(min(call.work))
            stop = start + 1
            before, length = call.entries([(0, start), (start, stop)])
            own = torch.cat((own, pixels.detach().narrow(call.dim, before, length)), call.dim)
        return {call.name: own, **call.others(start, stop)}

    @contextmanager
    def _summing_gradients(self) -> Iterator[None]:
        """Let the tower read aliases of its trained parameters. Their gradients are summed over the ranks.

        Raises:
            ValueError: a wrapper would read the parameters themselves.
        """
        if not torch.is_grad_enabled():
            yield
            return
        slots: list[tuple[dict[str, Any], str]] = []
        for module in self.modules():
            _check_wrapper(module)
            slots += [(module._parameters, leaf) for leaf, x in module._parameters.items() if x is not None]
        groups: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
        for name, param in self.named_parameters():
            if param.requires_grad:  # those of a block are read together, or not at all
                block = _BLOCK.match(name)
                groups.setdefault((block[0] if block else name, param.dtype), []).append(param)
        aliases = {
            id(param): alias
            for group in groups.values()
            for param, alias in zip(group, _SumGradients.apply(self.tp, *group), strict=True)
        }
        before = [holder[leaf] for holder, leaf in slots]
        for (holder, leaf), param in zip(slots, before, strict=True):
            holder[leaf] = aliases.get(id(param), param)
        try:
            yield
        finally:
            for (holder, leaf), param in zip(slots, before, strict=True):
                holder[leaf] = param

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        """Draw the dropout masks of this rank's images from its own stream."""
        if self.stream is not None and self.training:
            self.stream.enter()
        try:
            yield
        finally:
            if self.stream is not None:
                self.stream.leave()


_JOINING = ("PixtralVisionModel",)
"""Towers that read images by item and return the patches of all images as one row."""


@cache
def _argument_names(cls: type[nn.Module]) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)[1:]


def _check_wrapper(module: nn.Module) -> None:
    """Raise ``ValueError`` for a wrapper inside a tower that reads parameters and not their aliases."""
    function: Any = vars(module).get("_gradient_checkpointing_func")
    reenters = getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get(
        "use_reentrant"
    )
    reasons = {
        f"fully_shard of a {type(module).__name__} inside of a tower": isinstance(module, FSDPModule),
        "reentrant checkpointing, use_reentrant=True": reenters,
    }
    for name, is_used in reasons.items():
        if is_used:
            raise ValueError(f'{_OPTION} cannot be used with {name}: leave it out, or use tower_parallel="{WEIGHTS}"')


def _features(output: Any) -> Any:
    """Return the tensors in the output of a tower. Attention weights are left out: no model reads them."""
    if isinstance(output, ModelOutput):
        return {name: value for name, value in output.items() if name != "attentions"}
    return output


def _gathered(
    tp: Axis, has_images: Sequence[bool], joins: bool, local: Tensor, shapes: Sequence[tuple[int, ...]]
) -> Tensor:
    """Gather features of the images of all ranks, in the order of the images.

    Args:
        has_images: whether each rank has images. Other ranks have features to drop.
        joins: whether features may be ``[1, patches of all images, ...]``.
        local: features of this rank.
        shapes: shape of the features of each rank.
    """
    dim = int(joins and local.dim() == 3 and all(shape[0] == 1 for shape in shapes))
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1:
        raise ValueError(f"{_OPTION}: the features of images have different shapes on the ranks: {list(shapes)}")
    sizes = [shape[dim] if given else 0 for shape, given in zip(shapes, has_images, strict=True)]
    own = local.narrow(dim, 0, sizes[tp.rank])
    return gather_from(tp, own, dim, sizes) if own.is_floating_point() else all_gather(tp, own, dim, sizes)


class _Pending:
    """Features that are gathered when they are read. All ranks read the same ones in the same order."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather = gather
        self._found: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._found is None:
            self._found = self._gather()
        return self._found


def _resolved(value: Any) -> Any:
    return tree_map_only(_Pending, lambda each: each(), value)


class _PendingTuple(tuple[Any, ...]):
    """Hidden states of all blocks. Each of them is gathered when it is read."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _PendingTuple(found) if isinstance(index, slice) else _resolved(found)

    def __iter__(self) -> Iterator[Any]:
        return map(_resolved, super().__iter__())


class PendingOutput(ModelOutput):
    """Output of a tower whose fields are gathered when they are read, on all ranks.

    Attributes:
        _pending: names of the fields that nobody has read.
    """

    _pending: set[str]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        pending = super().__getattribute__("__dict__")["_pending"]
        if name in pending:
            pending.remove(name)
            value = _PendingTuple(value) if name == "hidden_states" else _resolved(value)
            setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_pending"].discard(name)
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def gathered(self) -> Any:
        """Return the output as its own class, with all features."""
        values = {name: tuple(each) if isinstance(each, _PendingTuple) else each for name, each in self.items()}
        return type(self).__bases__[1](**values)

    def without_pending(self) -> Any:
        """Return the output as its own class, with the features that the model has read or set."""
        left_out = {*self._pending, "hidden_states"}
        return type(self).__bases__[1](**{name: self[name] for name in self if name not in left_out})


@cache
def _pending_class(cls: type[ModelOutput]) -> type[Any]:
    return type(cls.__name__, (PendingOutput, cls), {"__module__": cls.__module__})


def _drop_pending(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a base model: the decoder has read what it needs of the outputs of towers."""
    if isinstance(output, ModelOutput):
        for name, value in [*output.items()]:
            if isinstance(value, PendingOutput):
                output[name] = value.without_pending()


def _is_compiled() -> bool:
    """Return whether a compiled function calls the tower, also where its graph breaks."""
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
    except ImportError:  # features are gathered at once, which is right in any case
        return True
    return torch.compiler.is_compiling() or get_eval_frame_callback() is not None


def _with_pending(output: Any, pending: Any) -> Any:
    """Return the output of a tower with other features."""
    if not isinstance(output, ModelOutput):
        return _resolved(pending)
    if _is_compiled():  # guards need fields that stay the same
        return type(output)(**_resolved(pending))
    made: Any = type(output)(**pending)
    vars(made)["_pending"] = {*pending}
    made.__class__ = _pending_class(type(output))  # type: ignore[arg-type]
    return made
