"""Attention by blocks matches torch's attention with transformers' masks, and steps aside where it cannot."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from oslo_models.contracts import checks
from oslo_models.layers import blockwise_attention as blockwise
from oslo_models.layers.blockwise_attention import BLOCKWISE, blockwise_attention
from oslo_models.layers.lazy_mask import LazyMask, MaskRule

from support.long_masks import short_blocks
from support.reference import TOLERANCE, differences

Patch = pytest.MonkeyPatch
Mask = Callable[[Any, Any, Tensor], Any]


def padding(rows: int, length: int, draw: random.Random, left: bool = True) -> Tensor:
    """Return a padding mask. The first row has no padding, another one is all padding but one token."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        count = length - 1 if row == 1 else draw.randrange(1, length)
        mask[row, slice(0, count) if left else slice(length - count, length)] = 0
    return mask


def positions(rows: int, length: int, draw: random.Random) -> Tensor:
    """Return the positions of texts that are packed into each row."""
    packed = []
    for _ in range(rows):
        ends = sorted({length, *(draw.randrange(1, length) for _ in range(3))})
        packed.append(torch.cat([torch.arange(stop - start) for start, stop in zip([0, *ends], ends, strict=False)]))
    return torch.stack(packed)


def made(create: Any, config: Any, embeds: Tensor, padding: Tensor | None = None, **more: Any) -> Any:
    """Return the mask without a cache, whose argument has another name in older releases."""
    return create(config, embeds, padding, None, **more)


def even_later(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Let all queries see every fifth token, as for images: transformers evaluates such functions by ``vmap``."""
    return key % 5 == 0


def masks(draw: random.Random, rows: int, length: int) -> dict[str, Mask]:
    left, right = padding(rows, length, draw), padding(rows, length, draw, left=False)
    packed = positions(rows, length, draw)
    prefix = torch.full((rows, length), -1)
    prefix[:, 2 : length // 2] = 0
    return {
        "left padding": lambda config, x, _: made(create_causal_mask, config, x, padding=left),
        "right padding": lambda config, x, _: made(create_causal_mask, config, x, padding=right),
        "packing": lambda config, x, _: made(create_causal_mask, config, x, position_ids=packed),
        "window": lambda config, x, _: made(create_sliding_window_causal_mask, config, x),
        "window, packing": lambda config, x, _: made(create_sliding_window_causal_mask, config, x, position_ids=packed),
        "window, padding": lambda config, x, _: made(create_sliding_window_causal_mask, config, x, padding=left),
        "chunks": lambda config, x, _: made(create_chunked_causal_mask, config, x),
        "chunks, padding": lambda config, x, _: made(create_chunked_causal_mask, config, x, padding=left),
        "encoder": lambda config, x, _: create_bidirectional_mask(config, x, right),
        "cross": lambda config, x, y: create_bidirectional_mask(config, x, left, encoder_hidden_states=y),
        "image": lambda config, x, _: made(create_causal_mask, config, x, block_sequence_ids=prefix),
        "function": lambda config, x, _: made(create_causal_mask, config, x, or_mask_function=even_later),
    }


NAMES = [*masks(random.Random(0), 2, 8)]


class Layer(nn.Module):
    """Attention layer of transformers, as its attention functions see it."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def attended(layer: Layer, implementation: str, mask: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output of an attention function and the gradients of its queries, keys and values."""
    function = blockwise_attention if implementation == BLOCKWISE else sdpa_attention_forward
    query, key, value = (x.detach().requires_grad_() for x in tensors)
    output, _ = function(layer, query, key, value, mask, **options)
    weights = torch.arange(output.numel(), dtype=torch.float64).cos().view_as(output)
    (output * weights.to(output.dtype)).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


def drawn(name: str, seed: int, groups: int = 2) -> tuple[Callable[[str], Any], Layer, list[Tensor], dict[str, Any]]:
    """Draw an attention layer: a function from an implementation to its mask, the layer, its tensors and options."""
    draw = random.Random(seed)
    rows, length, heads = 3, draw.randrange(13, 30), draw.choice((1, 2))
    queries = length if name != "cross" else draw.randrange(9, 25)
    config = LlamaConfig(sliding_window=draw.randrange(2, 12), attention_chunk_size=draw.randrange(2, 12))
    make = masks(draw, rows, length)[name]
    x, y = torch.zeros(rows, queries, 4, dtype=torch.float64), torch.zeros(rows, length, 4, dtype=torch.float64)

    def mask(implementation: str) -> Any:
        config._attn_implementation = implementation
        return make(config, x, y)

    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, queries, heads * groups, 6), (rows, length, heads, 6), (rows, length, heads, 6)]
    tensors = [torch.randn(size, dtype=torch.float64, generator=generator).transpose(1, 2) for size in sizes]
    return mask, Layer(groups), tensors, {"scaling": draw.choice((None, 0.7))}


