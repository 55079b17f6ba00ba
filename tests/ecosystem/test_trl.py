"""TRL's trainers on sharded models: each step and its logs match one process with the same total batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL's trainers need trl")

from support import trl_trainers
from support.mutants import Edit, MutantPool
from support.pool import Pool

ZOO = pytest.mark.zoo
COLUMNS = {
    "SFTTrainer": ("prompt", "completion"),
    "DPOTrainer": ("prompt", "chosen", "rejected"),
    "GRPOTrainer": ("prompt",),
    "RLOOTrainer": ("prompt",),
    "RewardTrainer": ("prompt", "chosen", "rejected"),
    "KTOTrainer": ("prompt", "completion", "label"),
    "ORPOTrainer": ("prompt", "chosen", "rejected"),
    "CPOTrainer": ("prompt", "chosen", "rejected"),
    "DistillationTrainer": ("prompt",),
    "GKDTrainer": ("prompt", "completion"),
    "OnlineDPOTrainer": ("prompt",),
}


def compare(pool: Pool, kind: str, tp: int, dp: int, seed: int, folder: Path, pp: int = 1, **settings: Any) -> None:
    """Train on one process with the batches of all replicas, and on ``tp * pp * dp * cp`` ranks."""
    args, options = settings.get("args", {}), {**settings.get("options", {})}
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, COLUMNS[kind])
    args = {"output_dir": str(folder), **args}
    total = {
        **args,
        "per_device_train_batch_size": args.get("per_device_train_batch_size", 4) * dp,
        **settings.get("total", {}),
    }
    if args.get("precompute_ref_log_probs"):
        options["rows_in"] = str(folder / "rows")
    run, cp = trl_trainers.reference_run(kind, seed, total, rows, **options), settings.get("cp", 1)
    train = trl_trainers.differences_on_ranks
    for lines in pool.run(tp * pp * dp * cp, train, run, kind, tp, args, rows, options, pp, cp, env=True):
        assert not lines, "\n".join(lines[:30])


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFTTrainer", {"gradient_accumulation_steps": 2}),
    "SFT, dft": ("SFTTrainer", {"loss_type": "dft"}),
    "DPO": ("DPOTrainer", {"beta": 0.5}),
    "DPO, weighted": ("DPOTrainer", {"use_weighting": True, "beta": 0.5, "gradient_accumulation_steps": 2}),
    "DPO, precomputed": ("DPOTrainer", {"precompute_ref_log_probs": True, "beta": 0.5}),
    "DPO, synchronized": ("DPOTrainer", {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.5}),
    "reward": ("RewardTrainer", {"center_rewards_coefficient": 0.1, "gradient_accumulation_steps": 2}),
    "KTO, unpaired": ("KTOTrainer", {"loss_type": "apo_zero_unpaired", "gradient_accumulation_steps": 2}),
    "KTO, precomputed": (
        "KTOTrainer",
        {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True, "beta": 0.5},
    ),
}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_tensor_parallel(pool: Pool, kind: str, tmp_path: Path, seed: int) -> None:
    name, args = KINDS[kind]
    compare(pool, name, 2, 1, seed, tmp_path, args=args)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
STAGES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "alone": (1, 1, 1, {}),
    "tp=2": (2, 1, 1, {}),
    "dp=2": (1, 2, 1, {}),
    "cp=2": (1, 1, 2, {}),
    "cp=2, tp=2": (2, 1, 2, {}),
    "cp=2, dp=2": (1, 2, 2, {}),
    "cp=2, packed": (1, 1, 2, {"packing": True}),
    "cp=2, evaluated": (1, 1, 2, EVALUATED),
    "packed": (1, 1, 1, {"packing": True}),
    "evaluated": (1, 1, 1, EVALUATED),
}


@pytest.mark.parametrize(
    "case", [each if each in ("alone", "cp=2") else pytest.param(each, marks=pytest.mark.zoo) for each in STAGES]
)
def test_supervised_fine_tuning_on_stages(pool: Pool, case: str, tmp_path: Path, seed: int) -> None:
    tp, dp, cp, more = STAGES[case]
    compare(pool, "SFTTrainer", tp, dp, seed, tmp_path, pp=2, cp=cp, args={"gradient_accumulation_steps": 2, **more})


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_all_sizes(pool: Pool, kind: str, tp: int, dp: int, tmp_path: Path, seed: int) -> None:
    name, args = KINDS[kind]
    compare(pool, name, tp, dp, seed, tmp_path, args=args)


SAMPLED = {
    "beta": 0.2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "shuffle_dataset": False,
}
OVER_CONTEXT: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "SFT": ("SFTTrainer", 1, 1, {"gradient_accumulation_steps": 2}),
    "SFT, tp=2": ("SFTTrainer", 2, 1, {"loss_type": "dft"}),
    "SFT, dp=2": ("SFTTrainer", 1, 2, {}),
    "SFT, packed": ("SFTTrainer", 1, 1, {"packing": True}),
    "SFT, evaluated": ("SFTTrainer", 1, 1, {"eval_strategy": "steps", "per_device_eval_batch_size": 4}),
    "DPO": ("DPOTrainer", 1, 1, {"beta": 0.5, "use_weighting": True}),
    "DPO, precomputed": ("DPOTrainer", 1, 1, {"precompute_ref_log_probs": True, "beta": 0.5}),
    "reward": ("RewardTrainer", 1, 1, {"center_rewards_coefficient": 0.1}),
    "KTO": ("KTOTrainer", 1, 1, {"beta": 0.5}),
    "GRPO": ("GRPOTrainer", 1, 1, SAMPLED),
    "GRPO, tp=2": ("GRPOTrainer", 2, 1, SAMPLED),
    "RLOO": ("RLOOTrainer", 1, 1, SAMPLED),
}


@pytest.mark.parametrize(
    "case", [each if each in ("SFT", "DPO", "GRPO") else pytest.param(each, marks=ZOO) for each in OVER_CONTEXT]
)
def test_tokens_divided_over_ranks(pool: Pool, case: str, tmp_path: Path, seed: int) -> None:
    kind, tp, dp, args = OVER_CONTEXT[case]
    compare(pool, kind, tp, dp, seed, tmp_path, cp=2, args=args)


REPLICAS = {**SAMPLED, "pad_to_multiple_of": 8}
"""With equal padding on all replicas: rotary frequencies are float32, so results depend on positions."""


ON_ONE_REPLICA: dict[str, tuple[str, dict[str, Any]]] = {
    "KTO": ("KTOTrainer", {"beta": 0.5, "gradient_accumulation_steps": 2}),  # pairs the rows of a batch
    "distillation": ("DistillationTrainer", {"beta": 1.0, "max_completion_length": 6}),
    "distillation, forward": ("DistillationTrainer", {"beta": 0.0, "gradient_accumulation_steps": 2}),
    "distillation, mixed": ("DistillationTrainer", {"beta": 0.3, "temperature": 0.8, "max_completion_length": 6}),
    "ORPO": ("ORPOTrainer", {"gradient_accumulation_steps": 2}),
    "CPO": ("CPOTrainer", {"beta": 0.5}),
    "SimPO": ("CPOTrainer", {"loss_type": "simpo", "cpo_alpha": 0.3}),
    "GKD": ("GKDTrainer", {"lmbda": 0.0}),
    "online DPO": ("OnlineDPOTrainer", {"max_new_tokens": 6, "missing_eos_penalty": 0.5}),
    "GKD, generated": ("GKDTrainer", {"lmbda": 0.5, "max_new_tokens": 6, "beta": 0.3}),
    "GKD, by the teacher": ("GKDTrainer", {"lmbda": 0.3, "seq_kd": True, "max_new_tokens": 6, "beta": 1.0}),
}


@pytest.mark.parametrize(
    "kind", [each if each in ("KTO", "distillation") else pytest.param(each, marks=ZOO) for each in ON_ONE_REPLICA]
)
def test_losses_over_a_batch_and_generated_completions(pool: Pool, kind: str, tmp_path: Path, seed: int) -> None:
    name, args = ON_ONE_REPLICA[kind]
    compare(pool, name, 2, 1, seed, tmp_path, args={"max_completion_length": 6, **args} if "dist" in kind else args)


@pytest.mark.parametrize("kind", ["GRPOTrainer", "DistillationTrainer"])
def test_completions_come_from_the_running_batch(pool: Pool, kind: str, tmp_path: Path, seed: int) -> None:
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, COLUMNS[kind])
    args = {"output_dir": str(tmp_path), **(SAMPLED if kind == "GRPOTrainer" else {"max_completion_length": 6})}
    pool.run(2, trl_trainers.count_batches, kind, args, rows, env=True)


@pytest.mark.zoo
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_adapters(pool: Pool, kind: str, tp: int, dp: int, tmp_path: Path, seed: int) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapter.exclude_modules = ["lm_head"]
    args = {"SFT": {}, "DPO": {"beta": 0.5}, "GRPO": REPLICAS}[kind]
    options = {"peft_config": adapter} | ({"rollout_func": trl_trainers.drawn_words} if kind == "GRPO" else {})
    compare(pool, f"{kind}Trainer", tp, dp, seed, tmp_path, args=args, options=options)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "more",
    [{}, {"num_iterations": 2, "steps_per_generation": 2}, {"use_transformers_continuous_batching": True}],
    ids=["once", "again", "batch"],
)
@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_sampled_completions(pool: Pool, kind: str, more: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """Ranks sample the same tokens as one process from the same random state."""
    compare(pool, kind, 2, 1, seed, tmp_path, args={**SAMPLED, **more})


@pytest.mark.zoo
@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_completions_of_replicas(pool: Pool, tp: int, dp: int, scale: str, tmp_path: Path, seed: int) -> None:
    """Replicas sample from different random states, so this test draws completions from their prompts."""
    args = {**REPLICAS, "scale_rewards": scale, "sync_ref_model": True, "ref_model_sync_steps": 2}
    compare(pool, "GRPOTrainer", tp, dp, seed, tmp_path, args=args, options={"rollout_func": trl_trainers.drawn_words})


@pytest.mark.zoo
@pytest.mark.parametrize(("kind", "dp"), [("SFT", 1), ("DPO", 2), ("GRPO", 2)])
def test_evaluation(pool: Pool, kind: str, dp: int, tmp_path: Path, seed: int) -> None:
    """In supervised training, TRL averages the replicas' token means, regardless of their numbers of tokens."""
    args: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args |= {**REPLICAS, "per_device_eval_batch_size": 8, "do_eval": True} if kind == "GRPO" else {}
    total = {"per_device_eval_batch_size": dp * args["per_device_eval_batch_size"]}
    options = {"rollout_func": trl_trainers.drawn_words} if kind == "GRPO" else {}
    compare(pool, f"{kind}Trainer", 2, dp, seed, tmp_path, args=args, total=total, options=options)


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "replicas, CPO": ("CPOTrainer", 0, {}, "CPOTrainer scales its loss by the rows of one process, and 2 replicas"),
    "stages, dft": (
        "SFTTrainer",
        2,
        {"loss_type": "dft"},
        "loss 'dft' .*_size=2 only .*loss_type='nll'",
    ),
    "stages, DPO": ("DPOTrainer", 2, {}, "load the model with pipeline_parallel_size=1"),
    "offloading": ("SFTTrainer", 1, {"activation_offloading": True}, "activation_offloading=True.*checkpointing=True"),
    "Liger": ("SFTTrainer", 1, {"use_liger_kernel": True}, "use_liger_kernel=True.*fuse"),
    "float32 head": ("GRPOTrainer", 1, {**SAMPLED, "cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
    "groups": (
        "GRPOTrainer",
        1,
        {**SAMPLED, "per_device_train_batch_size": 2},
        "is 2, which is not a multiple of the 4",
    ),
    "rounded weights": (
        "GRPOTrainer",
        1,
        {**SAMPLED, "use_transformers_continuous_batching": True, "bf16": True},
        "use_transformers_continuous_batching=True with bf16 or fp16 .* TRL would round the trained weights",
    ),
    "rows in memory": ("DPOTrainer", 1, {"precompute_ref_log_probs": True}, "train dataset, which is in memory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_calls_are_refused_by_name(pool: Pool, what: str, tmp_path: Path, seed: int) -> None:
    kind, pp, args, message = REFUSED[what]
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 8, COLUMNS[kind])
    args = {"output_dir": str(tmp_path), **args}
    pool.run(2, trl_trainers.refuse, kind, pp, args, rows, message, env=True)


def test_other_trainers_of_trl_are_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 8, COLUMNS["SFTTrainer"])
    pool.run(2, trl_trainers.refuse_bare_mixin, {"output_dir": str(tmp_path)}, rows, env=True)


def test_teachers_are_sharded_like_the_student(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 8, COLUMNS["DistillationTrainer"])
    pool.run(2, trl_trainers.refuse_full_teacher, {"output_dir": str(tmp_path)}, rows, env=True)


def test_trainers_below_ours_are_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 8, COLUMNS["GKDTrainer"])
    pool.run(2, trl_trainers.refuse_derived, {"output_dir": str(tmp_path)}, rows, env=True)


