"""Compare the tokens of fused models with the tokens of transformers, on tiny random models of several architectures.

Two left-padded prompts and one without padding are continued greedily, with a cache, in each dtype. The table names the
operations that were fused, and the first token that differs.
"""

from __future__ import annotations

import argparse
from typing import Any

_SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"intermediate_size": 80, "vocab_size": 199, "max_position_embeddings": 128, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": None},
}
_HEADS = {"num_key_value_heads": None, "head_dim": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {"head_dim": None},
    "Qwen3ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "GPT2LMHeadModel": _HEADS,
    "GPTNeoXForCausalLM": _HEADS,
    "Gemma3ForCausalLM": {"sliding_window": 16},
}
"""The sizes of each architecture that differ from the common ones. ``None``: not an argument of its config."""
DTYPES = ("float64", "float32")


def row(name: str, dtype: str, new: int) -> list[str]:
    """Return the cells of a line of the table."""
    import torch
    import transformers

    import oslo_models

    original, own = getattr(transformers, name), getattr(oslo_models, name)
    sizes = {**_SIZES, **FAMILIES[name]}
    config = original.config_class(**{key: x for key, x in sizes.items() if x is not None or key == "eos_token_id"})
    # grouped products take no float64
    options = {"experts_implementation": "eager"} if "Mixtral" in name else {}
    torch.manual_seed(0)
    plain = original.from_pretrained(
        None, config=config, state_dict=original(config).state_dict(), dtype=getattr(torch, dtype), **options
    ).eval()
    with torch.no_grad():
        for param in plain.parameters():
            if param.dim() > 1:  # makes tokens depend on earlier tokens
                param.mul_(4)
    weights = plain.state_dict()
    model = own.from_pretrained(None, config=config, state_dict=weights, dtype=plain.dtype, **options).eval()
    ids = torch.randint(3, config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :7] = 0
    given = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    expected = plain.generate(ids, **given)[:, 9:]
    model.fuse(measure=False)
    found = model.generate(ids, **given)[:, 9:]
    wrong = (found != expected).any(0).nonzero().flatten().tolist()
    distinct = len(set(expected.flatten().tolist()))
    report = model.fusion_report()
    fused = sorted({each.operation for each in report if each.fused})
    left = sorted({each.reason for each in report if "changed" in each.reason or "left unfused" in each.reason})
    equal = f"{expected.numel()} of {expected.numel()}" if not wrong else f"differ from token {wrong[0] + 1} on"
    return [name, dtype, equal, str(distinct), ", ".join(fused), "; ".join(left)]


def main(argv: list[str]) -> int:
    """Print the table. Return 1 if tokens differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tokens", description=__doc__)
    parser.add_argument("--new", metavar="N", type=int, default=64, help="new tokens for each prompt (default: 64)")
    args = parser.parse_args(argv)
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.new} tokens for 3 prompts\n")
    print("| model | dtype | equal tokens | distinct | fused | left unfused |\n|---|---|---|---:|---|---|")
    wrong = 0
    for name in FAMILIES:
        for dtype in DTYPES:
            cells = row(name, dtype, args.new)
            wrong += "differ" in cells[2]
            print("| " + " | ".join(cells) + " |", flush=True)
    return int(wrong > 0)