@pytest.mark.stacks
@pytest.mark.parametrize("name", NAMES)
def test_attention_by_blocks_matches_torch(name: str, seed: int) -> None:
    for groups in (1, 2, 3):
        mask, layer, tensors, options = drawn(name, seed + groups, groups)
        expected = attended(layer, "sdpa", mask("sdpa"), tensors, **options)
        with short_blocks() as shapes:
            lazy = mask(BLOCKWISE)
            assert type(lazy) is LazyMask and torch.equal(lazy.rule.whole(), mask("sdpa"))
            own = attended(layer, BLOCKWISE, lazy, tensors, **options)
            assert shapes == [tuple(tensors[0].shape)]
        names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
        lines = [differences(*each, TOLERANCE) for each in zip(names, own, expected, strict=True)]
        assert not any(lines), lines


def test_blocks_without_keys_are_skipped_and_masks_bound_in_size() -> None:
    x, config = torch.zeros(1, 4096, 1), LlamaConfig(sliding_window=512, attn_implementation=BLOCKWISE)
    rule = made(create_sliding_window_causal_mask, config, x).rule
    assert isinstance(rule, MaskRule)
    seen = [sum(run.keys.stop - run.keys.start for run in runs) for runs in rule.runs[0]]
    assert seen == [512, *[1024] * 7]
    assert rule._whole is None
    packed = torch.arange(1024).repeat(4)[None]
    (runs,) = made(create_causal_mask, config, x, position_ids=packed).rule.runs
    assert [[(run.keys.start // 512, run.kind) for run in each] for each in runs[:4]] == [
        [(0, "causal")],
        [(0, "full"), (1, "causal")],
        [(2, "causal")],
        [(2, "full"), (3, "causal")],
    ]


def test_masks_are_none_or_full_where_transformers_makes_none_and_for_short_texts() -> None:
    config = LlamaConfig(sliding_window=512, attn_implementation=BLOCKWISE)
    x = torch.zeros(1, 4096, 1)
    assert made(create_causal_mask, config, x) is None
    assert made(create_causal_mask, config, x, padding=torch.ones(1, 4096)) is None
    assert type(made(create_sliding_window_causal_mask, config, x[:, :1000])) is Tensor
    assert type(made(create_sliding_window_causal_mask, config, x.to("meta"))) is Tensor


def test_operations_on_a_lazy_mask_compute_with_the_whole_mask(seed: int) -> None:
    mask, layer, tensors, _ = drawn("window, padding", seed)
    whole = mask("sdpa")
    with short_blocks() as shapes:
        lazy = mask(BLOCKWISE)
        assert torch.equal(lazy.logical_not(), ~whole) and torch.equal(torch.where(lazy, 1, 0), whole.long())
        assert repr(lazy).startswith("LazyMask(") and lazy.shape == whole.shape and lazy.dtype == whole.dtype
        assert isinstance(lazy.detach(), LazyMask) and not lazy.rule.changed
        lazy[:, :, :, :3] = True  # what others write is not lost
        whole[:, :, :, :3] = True
        own = attended(layer, BLOCKWISE, lazy, tensors)
        assert not shapes
    for ours, right in zip(own, attended(layer, "sdpa", whole, tensors), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("what", ["dropout", "position_bias", "width of values", "changed mask"])
def test_other_attention_is_left_to_torch(what: str, seed: int) -> None:
    mask, layer, tensors, _ = drawn("left padding", seed)
    options: dict[str, Any] = {}
    if what == "dropout":
        options["dropout"] = 0.5
    elif what == "position_bias":
        options["position_bias"] = torch.randn(1, tensors[0].shape[1], *mask("sdpa").shape[2:], dtype=torch.float64)
    elif what == "width of values":
        tensors[2] = tensors[2][..., :4]
    torch.manual_seed(seed)
    expected = attended(layer, "sdpa", mask("sdpa"), tensors, **options)
    with short_blocks() as shapes:
        lazy = mask(BLOCKWISE)
        if what == "changed mask":
            lazy.logical_and_(torch.ones((), dtype=torch.bool))
        torch.manual_seed(seed)
        own = attended(layer, BLOCKWISE, lazy, tensors, **options)
        assert not shapes
    for ours, right in zip(own, expected, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_attention_keeps_the_lazy_mask(use_reentrant: bool, seed: int) -> None:
    mask, layer, tensors, options = drawn("packing", seed)
    expected = attended(layer, "sdpa", mask("sdpa"), tensors, **options)
    with short_blocks() as shapes:
        lazy = mask(BLOCKWISE)
        query, key, value = (x.detach().requires_grad_() for x in tensors)

        def run(*args: Any) -> Tensor:
            return blockwise_attention(layer, *args, **options)[0]

        output = checkpoint(run, query, key, value, lazy, use_reentrant=use_reentrant)
        weights = torch.arange(output.numel(), dtype=output.dtype).cos().view_as(output)
        (output * weights).sum().backward()
        assert len(shapes) == 2 and lazy.rule._whole is None
    for ours, right in zip([output, query.grad, key.grad, value.grad], expected, strict=True):
        assert not differences("tensor", ours.detach(), right, TOLERANCE)


def test_under_autocast_attention_runs_in_its_dtype(seed: int) -> None:
    """The result is as close to the exact one as that of torch's attention."""
    mask, layer, tensors, options = drawn("window", seed)
    tensors = [tensors[0].bfloat16().float(), *(x.bfloat16() for x in tensors[1:])]
    exact = attended(layer, "sdpa", mask("sdpa"), [x.double() for x in tensors], **options)
    with short_blocks() as shapes, torch.autocast("cpu", torch.bfloat16):
        own = attended(layer, BLOCKWISE, mask(BLOCKWISE), tensors, **options)
        theirs = attended(layer, "sdpa", mask("sdpa"), tensors, **options)
        assert shapes
    for ours, right, expected in zip(own, theirs, exact, strict=True):
        assert ours.dtype == right.dtype
        errors = [(x.double() - expected).square().mean().sqrt() for x in (ours, right)]
        assert errors[0] < 2 * errors[1] < 0.05 * expected.square().mean().sqrt()


def test_a_mask_changed_before_the_backward_pass_raises(seed: int) -> None:
    shown = padding(2, 20, random.Random(seed)).bool()  # transformers copies masks of other dtypes
    config = LlamaConfig(attn_implementation=BLOCKWISE)
    query = torch.randn(2, 2, 20, 6, requires_grad=True)
    with short_blocks():
        lazy = made(create_causal_mask, config, torch.zeros(2, 20, 4), padding=shown)
        output, _ = blockwise_attention(Layer(1), query, query, query, lazy)
        shown[:, 0] = False
        with pytest.raises(RuntimeError, match="changed in place before its backward pass"):
            output.sum().backward()


@pytest.fixture
def fresh_checks() -> Any:
    blockwise._computes_as_assumed.cache_clear()
    yield
    blockwise._computes_as_assumed.cache_clear()


def test_a_changed_kernel_is_named_and_masks_are_whole(fresh_checks: None, monkeypatch: Patch) -> None:
    forward, backward = blockwise._kernels()

    def other(*args: Any, **kwargs: Any) -> Any:
        output, logsum = forward(*args, **kwargs)
        return output, logsum / 2  # such as logarithms to another base

    monkeypatch.setattr(blockwise, "_kernels", lambda: (other, backward))
    config, x = LlamaConfig(sliding_window=9, attn_implementation=BLOCKWISE), torch.zeros(1, 2048, 1)
    with pytest.warns(UserWarning, match=r"torch .* changed its attention on CPUs .*masks take memory"):
        assert type(made(create_sliding_window_causal_mask, config, x)) is Tensor


def test_a_changed_attention_function_is_named_and_masks_are_whole(monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "broken", lambda original: f"transformers 9 changed {original.rpartition('.')[2]}")
    checks._warn.cache_clear()
    config, x = LlamaConfig(sliding_window=9, attn_implementation=BLOCKWISE), torch.zeros(1, 2048, 1)
    with pytest.warns(UserWarning, match="transformers 9 changed sdpa_attention_forward, so masks take memory"):
        assert type(made(create_sliding_window_causal_mask, config, x)) is Tensor


def test_the_installed_torch_computes_as_assumed(fresh_checks: None) -> None:
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blockwise.is_available()
    assert torch.equal(state, torch.get_rng_state())
    assert (
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask
    )  # nothing of others is replaced
