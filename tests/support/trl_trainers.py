"""Runs TRL's trainers in float64 in one process, and on the ranks of a sharded model."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import PreTrainedConfig

from support import adapters, pipelines
from support.pipelines import model_on_stages, stage_differences, stage_parameters
from support.reference import TOLERANCE, full_parameters, reference_model
from support.trainers import SHORT, Run, fresh_accelerate, in_float64, log_differences, watch

NAME = "LlamaForCausalLM"
REWARDED = ("GRPOTrainer", "RLOOTrainer")
STEPS = (1, 5)
ARGUMENTS = {
    **SHORT,
    "bf16": False,
    "gradient_checkpointing": False,  # recomputation would leave float64
    "max_grad_norm": 0.5,
}
Rows = list[dict[str, str]]


class PlainScores:
    """Replaces TRL's kernel, which sums in float32: computes the same from all logits in their dtype."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        logits = torch.nn.functional.linear(hidden, weight, bias) * scale
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        squares, mean = (2 * log_probs.detach()).logsumexp(-1), logits.detach().mean(-1)
        picked = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return picked, entropy, squares, mean, logits.argmax(-1) == targets


@contextmanager
def plain_scores() -> Iterator[None]:
    """Let TRL use `PlainScores`."""
    from trl.trainer import utils

    kernel = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = PlainScores  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = kernel  # type: ignore[misc]


def tiny_config() -> PreTrainedConfig:
    return pipelines.config("llama", vocab_size=37, eos_token_id=1, bos_token_id=2, pad_token_id=0)


def tiny_tokenizer(size: int) -> Any:
    """A word for each token: "w3" is token 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, size)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<bos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>", padding_side="left"
    )


def sentences(config: PreTrainedConfig, seed: int, count: int, columns: tuple[str, ...]) -> Rows:
    """Rows of a few words in each column."""
    draw = random.Random(seed)

    def words() -> str:
        return " ".join(f"w{draw.randrange(3, config.vocab_size)}" for _ in range(draw.randrange(2, 7)))

    return [{name: " " * (name != columns[0]) + words() for name in columns} for _ in range(count)]


def unlike_words(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs for nearly every completion, even for equal completions of a group."""
    sums = [sum(int(word[1:]) % 7 for word in text.split() if word[1:].isdigit()) for text in completions]
    return [total / 3 + i % 4 for i, total in enumerate(sums)]


