"""The runner of cases about GRPO."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.definitions import Peer, Result


def take_steps(
    peer: Peer,
    cls: str,
    checkpoint: Path,
    tiny: Path,
    *,
    prompts: int,
    group: int,
    prompt: int,
    new: int,
    mean: int,
    timed: int,
) -> Result:
    """Steps of TRL's GRPO: tokens per second of the rollouts, and seconds of a whole step.

    Each figure is the median of ``timed`` steps after a first one. A peer with a name that ends in ``-batch`` sets
    ``use_transformers_continuous_batching``.

    Args:
        group: completions of a prompt.
        new: tokens of a completion, at most.
        mean: number of tokens after which a completion ends on average: one in ``mean`` tokens is an end token.
    """
    import torch
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    from oslo_models import integrations

    model = peer.load(cls, checkpoint)
    size = model.config.vocab_size
    model.generation_config.eos_token_id = [*range(0, size, mean)]
    rates, seconds = list[float](), list[float]()
    base: Any = integrations.GRPOTrainer if hasattr(model, "mesh") else trl.GRPOTrainer

    class Timed(base):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            rates.append(sum(map(len, found[0])) / (time.perf_counter() - start))
            return found

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    ids = torch.randint(1, size, (prompts, prompt), generator=torch.Generator().manual_seed(0))
    rows = [{"prompt": " ".join(f"w{number}" for number in row)} for row in ids.tolist()]
    args = trl.GRPOConfig(
        str(tiny.parent / "grpo"),
        **{"max_steps": timed + 1, "per_device_train_batch_size": prompts * group, "num_generations": group},
        **{"max_completion_length": new, "use_cpu": True, "bf16": False, "gradient_checkpointing": False},
        **{"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 0},
        use_transformers_continuous_batching=peer.name.endswith("-batch"),
    )
    trainer = Timed(
        **{"model": model, "args": args, "train_dataset": Dataset.from_list(rows), "callbacks": [Clock()]},
        **{"processing_class": tokenizer_of_words(size), "reward_funcs": [reward_of_even_tokens]},
    )
    trainer.train()
    assert len(rates) == len(seconds) == timed + 1
    return Result({"rollouts": statistics.median(rates[1:]), "training step": statistics.median(seconds[1:])})


def reward_of_even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def tokenizer_of_words(size: int) -> Any:
    """Return a tokenizer of the words ``w1``, ``w2``, ... and of an end token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<end>": 0, **{f"w{number}": number for number in range(1, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
