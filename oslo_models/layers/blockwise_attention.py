"""Attention by blocks of queries and keys on a CPU. Masks take no memory that grows with the square of the length.

Torch's attention saves a mask of all queries and keys in every layer. Here each block's mask is evaluated in the
forward pass and again in the backward pass, and blocks without visible keys are skipped. Torch's own kernel computes
the blocks. The logarithms of their sums merge the results. Source: Dao, "FlashAttention-2", 2023.

Layers find `blockwise_attention` and `blockwise_mask` through transformers' registries, under the name `BLOCKWISE`.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oslo_models.contracts import holds
from oslo_models.distributed.collectives import has_dispatch_mode
from oslo_models.layers.context_attention import AttentionInputs, attention_of_parts, has_parts
from oslo_models.layers.context_parts import ContextPart
from oslo_models.layers.lazy_mask import LazyMask, MaskRule, Run, blocks

BLOCKWISE = "oslo_models_blockwise"
"""The name of `blockwise_attention` and `blockwise_mask` among transformers' attention implementations."""
TORCH_ATTENTION = ("sdpa", BLOCKWISE)
"""Names of attention implementations with the results of torch's attention."""
LEAST = 1024 * 1024
"""Queries times keys from which masks are lazy. Below, the mask of all queries and keys is faster, and small."""

_SDPA = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
_SDPA_MASK = "transformers.masking_utils.sdpa_mask"
_UNSUPPORTED = ("softcap", "position_bias", "cache", "s_aux")

# Masks ----------------------------------------------------------------------------------------------------------------


class _MaskNeededError(Exception):
    """Transformers evaluates the mask function."""


def _needed(*indices: Any) -> Tensor:
    raise _MaskNeededError


def blockwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' ``sdpa_mask``. Long masks on a CPU are a `LazyMask`.

    Args:
        **kwargs: further options of ``sdpa_mask``.

    Returns:
        ``None`` where transformers makes no mask.
    """
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    given = {**sizes, "q_offset": q_offset, "kv_offset": kv_offset, "device": device, **kwargs}
    padding, function = kwargs.get("attention_mask"), kwargs.get("mask_function")
    numbers = (*sizes.values(), q_offset, kv_offset)
    if (
        _is_traced()
        or not all(type(each) is int for each in numbers)
        or q_length == 1
        or q_length * kv_length < LEAST
        or torch.device(device).type != "cpu"
        or function is None
        or not (padding is None or type(padding) is Tensor)
        or not is_available()
    ):
        return sdpa_mask(**given)
    try:
        return sdpa_mask(**{**given, "mask_function": _needed, "use_vmap": False})
    except _MaskNeededError:
        shape, vmap = (batch_size, 1, q_length, kv_length), kwargs.get("use_vmap", False)
        return LazyMask(MaskRule(shape, function, padding, (q_offset, kv_offset), vmap))


def _is_traced() -> bool:
    """Whether values of tensors cannot be read, or operations are observed."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return traced or has_dispatch_mode() or torch._C._are_functorch_transforms_active()


# Attention ------------------------------------------------------------------------------------------------------------


def blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' ``sdpa_attention_forward``. With a `LazyMask`, attention runs block by block where it can.

    Dropout, a bias of positions, values of another width than keys and other devices are left to torch's attention,
    which gets the whole mask.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, key heads, keys, width]``.
        **kwargs: further options of ``sdpa_attention_forward``.

    Returns:
        ``[batch, queries, heads, width]``, and ``None`` for the weights.
    """
    if has_parts(query, key, value):
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        return _attention_of_parts(module, query, key, value, attention_mask, given)
    if isinstance(attention_mask, LazyMask):
        rule = attention_mask.rule
        if torch.is_autocast_enabled("cpu") and query.device.type == "cpu":
            narrow = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(narrow) if x.dtype is not torch.float64 else x for x in (query, key, value))
        special = dropout or any(kwargs.get(name) is not None for name in _UNSUPPORTED)
        if not special and _computes(rule, query, key, value, getattr(module, "num_key_value_groups", 1)):
            output: Tensor = _BlockwiseAttention.apply(query, key, value, rule, scaling)
            return output, None
        attention_mask = rule.whole()
    given = {"dropout": dropout, "scaling": scaling, **kwargs}
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    return result


def _attention_of_parts(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Any, None]:
    """Exchange the heads of parts of the tokens, and return a part of the output."""
    is_causal = options.pop("is_causal", None)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal and mask is None and query.shape[2] > 1)

    def attend(local: AttentionInputs) -> Tensor:
        heads: Any = _Heads(local.groups, local.is_causal)
        own = options if local.bias is None else {**options, "position_bias": local.bias}
        return blockwise_attention(heads, local.query, local.key, local.value, local.mask, **own)[0]

    bias = options.get("position_bias")
    part = attention_of_parts(attend, query, key, value, mask, is_causal, heads_dim=2, bias=bias)
    if part is not NotImplemented:
        return part, None
    query, key, value = (x.full("attention") if isinstance(x, ContextPart) else x for x in (query, key, value))
    return blockwise_attention(module, query, key, value, mask, is_causal=is_causal, **options)


class _Heads(NamedTuple):
    """Attributes of an attention module that transformers' attention reads."""

    num_key_value_groups: int
    is_causal: bool