def test_head_of_trl_outside_of_our_trainers_is_refused(pool: Pool) -> None:
    pool.run(2, trl_trainers.use_fused_head_of_trl)


HEADS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama": ("llama", "float32", 2, {}),
    "one rank": ("llama", "bfloat16", 1, {}),
    "bounded": ("gemma2", "float32", 2, {"final_logit_softcapping": 0.5}),
    "bounded, bfloat16": ("gemma2", "bfloat16", 2, {"final_logit_softcapping": 0.5}),
    "divided, bfloat16": ("granite", "bfloat16", 2, {"logits_scaling": 3.0}),
}


@pytest.mark.parametrize("what", [each if each == "llama" else pytest.param(each, marks=ZOO) for each in HEADS])
def test_exact_rollouts_have_the_log_probabilities_of_the_trained_head(pool: Pool, what: str, seed: int) -> None:
    variant, dtype, tp, bounds = HEADS[what]
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 6, ("prompt",))
    prompts = [[int(word[1:]) for word in row["prompt"].split()] for row in rows]
    pool.run(tp, trl_trainers.compare_exact_rollouts, prompts, 0.7, variant, dtype, tp, bounds)


RATIOS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "tp=2": (2, 1, {"temperature": 0.7}, "float32"),
    "tp=2, LoRA": (2, 1, {"temperature": 1.3}, "float32"),
    "bfloat16, LoRA": (2, 1, {"temperature": 0.9}, "bfloat16"),
    "one process": (1, 1, {"beta": 0.0}, "float32"),  # TRL would load a reference model from the hub
    "autocast": (2, 1, {"bf16": True, "gradient_checkpointing": True}, "float32"),
    "dp=2": (1, 2, {"temperature": 0.7}, "float32"),
    "continuous batching": (2, 1, {"use_transformers_continuous_batching": True}, "float32"),
}


