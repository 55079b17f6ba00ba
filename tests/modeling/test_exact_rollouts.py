"""`use_exact_rollouts`: a training forward computes the log-probabilities of a rollout again, bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models.layers import invariant_sums
from oslo_models.modeling.exact_rollouts import TYPES

from support import zoo
from support.mutants import Edit, MutantPool
from support.pipelines import model_on_stages
from support.pool import Pool, WorkerError
from support.reference import full_parameters, reference_model

Case = tuple[str, PreTrainedConfig, dict[str, Tensor]]
Rollouts = list[tuple[list[int], list[int], list[float]]]
"""Prompts, new tokens and their log-probabilities."""


def case(variant: str, seed: int) -> Case:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    return name, config, full_parameters(reference_model(name, config, seed))


def on_ranks(given: Case, tp: int, pp: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    return model_on_stages(*given, tp, pp, dtype)


def drawn_prompts(vocabulary: int, seed: int, count: int, longest: int = 12) -> list[list[int]]:
    """Groups of one to five equal prompts."""
    draw, prompts = random.Random(seed), list[list[int]]()
    while len(prompts) < count:
        prompt = [draw.randrange(3, vocabulary) for _ in range(draw.randint(1, longest))]
        prompts += [prompt] * draw.randint(1, 5)
    return prompts[:count]


def roll_out(model: Any, prompts: list[list[int]], temperature: float, **options: Any) -> Rollouts:
    torch.manual_seed(11)
    given = {"do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": 0, "max_new_tokens": 8}
    outputs = model.generate_batch(prompts, None, SimpleNamespace(return_logprobs=True), **{**given, **options})
    return [(each.prompt_ids, each.generated_tokens, each.logprobs) for each in outputs.values()]


def trained(model: Any, rollouts: Rollouts, temperature: float, side: str, more: int) -> list[list[float]]:
    """Return the log-probabilities of a padded training forward."""
    rows = [prompt + new for prompt, new, _ in rollouts]
    longest = max(map(len, rows)) + more
    before = [(longest - len(row)) * (side == "left") for row in rows]
    ids_BL, mask_BL = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for index, row in enumerate(rows):
        ids_BL[index, before[index] : before[index] + len(row)] = torch.tensor(row)
        mask_BL[index, before[index] : before[index] + len(row)] = 1
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0).long()
    logits = model(ids_BL, attention_mask=mask_BL.long(), position_ids=positions_BL).logits
    found_BL = model.token_log_probabilities(logits[:, :-1], ids_BL[:, 1:], temperature)
    found_BL.sum().backward()
    first = [start + len(prompt) - 1 for start, (prompt, _, _) in zip(before, rollouts, strict=True)]
    return [
        found_BL[index, start : start + len(new)].tolist()
        for index, (start, (_, new, _)) in enumerate(zip(first, rollouts, strict=True))
    ]


def check_rollouts(
    given: Case, tp: int, prompts: list[list[int]], seed: int, new: int = 8, dtype: torch.dtype = torch.float32
) -> Rollouts:
    """Compare every token. Return the rollouts."""
    model: Any = on_ranks(given, tp, dtype=dtype).use_exact_rollouts().train()
    draw, temperature = random.Random(seed), 1.3
    rollouts = roll_out(model, prompts, temperature, max_batch_size=draw.choice([3, 7, None]), max_new_tokens=new)
    rest = [*rollouts]
    while rest:
        count, side = draw.randint(1, 9), draw.choice(["left", "right"])
        batch, rest = rest[:count], rest[count:]
        found = trained(model, batch, temperature, side, draw.randint(0, 3))
        assert found == [logprobs for _, _, logprobs in batch]
    return rollouts


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_training_computes_the_log_probabilities_of_the_rollout(pool: Pool, variant: str, seed: int) -> None:
    """The same bits in one process and on two ranks."""
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 14)
    (alone,) = pool.run(1, check_rollouts, given, 1, prompts, seed)
    for rollouts in pool.run(2, check_rollouts, given, 2, prompts, seed):
        assert rollouts == alone


@pytest.mark.zoo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", TYPES)
def test_every_supported_type(pool: Pool, variant: str, dtype: torch.dtype, seed: int) -> None:
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 10)
    pool.run(2, check_rollouts, given, 2, prompts, seed, 8, dtype)


@pytest.mark.zoo
def test_ten_thousand_tokens(pool: Pool, seed: int) -> None:
    given = case("llama", seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 700)
    rollouts = pool.run(2, check_rollouts, given, 2, prompts, seed, 20)[0]
    assert sum(len(new) for _, new, _ in rollouts) >= 10_000


def check_adapters(given: Case, prompts: list[list[int]], seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = on_ranks(given, 2).use_exact_rollouts()
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], lora_alpha=64, init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"lora_A.* was added after use_exact_rollouts: call it again"):
        roll_out(adapted, prompts, 0.7)
    model.use_exact_rollouts()
    rollouts = roll_out(adapted.train(), prompts, 0.7)
    assert trained(adapted, rollouts, 0.7, "left", 2) == [logprobs for _, _, logprobs in rollouts]
    with adapted.disable_adapter():
        assert trained(model.requires_grad_(), rollouts, 0.7, "left", 2) != [logprobs for _, _, logprobs in rollouts]


def test_adapters_stay_active(pool: Pool, seed: int) -> None:
    given = case("llama", seed)
    pool.run(2, check_adapters, given, drawn_prompts(given[1].vocab_size, seed, 9), seed)


# Sums -----------------------------------------------------------------------------------------------------------------


def test_products_do_not_depend_on_the_batch(seed: int) -> None:
    torch.manual_seed(seed)
    x_ND, weight_OD = torch.randn(67, 131) * 10, torch.randn(45, 131)
    kept = invariant_sums.RoundedWeight()
    whole = invariant_sums.product(x_ND, weight_OD, None, kept, 131)
    torch.testing.assert_close(whole, x_ND @ weight_OD.t(), rtol=1e-4, atol=1e-3)
    for rows in ([3], [66, 3], [*range(20, 60)]):
        assert torch.equal(invariant_sums.product(x_ND[rows], weight_OD, None, kept, 131), whole[rows])
    bits = invariant_sums.bits_of(131)
    (x, _), (weight, _) = invariant_sums.to_integers(x_ND, bits), invariant_sums.to_integers(weight_OD, bits)
    order = torch.randperm(131)
    assert torch.equal(x @ weight.t(), x[:, order] @ weight[:, order].t())
    assert float((x.abs() @ weight.abs().t()).max()) <= 2.0**53


def test_kept_weights_follow_the_version_counter(seed: int) -> None:
    torch.manual_seed(seed)
    x_ND, weight_OD, kept = torch.randn(3, 8), torch.randn(5, 8), invariant_sums.RoundedWeight()
    kept.keeps = True
    for _ in range(2):
        found = invariant_sums.product(x_ND, weight_OD, None, kept, 8)
        torch.testing.assert_close(found, x_ND @ weight_OD.t(), rtol=1e-4, atol=1e-4)
        weight_OD.mul_(-0.5)
    kept.release()
    assert kept._kept is None


def test_gradients_of_products(seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randn(size, requires_grad=True) for size in ((2, 3, 8), (5, 8), (5,))]
    given = torch.randn(2, 3, 5)
    kept = invariant_sums.RoundedWeight()
    found = torch.autograd.grad(invariant_sums.product(*tensors, kept, 8), tensors, given)
    for own, right in zip(
        found, torch.autograd.grad(torch.nn.functional.linear(*tensors), tensors, given), strict=True
    ):
        torch.testing.assert_close(own, right)


def test_elementwise_functions_do_not_depend_on_positions(seed: int) -> None:
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.float64):
        x = (torch.randn(70_001) * 4).to(dtype)
        for function in (torch.exp, torch.nn.functional.silu):
            whole = invariant_sums.lanewise(function, x)
            torch.testing.assert_close(whole, function(x))
            for start, stop in ((0, 1), (3, 20), (69_990, 70_001), (1, 33_000)):
                assert torch.equal(invariant_sums.lanewise(function, x[start:stop]), whole[start:stop])


def test_attention_does_not_depend_on_padding(seed: int) -> None:
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 4, 9, 6), torch.randn(3, 2, 9, 6), torch.randn(3, 2, 9, 6)
    whole = invariant_sums.attention(query, key, value, None, 0.4, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.4, enable_gqa=True
    )
    torch.testing.assert_close(whole, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    for length in (1, 4, 9):
        padded = [torch.cat((torch.randn(1, x.shape[1], 5, 6), x[1:2, :, :length]), 2) for x in (key, value)]
        shown = torch.arange(length + 5)[None, None, None] >= 5
        last = invariant_sums.attention(query[1:2, :, length - 1 : length], *padded, shown, 0.4, 64)
        assert torch.equal(last[0, 0], whole[1, length - 1])


# Refusals and mutants -------------------------------------------------------------------------------------------------


def check_refusals(given: Case, other: Case) -> None:
    model: Any = on_ranks(given, 2).use_exact_rollouts()
    assert model.use_exact_rollouts() is model
    with pytest.raises(ValueError, match="fuse replaces layers that use_exact_rollouts needs"):
        model.fuse()
    with pytest.raises(ValueError, match="top_k=5 changes the distribution"):
        roll_out(model, [[3, 4]], 1.0, top_k=5)
    with pytest.raises(ValueError, match=r"does not support this GPT2LMHeadModel: its type gpt2 is none of llama"):
        on_ranks(other, 2).use_exact_rollouts()
    with pytest.raises(ValueError, match=r"its weights are torch\.float64; load it with dtype"):
        on_ranks(given, 2, dtype=torch.float64).use_exact_rollouts()


def test_unsupported_models_are_refused(pool: Pool, seed: int) -> None:
    pool.run(2, check_refusals, case("llama", seed), case("gpt2", seed))


SUMS = "layers.invariant_sums"
MUTANTS = {
    "product": Edit(f"{SUMS}:_Product.forward", "x_ND @ w_OD.t()", "(x_ND.float() @ w_OD.t().float()).double()"),
    "weights of attention": Edit(f"{SUMS}:_attention", "to_integers(weights, bits_of(most))", "weights, scale * 0 + 1"),
    "partial sums": Edit(f"{SUMS}:_most", "axis.size == 1", "True"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(pool: Pool, name: str, seed: int) -> None:
    given = case("llama", seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 14)
    expected = pool.run(1, check_rollouts, given, 1, prompts, seed)[0]

    def check() -> None:
        for rollouts in MutantPool(pool, MUTANTS[name]).run(2, check_rollouts, given, 2, prompts, seed):
            assert rollouts == expected

    with pytest.raises((AssertionError, WorkerError), match=r""):
        check()