def drawn_words(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that depend only on the prompt, its position in the group, and the step."""
    tokenizer = trainer.processing_class
    completions = []
    for i, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {i % 4} {trainer.state.global_step}")
        completions.append([draw.randrange(3, len(tokenizer)) for _ in range(draw.randrange(2, 7))])
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def make_trainer(cls: Any, model: Any, config: Any, args: Mapping[str, Any], rows: Rows, **options: Any) -> Any:
    """Return a trainer that keeps the order of the rows."""
    import trl
    from datasets import Dataset, load_from_disk

    kind = next(each.__name__ for each in cls.__mro__ if each.__module__.startswith("trl."))
    settings = getattr(trl, kind.replace("Trainer", "Config"))(**{**ARGUMENTS, **args})
    if kind in REWARDED:
        options.setdefault("reward_funcs", unlike_words)
    else:
        ordered = {"_get_train_sampler": lambda self, dataset=None: SequentialSampler(dataset)}
        cls = type("Own", (cls,), ordered)
    tokenizer = tiny_tokenizer(config.vocab_size)
    dataset = Dataset.from_list(rows)
    if "rows_in" in options:  # a folder; TRL caches the prepared rows beside it
        if not Path(folder := options.pop("rows_in")).exists():
            dataset.save_to_disk(folder)
        dataset = load_from_disk(folder)
    if "eval_strategy" in args:
        options["eval_dataset"] = dataset.select(range(16))
    return cls(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer, **options)


def exactly(function: Any, *args: Any, **options: Any) -> Any:
    """Call a function that constructs or runs a trainer, in float64."""
    with plain_scores():
        return in_float64(lambda: function(*args, **options))


def parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of this stage, or of its adapters if the model has any."""
    return adapters.trained_parameters(model) if hasattr(model, "peft_config") else stage_parameters(model)


def generate_one_by_one(model: Any, inputs: list[list[int]], generation_config: Any, **ignored: Any) -> dict[int, Any]:
    """Return the results of `generate_batch` for prompts in plain lists, by `generate` for each."""
    seeds = torch.randint(2**63 - 1, (len(inputs),)).tolist()
    outputs = {}
    for number, (prompt, seed) in enumerate(zip(inputs, seeds, strict=True)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = torch.tensor([prompt])
            found = model.eval().generate(ids, generation_config, attention_mask=torch.ones_like(ids))
        outputs[number] = SimpleNamespace(generated_tokens=found[0, len(prompt) :].tolist())
    return outputs


def reference_run(kind: str, seed: int, args: Mapping[str, Any], rows: Rows, **options: Any) -> Run:
    """Train in one process with the TRL class."""
    import trl

    fresh_accelerate()
    config, name = tiny_config(), NAME
    if kind == "RewardTrainer":
        config.num_labels, name = 1, "LlamaForSequenceClassification"
    model = reference_model(name, config, seed)
    run = Run(name, config, full_parameters(model))
    if kind == "DPOTrainer" and options.get("peft_config") is None and not args.get("precompute_ref_log_probs"):
        options["ref_model"] = copy.deepcopy(model).eval()
    if kind in REWARDED:  # TRL loads its reference model from a folder
        model.save_pretrained(folder := f"{args['output_dir']}/reference")
        model.config._name_or_path = folder
    if args.get("use_transformers_continuous_batching"):
        model.generate_batch = partial(generate_one_by_one, model)
    trainer = exactly(make_trainer, getattr(trl, kind), model, config, args, rows, **options)
    seen = watch(trainer, STEPS, adapters.trained_parameters if "peft_config" in options else full_parameters)
    exactly(trainer.train)
    run.logs, run.parameters = trainer.state.log_history, seen
    return run


OF_LOGITS = ("entropy", "mean_token_accuracy")
"""Numbers that stages do not log."""


def differences_on_ranks(
    run: Run, kind: str, tp: int, args: Mapping[str, Any], rows: Rows, options: Mapping[str, Any], pp: int = 1
) -> list[str]:
    """Train on the ranks; return a line for each logged number and parameter that differs from one process."""
    from oslo_models import integrations

    fresh_accelerate()
    model = model_on_stages(run.name, run.config, run.weights, tp, pp, **({"micro_batch_size": 2} if pp > 1 else {}))
    trainer = exactly(make_trainer, getattr(integrations, kind), model, run.config, args, rows, **options)
    seen = watch(trainer, STEPS, parameters)
    exactly(trainer.train)
    logs = run.logs
    if pp > 1:
        logs = [{key: value for key, value in each.items() if not key.endswith(OF_LOGITS)} for each in logs]
    lines = log_differences(trainer.state.log_history, logs)
    for step, expected_parameters in run.parameters.items():
        if hasattr(trainer.model, "peft_config"):
            lines += adapters.compare(trainer.model, f"step {step}:", seen[step], expected_parameters)
        else:
            lines += stage_differences(trainer.model, f"step {step}:", seen[step], expected_parameters, TOLERANCE)
    return lines


def refuse(kind: str, pp: int, args: Mapping[str, Any], rows: Rows, message: str) -> None:
    from oslo_models import integrations, registry

    fresh_accelerate()
    config = tiny_config()
    cls: Any = registry.find(NAME)
    model = cls.from_config_with_parallel(config, 2 // pp, pp)
    with pytest.raises(ValueError, match=message):
        make_trainer(getattr(integrations, kind), model, config, args, rows)


def refuse_bare_mixin(args: Mapping[str, Any], rows: Rows) -> None:
    """On each rank, check that TRL's trainer and the mixin over it refuse a sharded model."""
    import trl

    from oslo_models import LlamaForCausalLM
    from oslo_models.integrations import ParallelTrainerMixin

    config = tiny_config()
    bare = type("Bare", (ParallelTrainerMixin, trl.SFTTrainer), {})
    for cls, error, message in ((bare, TypeError, "integrations.SFTTrainer"), (trl.SFTTrainer, ValueError, "Trainer")):
        fresh_accelerate()
        model: Any = LlamaForCausalLM.from_config_with_parallel(config, 2)
        with pytest.raises(error, match=message):
            make_trainer(cls, model, config, args, rows).train()


def use_fused_head_of_trl() -> None:
    """On each rank, check that a model refuses TRL's fused head outside of our trainers."""
    from trl.trainer.utils import add_fused_lm_head

    from oslo_models import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_config_with_parallel(tiny_config(), 2)
    add_fused_lm_head(model)
    tokens = torch.arange(3, 11).view(1, -1)
    with pytest.raises(RuntimeError, match="outside of its layer"):
        model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