def ratios(pool: Pool, folder: Path, seed: int, tp: int, dp: int, dtype: str = "float32", **settings: Any) -> Any:
    """Return the shares of ratios of exactly 1, by rank and step. Each generation pads prompts on the left."""
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, COLUMNS["GRPOTrainer"])
    rows = [{"prompt": "w3"} if number % 2 else row for number, row in enumerate(rows)]
    args = {**SAMPLED, "output_dir": str(folder), "num_iterations": 2, "seed": seed % 2**31, "max_steps": 4}
    given = {**args, **settings.get("args", {})}, rows, tp, settings.get("options", {}), dtype
    return pool.run(tp * dp, trl_trainers.importance_ratios, *given, env=True)


@pytest.mark.parametrize("what", [each if each == "tp=2" else pytest.param(each, marks=ZOO) for each in RATIOS])
def test_importance_ratio_of_the_first_update_is_one(pool: Pool, what: str, tmp_path: Path, seed: int) -> None:
    """Each rollout is used for two updates: in the second one, the weights have changed."""
    tp, dp, more, dtype = RATIOS[what]
    options: dict[str, Any] = {}
    if "LoRA" in what:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    for shares in ratios(pool, tmp_path, seed, tp, dp, dtype, args=more, options=options):
        assert shares[::2] == [1.0, 1.0] and max(shares[1::2]) < 1.0


def test_exact_rollouts_of_a_replaced_generate_are_refused(pool: Pool, tmp_path: Path, seed: int) -> None:
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, COLUMNS["GRPOTrainer"])
    args = {**SAMPLED, "output_dir": str(tmp_path), "seed": seed % 2**31, "max_steps": 1}
    pool.run(2, trl_trainers.refuse_replaced_generate, args, rows, env=True)


HEAD = "integrations.trl.head"
MUTANTS = {
    "positions": Edit(f"{HEAD}:_fused_forward", "model.has_exact_rollouts and kwargs", "False and kwargs"),
    "head": Edit(f"{HEAD}:_score", "WithValue.apply(found.log_probs, value_N)", "found.log_probs"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_change_the_importance_ratio(pool: Pool, name: str, tmp_path: Path, seed: int) -> None:
    edited: Any = MutantPool(pool, MUTANTS[name])
    for shares in ratios(edited, tmp_path, seed, 2, 1):
        assert min(shares[::2]) < 1.0
