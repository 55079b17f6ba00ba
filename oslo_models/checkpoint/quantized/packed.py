"""`PackedWeight`: local shard of a quantised weight. It stays quantised in memory; each use dequantises it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oslo_models.checkpoint.quantized.weight import QuantizedWeight
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor
from oslo_models.sharding.layout import Index, Layout, Range

_Key = tuple[str, tuple[Range, ...], tuple[int, ...] | None]
_aten = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear")
)
_SAME = frozenset((_aten.detach.default, _aten.alias.default))


@dataclass
class HeldTensors:
    """In-memory reader of one quantised weight: caches the regions of checkpoint tensors that the weight has read.

    Attributes:
        tensors: shapes and dtypes of the full tensors.
        read: reads a region that is not cached yet; ``None`` once all required regions are cached.
        regions: the cached regions, by name, bounds and shape.
    """

    tensors: dict[str, StoredTensor]
    read: Callable[..., Tensor] | None = None
    regions: dict[_Key, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> HeldTensors:
        """Return a reader of tensors in memory."""

        def read(name: str, region: Index, shape: tuple[int, ...] | None) -> Tensor:
            tensor = tensors[name] if shape is None else tensors[name].view(shape)
            return tensor[region].clone()  # a view would keep the full tensor in memory

        infos = {name: StoredTensor(Layout(tuple(each.shape)), each.dtype, ()) for name, each in tensors.items()}
        return cls(infos, read)

    def read_region(self, name: str, region: Index, shape: tuple[int, ...] | None = None) -> Tensor:
        """See `CheckpointReader.read_region`."""
        key = name, tuple((each.start, each.stop) for each in region), shape
        if key not in self.regions:
            assert self.read is not None, f"{key} is not held"
            self.regions[key] = self.read(name, region, shape)
        return self.regions[key]

    def with_tensors(self, tensors: list[Tensor]) -> HeldTensors:
        """Return a copy with ``tensors`` as the cached regions, such as copies on another device."""
        return replace(self, regions=dict(zip(self.regions, tensors, strict=True)))


@dataclass(frozen=True)
class Packing:
    """Content of a `PackedWeight`.

    Attributes:
        weight: the quantised weight; its reader is a `HeldTensors`.
        regions: the row and column ranges of the full weight that are concatenated.
        dim: the dimension of the concatenation.
        is_transposed: the layer stores the weight as ``[in, out]``.
        compute_dtype: the dtype of matrix products. Defaults to the dtype of the other operand.
    """

    weight: QuantizedWeight
    regions: tuple[tuple[Range, Range], ...]
    dim: int
    is_transposed: bool = False
    compute_dtype: torch.dtype | None = None

    @property
    def held(self) -> HeldTensors:
        held: Any = self.weight.reader
        assert isinstance(held, HeldTensors)
        return held

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.held.regions.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the layer's weight."""
        sizes = [sum(stop - start for start, stop in {each[dim] for each in self.regions}) for dim in (0, 1)]
        return (sizes[1], sizes[0]) if self.is_transposed else (sizes[0], sizes[1])

    def with_tensors(self, tensors: list[Tensor]) -> Packing:
        weight: Any = copy.copy(self.weight)
        weight.reader = self.held.with_tensors(tensors)
        return replace(self, weight=weight)

    def values(self) -> Tensor:
        """Dequantise the weight in the dtype of its format."""
        device = self.tensors[0].device
        with nullcontext() if device.type == "cpu" else device:
            parts = [self.weight.read(rows, columns) for rows, columns in self.regions]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        return joined.T if self.is_transposed else joined


