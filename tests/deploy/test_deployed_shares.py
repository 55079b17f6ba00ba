"""A deployed model with ``tensor_parallel_shares``: answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from support.deployment import LlamaWithWidth

SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 256, "initializer_range": 0.3},
    **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}


def test_deployed_model_with_unequal_shares_answers_as_one_process(forked: None, tmp_path: Path, seed: int) -> None:
    """Also for a running batch, and for a prompt that begins with the cached keys and values of another one."""
    torch.manual_seed(seed)
    whole: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    whole.save_pretrained(tmp_path)
    options = {"tensor_parallel_size": 2, "tensor_parallel_shares": [2, 1], "deploy": True, "reuse_prefixes": True}
    with LlamaWithWidth.from_pretrained_with_parallel(tmp_path, **options) as model:
        ids = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(seed))
        for rows in (ids, ids[:1], torch.cat((ids[:1, :20], ids[1:, :9]), 1)):
            given = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "do_sample": False}
            assert torch.equal(model.generate(**given, max_new_tokens=8), whole.generate(**given, max_new_tokens=8))
            logits = model(**{name: given[name] for name in ("input_ids", "attention_mask")}).logits
            assert torch.allclose(logits, whole(rows).logits, rtol=1e-4, atol=1e-4)
        assert model.reused_prompt_tokens > 0
        assert model.mlp_width() == 48  # two thirds of 72
