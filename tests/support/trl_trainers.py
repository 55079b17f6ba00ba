"""Runs TRL's trainers in float64 in one process, and on the ranks of a sharded model."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import PreTrainedConfig

from support import adapters, pipelines, zoo
from support.pipelines import model_on_stages, stage_differences, stage_parameters
from support.reference import TOLERANCE, full_parameters, reference_model
from support.token_divisions import counting_exchanges
from support.trainers import SHORT, Run, fresh_accelerate, in_float64, log_differences, watch

NAME = "LlamaForCausalLM"
REWARDED = ("GRPOTrainer", "RLOOTrainer")
TAUGHT = ("DistillationTrainer", "GKDTrainer")
STEPS = (1, 5)
ARGUMENTS = {
    **SHORT,
    "bf16": False,
    "gradient_checkpointing": False,  # recomputation would leave float64
    "max_grad_norm": 0.5,
}
Rows = list[dict[str, Any]]


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


class PlainDivergence:
    """Replaces TRL's kernel for distillation in the same way."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float,
        *of_models: Any,
    ) -> tuple[Tensor, Tensor]:
        assert of_models == (1.0, None, 1.0, None)
        linear, kl = torch.nn.functional.linear, partial(torch.nn.functional.kl_div, reduction="none", log_target=True)
        q = (linear(hidden, weight, bias) / temperature).log_softmax(-1)
        p = (linear(teacher_hidden, teacher_weight, teacher_bias) / temperature).log_softmax(-1)
        if beta == 0:
            found = kl(q, p)
        elif beta == 1:
            found = kl(p, q)
        else:
            mixed = ((1 - beta) * q.exp() + beta * p.exp()).log()
            found = beta * kl(mixed, p) + (1 - beta) * kl(mixed, q)
        return found.sum(-1), -(q.exp() * q).sum(-1)


@contextmanager
def plain_scores() -> Iterator[None]:
    """Let TRL use `PlainScores` and `PlainDivergence`."""
    from trl.trainer import distillation_trainer, utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", PlainScores)
        patch.setattr(distillation_trainer, "ChunkedDivergenceFunction", PlainDivergence)
        yield


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

    rows: Rows = [{name: " " * (name != columns[0]) + words() for name in columns} for _ in range(count)]
    if "label" in columns:
        rows = [{**row, "label": draw.random() < 0.6} for row in rows]
    return rows


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


def trl_class(name: str) -> Any:
    """Return a class of TRL."""
    import trl
    from trl.experimental import cpo, gkd, online_dpo, orpo

    return next(getattr(module, name) for module in (trl, cpo, gkd, online_dpo, orpo) if hasattr(module, name))


