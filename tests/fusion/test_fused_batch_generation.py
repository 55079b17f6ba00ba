"""`generate_batch` of fused models: the tokens of transformers' `generate` for each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from support import zoo
from support.float64 import lifted_casts
from support.pipelines import model_on_stages
from support.pool import Pool
from support.reference import full_parameters, reference_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def check(
    name: str, config: PreTrainedConfig, weights: Any, tp: int, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Generate, compute gradients, and generate again."""
    model = model_on_stages(name, config, weights, tp, 1)
    model.fuse()
    for _ in range(2):
        ids = torch.tensor([prompts[0] * 2])
        with lifted_casts():
            outputs = model.generate_batch(prompts, max_batch_size=4, **OPTIONS)
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
        assert [each.generated_tokens for each in outputs.values()] == expected


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("variant", ["llama", "gpt2", "qwen3_moe", "t5"])
def test_fused_models_generate_the_tokens_of_transformers(pool: Pool, variant: str, tp: int, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed).eval()
    weights = full_parameters(model)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, config.vocab_size, (2 + n % 5,), generator=generator).tolist() for n in range(7)]
    expected = []
    for prompt in prompts:
        before = 1 if config.is_encoder_decoder else len(prompt)
        ids = torch.tensor([prompt])
        with lifted_casts(), torch.no_grad():
            expected.append(model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, before:].tolist())
    pool.run(tp, check, name, config, weights, tp, prompts, expected)