def _computes(rule: MaskRule, query: Tensor, key: Tensor, value: Tensor, groups: int) -> bool:
    """Return whether tensors fit a mask and torch's kernel."""
    rows, _, queries, keys = rule.shape
    heads, width = key.shape[1], key.shape[-1]
    return (
        not rule.changed
        and all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in (query, key, value))
        and query.dtype == key.dtype == value.dtype
        and query.is_floating_point()
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and query.shape == (rows, heads * groups, queries, width)
        and key.shape == value.shape == (rows, heads, keys, width)
        and not torch.compiler.is_compiling()
    )


class _BlockwiseAttention(torch.autograd.Function):
    """Attention with a mask that is evaluated by blocks. Saves its inputs, its output and a logarithm of each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, scale: float | None) -> Tensor:
        batch, heads, queries, width = query.shape
        output = query.new_empty(batch, queries, heads, width)
        sums = query.new_empty(batch, heads, queries, dtype=_wide(query.dtype))
        for row, of_row in enumerate(rule.runs):
            q, k, v = _groups(query[row], key[row], value[row])
            out, logsum = _by_groups(output[row].transpose(0, 1), k), _by_groups(sums[row], k)
            for block, runs in zip(blocks(queries), of_row, strict=True):
                parts = [
                    _part(q[:, :, block], k, v, run, _options(rule, row, block, run, q.dtype, scale)) for run in runs
                ]
                out[:, :, block], logsum[:, :, block] = _merged(parts)
        ctx.rule, ctx.scale = rule, scale
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        rule: MaskRule = ctx.rule
        wide, (_, backward), grad = _wide(query.dtype), _kernels(), grad.contiguous()
        grads = [torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (query, key, value)]
        for row, of_row in enumerate(rule.runs):
            q, k, v = _groups(query[row], key[row], value[row])
            out, logsum = _by_groups(output[row].transpose(0, 1), k), _by_groups(sums[row], k)
            given = _by_groups(grad[row].transpose(0, 1), k)
            grad_q, grad_k, grad_v = _by_groups(grads[0][row], k), grads[1][row], grads[2][row]
            for block, runs in zip(blocks(q.shape[2]), of_row, strict=True):
                for run in runs:
                    options = _options(rule, row, block, run, q.dtype, ctx.scale)
                    tensors = (q[:, :, block], k[:, :, run.keys], v[:, :, run.keys], out[:, :, block])
                    parts = backward(given[:, :, block], *tensors, logsum[:, :, block], 0.0, **options)
                    grad_q[:, :, block] += parts[0]
                    grad_k[:, run.keys] += parts[1].sum(0, dtype=wide)
                    grad_v[:, run.keys] += parts[2].sum(0, dtype=wide)
        return (*(x.to(query.dtype) for x in grads), None, None)


def _groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of one row ``[group, key heads, length, width]``. All groups share the keys and values."""
    groups = len(query) // len(key)
    return _by_groups(query, key[None]), key.expand(groups, *key.shape), value.expand(groups, *value.shape)


def _by_groups(x: Tensor, key: Tensor) -> Tensor:
    """Return a view ``[group, key heads, ...]`` of a tensor ``[heads, ...]``. Consecutive heads share a key head."""
    return x.unflatten(0, (key.shape[1], -1)).transpose(0, 1)