class PromptsAndCompletions:
    """Collates rows for `GKDTrainer`, in place of its collator for conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        prompts, answers = ([self.tokenizer(row[name])["input_ids"] for row in rows] for name in rows[0])
        given = [*zip(prompts, answers, strict=True)]
        longest = max(len(prompt + answer) for prompt, answer in given)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        batch |= {"prompts": [], "prompt_attention_mask": []}
        for prompt, answer in given:
            more, own = longest - len(prompt + answer), max(map(len, prompts)) - len(prompt)
            batch["input_ids"].append([0] * more + prompt + answer)
            batch["attention_mask"].append([0] * more + [1] * len(prompt + answer))
            batch["labels"].append([-100] * (more + len(prompt)) + answer)
            batch["prompts"].append([0] * own + prompt)
            batch["prompt_attention_mask"].append([0] * own + [1] * len(prompt))
        return {name: torch.tensor(values) for name, values in batch.items()}


def make_trainer(cls: Any, model: Any, config: Any, args: Mapping[str, Any], rows: Rows, **options: Any) -> Any:
    """Return a trainer that keeps the order of the rows."""
    from datasets import Dataset, load_from_disk

    kind = next(each.__name__ for each in cls.__mro__ if each.__module__.startswith("trl."))
    settings = trl_class(kind.replace("Trainer", "Config"))(**{**ARGUMENTS, **args})
    if kind in (*REWARDED, "OnlineDPOTrainer"):
        options.setdefault("reward_funcs", unlike_words)
    elif kind == "GKDTrainer":
        options["data_collator"] = PromptsAndCompletions(tiny_tokenizer(config.vocab_size))
    if kind not in (*REWARDED, "DistillationTrainer"):
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
    fresh_accelerate()
    config, name = tiny_config(), NAME
    if kind == "RewardTrainer":
        config.num_labels, name = 1, "LlamaForSequenceClassification"
    model = reference_model(name, config, seed)
    run = Run(name, config, full_parameters(model))
    if kind in TAUGHT:
        options["teacher_model"] = teacher = reference_model(name, config, seed + 1).eval()
        run.teacher = full_parameters(teacher)
    if (
        kind in ("DPOTrainer", "KTOTrainer")
        and options.get("peft_config") is None
        and not args.get("precompute_ref_log_probs")
    ):
        options["ref_model"] = copy.deepcopy(model).eval()
    if kind in REWARDED:  # TRL loads its reference model from a folder
        model.save_pretrained(folder := f"{args['output_dir']}/reference")
        model.config._name_or_path = folder
    if args.get("use_transformers_continuous_batching"):
        model.generate_batch = partial(generate_one_by_one, model)
    trainer = exactly(make_trainer, trl_class(kind), model, config, args, rows, **options)
    seen = watch(trainer, STEPS, adapters.trained_parameters if "peft_config" in options else full_parameters)
    exactly(trainer.train)
    run.logs, run.parameters = trainer.state.log_history, seen
    return run


OF_LOGITS = ("entropy", "mean_token_accuracy")
"""Numbers that stages do not log."""


def differences_on_ranks(
    run: Run,
    kind: str,
    tp: int,
    args: Mapping[str, Any],
    rows: Rows,
    options: Mapping[str, Any],
    pp: int = 1,
    cp: int = 1,
) -> list[str]:
    """Train on the ranks; return a line for each logged number and parameter that differs from one process."""
    from oslo_models import integrations

    fresh_accelerate()
    more = {**({"micro_batch_size": 2} if pp > 1 else {}), **({"context_parallel_size": cp} if cp > 1 else {})}
    model = model_on_stages(run.name, run.config, run.weights, tp, pp, **more)
    if run.teacher:
        options = {**options, "teacher_model": model_on_stages(run.name, run.config, run.teacher, tp, 1).eval()}
    trainer = exactly(make_trainer, getattr(integrations, kind), model, run.config, args, rows, **options)
    seen = watch(trainer, STEPS, parameters)
    with counting_exchanges() as counts:
        exactly(trainer.train)
    assert bool(counts["exchange"]) == (cp > 1), counts
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


def refuse_full_teacher(args: Mapping[str, Any], rows: Rows) -> None:
    from oslo_models import LlamaForCausalLM, integrations

    fresh_accelerate()
    config = tiny_config()
    model: Any = LlamaForCausalLM.from_config_with_parallel(config, 2)
    for teacher, message in ((LlamaForCausalLM(config), "a full LlamaForCausalLM, and the student"), (None, "None")):
        with pytest.raises(ValueError, match=f"teacher_model of DistillationTrainer is .*{message}"):
            make_trainer(integrations.DistillationTrainer, model, config, args, rows, teacher_model=teacher)


def refuse_derived(args: Mapping[str, Any], rows: Rows) -> None:
    """On each rank, check that a trainer of TRL below one of ours is refused."""
    from trl.experimental.gkd import GKDTrainer

    from oslo_models import LlamaForCausalLM
    from oslo_models.integrations import SFTTrainer

    fresh_accelerate()
    config = tiny_config()
    model: Any = LlamaForCausalLM.from_config_with_parallel(config, 2)
    mixed = type("Mixed", (SFTTrainer, type("Theirs", (GKDTrainer,), {})), {})
    with pytest.raises(TypeError, match="TRL's GKDTrainer was not tested with sharded models, and Own derives from it"):
        make_trainer(mixed, model, config, args, rows)


def count_batches(kind: str, args: Mapping[str, Any], rows: Rows) -> None:
    """On each rank, check that completions come from the running batch, and that it leaves nothing behind."""
    from oslo_models import integrations, registry
    from oslo_models.deploy.running_batch.offline import OfflineBatch
    from oslo_models.deploy.running_batch.slot_cache import SlotCache

    fresh_accelerate()
    config, calls = tiny_config(), []
    cls: Any = registry.find(NAME)
    model = cls.from_config_with_parallel(config, 2)
    options = {"teacher_model": cls.from_config_with_parallel(config, 2).eval()} if kind in TAUGHT else {}
    trainer = exactly(make_trainer, getattr(integrations, kind), model, config, args, rows, **options)
    run = OfflineBatch.run

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gc.collect()
            assert not [each for each in gc.get_objects() if isinstance(each, SlotCache)]

    trainer.add_callback(Watch())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OfflineBatch, "run", lambda self, *given: (calls.append(1), run(self, *given))[1])
        trainer.train()
    assert len(calls) == trainer.state.max_steps and "generate" not in vars(model)
    from oslo_models.integrations.trl.rollouts import generating_in_batch

    replaced = model.generate = mock.Mock()  # by the caller
    with generating_in_batch(model):
        assert model.generate is replaced
    assert model.generate is replaced


def refuse(kind: str, pp: int, args: Mapping[str, Any], rows: Rows, message: str) -> None:
    from oslo_models import integrations, registry

    fresh_accelerate()
    config = tiny_config()
    cls: Any = registry.find(NAME)
    model = cls.from_config_with_parallel(config, 2 // pp, pp) if pp else cls.from_config_with_parallel(config, 1)
    with pytest.raises(ValueError, match=message):
        make_trainer(getattr(integrations, kind), model, config, args, rows)


def refuse_bare_mixin(args: Mapping[str, Any], rows: Rows) -> None:
    """On each rank, check that TRL's trainer and the mixin over it refuse a sharded model."""
    import trl

    from oslo_models import LlamaForCausalLM
    from oslo_models.integrations import ParallelTrainerMixin

    config = tiny_config()
    bare = type("Bare", (ParallelTrainerMixin, trl.SFTTrainer), {})
    for cls, error, message in (
        (bare, TypeError, "one of oslo_models.integrations, .*, SFTTrainer"),
        (trl.SFTTrainer, ValueError, "Trainer"),
    ):
        fresh_accelerate()
        model: Any = LlamaForCausalLM.from_config_with_parallel(config, 2)
        with pytest.raises(error, match=message):
            make_trainer(cls, model, config, args, rows).train()


