"""Collectives: values, gradients, and no more calls per model than in Megatron.

B batch size, L sequence length, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import registry
from oslo_models.distributed import collectives
from oslo_models.distributed.autograd_collectives import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from oslo_models.distributed.collectives import reduce_scatter
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.distributed.thread_group import ThreadGroup

from support import zoo
from support.pool import Pool

# Counts and sizes -----------------------------------------------------------------------------------------------------

COLLECTIVES = [
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "gather", "gather_object", "all_to_all"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "barrier"),
]
Counts = dict[tuple[str, int], int]
"""Number of calls by collective and by number of elements in the first tensor."""


@contextmanager
def counting() -> Iterator[Counter[tuple[str, int]]]:
    """Count the calls of ``torch.distributed``'s collectives by name and by number of elements that this rank sends."""
    counts: Counter[tuple[str, int]] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if name == "all_gather" else args[0] if args else None
            counts[name, sent.numel() if isinstance(sent, Tensor) else 0] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "shared_memory_of", lambda axis: None)  # which would take their place
        for name in COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        yield counts


def count_step(name: str, config: PreTrainedConfig, n: int, seed: int, checkpointing: bool | None) -> list[Counts]:
    """Count the collectives of a forward and a backward pass. ``checkpointing``: reentrant or not; `None`: without."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tensor_parallel_size=n, seed=seed, check_inputs=False)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    batch = plain_batch(name, config, seed)
    with counting() as forward:
        loss = model(**batch).loss
    with counting() as backward:
        loss.backward()
    return [dict(forward), dict(backward)]


def plain_batch(name: str, config: PreTrainedConfig, seed: int) -> dict[str, Tensor]:
    """Return a batch without token types, which GPT-2 looks up in its sharded embedding."""
    batch = zoo.batch(name, config, seed, torch.float32)
    batch.pop("token_type_ids", None)
    return batch


def sizes(config: PreTrainedConfig, name: str) -> tuple[int, int, int]:
    """Return (B, L, D) of the batch."""
    rows, length = zoo.batch(name, config, 0)["input_ids"].shape
    return rows, length, config.hidden_size


def expected_step(variant: str, shared_norm: bool = False) -> list[Counts]:
    """Megatron's scheme: one all-reduce per sharded region and direction, plus small all-reduces of the loss."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    B, L, D = sizes(config, name)
    blocks = config.num_hidden_layers
    tokens = B * L
    if config.is_encoder_decoder:
        # Two embeddings; two regions per encoder block and three per decoder block. All cross-attentions share
        # one sum of the gradient of the encoder output.
        forward, backward = 2 + 5 * blocks, 5 * blocks + 1 + 1
    else:
        forward, backward = 1 + 2 * blocks, (1 if shared_norm else 2) * blocks + 1
    return [
        {("all_reduce", B * L * D): forward, ("all_reduce", tokens): 1, ("all_reduce", 3 * tokens): 1},
        {("all_reduce", B * L * D): backward},
    ]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", ["gpt2", "gpt2-untied", "gpt_neo", "gptj", "llama-untied", "bert", "t5"])
def test_training_step_makes_two_all_reduces_per_block(pool: Pool, variant: str, n: int, seed: int) -> None:
    """No all-gather; per block, two all-reduces of B x L x D each way (GPT-J: one back, its regions share an input)."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    expected = expected_step(variant, shared_norm=variant == "gptj")
    for counts in pool.run(n, count_step, name, config, n, seed, None):
        assert counts == expected


@pytest.mark.parametrize("n", [2, 3])
def test_training_step_sums_gradients_of_replicated_key_value_heads(pool: Pool, n: int, seed: int) -> None:
    """Where ranks share key-value heads, the gradients of the key and value projections are summed too."""
    name, config = "LlamaForCausalLM", zoo.config("llama-one-kv", attention_bias=False)
    forward, backward = expected_step("llama-one-kv")
    backward["all_reduce", config.head_dim * config.hidden_size] = 2 * config.num_hidden_layers
    for counts in pool.run(n, count_step, name, config, n, seed, None):
        assert counts == [forward, backward]


@pytest.mark.parametrize("model_type", ["glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_shared_and_routed_experts_are_summed_over_the_ranks_together(pool: Pool, model_type: str, seed: int) -> None:
    """Two all-reduces per block in the forward pass, as without shared experts."""
    name, config = zoo.lm_head(model_type), zoo.config(model_type, intermediate_size=32, moe_intermediate_size=32)
    B, L, D = sizes(config, name)
    for forward, _ in pool.run(2, count_step, name, config, 2, seed, None):
        assert forward["all_reduce", B * L * D] == 1 + 2 * config.num_hidden_layers


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("variant", ["gpt2", "llama-untied"])
def test_checkpointed_step_repeats_forward_all_reduces(pool: Pool, variant: str, reentrant: bool, seed: int) -> None:
    """Recomputation repeats the blocks' forward all-reduces, except the last of each block when it stops early."""
    name, config = zoo.lm_head(variant), zoo.config(variant, use_cache=False)
    forward, backward = expected_step(variant)
    B, L, D = sizes(config, name)
    backward["all_reduce", B * L * D] += config.num_hidden_layers * (2 if reentrant else 1)
    for counts in pool.run(2, count_step, name, config, 2, seed, reentrant):
        assert counts == [forward, backward]


