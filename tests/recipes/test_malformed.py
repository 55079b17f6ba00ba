"""Mistakes in recipes: one line that names key, value and remedy, exit status 2, and no process is started."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3nTextConfig

pytest.importorskip("trl", reason="recipes are TRL's")

from oslo_models.cli.main import main
from oslo_models.data import DatasetPreprocessor
from oslo_models.recipes import launching

from support.trainers import fresh_accelerate
from support.trl_trainers import tiny_config, tiny_tokenizer

NONE: dict[str, Any] = {}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("sft", {"learning_rat": 1e-4}, r"learning_rat: .*no such key; did you mean learning_rate\?"),
    "key of the batch": ("sft", {"per_device_batch_size": 2}, "did you mean per_device_(train|eval)_batch_size"),
    "strange key": ("sft", {"qqqq": 1}, "qqqq: .*no such key; `trl sft --help`"),
    "key of accelerate": ("sft", {"num_processes": 2}, "num_processes: leave it out.*devices"),
    "key of another command": ("sft", {"reward_funcs": ["a"]}, "reward_funcs: oslo-models sft has no such key"),
    "word for a number": ("sft", {"learning_rate": "fast"}, "learning_rate: 'fast' is a string; give a number"),
    "list for a number": ("sft", {"learning_rate": [1]}, r"learning_rate: \[1\] is a list; give a number"),
    "negative number": ("sft", {"learning_rate": -1.0}, "learning_rate=-1.0: give a number of at least 0"),
    "fraction of a step": ("sft", {"max_steps": 2.5}, "max_steps: 2.5 is a number; give an integer"),
    "word for an integer": ("sft", {"max_steps": "many"}, "max_steps: 'many' is a string; give an integer"),
    "boolean for an integer": ("sft", {"max_steps": True}, "max_steps: True is a boolean; give an integer"),
    "empty batch": ("sft", {"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: .* at least 1"),
    "word for a boolean": ("sft", {"bf16": "maybe"}, "bf16: 'maybe' is a string; give true or false"),
    "mapping for a boolean": ("sft", {"packing": {"a": 1}}, "packing: .* is a mapping; give true or false"),
    "no without quotes": ("sft", {"eval_strategy": False}, 'eval_strategy: False is not one of no, .*write "no" with'),
    "unknown choice": ("sft", {"eval_strategy": "sometimes"}, "eval_strategy: 'sometimes' is not one of no, steps"),
    "unknown schedule": ("sft", {"lr_scheduler_type": "cosin"}, "lr_scheduler_type: 'cosin' is not one of .*cosine"),
    "unknown optimizer": ("sft", {"optim": "adam"}, "optim: 'adam' is not one of adamw_torch"),
    "unknown type": ("sft", {"dtype": "bf16"}, "dtype: 'bf16' is not one of auto, bfloat16"),
    "number for a string": ("sft", {"output_dir": 7}, 'output_dir: 7 is a number; give a str.*; write "7" with quotes'),
    "mapping for a list": ("sft", {"lora_target_modules": {"q": 1}}, "lora_target_modules: .*list of strings"),
    "number for a mapping": ("sft", {"lr_scheduler_kwargs": 3}, "lr_scheduler_kwargs: 3 is a number; give a mapping"),
    "no value": ("sft", {"max_steps": None}, "max_steps: it has no value; give an integer, or leave the key out"),
    "environment": ("sft", {"env": 3}, "env: 3 is no mapping"),
    "output is a file": ("sft", {"output_dir": "rows.jsonl/out"}, "output_dir=rows.jsonl/out: .* is a file; give"),
    "no model": ("sft", {"model_name_or_path": None}, "model_name_or_path: it is missing; give a folder or a name"),
    "model not there": ("sft", {"model_name_or_path": "./gone"}, "model_name_or_path=./gone: there is no such folder"),
    "model without files": ("sft", {"model_name_or_path": "empty"}, "model_name_or_path=empty: its configuration"),
    "unknown architecture": ("sft", {"model_name_or_path": "strange"}, "strange: oslo_models has no MambooForCausalLM"),
    "no rows": ("sft", {"dataset_name": None}, "dataset_name: it is missing; give a name on the hub, a folder"),
    "rows not there": ("sft", {"dataset_name": "gone.jsonl"}, "dataset_name=gone.jsonl: there is no such file"),
    "damaged rows": ("sft", {"dataset_name": "damaged.jsonl"}, "dataset_name=damaged.jsonl: it cannot be loaded: .*J"),
    "other columns": ("sft", {"dataset_name": "others.jsonl"}, "it has the columns question; sft needs text, or mess"),
    "unknown split": ("sft", {"dataset_train_split": "trian"}, "dataset_train_split=trian: .* has the splits train;"),
    "no test split": ("sft", {"eval_strategy": "steps"}, "dataset_test_split=test: .* has the splits train; name one"),
    "files of a mixture": (
        "sft",
        {"dataset_name": None, "datasets": [{"path": "json", "data_files": "gone.json"}]},
        r"datasets\[0\].data_files=gone.json: there is no such file",
    ),
    "too many ranks": ("sft", {"tensor_parallel_size": 9}, "tensor_parallel_size=9 is more than .*; use 1 to"),
    "no ranks": ("sft", {"tensor_parallel_size": 0}, "tensor_parallel_size=0: .*integer of at least 1"),
    "word for ranks": ("sft", {"tensor_parallel_size": "two"}, "tensor_parallel_size: 'two' is a string; give an int"),
    "shares of other ranks": (
        "sft",
        {"tensor_parallel_size": 2, "tensor_parallel_shares": [2, 1, 1]},
        r"tensor_parallel_shares=\[2, 1, 1\] has 3 shares for tensor_parallel_size=2: give one for each",
    ),
    "no share": ("sft", {"tensor_parallel_shares": [2, 0]}, "each of tensor_parallel_shares must be an integer .* 0"),
    "shares as text": ("sft", {"tensor_parallel_shares": "2,1"}, "tensor_parallel_shares: '2,1' is a string; give a"),
    "blocks without stages": ("sft", {"blocks_per_stage": [1, 1]}, r"blocks_per_stage=\[1, 1\] is for pipeline_"),
    "devices left over": (
        "sft",
        {"tensor_parallel_size": 2, "devices": 3},
        "tensor_parallel_size=2: .* does not divide the 3 processes of devices=3 .*; set devices to a multiple of 2",
    ),
    "stages": (
        "dpo",
        {"pipeline_parallel_size": 2, "dataset_name": "pairs.jsonl"},
        "pipeline_parallel_size=2: .*; use tensor_parallel_size instead",
    ),
    "micro-batches": (
        "sft",
        {"pipeline_parallel_size": 2, "micro_batch_size": 3, "per_device_train_batch_size": 4},
        "micro_batch_size=3: it does not divide per_device_train_batch_size=4; change one of them",
    ),
    "hosts without a place": ("sft", {"nnodes": 2}, "nnodes=2: .*add rdzv_endpoint: HOST:PORT"),
    "unknown host": (
        "sft",
        {"nnodes": 2, "rdzv_endpoint": "none.invalid:1"},
        "rdzv_endpoint=none.invalid:1: this machine cannot reach none.invalid: .*; give a name or an address",
    ),
    "port of a host": ("sft", {"nnodes": 2, "rdzv_endpoint": "one:many"}, "rdzv_endpoint=one:many: .*HOST:PORT"),
    "merging nothing": ("sft", {"merge_adapter": True}, "merge_adapter=true: there is no adapter; add use_peft: true"),
    "merging into four bits": (
        "sft",
        {"merge_adapter": True, "use_peft": True, "load_in_4bit": True},
        "merge_adapter=true: load_in_4bit=true has quantised weights, .*; leave merge_adapter out",
    ),
    "merging in pretraining": ("pretrain", {"merge_adapter": True}, "merge_adapter=true: pretrain trains all weights"),
    "four bits in full": ("sft", {"load_in_4bit": True}, "load_in_4bit=true: .*add use_peft: true"),
    "four and eight bits": ("sft", {"load_in_4bit": True, "load_in_8bit": True, "use_peft": True}, "bit"),
    "DeepSpeed": ("sft", {"deepspeed": "zero.json"}, "deepspeed='zero.json': .* leave deepspeed out"),
    "unknown tracker": ("sft", {"report_to": "tensorbord"}, "report_to=tensorbord: .* did you mean tensorboard"),
    "states in blocks": (
        "sft",
        {"optim": "adamw_8bit", "tensor_parallel_size": 2},
        "optim=adamw_8bit: .*tensor_parallel_size=2, .*in blocks.*; use adamw_torch_fused",
    ),
    "states in blocks, of torch": (
        "sft",
        {"optim": "adamw_torch_4bit", "devices": 2},
        "optim=adamw_torch_4bit: .*tensor_parallel_size=2, .*; use adamw_torch_fused",
    ),
    "paged states in blocks": (
        "dpo",
        {"dataset_name": "pairs.jsonl", "optim": "paged_adamw_8bit", "tensor_parallel_size": 2},
        "optim=paged_adamw_8bit: .*; use adamw_torch_fused",
    ),
    "states without a library": (
        "sft",
        {"optim": "paged_adamw_32bit", "tensor_parallel_size": 1},
        "optim=paged_adamw_32bit: it needs bitsandbytes; run pip install bitsandbytes",
    ),
    "updates in the backward pass": (
        "pretrain",
        {"optim": "lomo", "pipeline_parallel_size": 2, "data": ["texts"], "max_length": 4},
        "optim=lomo: .*pipeline_parallel_size=2: it updates parameters during the backward pass, .*; use adamw_torch_f",
    ),
    "offloading": ("sft", {"activation_offloading": True}, "activation_offloading=True: .*use gradient_checkpointing"),
    "rows of DPO": ("dpo", {"dataset_name": "rows.jsonl"}, "it has the columns .*; dpo needs chosen and rejected"),
    "no rewards": ("grpo", NONE, "reward_funcs: it is missing; give names of TRL's rewards"),
    "unknown reward": ("grpo", {"reward_funcs": ["acuracy_reward"]}, "acuracy_reward: .* did you mean accuracy_reward"),
    "reward not there": ("grpo", {"reward_funcs": ["gone.reward"]}, "reward_funcs=gone.reward: it cannot be imported"),
    "no generations": ("grpo", {"num_generations": 0}, "num_generations=0: give an integer of at least 1"),
    "unknown schedule of stages": ("pretrain", {"schedule": "gpipe"}, "schedule=gpipe: give one of 1f1b, zb-h1"),
    "schedule without stages": ("pretrain", {"schedule": "zb-h1"}, "schedule=zb-h1: .*; add pipeline_parallel_size"),
    "schedule with checkpointing": (
        "pretrain",
        {"schedule": "zb-h1", "pipeline_parallel_size": 2, "gradient_checkpointing": True},
        "schedule=zb-h1: it does not work with gradient_checkpointing; leave one of them out",
    ),
    "tokens on one rank": (
        "sft",
        {"sequence_parallel": True, "tensor_parallel_size": 1},
        "sequence_parallel=True divides tokens over tensor-parallel ranks, and tensor_parallel_size is 1: set it",
    ),
    "tokens of another model": (
        "sft",
        {"sequence_parallel": True, "tensor_parallel_size": 2, "model_name_or_path": "streams"},
        "sequence_parallel=True does not support Gemma3nForCausalLM: its blocks read several hidden states; leave it",
    ),
    "tokens of fused modules": (
        "dpo",
        {"sequence_parallel": True, "tensor_parallel_size": 2, "fuse": True},
        "sequence_parallel=true: it does not work with fuse=true; leave one of them out",
    ),
    "tokens of four bits": (
        "sft",
        {"sequence_parallel": True, "tensor_parallel_size": 2, "use_peft": True, "load_in_4bit": True},
        "sequence_parallel=true: it does not work with load_in_4bit=true; leave one of them out",
    ),
    "tokens of deferred gradients": (
        "pretrain",
        {"sequence_parallel": True, "pipeline_parallel_size": 2, "schedule": "zb-h1"},
        "sequence_parallel=true: it does not work with schedule=zb-h1; leave one of them out",
    ),
    "tokens of no ranks": ("sft", {"context_parallel_size": 0}, "context_parallel_size=0: .*integer of at least 1"),
    "rows of quantised weights": (
        "sft",
        {"context_parallel_size": 2, "use_peft": True, "load_in_4bit": True},
        "context_parallel_size=2: it does not work with load_in_4bit=true; leave one of them out",
    ),
    "rows on stages": (
        "sft",
        {"context_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "zb-h1"},
        "context_parallel_size=2: it does not work with schedule=zb-h1; leave one of them out",
    ),
    "rows of another model": (
        "sft",
        {"context_parallel_size": 2, "model_name_or_path": "streams"},
        "context_parallel_size=2 does not support Gemma3nForCausalLM: it was not tested with gemma3n_text",
    ),
    "rows on too few devices": (
        "sft",
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "devices": 2},
        "tensor_parallel_size=2: .* context_parallel_size=2 .* the 2 processes .*; set devices to a multiple of 4",
    ),
    "no data": ("pretrain", NONE, "data: it is missing; give datasets of `oslo-models preprocess`"),
    "data not there": ("pretrain", {"data": ["gone"]}, "data=gone: there is no file gone.bin; `oslo-models"),
    "two models": ("pretrain", {"config_name": "model"}, "config_name=model: .*leave one out"),
    "another recipe": ("sft", {"output_dir": "trained"}, "checkpoint-2 belongs to a recipe with max_steps=9, .*None"),
}  # fmt: skip
FLAGS: dict[str, tuple[list[str], str]] = {
    "no recipe": (["gone.yaml"], "recipe gone.yaml: there is no such file"),
    "bomb": (["bomb.yaml"], r"recipe bomb.yaml: .*names such as \*name stand for more than 10000 values"),
    "circle": (["circle.yaml"], "recipe circle.yaml: it is nested too deeply|stand for more than"),
    "deep": (["deep.yaml"], "recipe deep.yaml: it is nested too deeply"),
    "large": (["large.yaml"], "recipe large.yaml: it has 300000 bytes"),
    "no date": (["date.yaml"], "recipe date.yaml: it is not YAML"),
    "no YAML": (["broken.yaml"], "recipe broken.yaml: it is not YAML: .*write one `key: value` a line"),
    "a list": (["list.yaml"], "recipe list.yaml: it holds no keys"),
    "unknown flag": (["good.yaml", "--tensor_parallel", "2"], "tensor_parallel: .* did you mean tensor_parallel_size"),
    "hyphens": (["good.yaml", "--learning-rat", "2"], "learning_rat: .* did you mean learning_rate"),
    "two recipes": (["good.yaml", "other.yaml"], "other.yaml: it belongs to no key; write oslo-models sft RECIPE.yaml"),
    "value of a flag": (["good.yaml", "--max_steps", "x"], "max_steps: 'x' is a string; give an integer"),
    "flag without a value": (["good.yaml", "--max_steps"], "max_steps: expected one argument"),
    "choice of a flag": (["good.yaml", "--optim", "adam"], "optim: invalid choice: 'adam' .choose from"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    tiny_config().save_pretrained(folder / "model")
    strange = json.loads((folder / "model/config.json").read_text()) | {"architectures": ["MambooForCausalLM"]}
    model = json.loads((folder / "model/config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "model/config.json").write_text(json.dumps(model))
    (folder / "strange").mkdir()
    (folder / "strange/config.json").write_text(json.dumps(strange))
    Gemma3nTextConfig(architectures=["Gemma3nForCausalLM"]).save_pretrained(folder / "streams")
    (folder / "empty").mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "w3", "completion": " w4"}) + "\n")
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "w3", "chosen": " w4", "rejected": " w5"}) + "\n")
    DatasetPreprocessor(tiny_tokenizer(tiny_config().vocab_size), num_workers=1).preprocess(
        ["w3 w4 w5 w6 w7"] * 4, str(folder / "texts")
    )
    (folder / "others.jsonl").write_text(json.dumps({"question": "w3"}) + "\n")
    (folder / "damaged.jsonl").write_text('{"text": "w3"}\n{"text": ')
    (folder / "broken.yaml").write_text("learning_rate: [1")
    (folder / "list.yaml").write_text("- 1")
    names = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]\n" for i in range(1, 30))
    (folder / "bomb.yaml").write_text(f"b0: &b0 [1]\n{names}env: *b29\n")
    (folder / "circle.yaml").write_text("env: &a [*a]\n")
    (folder / "deep.yaml").write_text("env: " + "[" * 5000 + "]" * 5000)
    (folder / "large.yaml").write_text("#" * 300_000)
    (folder / "date.yaml").write_text("env: 2026-99-99\n")
    checkpoint = folder / "trained/checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (folder / "trained/recipe.yaml").write_text("max_steps: 9\n")
    write(folder / "good.yaml", NONE)
    return folder


def write(path: Path, changes: dict[str, Any]) -> None:
    import yaml

    good = {"model_name_or_path": "model", "dataset_name": "rows.jsonl", "output_dir": "out", "bf16": False}
    keys = {**good, **changes}
    missing = [key for key in ("model_name_or_path", "dataset_name") if keys[key] is None]
    path.write_text(yaml.safe_dump({key: value for key, value in keys.items() if key not in missing}))


@pytest.fixture(autouse=True)
def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in the folder of the recipes, and forbid processes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launching, "launch", lambda *args: pytest.fail("processes were started"))
    yield
    fresh_accelerate()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the line that refuses the arguments."""
    capsys.readouterr()
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"oslo-models {argv[0]}: ")]
    assert len(lines) == 1 and "internal" not in lines[0], lines
    return lines[0].removeprefix(f"oslo-models {argv[0]}: error: ")