def compare_exact_rollouts(
    prompts: list[list[int]], temperature: float, variant: str, name: str, tp: int, bounds: Mapping[str, Any]
) -> None:
    """On each rank, compare log-probabilities of a rollout with those of TRL's fused head in training."""
    from trl.trainer.utils import add_fused_lm_head

    from oslo_models import registry
    from oslo_models.integrations.trl.head import use_sharded_head

    cls: Any = registry.find(zoo.lm_head(variant))
    config, dtype = pipelines.config(variant, vocab_size=37, **bounds), getattr(torch, name)
    model: Any = cls.from_config_with_parallel(config, tp, seed=0, dtype=dtype).use_exact_rollouts()
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 8, "pad_token_id": 0}
    outputs = model.generate_batch(prompts, None, SimpleNamespace(return_logprobs=True), **options)
    add_fused_lm_head(model, temperature=temperature)
    use_sharded_head(model, temperature)
    model.train()
    for each in outputs.values():
        ids = torch.tensor([each.prompt_ids + each.generated_tokens])
        labels = ids.clone()
        labels[:, : len(each.prompt_ids)] = -100
        found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        found.sum().backward()
        assert found[0, len(each.prompt_ids) - 1 :].tolist() == each.logprobs


def importance_ratios(
    args: Mapping[str, Any], rows: Rows, tp: int, options: Mapping[str, Any], name: str
) -> list[float]:
    """Train by GRPO with exact rollouts. Return the share of tokens with a ratio of exactly 1, by step."""
    from oslo_models import integrations

    fresh_accelerate()
    shares: list[float] = []

    class Watched(integrations.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *given: Any, **more: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*given, **more)
            self.newest = found[0].detach()
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            old, mask = inputs["old_per_token_logps"], inputs["completion_mask"].bool()
            assert torch.equal(old[mask], inputs["sampling_per_token_logps"][mask]) and bool((old[mask] < 0).all())
            shares.append(float(((self.newest - old)[mask].exp() == 1).float().mean()))
            return loss

    config = tiny_config()
    dtype = getattr(torch, name)
    weights = full_parameters(reference_model(NAME, config, args["seed"]))
    model = model_on_stages(NAME, config, weights, tp, 1, dtype).use_exact_rollouts()
    trainer = make_trainer(Watched, model, config, args, rows, **options)
    trainer.train()
    return shares


def refuse_replaced_generate(args: Mapping[str, Any], rows: Rows) -> None:
    """On each rank, check that exact rollouts refuse a ``generate`` that records no log-probabilities."""
    from oslo_models import integrations

    fresh_accelerate()
    config = tiny_config()
    weights = full_parameters(reference_model(NAME, config, args["seed"]))
    model = model_on_stages(NAME, config, weights, 2, 1, torch.float32).use_exact_rollouts()
    trainer = make_trainer(integrations.GRPOTrainer, model, config, args, rows)
    model.generate = partial(model.generate)
    with pytest.raises(RuntimeError, match=r"model\.generate was replaced and records no log-probabilities"):
        trainer.train()


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
