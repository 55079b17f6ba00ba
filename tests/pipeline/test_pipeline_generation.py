"""`generate` on pipeline stages gives the tokens of one process on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pipelines import model_on_stages
from support.pool import Pool
from support.reference import full_parameters, reference_model

VARIANTS = ["gpt2", "gpt_neo", "gptj", "llama", "llama-one-kv", "t5"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
    "sampling beams": {"do_sample": True, "num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "stop": {"eos_token_id": list(range(2, 60)), "num_beams": 2},
    "embeddings": {},
}


def inputs(way: str, config: PreTrainedConfig, seed: int) -> dict[str, Tensor]:
    """Three rows with left padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocab_size, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((2, 0, 1)):
        ids[row, :padding], mask[row, :padding] = config.pad_token_id, 0
    if way == "embeddings":
        embeddings = torch.randn(3, 6, config.hidden_size, generator=generator, dtype=torch.float64)
        return {"inputs_embeds": embeddings, "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, way: str, config: PreTrainedConfig, seed: int) -> Any:
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": 7, **WAYS[way]}
    with lifted_casts():
        result = model.generate(**inputs(way, config, seed), **options)
    drawn = torch.rand(2)
    return (result.sequences if hasattr(result, "sequences") else result), getattr(result, "scores", ()), drawn


def check_generation(
    name: str,
    config: PreTrainedConfig,
    weights: dict[str, Tensor],
    of_replicas: list[dict[str, Any]],
    seed: int,
    tp: int,
    pp: int,
) -> None:
    model = model_on_stages(name, config, weights, tp, pp, micro_batch_size=2).eval()
    expected, seed, lines = of_replicas[model.mesh.dp.rank], seed + model.mesh.dp.rank, []
    for way, (tokens, scores, drawn) in expected.items():
        own_tokens, own_scores, own_drawn = generated(model, way, config, seed)
        if not torch.equal(own_tokens, tokens):
            lines.append(f"{way}: {own_tokens.tolist()} instead of {tokens.tolist()}")
        same = all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(own_scores, scores, strict=True))
        if not (same and torch.equal(own_drawn, drawn)):
            lines.append(f"{way}: other scores or another random state")
        assert model.micro_batch_size == 2
    # A loop over micro-batches still works, and generation after it.
    batch = pipelines.batch(name, config, seed)
    with lifted_casts():
        for output in model(**batch):
            output.loss.backward()
    tokens, _, _ = expected["greedy"]
    assert torch.equal(generated(model, "greedy", config, seed)[0], tokens)
    assert not lines, "\n".join(lines)


def generate(pool: Pool, variant: str, ways: list[str], tp: int, pp: int, replicas: int, seed: int) -> None:
    name, config = zoo.lm_head(variant), pipelines.config(variant)
    model = reference_model(name, config, seed).eval()
    weights = full_parameters(model)
    expected = [{way: generated(model, way, config, seed + replica) for way in ways} for replica in range(replicas)]
    pool.run(tp * pp * replicas, check_generation, name, config, weights, expected, seed, tp, pp)


@pytest.mark.drawn(4)
@pytest.mark.stacks
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_generate_on_stages_gives_the_tokens_of_one_process(
    pool: Pool, variant: str, tp: int, pp: int, seed: int
) -> None:
    generate(pool, variant, list(WAYS), tp, pp, 1, seed)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("variant", "tp", "pp", "replicas"),
    [
        *((variant, tp, pp, 1) for variant in VARIANTS for tp, pp in ((1, 4), (3, 2))),
        *((variant, 1, 2, 2) for variant in VARIANTS),
        *((variant, 2, 2, 2) for variant in ("gpt2", "t5")),
        *(("bert-decoder", tp, pp, 1) for tp, pp in ((1, 2), (1, 4), (2, 2), (3, 2))),
    ],
)
def test_generate_on_stages_with_tensor_parallel_ranks_and_replicas(
    pool: Pool, variant: str, tp: int, pp: int, replicas: int, seed: int
) -> None:
    """Each replica has different prompts."""
    generate(pool, variant, ["greedy", "beams"], tp, pp, replicas, seed)


@pytest.mark.parametrize(
    ("kinds", "pp"),
    [
        (["full_attention", "linear_attention", "full_attention"], 3),
        pytest.param(["linear_attention", "full_attention", "full_attention"], 2, marks=pytest.mark.zoo),
        pytest.param(["full_attention", "linear_attention", "full_attention"], 2, marks=pytest.mark.zoo),
        pytest.param(["full_attention", "linear_attention", "linear_attention"], 2, marks=pytest.mark.zoo),
    ],
)
def test_stages_count_positions_as_the_first_block_of_all_does(
    pool: Pool, kinds: list[str], pp: int, seed: int
) -> None:
    """MiniMax's cache takes the number of positions from its first layer, which linear attention leaves empty."""
    name, config = "MiniMaxForCausalLM", zoo.config("minimax", layer_types=kinds, num_hidden_layers=3)
    model = reference_model(name, config, seed).eval()
    expected = [{way: generated(model, way, config, seed) for way in ("greedy", "beams", "scores")}]
    weights = {**model.state_dict(), **full_parameters(model)}
    pool.run(pp, check_generation, name, config, weights, expected, seed, 1, pp)


def generate_in_half_precision(model: Any, config: PreTrainedConfig, seed: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.generate(**inputs("greedy", config, seed), max_new_tokens=4, do_sample=False)


def check_half_precision(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], expected: Tensor, seed: int
) -> None:
    model = model_on_stages(name, config, weights, 1, 2, torch.float32).eval()
    assert torch.equal(generate_in_half_precision(model, config, seed), expected)


@pytest.mark.parametrize("variant", ["gpt2", "llama", "t5"])
def test_generate_on_stages_under_autocast(pool: Pool, variant: str, seed: int) -> None:
    """Hidden states and logits travel in the dtype of the model, regardless of the autocast dtype."""
    name, config = zoo.lm_head(variant), pipelines.config(variant)
    model = reference_model(name, config, seed, torch.float32).eval()
    expected = generate_in_half_precision(model, config, seed)
    pool.run(2, check_half_precision, name, config, full_parameters(model), expected, seed)
