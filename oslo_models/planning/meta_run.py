"""Runs a model on the meta device, and counts its memory and its collectives.

Meta tensors have shapes and no values. Every operation passes through `MetaRun`, which counts the bytes of all storages
that are alive, and records each collective instead of running it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from oslo_models.distributed.collectives import axis_of_handle
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers.sharded_activation import ShardedActivation
from oslo_models.planning.quantized_layers import product

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, CACHE, COMMUNICATION = "activations", "logits", "key-value cache", "communication buffers"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, CACHE, COMMUNICATION)
SMALL = 64
"""Limit of elements: smaller tensors keep known values on the CPU, since code branches on them."""

aten = torch.ops.aten
_FACTORIES = {aten.zeros.default, aten.ones.default, aten.full.default, aten._to_copy.default, aten.lift_fresh.default}


@dataclass(frozen=True)
class CollectiveKind:
    """One kind of collective of a rank.

    Attributes:
        axis: the name of its axis, such as ``"tp"``.
        ranks: the number of ranks that take part.
        operation: such as ``"all-reduce"``.
        payload: bytes of this rank's tensor.
    """

    axis: str
    ranks: int
    operation: str
    payload: int


class MetaRun(TorchDispatchMode):
    """Context that counts live bytes by part of `PARTS`, and collectives.

    Args:
        mesh: the mesh of the rank.
        vocabulary: sizes of the vocabulary, in full and on this rank. A tensor with such a last dimension holds logits.

    Attributes:
        part: the part for new storages, unless another rule applies.
        live: bytes that are alive, by part.
        peak: ``live`` at the highest total since the last `reset_peak`.
        collectives: the number of collectives of each kind.
    """

    def __init__(self, mesh: ParallelMesh, vocabulary: Iterable[int] = ()) -> None:
        super().__init__()
        self._mesh, self._vocabulary = mesh, frozenset(vocabulary)
        self._storages: dict[int, tuple[Any, int, str, int]] = {}
        self._seen = self._seen_at_peak = 0
        self.part = ACTIVATIONS
        self.live: Counter[str] = Counter()
        self.total, self._highest = 0, 0
        self.peak: Counter[str] = Counter()
        self.collectives: Counter[CollectiveKind] = Counter()
        self._axes: dict[str, str] = {}
        self._kinds: dict[Any, str] = {}
        self._shapes: dict[Any, Any] = {}

    def reset_peak(self) -> None:
        """Restart the search for the peak at the current bytes."""
        self._note_peak()

    def _note_peak(self) -> None:
        self._highest, self._seen_at_peak, self.peak = self.total, self._seen, Counter(self.live)

    @contextmanager
    def counting_as(self, part: str) -> Iterator[None]:
        """Count new storages in the block as ``part``."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def count(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count the storages of tensors as ``part`` from now on, and in the peak."""
        for tensor in tensors:
            self._see(tensor, part)
            key = tensor.untyped_storage()._cdata
            if tensor.is_meta:
                ref, size, old, number = self._storages[key]
                self._storages[key] = ref, size, part, number
                for parts in (self.live, *([self.peak] if number <= self._seen_at_peak else [])):
                    parts[old] -= size
                    parts[part] += size

    def _see(self, tensor: Tensor, part: str | None = None) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        if part is None:
            is_logits = self.part == ACTIVATIONS and tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary
            part = LOGITS if is_logits else self.part
        size = storage.nbytes()
        self._seen += 1
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), size, part, self._seen
        self.live[part] += size
        self.total += size
        if self.total > self._highest:
            self._note_peak()

    def _free(self, key: int) -> None:
        _, size, part, _ = self._storages.pop(key)
        self.live[part] -= size
        self.total -= size

    # Operations -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective_of_torch(func, args, kwargs)
        if func.namespace == "oslo" and (run := _OWN_COLLECTIVES.get(func.name())) is not None:
            result = run(self, *args)
        elif (rule := _RULES.get(func)) is not None:
            return rule(func, *args, **kwargs)
        elif func is aten._grouped_mm.default:
            result = _grouped_product(*args, **kwargs)
        else:
            result = self._run(func, args, kwargs)
            _keep_value(func, args, kwargs, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or reuse the shapes of an equal one: blocks are alike, and meta functions of torch slow."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind == "in place" and args[0].is_meta:
            return args[0]
        key = _key(func, args, kwargs) if kind == "new" else None
        if key is None:
            return func(*args, **kwargs)
        known = self._shapes.get(key)
        if known is None:
            result = func(*args, **kwargs)
            self._shapes[key] = _description(result)
            return result
        if known is False:
            return func(*args, **kwargs)
        made = [each and torch.empty_strided(*each[:2], dtype=each[2], device="meta") for each in known[1]]
        return tuple(made) if known[0] else made[0]

    def _collective_of_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a collective, and run it on empty tensors of the CPU. The result is the handle of its work."""
        name = func.name().removeprefix("c10d::").strip("_")
        group = next(torch.distributed.ProcessGroup.unbox(arg) for arg in args if _is_group(arg))
        sent = args[1] if name in ("allgather", "_allgather_base") else args[0]
        tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, Tensor)]
        payload = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        axis = self._axis_of(group)
        self.collectives[CollectiveKind(axis, group.size(), _OPERATIONS.get(name, name), payload)] += 1
        if name in ("recv", "allgather", "_allgather_base", "alltoall_base"):
            self.count([leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)], COMMUNICATION)
        if name == "alltoall_base":  # one element for each rank, whatever its numbers of rows
            return func(*(torch.empty(group.size()) for _ in range(2)), args[2], [], [], *args[5:], **kwargs)
        return func(*tree_map_only(Tensor, lambda _: torch.empty(1), args), **kwargs)

    def _axis_of(self, group: Any) -> str:
        if not self._axes:
            mesh = self._mesh
            for axis in (mesh.world, *mesh.created_axes()):
                if axis.group is not None:
                    self._axes.setdefault(axis.group.group_name, axis.name)
        if group.group_name not in self._axes:
            self._axes = {}  # an axis that was created since
            return next((axis.name for axis in self._mesh.created_axes() if axis.group is group), "another group")
        return self._axes[group.group_name]

    def _all_reduce(self, x: Tensor, handle: int, *_: Any) -> Tensor:
        axis = axis_of_handle(handle)
        self.collectives[CollectiveKind(axis.name, axis.size, "all-reduce", x.numel() * x.itemsize)] += 1
        return x if x.is_contiguous() else x.contiguous()

    def _all_gather(self, x: Tensor, handle: int, dim: int, sizes: list[int]) -> Tensor:
        axis, payload = axis_of_handle(handle), x.numel() * x.itemsize // max(x.shape[dim], 1) * max(sizes)
        self.collectives[CollectiveKind(axis.name, axis.size, "all-gather", payload)] += 1
        shape = (*x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
        shards = [x.new_empty(shape) for _ in sizes]
        self.count(shards, COMMUNICATION)
        gathered = x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
        self._see(gathered)
        return gathered

    def _reduce_scatter(self, x: Tensor, handle: int, dim: int, sizes: list[int]) -> Tensor:
        axis, shape = axis_of_handle(handle), (*x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
        padded = x.new_empty(len(sizes), *shape)
        payload = padded.numel() * padded.itemsize
        self.collectives[CollectiveKind(axis.name, axis.size, "reduce-scatter", payload)] += 1
        self.count([padded], COMMUNICATION)
        own = x.new_empty(*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
        self._see(own)
        return own


def _kind_of(func: Any) -> str:
    """Return whether an operation returns new tensors, changes its first argument, or neither."""
    schema = func._schema
    returns = [each.alias_info for each in schema.returns]
    if not schema.is_mutable and returns and not any(returns):
        return "new"
    first = schema.arguments[0].alias_info if schema.arguments else None
    written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if torch.Tag.inplace_view in func.tags:  # changes the shape
        return "other"
    is_in_place = func.name().partition(".")[0].endswith("_") and len(written) == len(returns) == 1
    return "in place" if is_in_place and first is not None and first.is_write else "other"


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a key for the shapes of an operation's results, or ``None`` if it depends on more."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_meta:
                raise TypeError
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple(map(part, value))
        return type(value), value

    try:
        key = func, part(args), tuple((name, part(value)) for name, value in kwargs.items())
        hash(key)
    except TypeError:
        return None
    return key


def _description(result: Any) -> Any:
    """Return the shapes, strides and types of results, or ``False`` unless all of them are new meta tensors."""
    several = isinstance(result, (tuple, list))
    results = result if several else [result]
    if not all(each is None or (isinstance(each, Tensor) and each.is_meta) for each in results):
        return False
    return several, [each if each is None else (each.shape, each.stride(), each.dtype) for each in results]


_OWN_COLLECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "oslo::all_reduce": MetaRun._all_reduce,
    "oslo::all_gather": MetaRun._all_gather,
    "oslo::reduce_scatter": MetaRun._reduce_scatter,
}
_OPERATIONS = {
    **{"allreduce": "all-reduce", "allgather": "all-gather", "_allgather_base": "all-gather", "recv": "receive"},
    **{"alltoall_base": "all-to-all"},
}


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().qualified_name()


# Values that code reads -----------------------------------------------------------------------------------------------


def _value(tensor: Tensor) -> Tensor | None:
    """Return the known value of a small tensor."""
    return tensor if tensor.device.type == "cpu" else getattr(tensor, "_value", None)


def _keep_value(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """Compute a small result on the CPU as well if the values of all inputs are known."""
    if not isinstance(result, Tensor) or not result.is_meta or result.numel() > SMALL:
        return
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    if all(_value(each) is not None for each in inputs) if inputs else func in _FACTORIES:
        own = {key: value for key, value in kwargs.items() if key != "device"}
        known = func(*(_value(arg) if isinstance(arg, Tensor) else arg for arg in args), **own)
        result._value = known  # type: ignore[attr-defined]
    elif func in (aten.all.default, aten.any.default):  # all tokens are valid, and none is special
        result._value = torch.tensor(func is aten.all.default)  # type: ignore[attr-defined]


def _item(func: Any, tensor: Tensor) -> Any:
    value = _value(tensor)
    if value is not None:
        return value.item()
    if tensor.is_floating_point():  # a flag that a stage has failed
        return 0.0
    raise UnknownValueError("the forward pass reads values of its activations")


def _nonzero(func: Any, tensor: Tensor) -> Tensor:
    value = _value(tensor)
    if value is None:
        raise UnknownValueError("the forward pass selects tokens by their values")
    return value.nonzero()


_RULES: Mapping[Any, Callable[..., Any]] = {aten._local_scalar_dense.default: _item, aten.nonzero.default: _nonzero}


class UnknownValueError(ValueError):
    """The shapes of a step depend on values, which the meta device does not have."""


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
    """Return the empty product of ``aten::_grouped_mm``. Its own meta function takes no float32."""
    if a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    elif a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        shape = (len(offsets), a.shape[0], b.shape[1])
    elif a.dim() == 2:
        return a.new_empty(a.shape[0], b.shape[2], dtype=options.get("out_dtype") or a.dtype)
    else:
        return a.new_empty(a.shape[1], b.shape[1], dtype=options.get("out_dtype") or a.dtype)
    return a.new_empty(shape, dtype=options.get("out_dtype") or a.dtype)


# Functions ------------------------------------------------------------------------------------------------------------


class OnDevice(TorchFunctionMode):
    """Context in which meta tensors behave more like tensors of a device.

    ``torch.tensor`` keeps its values, products dequantise 4-bit weights, and attention never holds its scores. torch
    chooses its kernel by the device, and would compute meta tensors by matrix products. They remain where a real device
    uses them too: for a mask with gradients, and with dropout on a CPU.

    Args:
        device_type: the type of the planned device, ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._has_dropout = device_type != "cpu"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self._takes(args, kwargs):
            return _flash(*args, **kwargs)
        if func is F.scaled_dot_product_attention and (kind := _kind_of_part(args, kwargs)) is not None:
            with self:  # attention of local heads belongs to this mode, too
                return kind.__torch_function__(func, types, args, kwargs)
        if func is F.linear and args[1].dtype == torch.uint8:
            return product(*args, **kwargs)
        if func is torch.tensor:
            result = func(*args, **kwargs)
            if result.is_meta and result.numel() <= SMALL:
                vars(result)["_value"] = func(*args, **{**kwargs, "device": "cpu"})
            return result
        return func(*args, **kwargs)

    def _takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if not all(
            type(each) in (Tensor, torch.nn.Parameter) for each in (*args, *kwargs.values()) if _is_tensor(each)
        ):
            return False
        given: list[Any] = [*args, *(kwargs.get(name) for name in _ATTENTION[len(args) :])]
        query, _, value, mask, dropout, *_ = given
        return (
            query.is_meta
            and query.dim() == 4
            and query.shape[-1] == value.shape[-1]
            and not (mask is not None and mask.requires_grad)
            and (not dropout or self._has_dropout)
        )


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _kind_of_part(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type[ShardedActivation] | None:
    return next((type(each) for each in (*args, *kwargs.values()) if isinstance(each, ShardedActivation)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output