def count_generation(name: str, config: PreTrainedConfig, tokens: int, seed: int, options: dict[str, Any]) -> Counts:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed, check_inputs=False).eval()
    batch = zoo.batch(name, config, seed, torch.float32)
    prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with counting() as counts:
        model.generate(**prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)
    return dict(counts)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_generation_makes_one_all_gather_per_token(pool: Pool, variant: str, beams: int, seed: int) -> None:
    """Per token, one all-gather of the logits of the last position."""
    variant = "bert-decoder" if variant == "bert" else variant
    name, config, tokens = zoo.lm_head(variant), zoo.config(variant), 4
    B, L, D = sizes(config, name)
    for counts in pool.run(2, count_generation, name, config, tokens, seed, {"do_sample": False, "num_beams": beams}):
        gathers = {key: count for key, count in counts.items() if key[0].startswith("all_gather")}
        local_vocab = (config.vocab_size + 1) // 2  # the shorter part travels padded to the longer
        assert gathers == {("all_gather", B * beams * local_vocab): tokens}
        kinds = {name for name, _ in counts}
        assert kinds == {"all_gather", "all_reduce", "broadcast"}, counts
        assert sum(count for key, count in counts.items() if key[0] == "broadcast") == 1  # the random state, once
        if not config.is_encoder_decoder:
            sums = 1 + 2 * config.num_hidden_layers
            assert counts["all_reduce", B * beams * L * D] == sums
            assert counts["all_reduce", B * beams * D] == sums * (tokens - 1)


# Values and gradients -------------------------------------------------------------------------------------------------


def axis_of(n: int) -> Axis:
    return ParallelMesh(n).tp