WITHOUT_A_LIBRARY = "states without a library"


@pytest.mark.parametrize("case", CASES)
def test_mistake_in_a_recipe_is_answered_by_one_line(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == WITHOUT_A_LIBRARY and importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    task, changes, message = CASES[case]
    if task == "pretrain":
        changes = {**changes, "dataset_name": None}
    write(folder / "recipe.yaml", changes)
    assert_matches(message, refusal(capsys, task, "recipe.yaml"))


@pytest.mark.parametrize("case", FLAGS)
def test_mistake_in_flags_is_answered_by_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = FLAGS[case]
    assert_matches(message, refusal(capsys, "sft", *flags))


def test_good_recipe_reaches_the_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(launching, "launch", lambda *args: calls.append(args))
    assert main(["sft", "good.yaml", "--devices", "2"]) == 0
    module, arguments, sizes, endpoint, _ = calls[0]
    assert (sizes.tensor, sizes.pipeline, sizes.devices, endpoint) == (2, 1, 2, None)
    assert arguments[:4] == ["sft", "good.yaml", "--devices", "2"] and module == "oslo_models.recipes.worker"


def assert_matches(message: str, line: str) -> None:

    assert re.search(message, line), line


def test_libraries_of_optimizers_equal_transformers() -> None:
    from transformers import trainer_optimizer
    from transformers.training_args import OptimizerNames

    from oslo_models.recipes import checks

    own = {
        name: {each for each in OptimizerNames if expression.search(each.value)}
        for name, expression in checks._LIBRARIES.items()
    }
    assert own["bitsandbytes"] == set(trainer_optimizer._BITSANDBYTES_OPTIMIZERS)
    assert own["torchao"] == set(trainer_optimizer._TORCHAO_OPTIMIZERS)
