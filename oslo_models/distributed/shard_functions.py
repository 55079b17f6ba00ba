"""Lists the torch functions that run on the local tensor of a shard.

`sharded_tensor.handlers` handles a few others. The rest raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

_OF_ELEMENTS = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max
clamp_min clip conj conj_physical copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac gcd ge greater greater_equal gt heaviside hypot i0 igamma igammac
isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp le lerp less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mul multiply mvlgamma
nan_to_num ne neg negative nextafter not_equal polygamma positive pow rad2deg real reciprocal relu remainder
resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh
true_divide trunc where xlogy masked_fill hardshrink
celu selu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu softplus softshrink softsign
tanhshrink threshold
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx expit gammainc gammaincc gammaln i0e i1 i1e log_ndtr
modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr ndtri psi
scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 xlog1py zeta
zeros_like empty_like ones_like full_like bool byte char short int long chalf cfloat cdouble type_as
"""
_OPERATORS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv ifloordiv mod rmod
imod pow rpow ipow neg pos abs eq ne lt le gt ge and rand iand or ror ior xor rxor ixor invert lshift rlshift ilshift
rshift rrshift irshift
"""
_IN_PLACE = "copy_ fill_ zero_ detach_ requires_grad_ float_power_"

_ABOUT_MEMORY = """
__array_wrap__ __complex__ __deepcopy__ __dlpack__ __dlpack_device__ __float__ __format__ __index__ __int__
__long__ __bool__ __nonzero__ __len__ __repr__ __reduce_ex__ __setstate__ __hash__ _is_view backward
const_data_ptr data_ptr dim dim_order element_size get_device is_coalesced is_complex is_conj is_contiguous
is_distributed is_floating_point is_inference is_neg is_nonzero is_pinned is_quantized is_same_size is_set_to is_shared
is_signed item module_load ndimension nelement numel pin_memory record_stream register_hook
register_post_accumulate_grad_hook requires_grad_ resize_ retain_grad set_ share_memory_ size sparse_dim dense_dim
storage storage_offset storage_type stride untyped_storage as_subclass new_empty new_zeros new_ones new_full
new_tensor new_empty_strided _nested_tensor_size _typed_storage _make_subclass _has_compatible_shallow_copy_type
has_names names is_nested view_as_real data_ptr _cdata _version
"""
_ATTRIBUTES = """
_backward_hooks _base _cdata _grad _grad_fn _post_accumulate_grad_hooks _version __cuda_array_interface__ data device
dtype grad grad_dtype grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested
is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name names nbytes ndim output_nr
requires_grad retains_grad shape volatile imag real
"""
_SHAPES = """
as_strided broadcast_to chunk diagonal expand expand_as flatten flip fliplr flipud index_select movedim moveaxis narrow
narrow_copy permute ravel reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split
tile transpose tril triu unbind unflatten unsqueeze view view_as atleast_1d atleast_2d atleast_3d adjoint repeat
"""
NOT_OF_ELEMENTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")


def _found(names: Iterable[str], *places: Any) -> set[Function]:
    names = list(names)
    return {found for place in places for name in names if callable(found := getattr(place, name, None))}


def _foreach() -> set[Function]:
    names = [name for name in dir(torch) if name.startswith(("_foreach_", "_fused_ad", "_fused_sgd", "_amp_"))]
    return _found((name for name in names if name.rstrip("_") not in NOT_OF_ELEMENTS), torch)


def _names(text: str) -> list[str]:
    return text.split()


ELEMENTWISE: frozenset[Function] = frozenset(
    _found(_names(_OF_ELEMENTS), torch, Tensor, F, torch.special)
    | _found((f"{name}_" for name in _names(_OF_ELEMENTS)), torch, Tensor, F)
    | _found((f"__{name}__" for name in _names(_OPERATORS)), Tensor)
    | _found(_names(_IN_PLACE), torch, Tensor)
)
"""Elementwise functions: exact on shards of one layout."""

LISTS_ELEMENTWISE: frozenset[Function] = frozenset(_foreach())
"""Elementwise functions of lists of tensors, called by optimizers. They are exact on shards."""

ABOUT_MEMORY: frozenset[Function] = frozenset(
    _found(_names(_ABOUT_MEMORY), torch, Tensor)
    | {
        accessor
        for name in _names(_ATTRIBUTES)
        for action in ("__get__", "__set__", "__delete__")
        if (accessor := getattr(getattr(Tensor, name, None), action, None)) is not None
    }
    | {torch.is_tensor, torch.is_storage, torch.result_type, torch.can_cast, Tensor.stride}
)
"""Functions that query properties of the local memory or read a tensor with one element."""

RESHAPED: frozenset[Function] = frozenset(
    _found(_names(_SHAPES), torch, Tensor, torch.functional)
    | {Tensor.__getitem__, *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))}
)
"""Functions that return elements of the local tensor in another shape."""

JOINS = frozenset(
    _names("cat concat concatenate hstack vstack dstack row_stack column_stack stack flatten_dense_tensors")
)
"""Names of functions that join tensors without other computation."""
SPLITS = frozenset(["unflatten_dense_tensors"])
"""Names of functions that undo a join."""
