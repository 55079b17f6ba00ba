"""`use_exact_rollouts`: a training forward computes the log-probabilities of a rollout again, bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import registry
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


CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "mixtral": {"intermediate_size": 32},  # grouped products take rows of 16 bytes
    "qwen3_moe": {"moe_intermediate_size": 32},
}
"""Settings beside the zoo's: bounds that change the logits."""


def case(variant: str, seed: int) -> Case:
    name, config = zoo.lm_head(variant), zoo.config(variant, **CHANGES.get(variant, {}))
    return name, config, full_parameters(reference_model(name, config, seed))


def on_ranks(given: Case, tp: int, pp: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return model_on_stages(*given, tp, pp, dtype, **options)


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


def padded(rollouts: Rollouts, side: str, more: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of a forward, and the log-probabilities of new tokens; NaN for other positions."""
    longest = max(len(prompt + new) for prompt, new, _ in rollouts) + more
    ids_BL, mask_BL = torch.zeros(2, len(rollouts), longest, dtype=torch.long)
    logprobs_BL = torch.full((len(rollouts), longest), float("nan"))
    for row, (prompt, new, logprobs) in enumerate(rollouts):
        stop = longest if side == "left" else len(prompt + new)
        ids_BL[row, stop - len(prompt + new) : stop] = torch.tensor(prompt + new)
        mask_BL[row, stop - len(prompt + new) : stop] = 1
        logprobs_BL[row, stop - len(new) : stop] = torch.tensor(logprobs)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids_BL, "attention_mask": mask_BL, "position_ids": positions_BL}, logprobs_BL


def trained(
    model: Any, rollouts: Rollouts, temperature: float, side: str, more: int, only_new: bool = False
) -> list[list[float]]:
    """Return the log-probabilities of a padded training forward. Train on them, or on all tokens."""
    batch, logprobs_BL = padded(rollouts, side, more)
    logits = model(**batch).logits
    found_BL = model.token_log_probabilities(logits[:, :-1], batch["input_ids"][:, 1:], temperature)
    (found_BL[~logprobs_BL[:, 1:].isnan()] if only_new else found_BL).sum().backward()
    return [
        found_L[~logprobs_L.isnan()].tolist() for found_L, logprobs_L in zip(found_BL, logprobs_BL[:, 1:], strict=True)
    ]


def check_rollouts(
    given: Case,
    tp: int,
    prompts: list[list[int]],
    seed: int,
    new: int = 8,
    dtype: torch.dtype = torch.float32,
    adapted: bool = False,
) -> Rollouts:
    """Compare every token. Return the rollouts."""
    model: Any = on_ranks(given, tp, dtype=dtype)
    model = (with_adapters(model, seed) if adapted else model.use_exact_rollouts()).train()
    draw, temperature = random.Random(seed), 1.3
    rollouts = roll_out(model, prompts, temperature, max_batch_size=draw.choice([3, 7, None]), max_new_tokens=new)
    rest = [*rollouts]
    while rest:
        count, side = draw.randint(1, 9), draw.choice(["left", "right"])
        batch, rest = rest[:count], rest[count:]
        found = trained(model, batch, temperature, side, draw.randint(0, 3))
        assert found == [logprobs for _, _, logprobs in batch]
    return rollouts


def with_adapters(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "o_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, lora_alpha=64, init_lora_weights=False))
    model.use_exact_rollouts()
    return adapted


QUICK = [("llama", 2), ("llama", 3), ("qwen3", 2)]
SIZES = [*QUICK, ("llama-one-kv", 2), ("llama-one-kv", 3), ("llama-9-heads", 2), ("qwen2", 3), ("qwen3_moe", 3)]
"""Variants and ranks: unequal shares of heads and widths, and heads that several ranks share."""


@pytest.mark.parametrize(
    ("variant", "tp"), [each if each in QUICK else pytest.param(*each, marks=pytest.mark.zoo) for each in SIZES]
)
def test_training_computes_the_log_probabilities_of_the_rollout(pool: Pool, variant: str, tp: int, seed: int) -> None:
    """The same bits in one process and on several ranks."""
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 14)
    (alone,) = pool.run(1, check_rollouts, given, 1, prompts, seed)
    for rollouts in pool.run(tp, check_rollouts, given, tp, prompts, seed):
        assert rollouts == alone


@pytest.mark.zoo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", TYPES)
def test_every_supported_type(pool: Pool, variant: str, dtype: torch.dtype, seed: int) -> None:
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 10)
    (alone,) = pool.run(1, check_rollouts, given, 1, prompts, seed, 8, dtype)
    for rollouts in pool.run(2, check_rollouts, given, 2, prompts, seed, 8, dtype):
        assert rollouts == alone


def step(model: Any, rollouts: Rollouts, temperature: float) -> list[Tensor]:
    """Return log-probabilities and gradients."""
    model.zero_grad()
    batch, logprobs_BL = padded(rollouts, "left", 1)
    logits = model(**batch).logits
    found_BL = model.token_log_probabilities(logits[:, :-1], batch["input_ids"][:, 1:], temperature)
    found = found_BL[~logprobs_BL[:, 1:].isnan()]
    found.sum().backward()
    grads = (param.grad for param in model.parameters() if param.grad is not None)
    return [found.detach(), *(grad.detach().clone().as_subclass(Tensor) for grad in grads)]


def check_values(given: Case, tp: int, prompts: list[list[int]]) -> None:
    """Compare values and gradients with the model before `use_exact_rollouts`."""
    model: Any = on_ranks(given, tp).train()
    if model.config.model_type == "gemma2":  # torch's attention ignored the bound of scores before transformers 5.21
        model.set_attn_implementation("eager")
    rollouts = roll_out(model, prompts, 0.9)
    ordinary, exact = step(model, rollouts, 0.9), step(model.use_exact_rollouts(), rollouts, 0.9)
    torch.testing.assert_close(exact, ordinary, rtol=1e-3, atol=1e-4)
    assert not torch.equal(exact[0], ordinary[0])


@pytest.mark.zoo
@pytest.mark.parametrize(("variant", "tp"), [*((variant, tp) for variant in TYPES for tp in (1, 2)), *SIZES[3:]])
def test_values_and_gradients_are_the_ones_of_the_ordinary_model(pool: Pool, variant: str, tp: int, seed: int) -> None:
    given = case(variant, seed)
    pool.run(tp, check_values, given, tp, drawn_prompts(given[1].vocab_size, seed, 8))


# Stages ---------------------------------------------------------------------------------------------------------------


def check_stages(
    given: Case, tp: int, pp: int, prompts: list[list[int]], seed: int, dtype: torch.dtype
) -> tuple[Rollouts, float]:
    """Compare every token on the last stage. Return the rollouts and the norm of the gradients."""
    model: Any = on_ranks(given, tp, pp, dtype, micro_batch_size=2).use_exact_rollouts().train()
    temperature, ratios = 1.3, list[Tensor]()
    rollouts = roll_out(model, prompts, temperature, max_batch_size=3)

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, old: Any = None, **kwargs: Any) -> Tensor:
        new = model.token_log_probabilities(logits[:, :-1], labels[:, 1:], temperature)
        is_new = ~old[:, 1:].isnan()
        ratio: Tensor = (new - old[:, 1:])[is_new].exp()
        ratios.append(ratio.detach())
        return ratio.sum()

    model.loss_function = loss_function
    for side in ("left", "right"):
        batch, logprobs_BL = padded(rollouts, side, seed % 3)
        for output in model(**batch, labels=batch["input_ids"], old=logprobs_BL):
            output.loss.backward()
    found = torch.cat(ratios) if model.stage.is_last else torch.ones(2 * sum(len(new) for _, new, _ in rollouts))
    assert len(found) == 2 * sum(len(new) for _, new, _ in rollouts)
    assert torch.equal(found, torch.ones_like(found))
    return rollouts, float(model.clip_grad_norm_(1e9))


STAGES = [("llama", 1, torch.float32), ("llama", 2, torch.float32), ("qwen3", 1, torch.bfloat16)]
STAGES += [("gemma2", 1, torch.float32), ("mixtral", 2, torch.float32), ("granite", 1, torch.bfloat16)]


@pytest.mark.parametrize(
    ("variant", "tp", "dtype"),
    [each if each[:2] == ("llama", 1) else pytest.param(*each, marks=pytest.mark.zoo) for each in STAGES],
)
def test_pipeline_stages(pool: Pool, variant: str, tp: int, dtype: torch.dtype, seed: int) -> None:
    """A loss of the last stage has the log-probabilities of the rollout, with the bits of one process."""
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 8)
    found = pool.run(2 * tp, check_stages, given, tp, 2, prompts, seed, dtype)
    ((alone, norm),) = pool.run(1, rollouts_alone, given, prompts, dtype)
    for rollouts, own in found:
        assert rollouts == alone
        assert own == pytest.approx(norm, rel=1e-4 if dtype is torch.float32 else 0.05)


def rollouts_alone(given: Case, prompts: list[list[int]], dtype: torch.dtype) -> tuple[Rollouts, float]:
    model: Any = on_ranks(given, 1, dtype=dtype).use_exact_rollouts().train()
    rollouts = roll_out(model, prompts, 1.3, max_batch_size=3)
    for side in ("left", "right"):  # a ratio of 1 has the gradient of the log-probability
        trained(model, rollouts, 1.3, side, 0, only_new=True)
    return rollouts, float(model.clip_grad_norm_(1e9))


@pytest.mark.zoo
@pytest.mark.parametrize("adapted", [False, True])
def test_ten_thousand_tokens(pool: Pool, adapted: bool, seed: int) -> None:
    given = case("llama", seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 700)
    rollouts = pool.run(2, check_rollouts, given, 2, prompts, seed, 20, torch.float32, adapted)[0]
    assert sum(len(new) for _, new, _ in rollouts) >= 10_000


def check_adapters(given: Case, tp: int, prompts: list[list[int]], seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = on_ranks(given, tp).use_exact_rollouts()
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"lora_A.* was added after use_exact_rollouts: call it again"):
        roll_out(adapted, prompts, 0.7)
    adapted = with_adapters(on_ranks(given, tp), seed)
    model = adapted.base_model.model
    rollouts = roll_out(adapted.train(), prompts, 0.7)
    assert trained(adapted, rollouts, 0.7, "left", 2) == [logprobs for _, _, logprobs in rollouts]
    with adapted.disable_adapter():
        assert trained(model.requires_grad_(), rollouts, 0.7, "left", 2) != [logprobs for _, _, logprobs in rollouts]
    dropping = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"lora_dropout.default drops activations in training \(p=0\.1\)"):
        get_peft_model(on_ranks(given, tp), dropping).base_model.model.use_exact_rollouts()  # type: ignore[operator]


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_adapters_stay_active(pool: Pool, tp: int, seed: int) -> None:
    given = case("llama", seed)
    pool.run(tp, check_adapters, given, tp, drawn_prompts(given[1].vocab_size, seed, 9), seed)


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


def check_refusals(given: Case, other: Case, mixture: Case, dropping: Case) -> None:
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
    with pytest.raises(ValueError, match=r"the ranks have different experts of .*experts; .*expert_parallel_size=1"):
        on_ranks(mixture, 2, expert_parallel_size=2).use_exact_rollouts()
    with pytest.raises(ValueError, match=r"resid_attn_dropout drops activations in training \(p=0\.2\)"):
        on_ranks(dropping, 2).use_exact_rollouts()
    with pytest.raises(ValueError, match="it was loaded with sequence_parallel=True"):
        on_ranks(given, 2, sequence_parallel=True).use_exact_rollouts()
    with pytest.raises(ValueError, match="it is a full model; load it by from_pretrained_with_parallel"):
        registry.find(given[0])(given[1]).use_exact_rollouts()  # type: ignore[operator]


def test_unsupported_models_are_refused(pool: Pool, seed: int) -> None:
    dropping = ("Phi3ForCausalLM", zoo.config("phi3", dropout=0.2), case("phi3", seed)[2])
    pool.run(2, check_refusals, case("llama", seed), case("gpt2", seed), case("mixtral", seed), dropping)


SUMS, LAYERS = "layers.invariant_sums", "modeling.invariant_layers"
_ROWS = "layout.shape[0], self.tp, owned"
MUTANTS = {
    "product": (
        "llama",
        Edit(f"{SUMS}:_Product.forward", "x_ND @ w_OD.t()", "(x_ND.float() @ w_OD.t().float()).double()"),
    ),
    "weights of attention": (
        "llama",
        Edit(f"{SUMS}:_attention", "to_integers(weights, bits_of(most))", "weights, scale * 0 + 1"),
    ),
    "partial sums": ("llama", Edit(f"{SUMS}:_most", "axis.size == 1", "True")),
    "terms": (
        "llama",
        Edit(f"{LAYERS}:_InvariantRowParallelLinear.forward", 'self.layouts["weight"].shape[1]', "x.shape[-1]"),
    ),
    "norm over all heads": (
        "olmo2",
        Edit(f"{LAYERS}:_InvariantNorm._value", _ROWS, "layout.shape[0], self.tp, [slice(None)][self.tp.rank :]"),
    ),
    "products of experts": (
        "qwen3_moe",
        Edit(f"{SUMS}:products_of_experts", "to_integers(x_ND, bits, _most(x_ND, axis))", "to_integers(x_ND, bits)"),
    ),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(pool: Pool, name: str, seed: int) -> None:
    variant, edit = MUTANTS[name]
    given = case(variant, seed)
    prompts = drawn_prompts(given[1].vocab_size, seed, 14)
    expected = pool.run(1, check_rollouts, given, 1, prompts, seed)[0]

    def check() -> None:
        for rollouts in MutantPool(pool, edit).run(2, check_rollouts, given, 2, prompts, seed):
            assert rollouts == expected

    with pytest.raises((AssertionError, WorkerError), match=r""):
        check()