class PackedWeight(Tensor):
    """Frozen weight of a layer, stored as quantised values and scales.

    Matrix products in the forward and backward pass dequantise the weight and discard the result. Other functions
    receive the dequantised weight. Its ``dtype`` is the dtype of the model. ``to(dtype)`` changes only the dtype of the
    dequantised weight.

    Attributes:
        packing: the quantised tensors and their arrangement.
    """

    packing: Packing
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, packing: Packing, dtype: torch.dtype) -> PackedWeight:
        device = packing.tensors[0].device
        made: PackedWeight = Tensor._make_wrapper_subclass(cls, packing.shape, dtype=dtype, device=device)
        return made

    def __init__(self, packing: Packing, dtype: torch.dtype) -> None:
        self.packing = packing

    def dequantize(self) -> Tensor:
        """Return the plain weight."""
        return self.packing.values().to(self.dtype)

    @property
    def nbytes_held(self) -> int:
        """The bytes of the quantised values and scales."""
        return sum(tensor.nbytes for tensor in self.packing.tensors)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, PackedWeight) or value.shape != self.shape:
            raise ValueError(_FROZEN)
        torch.utils.swap_tensors(self, nn.Parameter(value.detach(), self.requires_grad))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, first = kwargs or {}, args[0] if args else None
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, PackedWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise ValueError(_FROZEN)
        if isinstance(first, PackedWeight):
            packing, dtype = first.packing, first.dtype
            if func in _SAME:
                return cls(packing, dtype)
            if func is _aten.clone.default:
                return cls(packing.with_tensors([each.clone() for each in packing.tensors]), dtype)
            if func is _aten.t.default or (func is _aten.transpose.int and {each % 2 for each in args[1:3]} == {0, 1}):
                return cls(replace(packing, is_transposed=not packing.is_transposed), dtype)
            if func is _aten._to_copy.default:
                return _moved(first, kwargs)
        if func in _PRODUCTS:
            return _product(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Packing, torch.dtype]]:
        tensors = self.packing.tensors
        for number, tensor in enumerate(tensors):
            setattr(self, f"part_{number}", tensor)
        return [f"part_{number}" for number in range(len(tensors))], (self.packing, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedWeight:
        packing, dtype = context
        return cls(packing.with_tensors(list(parts.values())), dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            is_param = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_param else copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind, shape = type(self.packing.weight).__name__, tuple(self.shape)
        return f"PackedWeight({kind}, shape={shape}, dtype={self.dtype}, {self.nbytes_held:,} bytes)"


_FROZEN = (
    "a quantised weight cannot be changed: an adapter is merged into plain weights, which "
    "from_pretrained_with_parallel(..., dequantize=True) loads of a quantised checkpoint"
)


def _moved(weight: PackedWeight, kwargs: Mapping[str, Any]) -> PackedWeight:
    device, packing = kwargs.get("device"), weight.packing
    if device is not None and torch.device(device) != weight.device:
        packing = packing.with_tensors([each.to(device) for each in packing.tensors])
    return PackedWeight(packing, kwargs.get("dtype") or weight.dtype)


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, PackedWeight) else value


def _product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Compute a product in ``compute_dtype``, by default the other operand's dtype. The result has the latter."""
    packing = next(arg.packing for arg in args if isinstance(arg, PackedWeight))
    others = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, PackedWeight)]
    given = others[-1].dtype if others else packing.values().dtype
    compute = packing.compute_dtype or given

    def computed(arg: Any) -> Any:
        if isinstance(arg, PackedWeight):
            return arg.packing.values().to(compute)
        return arg.to(compute) if isinstance(arg, Tensor) else arg

    result: Tensor = func(*map(computed, args), **kwargs)
    return result.to(given)


def pack(
    weight: QuantizedWeight,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    is_transposed: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Return the local shard of a quantised weight. Only the values and scales that its dequantisation needs are read.

    Args:
        weight: the full weight.
        layout: the layout of the layer's weight.
        dtype: the dtype of the dequantised weight.
        is_transposed: the layer stores the weight as ``[in, out]``.
        compute_dtype: see `Packing`.
    """
    source: Any = weight.reader
    infos = {name: replace(source.tensors[name], files=()) for name in weight.parts.values()}
    held = HeldTensors(infos, source.read_region)
    own = type(weight)(held, weight.parts, weight.settings)  # type: ignore[arg-type]
    places = [wanted[::-1] if is_transposed else wanted for wanted, _ in layout.shard_indices(rank)]
    regions = tuple(((rows.start, rows.stop), (columns.start, columns.stop)) for rows, columns in places)
    regions = tuple(each for each in regions if all(start < stop for start, stop in each)) or regions[:1]
    dim = 0 if layout.dim is None else (1 - layout.dim if is_transposed else layout.dim)
    for rows, columns in regions:
        own.read(rows, columns)
    held.read = None
    return PackedWeight(Packing(own, regions, dim, is_transposed, compute_dtype), dtype)


@dataclass(frozen=True)
class PackingReader(CheckpointReader):
    """Checkpoint that returns the weights of some layers as `PackedWeight`.

    Attributes:
        inner: the checkpoint.
        packed: the names of these weights.
        quantized: returns the quantised full weight for a name.
        transposed: the names of packed weights that layers store as ``[in, out]``.
        compute_dtype: see `Packing`.
    """

    inner: CheckpointReader | None = None
    packed: frozenset[str] = frozenset()
    quantized: Callable[[str], QuantizedWeight] | None = None
    transposed: frozenset[str] = frozenset()
    compute_dtype: torch.dtype | None = None

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None and self.quantized is not None
        if name not in self.packed:
            return self.inner.read(name, layout, rank)
        dtype, is_transposed = self.tensors[name].dtype, name in self.transposed
        return pack(self.quantized(name), layout, rank, dtype, is_transposed, self.compute_dtype)

    def copy_region(self, name: str, wanted: Index, out: Tensor, shape: tuple[int, ...] | None = None) -> None:
        assert self.inner is not None
        self.inner.copy_region(name, wanted, out, shape)