def own_weights(axis: Axis, *shape: int) -> Tensor:
    """Return weights that differ on each rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(axis.rank))


def check_gradients(n: int) -> None:
    """For functions from replicated to replicated tensors, gradients match numerical gradients on every rank."""
    axis = axis_of(n)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)  # the same on every rank
    parts = [5 - n + 1, *[1] * (n - 1)]
    assert sum(parts) == 5
    column, row = own_weights(axis, 5, 2 + axis.rank), own_weights(axis, 2 + axis.rank, 3)

    def megatron(x: Tensor) -> Tensor:
        return reduce_from(axis, torch.tanh(copy_to(axis, x) @ column) @ row)

    def siblings(x: Tensor) -> Tensor:
        hidden = x * 2
        gate, up = copy_to(axis, hidden) @ column, copy_to(axis, hidden) @ (column + 1)
        return reduce_from(axis, (gate.sigmoid() * up) @ row)

    def there_and_back(x: Tensor) -> Tensor:
        return gather_from(
            axis, torch.sin(scatter_to(axis, x, 1, parts)) * own_weights(axis, 2, parts[axis.rank]), 1, parts
        )

    def rows(x: Tensor) -> Tensor:
        return gather_from(axis, scatter_to(axis, x.T, 0, parts).exp(), -2, parts)

    def column_gathered(x: Tensor) -> Tensor:
        return gather_from(axis, copy_to(axis, x) @ column, -1, [2 + rank for rank in range(n)])

    def scattered_row(x: Tensor) -> Tensor:
        return reduce_from(axis, scatter_to(axis, x, -1, parts) @ own_weights(axis, parts[axis.rank], 2))

    def sequence_parallel(x: Tensor) -> Tensor:
        part = torch.sin(scatter_to(axis, x.T, 0, parts))
        product = torch.tanh(gather_to(axis, part, 0, parts).T @ column) @ row
        sizes = [1, *[2] * (n - 1)] if n == 2 else [1, 1, 1, 0][:n]
        return gather_from(axis, reduce_scatter_from(axis, product, -1, sizes).exp(), 1, sizes)

    for function in (megatron, siblings, there_and_back, rows, column_gathered, scattered_row, sequence_parallel):
        assert torch.autograd.gradcheck(function, x), function
    assert torch.autograd.gradgradcheck(sequence_parallel, x)


def check_values(n: int) -> None:
    axis = axis_of(n)
    sizes = [rank + 1 for rank in range(n)]
    full = torch.arange(2.0 * sum(sizes), requires_grad=True).view(2, -1)
    start = sum(sizes[: axis.rank])
    own = full[:, start : start + sizes[axis.rank]]
    assert torch.equal(scatter_to(axis, full, 1, sizes), own)
    assert torch.equal(scatter_to(axis, full, -1, sizes), own)
    assert torch.equal(gather_from(axis, own, 1, sizes), full)
    assert torch.equal(gather_to(axis, own, -1, sizes), full)
    assert torch.equal(reduce_scatter_from(axis, full * (axis.rank + 1), 1, sizes), own * sum(range(1, n + 1)))
    total = torch.full((3,), sum(range(n)) * 1.0)
    given = torch.full((3,), axis.rank * 1.0)
    assert torch.equal(reduce_from(axis, given.clone()), total)
    assert copy_to(axis, given) is given  # needs no gradient
    leaf = given.clone().requires_grad_()
    reduced = reduce_from(axis, leaf * 1)
    (reduced * torch.arange(3.0)).sum().backward()
    assert torch.equal(reduced, total)
    assert torch.equal(leaf.grad, torch.arange(3.0))
    leaf.grad = None
    gradient = torch.full((3,), axis.rank + 1.0)
    kept = gradient.clone()
    copy_to(axis, leaf * 1).backward(gradient)
    assert torch.equal(leaf.grad, torch.full((3,), sum(range(1, n + 1)) * 1.0))
    assert torch.equal(gradient, kept)  # the engine may hand it to others


def check_shared_copies(n: int) -> None:
    """Readers of the same tensor share a copy, unless it has changed or belongs to another axis."""
    mesh = ParallelMesh(n)
    x = torch.ones(4, requires_grad=True) * 1
    first = copy_to(mesh.tp, x)
    assert copy_to(mesh.tp, x) is first
    assert copy_to(ParallelMesh(n).tp, x) is not first
    weight = torch.ones(4, requires_grad=True)
    projection, hidden = torch.ones(3, 2, requires_grad=True), x.view(1, 2, 2) * 1
    with counting() as counts:  # as in a model, where nobody else keeps the copy
        query, key = F.linear(copy_to(mesh.tp, hidden), projection), F.linear(copy_to(mesh.tp, hidden), projection)
        (query + key).sum().backward()
    assert dict(counts) == {("all_reduce", 4): 1}
    leaf = torch.ones(4, requires_grad=True)
    y = leaf * 1
    before = copy_to(mesh.tp, y)
    y.mul_(3)
    after = copy_to(mesh.tp, y)
    assert after is not before
    assert torch.equal(after, torch.full((4,), 3.0))
    after.sum().backward()
    assert torch.equal(leaf.grad, torch.full((4,), 3.0 * n))
    with torch.no_grad():
        assert copy_to(mesh.tp, x) is x
    gc.disable()
    z = leaf * 1
    copy, reference = copy_to(mesh.tp, z), weakref.ref(z)
    (weight * copy).sum().backward()
    del copy, z
    assert reference() is None  # sharing makes no cycle that only the garbage collector would find
    gc.enable()
    leaf.grad = torch.full((4,), 3.0 * n)
    for step in (1, 2):  # a tensor that lives longer than one pass, such as given encoder states
        (weight * copy_to(mesh.tp, leaf)).sum().backward()
        assert torch.equal(leaf.grad, torch.full((4,), 3.0 * n + step * n))


def check_one_rank() -> None:
    """Collectives on an axis of one rank do nothing."""
    axis = axis_of(1)
    x = torch.ones(3, requires_grad=True)
    with counting() as counts:
        assert copy_to(axis, x) is reduce_from(axis, x) is gather_from(axis, x, 0, [3]) is scatter_to(axis, x, 0, [3])
        assert gather_to(axis, x, 0, [3]) is reduce_scatter_from(axis, x, 0, [3]) is x
        with agree(axis, "nothing"):
            pass
        require_equal(axis, {"a": 1}, "values")
    assert not counts


@pytest.mark.parametrize("n", [2, 3, 4])
def test_autograd_collectives_have_the_right_gradients(pool: Pool, n: int) -> None:
    pool.run(n, check_gradients, n)


@pytest.mark.parametrize("n", [2, 3])
def test_collectives_have_the_right_values(pool: Pool, n: int) -> None:
    pool.run(n, check_values, n)
    pool.run(n, check_shared_copies, n)


def test_collectives_on_one_rank_are_identities(pool: Pool) -> None:
    pool.run(2, check_one_rank)
    check_one_rank()


def test_ranks_in_threads_reduce_and_scatter() -> None:
    group, sizes = ThreadGroup([torch.device("cpu")] * 3), [1, 3, 2]
    given = torch.arange(12.0).view(2, 6)

    def task(rank: int) -> Tensor:
        return reduce_scatter(ParallelMesh.of_thread(group, rank).tp, given * (rank + 1), 1, sizes)

    for own, part in zip(group.run(task), given.split(sizes, 1), strict=True):
        assert torch.equal(own, part * 6)


# Agreement ------------------------------------------------------------------------------------------------------------


class _Strange(OSError):
    """Exception with a constructor of two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.both = one, two

    def __reduce__(self) -> Any:
        return type(self), self.both