def _options(
    rule: MaskRule, row: int, block: slice, run: Run, dtype: torch.dtype, scale: float | None
) -> dict[str, Any]:
    """Return the kernel's options for a block of queries and a run of keys."""
    bias = None
    if run.kind == "masked":
        seen = rule.part(slice(row, row + 1), block, run.keys)[0]
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
    return {"is_causal": run.kind == "causal", "attn_mask": bias, "scale": scale}


def _part(q: Tensor, k: Tensor, v: Tensor, run: Run, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output for a run of keys, and the logarithm of each query's sum: ``-inf`` if it sees no key."""
    output, logsum = _kernels()[0](q, k[:, :, run.keys], v[:, :, run.keys], 0.0, **options)
    if options["attn_mask"] is not None:
        logsum.masked_fill_(options["attn_mask"].amax(-1) == -math.inf, -math.inf)
    return output, logsum


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor | float, Tensor | float]:
    """Return the output and the logarithms over all keys. A query without keys gets zeros, as in torch's attention."""
    if not parts:
        return 0.0, 0.0
    output, logsum = parts[0]
    if len(parts) > 1:
        logsum = torch.stack([each for _, each in parts]).logsumexp(0)
    logsum = logsum.masked_fill(logsum == -math.inf, 0.0)
    if len(parts) > 1:
        output = sum(each * (own - logsum).exp().unsqueeze(-1) for each, own in parts)  # type: ignore[assignment]
    return output, logsum


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the kernel sums."""
    return torch.float64 if dtype is torch.float64 else torch.float32


# What is assumed of torch and transformers ----------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether the installed transformers and torch compute as assumed. If not, warn once."""
    without = "masks take memory as in transformers"
    return holds(_SDPA, without) and holds(_SDPA_MASK, without) and _computes_as_assumed()


def _kernels() -> tuple[Any, Any]:
    """Return the forward and backward operations of torch's attention on a CPU."""
    aten = torch.ops.aten
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return aten._scaled_dot_product_flash_attention_for_cpu, backward


@cache
def _computes_as_assumed() -> bool:
    """Compare two merged parts, with a row without keys, to the definition. Warn if they differ."""
    try:
        error = _error_of_kernels()
    except (AttributeError, RuntimeError, TypeError, ValueError) as raised:
        problem = str(raised)
    else:
        if error < 1e-12:
            return True
        problem = f"it is off by {error:.1e}"
    warnings.warn(
        f"torch {torch.__version__} changed its attention on CPUs ({problem}), so masks take memory as in transformers",
        stacklevel=2,
    )
    return False


@torch.no_grad()
def _error_of_kernels() -> float:
    """Return the largest error of an attention of two parts: output and gradients."""
    sizes = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4), "grad": (2, 2, 3, 4)}
    steps = torch.arange(80.0, dtype=torch.float64, device="cpu")
    q, k, v, grad = (
        torch.sin(steps[: math.prod(size)] * (index + 1)).view(size) for index, size in enumerate(sizes.values())
    )
    seen = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool, device="cpu")
    bias = torch.zeros(3, 5, dtype=q.dtype, device="cpu").masked_fill_(~seen, -math.inf)
    runs = [Run(slice(0, 2), "masked"), Run(slice(2, 5), "masked")]
    options = [{"is_causal": False, "attn_mask": bias[:, run.keys].contiguous(), "scale": 0.5} for run in runs]
    output, logsum = _merged([_part(q, k, v, run, each) for run, each in zip(runs, options, strict=True)])
    grads = [torch.zeros_like(each) for each in (q, k, v)]
    for run, each in zip(runs, options, strict=True):
        keys = (k[:, :, run.keys], v[:, :, run.keys])
        parts = _kernels()[1](grad, q, *keys, output, logsum, 0.0, **each)
        grads[0] += parts[0]
        grads[1][:, :, run.keys] += parts[1]
        grads[2][:, :, run.keys] += parts[2]
    weights = (q @ k.transpose(-1, -2) * 0.5 + bias).softmax(-1).nan_to_num(0.0)
    given = grad @ v.transpose(-1, -2)
    scores = weights * (given - (given * weights).sum(-1, keepdim=True)) * 0.5
    expected = (weights @ v, scores @ k, scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad)
    errors = [(own - right).abs().max() for own, right in zip((output, *grads), expected, strict=True)]
    return float(torch.stack(errors).max())


AttentionInterface.register(BLOCKWISE, blockwise_attention)
AttentionMaskInterface.register(BLOCKWISE, blockwise_mask)
