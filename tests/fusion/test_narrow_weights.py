"""``fuse(weights=...)``: linear layers on a CPU that read their weights in bfloat16 or int8."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels import linear as kernel
from oslo_kernels import narrow_linear as narrow
from oslo_models import LlamaForCausalLM
from oslo_models.fusion.narrow_weights import NarrowProduct

from support import zoo
from support.fusion import relative_error
from support.pool import Pool
from support.reference import parallel_model, reference_step

pytestmark = pytest.mark.skipif(
    kernel.unavailable_reason() is not None, reason=f"needs a compiler: {kernel.unavailable_reason()}"
)
# x is rounded to 16 bits for int8; a scale of another rank's channels would be wrong by some percent
TOLERANCE = {"bfloat16": 1e-5, "int8": 4e-4}


def rounded(weight_oi: Tensor, weights: str) -> Tensor:
    """Return the weight of a narrow layer by its definition."""
    if weights == "bfloat16":
        return weight_oi.bfloat16().double()
    scale = weight_oi.abs().amax(1, keepdim=True) / 127
    return (weight_oi / scale).round().double() * scale


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("weights", narrow.DTYPES)
def test_narrow_linear_multiplies_with_the_rounded_weight(weights: str, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    sizes = [(rows, draw.randint(1, 1400), draw.randint(1, 90)) for rows in (1, 2, 3, 4, 5, 7, 9, 16, 32, 33, 50)]
    for rows, inner, outer in (*sizes, (1, 1024, 24), (2, 512, 8), (6, 3000, 12)):
        x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer)
        x[0] *= 1e-3  # each row has a separate scale
        made = narrow.NarrowWeight.of(weight, narrow.DTYPES[weights])
        assert error(made.dequantized(), rounded(weight, weights)) < 1e-6
        for given in (bias, None):
            exact = F.linear(x.double(), rounded(weight, weights), None if given is None else given.double())
            found = narrow.narrow_linear(x, made, given)
            assert found.dtype == x.dtype and found.shape == exact.shape
            for row, right in zip(found, exact, strict=True):
                # an output that cancels to nearly nothing may be less exact
                limit = TOLERANCE[weights] * (x.norm() * weight.norm() / 10 + 1)
                assert float((row.double() - right).norm()) < limit, f"{rows} x {inner} x {outer}"
            assert error(found, exact) < 5 * TOLERANCE[weights] or inner < 8


@pytest.mark.parametrize("weights", narrow.DTYPES)
def test_narrow_linear_is_bitwise_independent_of_threads_and_other_rows(
    weights: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(kernel, "WEIGHTS_PER_THREAD", 1)
    x, bias = torch.randn(7, 700), torch.randn(70)
    made = narrow.NarrowWeight.of(torch.randn(70, 700), narrow.DTYPES[weights])
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(narrow.narrow_linear(x, made, bias))
    torch.set_num_threads(before)
    found.append(torch.cat([narrow.narrow_linear(row, made, bias) for row in x.split(1)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("weights", narrow.DTYPES)
def test_narrow_linear_keeps_non_finite_values_in_their_rows(weights: str) -> None:
    x = torch.randn(4, 600)
    x[1, 3], x[2, 599] = float("inf"), float("nan")
    found = narrow.narrow_linear(x, narrow.NarrowWeight.of(torch.randn(30, 600), narrow.DTYPES[weights]))
    assert found.isfinite().all(1).tolist() == [True, False, False, True]


def rounded_step(variant: str, weights: str, seed: int) -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """Return weights, token ids, and float64 logits of transformers with the rounded weights."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    state = {key: value.float() for key, value in reference_step(name, config, seed).weights.items()}
    model = zoo.original(name).from_pretrained(None, config=config, state_dict=state, dtype=torch.float64).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # the embedding stays as it is
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            io, weight = isinstance(module, Conv1D), module.weight.detach().float()
            wide = rounded(weight.t() if io else weight, weights)
            module.weight = nn.Parameter(wide.t().contiguous() if io else wide)
    ids = torch.randint(5, config.vocab_size, (2, 30), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return config, state, ids, model(ids).logits


def check_narrow_model(name: str, config: Any, state: Any, ids: Tensor, exact: Tensor, tp: int, weights: str) -> float:
    """Return the largest error of this rank's logits, for few rows and for many."""
    model = parallel_model(name, config, state, tp, torch.float32).eval()
    with torch.no_grad():
        before, names = model(ids).logits, list(model.state_dict())
        model.fuse(weights=weights)
        assert list(model.state_dict()) == names
        cut = ids[:, :7]
        errors = [
            relative_error({"": model(given).logits.float()}, {"": exact[:, : given.shape[1]]}) for given in (cut, ids)
        ]
        assert any(isinstance(module, NarrowProduct) for module in model.modules())
        assert torch.equal(model.unfuse()(ids).logits, before)
    return max(errors)


@pytest.mark.parametrize("variant, weights", [("llama", "int8"), ("gpt2", "int8"), ("llama", "bfloat16")])
def test_narrow_model_is_the_one_with_rounded_full_weights(pool: Pool, variant: str, weights: str, seed: int) -> None:
    """At any tensor-parallel size, scales cover full rows."""
    config, state, ids, exact = rounded_step(variant, weights, seed)
    for tp in (1, 2):
        errors = pool.run(tp, check_narrow_model, zoo.lm_head(variant), config, state, ids, exact, tp, weights)
        assert max(errors) < TOLERANCE[weights] * 2, f"tp {tp}: {errors}"


def check_narrow_stages(config: Any, ids: Tensor, expected: Tensor) -> None:
    model = LlamaForCausalLM.from_config_with_parallel(config, seed=3, pipeline_parallel_size=2).eval()
    model.fuse(weights="int8")
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_narrow_stages_generate_as_one_process(pool: Pool) -> None:
    config, ids = zoo.config("llama"), torch.tensor([[5, 6, 7, 9]])
    model = LlamaForCausalLM.from_config_with_parallel(config, seed=3).eval().fuse(weights="int8")
    pool.run(2, check_narrow_stages, config, ids, model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.zoo
def test_narrow_weights_in_workers() -> None:
    config, ids = zoo.config("llama"), torch.tensor([[5, 6, 7, 9]])
    model = LlamaForCausalLM.from_config_with_parallel(config, seed=3).eval().fuse(weights="int8")
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with LlamaForCausalLM.from_config_with_parallel(config, seed=3, tensor_parallel_size=2, deploy=True) as deployed:
        deployed.fuse(weights="int8")
        assert torch.equal(deployed.generate(ids, max_new_tokens=6, do_sample=False), expected)
        assert "weights in int8" in str(deployed.fusion_report())


def test_narrow_weights_are_not_trained_and_notice_changes() -> None:
    model = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=0).fuse(weights="int8")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(RuntimeError, match=r"weights='int8', which cannot be trained: .*no_grad.*unfuse"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match=r"fused with weights='int8': call unfuse\(\) first"):
        model.fuse()
    with torch.no_grad():
        model(ids)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="has changed since fuse"):
            model(ids)
    model.unfuse()(ids, labels=ids).loss.backward()


def test_narrow_weights_refuse_unsupported_calls() -> None:
    model = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=0)
    with pytest.raises(ValueError, match="'int4' is none of 'bfloat16', 'int8'"):
        model.fuse(weights="int4")
    with pytest.raises(ValueError, match=r"computes in float32, but the model is in torch\.float64"):
        model.double().fuse(weights="int8")
    assert model.float()._fusion is None
    model.bfloat16().eval().fuse(weights="int8")
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.dtype == torch.bfloat16