def fail_on(ranks: list[int], error: Exception | None) -> str:
    with agree(ParallelMesh(3).world, "opening the door"):
        if dist.get_rank() in ranks and error is not None:
            raise error
    return "done"


def test_agree_raises_on_all_ranks_and_names_the_failed_one(pool: Pool) -> None:
    """The failed rank raises its own exception; other ranks raise the same type with the rank's number."""
    assert pool.run(3, fail_on, [], ValueError("no")) == ["done"] * 3
    raised = pool.run(3, fail_on, [1], ValueError("no key"), expect=ValueError)
    assert [str(error) for error in raised] == [
        "opening the door: rank 1 failed: no key",
        "no key",
        "opening the door: rank 1 failed: no key",
    ]
    raised = pool.run(3, fail_on, [0, 2], FileNotFoundError("no door"), expect=FileNotFoundError)
    assert [str(error) for error in raised] == ["no door", "opening the door: rank 0 failed: no door", "no door"]
    raised = pool.run(3, fail_on, [2], _Strange("a", "b"), expect=OSError)
    assert str(raised[0]) == "opening the door: rank 2 failed: a and b"


def interrupted() -> None:
    """An interrupt such as Ctrl-C is no error; the rank raises it without asking the others."""
    with agree(ParallelMesh(2).world, "waiting"):
        raise KeyboardInterrupt


def test_agree_does_not_catch_interrupts(pool: Pool) -> None:
    pool.run(2, interrupted, expect=KeyboardInterrupt)


def compare_arguments(different: bool) -> None:
    rank = dist.get_rank()
    values: dict[str, Any] = {"same": [1, "x"], "size": 2 + rank % 2 if different else 2}
    if different and rank == 2:
        values["extra"] = None
    require_equal(ParallelMesh(3).world, values, "arguments of f")


def test_require_equal_names_values_that_differ(pool: Pool) -> None:
    """All ranks raise an error with the differing values and their ranks."""
    pool.run(3, compare_arguments, False)
    messages = {str(error) for error in pool.run(3, compare_arguments, True, expect=ValueError)}
    assert messages == {
        "ranks were given different arguments of f:\n"
        "  size: rank 0 has 2, rank 1 has 3, rank 2 has 2\n"
        "  extra: rank 0 has (not given), rank 1 has (not given), rank 2 has None"
    }
