"""``torch.compile`` of a sharded model: results match one process, and dynamo makes the expected graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedConfig

from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import ShardedParameter, local_tensor, mark
from oslo_models.fusion.lazy_logits import LazyLogits
from oslo_models.layers.linear import RowParallelLinear

from support import zoo
from support.float64 import lifted_casts
from support.fusion import as_on_a_gpu
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    differences,
    full_gradients,
    full_parameters,
    make_optimizer,
    parallel_model,
    reference_model,
    shard_differences,
)

pytestmark = pytest.mark.drawn(3, of="file")
BACKEND = "aot_eager"  # traces and partitions the graphs as inductor does, without its compiler


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def counts() -> tuple[int, int]:
    """Return dynamo's numbers of graphs and of graph breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def check_forward(config: Any, weights: Any, name: str, batches: list[Any], expected: list[Tensor]) -> tuple[int, int]:
    model = parallel_model(name, config, weights, 2).eval()
    with fresh_dynamo(), lifted_casts(), torch.no_grad():
        compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
        lines = []
        for batch, logits in zip(batches, expected, strict=True):
            lines += differences("logits", compiled(**without_labels(batch)).logits, logits, TOLERANCE)
        assert not lines, "\n".join(lines)
        return counts()


@pytest.mark.stacks
@pytest.mark.parametrize("variant", [pytest.param("gpt2", marks=pytest.mark.zoo), "llama"])
def test_compiled_forward_is_one_graph(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model, batches = reference_model(name, config, seed).eval(), [zoo.batch(name, config, seed + i) for i in range(3)]
    with lifted_casts(), torch.no_grad():
        expected = [model(**without_labels(batch)).logits for batch in batches]
    for graphs, breaks in pool.run(2, check_forward, config, full_parameters(model), name, batches, expected):
        assert (graphs, breaks) == (1, 0)


def take_steps(model: Any, forward: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the losses of training steps; the gradients of the last step remain."""
    optimizer = make_optimizer("AdamW", model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = forward(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


def check_training(
    config: PreTrainedConfig, weights: Any, name: str, batches: list[Any], expected: Any
) -> tuple[int, list[str]]:
    """Return the number of graphs, and the reasons for graph breaks."""
    losses, gradients, trained = expected
    model = parallel_model(name, config, weights, 2)
    with fresh_dynamo(), lifted_casts():
        own_losses = take_steps(model, torch.compile(model, backend=BACKEND), batches)
        lines = differences("losses", torch.stack(own_losses), torch.stack(losses), TOLERANCE)
        lines += shard_differences(model, "gradient", full_gradients(model), gradients, TOLERANCE)
        lines += shard_differences(model, "trained", full_parameters(model), trained, TOLERANCE)
        assert not lines, "\n".join(lines)
        return counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.stacks
@pytest.mark.parametrize(
    ("variant", "most"),
    [
        pytest.param("llama", 1, marks=pytest.mark.zoo),
        ("gpt2", 2),  # transformers warns of the loss_type of its class between head and loss, on one process too
    ],
)
def test_compiled_training_matches_one_process(pool: Pool, variant: str, most: int, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, use_cache=False)
    model, batches = reference_model(name, config, seed), [zoo.batch(name, config, seed + i) for i in range(3)]
    weights = full_parameters(model)
    with lifted_casts():
        losses = take_steps(model, model, batches)
    expected = losses, full_gradients(model), full_parameters(model)
    for graphs, reasons in pool.run(2, check_training, config, weights, name, batches, expected, timeout=900):
        assert graphs <= most, reasons
        assert all("logging" in reason for reason in reasons) and bool(reasons) == (most > 1), reasons


def check_fused_head(
    config: PreTrainedConfig, weights: Any, name: str, batches: list[Any], expected: Any
) -> tuple[int, int]:
    losses, gradients, trained = expected
    model = as_on_a_gpu(parallel_model(name, config, weights, 2))
    model.base_model.compile(backend="eager")  # dynamo alone; tests above cover its graphs of the body
    logits = mock.patch.object(LazyLogits, "compute", side_effect=AssertionError("logits were made"))
    with fresh_dynamo(), lifted_casts(), logits:
        lines = differences("losses", torch.stack(take_steps(model, model, batches)), torch.stack(losses), TOLERANCE)
        lines += shard_differences(model, "gradient", full_gradients(model), gradients, TOLERANCE)
        lines += shard_differences(model, "trained", full_parameters(model), trained, TOLERANCE)
        assert not lines, "\n".join(lines)
        return counts()


def test_fused_loss_of_a_compiled_body_matches_one_process(pool: Pool, seed: int) -> None:
    """Logits with a soft cap, over a sharded vocabulary, are never made; the rest is one graph."""
    name, config = zoo.lm_head("gemma2"), zoo.config("gemma2", use_cache=False)
    model, batches = reference_model(name, config, seed), [zoo.batch(name, config, seed + i) for i in range(2)]
    weights = full_parameters(model)
    with lifted_casts():
        losses = take_steps(model, model, batches)
    expected = losses, full_gradients(model), full_parameters(model)
    for graphs, breaks in pool.run(2, check_fused_head, config, weights, name, batches, expected):
        assert (graphs, breaks) == (1, 0)


class CastsAsT5(RowParallelLinear):
    """Reads the dtype of its weight outside the layer's forward, as T5's MLP does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.dtype == self.weight.dtype else x.to(self.weight.dtype))


@pytest.mark.parametrize("mode", [nullcontext, lifted_casts])
def test_attributes_of_shards_break_no_graph(mode: Any) -> None:
    layer: Any = nn.Linear(4, 6, dtype=torch.float64)
    layer.__class__, layer.tp, layer.stream = CastsAsT5, Axis("tp", 0, (0,), None), None
    mark(layer.weight, SimpleNamespace(is_part=True), ShardedParameter)
    x = torch.randn(3, 4)
    with fresh_dynamo(), mode():
        compiled = torch.compile(layer, backend=BACKEND, fullgraph=True)(x)
        compiled.sum().backward()
        assert counts() == (1, 0)
    assert torch.allclose(compiled, layer(x), rtol=0, atol=TOLERANCE)
    assert torch.allclose(local_tensor(layer.weight.grad), x.double().sum(0).expand(6, 4), rtol=0, atol=TOLERANCE)


def check_like_eager(config: PreTrainedConfig, batch: dict[str, Tensor], seed: int, mode: Any) -> tuple[int, int]:
    """A step of the compiled model matches an eager step, including the state of the random generator."""
    name = zoo.lm_head(config.model_type)
    model = parallel_model(name, config, full_parameters(reference_model(name, config, seed)), 2)
    found = []
    with fresh_dynamo(), mode():
        for forward in (model, torch.compile(model, backend=BACKEND)):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = forward(**batch).loss
            loss.backward()
            gradients = {key: param.grad.clone() for key, param in model.named_parameters()}
            found.append((loss.detach(), gradients, torch.rand(())))
        made = counts()
    (loss, gradients, drawn), (own_loss, own_gradients, own_drawn) = found
    lines = differences("loss", own_loss, loss, TOLERANCE) + differences("drawn", own_drawn, drawn, 0)
    for key, gradient in gradients.items():
        lines += differences(f"gradient of {key}", own_gradients[key], gradient, TOLERANCE)
    assert not lines, "\n".join(lines)
    return made


@pytest.mark.zoo
def test_compiled_dropout_equals_the_model(pool: Pool, seed: int) -> None:
    config = zoo.config("llama", dropout=0.3, use_cache=False)
    pool.run(2, check_like_eager, config, zoo.batch(zoo.lm_head("llama"), config, seed), seed, lifted_casts)


@pytest.mark.zoo
def test_compiled_training_of_t5_is_one_graph(pool: Pool, seed: int) -> None:
    """Without a torch function mode: under a mode, dynamo breaks at attributes of ``Parameter`` subclasses."""
    config = zoo.config("t5", use_cache=False)
    batch = zoo.batch(zoo.lm_head("t5"), config, seed)
    assert pool.run(2, check_like_eager, config, batch, seed, nullcontext) == [(1, 0)] * 2


def check_generation(config: Any, weights: Any, name: str, prompts: list[Tensor], expected: Any) -> tuple[int, int]:
    model = parallel_model(name, config, weights, 2).eval()
    with fresh_dynamo(), lifted_casts():
        model.forward = torch.compile(model.forward, backend=BACKEND, fullgraph=True)
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert generate(model, prompt).equal(tokens)
        return counts()


def generate(model: Any, prompt: Tensor) -> Tensor:
    options = {"cache_implementation": "static", "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    tokens: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokens


@pytest.mark.stacks
@pytest.mark.parametrize("variant", [pytest.param("gpt2", marks=pytest.mark.zoo), "llama"])
def test_compiled_generation_with_a_static_cache_makes_two_graphs(pool: Pool, variant: str, seed: int) -> None:
    """One graph for the prompt and one for further tokens; the next prompt of the same length reuses them."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, config.vocab_size, (2, 5), generator=generator) for _ in range(2)]
    with lifted_casts():
        expected = [generate(model, prompt) for prompt in prompts]
    for graphs, breaks in pool.run(2, check_generation, config, full_parameters(model), name, prompts, expected):
        assert graphs <= 2 and breaks == 0, (graphs, breaks)
