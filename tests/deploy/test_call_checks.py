"""Calls that the workers cannot compute are refused in the caller's process, with the way out."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from oslo_models.deploy import call_checks, engine
from oslo_models.deploy.call_checks import check_prompt, positions_of

from support import deployment, zoo
from support.deployment import prompt


class Own(transformers.LogitsProcessor):
    """As a class of the script that deploys a model."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores


def own_prefixes(number: int, ids: torch.Tensor) -> list[int]:
    return [5]


LONG = torch.ones(1, deployment.CONFIG.n_positions + 1, dtype=torch.long)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": LONG[:, :0]}, r"input_ids has no tokens: its shape is \(1, 0\)\. Pass at least one"),
    "no prompts": ({"inputs": LONG[:0, :5]}, r"inputs has no prompts: its shape is \(0, 5\)"),
    "mask": (
        {"input_ids": LONG[:, :5], "attention_mask": LONG[:, :4]},
        r"attention_mask has shape \(1, 4\), and input_ids has \(1, 5\): they have to be equal",
    ),
    "long": ({"input_ids": LONG}, r"input_ids has 513 tokens, and the model has 512 positions .*: shorten the prompt"),
    "class": (
        {"logits_processor": [Own()]},
        r"logits_processor of generate .* holds Own of the script itself .*module",
    ),
    "function": (
        {"prefix_allowed_tokens_fn": own_prefixes},
        "prefix_allowed_tokens_fn of generate .* holds own_prefixes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_workers_cannot_compute_are_refused_before_sending(
    model: Any, seed: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (Own, own_prefixes):  # as if this were the script
        monkeypatch.setattr(each, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], each.__name__, each, raising=False)
    given, message = REFUSED[what]
    batch = {} if {"input_ids", "inputs"} & given.keys() else prompt(seed, 1)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setattr(engine, "PendingCall", lambda *args: pytest.fail("it was sent"))
        model.generate(**batch, **given, max_new_tokens=2)


def test_text_that_names_the_main_module_is_sent(model: Any, whole: Any, seed: int) -> None:
    options = {**prompt(seed, 1), "max_new_tokens": 3, "do_sample": False, "cache_implementation": None}
    call_checks.check_importable("generate", ("__main__",), {"stop_strings": ["__main__"]})
    assert torch.equal(model.generate(**options), whole.generate(**options))


def test_prompts_of_other_inputs_and_of_positions_without_end_are_left_to_transformers() -> None:
    def skeleton(variant: str) -> Any:
        with torch.device("meta"):
            return zoo.original(zoo.lm_head(variant))._from_config(zoo.config(variant))

    long, short = torch.ones(1, 40, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
    for variant in ("llama", "xglm", "fsmt"):  # rotary; sinusoids that are computed when they are needed
        check_prompt({"input_ids": long}, positions_of(zoo.config(variant)), lambda variant=variant: skeleton(variant))  # type: ignore[misc]
    for variant in ("opt", "gptj", "bart"):
        with pytest.raises(ValueError, match="40 tokens, and the model has 32 positions"):
            check_prompt(
                {"input_ids": long}, positions_of(zoo.config(variant)), lambda variant=variant: skeleton(variant)
            )  # type: ignore[misc]
        check_prompt(
            {"input_ids": long[:, :32]}, positions_of(zoo.config(variant)), lambda: pytest.fail("it is short enough")
        )
    embeds = {"inputs_embeds": torch.ones(1, 4, 8), "input_ids": short[:, :0]}
    for given in ({}, {"inputs": torch.ones(1, 3, 8)}, embeds, {"input_ids": short, "attention_mask": short[None]}):
        check_prompt(given, positions_of(zoo.config("llama")), lambda: pytest.fail("it is short enough"))
