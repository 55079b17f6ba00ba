"""Optimizers of bitsandbytes and torchao with states in blocks: refused for shards, exact for full matrices."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from support import pipelines, trainers
from support.pool import Pool

pytestmark = pytest.mark.quantization

NAME = "GPT2LMHeadModel"
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def eight_bits(library: str, gathers: bool, model: Any) -> Any:
    """Return AdamW with states in 8 bits, of parameters with whole blocks."""
    if library == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit
    else:
        from torchao.optim import AdamW8bit
    matrices = [param for param in model.parameters() if param.dim() == 2]
    return model.matrix_optimizer(AdamW8bit, matrices, lr=1e-2) if gathers else AdamW8bit(matrices, lr=1e-2)


def paged(model: Any) -> Any:
    """Return AdamW with states in 32 bits that move to host memory. On CPUs, bitsandbytes does not move them."""
    from bitsandbytes.optim import PagedAdamW32bit

    return PagedAdamW32bit(list(model.parameters()), lr=1e-2)


def take_steps(model: Any, optimizer: Any, seed: int) -> None:
    """Take steps with drawn gradients: rounding differences of computed ones would cross a boundary of 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for name, param in model.named_parameters():
            layout = model.layouts[name] if hasattr(model, "layouts") else None
            grad = torch.randn(param.shape if layout is None else layout.shape, generator=generator)
            param.grad = grad if layout is None else layout.shard(grad, model.mesh.tp.rank).clone()
        optimizer.step()


def differences_on_rank(config: Any, weights: Any, trained: Any, seed: int, make: Any) -> list[str]:
    """Take the steps on this rank; return a line for each differing parameter."""
    model = pipelines.model_on_stages(NAME, config, weights, 2, 1, torch.float32)
    take_steps(model, make(model), seed)
    return pipelines.stage_differences(model, "trained", pipelines.stage_parameters(model), trained, 1e-6)


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
@pytest.mark.parametrize("gathers", [False, True], ids=["shards", "matrices"])
def test_eight_bits_are_exact_for_full_matrices_and_refused_for_shards(
    pool: Pool, library: str, gathers: bool, seed: int
) -> None:
    pytest.importorskip(library)
    config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=1, n_head=4, **NO_DROPOUT)
    model = trainers.reference_model(NAME, config, seed, torch.float32)
    weights, optimizer = trainers.full_parameters(model), eight_bits(library, False, model)
    take_steps(model, optimizer, seed)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert any("8bit" in type(value).__name__ or getattr(value, "dtype", None) == torch.uint8 for value in states)
    trained, make = trainers.full_parameters(model), partial(eight_bits, library, gathers)
    if gathers:
        assert pool.run(2, differences_on_rank, config, weights, trained, seed, make) == [[], []]
        return
    for error in pool.run(2, differences_on_rank, config, weights, trained, seed, make, expect=RuntimeError):
        assert re.match(r"AdamW8bit quantises the states of a shard \(.*matrix_optimizer", str(error)), error


def test_paged_states_in_32_bits_are_exact(pool: Pool, seed: int) -> None:
    pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=1, n_head=4, **NO_DROPOUT)
    model = trainers.reference_model(NAME, config, seed, torch.float32)
    weights = trainers.full_parameters(model)
    take_steps(model, paged(model), seed)
    trained = trainers.full_parameters(model)
    assert pool.run(2, differences_on_rank, config, weights, trained, seed, paged) == [[], []]
