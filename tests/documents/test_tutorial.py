"""The tutorial "Tensor Model Parallelism" of OSLO 2 (Apache-2.0) runs as printed; see `documents.ADAPTED`.

Its first edition, "Model Parallelism", has the same blocks without the key ``"enable"``. Some blocks lack it here too.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

import oslo_models

from support import zoo
from support.documents import TEXTS, run_block
from support.float64 import lifted_casts
from support.pipelines import Weights, model_on_stages, run_micro_batches, stage_differences, stage_parameters
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_parameters, reference_model

CREATION = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("gpt2")
tokenizer = AutoTokenizer.from_pretrained("gpt2")
"""

PARALLELIZATION = """
import oslo

model = oslo.initialize(
    model, config={"model_parallelism": {"enable": True, "tensor_parallel_size": NUM_YOUR_GPUS}}
)
"""

FROM_A_FILE = """
import oslo

model = oslo.initialize(model, config="oslo-config.json")
"""

INFERENCE = """
text = "I don't want a lot for Christmas. There is just one thing"
tokens = tokenizer(text, return_tensors="pt").to("cuda")
print(tokenizer.decode(model.generate(**tokens, num_beams=3)[0]))
"""

WITH_AN_OPTIMIZER = """
from torch.optim import Adam
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = Adam(model.parameters(), lr=3e-5)
tokenizer = AutoTokenizer.from_pretrained("gpt2")

# Add pad token for batch training
# GPT2 tokenizer doesn't have pad token.
tokenizer.pad_token = tokenizer.eos_token
"""

WITHOUT_ENABLE = """
import oslo

model = oslo.initialize(
    model, config={"model_parallelism": {"tensor_parallel_size": NUM_YOUR_GPUS}}
)
"""

LOADING = """
from datasets import load_dataset
from torch.utils.data import DataLoader

datasets = load_dataset("squad").data["train"]["context"]
datasets = [str(_) for _ in datasets[: TRAIN_STEP * BATCH_SIZE]]
dataloader = DataLoader(datasets, batch_size=BATCH_SIZE, shuffle=True)
"""

TRAINING = """
for step, batch in enumerate(dataloader):
    optimizer.zero_grad()

    # Make batch
    input_batch = tokenizer(
        batch,
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=SEQ_LEN,
    ).to("cuda")

    # Forward-Backward-Step
    loss = model(**input_batch, labels=input_batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
"""

SAVING = """
    # Save the parallelized model using `save_parallelized`
    if step % SAVE_INTERVAL == 0:
        model.save_parallelized(save_directory="./parallel_ckpt")

    if step > TRAIN_STEP:
        break
"""

AT_RANDOM = """
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config.from_pretrained("gpt2")
model = GPT2LMHeadModel(config)
"""

MERGING = """
model = model.from_parallelized("./parallel_ckpt")
model.save_parallelized("./merged_ckpt", merge_checkpoints=True)
"""

RANKS = 2
NUMBERS = {"NUM_YOUR_GPUS": RANKS, "BATCH_SIZE": 16, "SEQ_LEN": 20, "SAVE_INTERVAL": 3, "TRAIN_STEP": 4}


def run(*, divided: bool) -> tuple[str, Any]:
    """Return the output of the chapters "Inference" and "Training", and the model after them."""
    made = run_block(CREATION, *([PARALLELIZATION] if divided else []), **NUMBERS)
    with contextlib.redirect_stdout(io.StringIO()) as printed, lifted_casts():
        run_block(INFERENCE, **made)
        made = run_block(WITH_AN_OPTIMIZER, *([WITHOUT_ENABLE] if divided else []), **NUMBERS)
        torch.manual_seed(7)  # the order of the texts
        run_block(LOADING, TRAINING + SAVING if divided else TRAINING, **{**made, "given": TEXTS})
    return printed.getvalue(), made["model"]


def check_tutorial(expected: str, weights: Weights) -> None:
    printed, model = run(divided=True)
    assert printed == expected and isinstance(model, oslo_models.GPT2LMHeadModel) and model.is_tensor_parallelized()
    assert not stage_differences(model, "", stage_parameters(model), weights, TOLERANCE)
    torch.manual_seed(dist.get_rank())
    merged = run_block(AT_RANDOM, FROM_A_FILE, MERGING)["model"]
    merged.save_parallelized("./bin_ckpt", merge_checkpoints=True, safe_serialization=False)


def test_tutorial_runs_as_printed(pool: Pool, hub: Any) -> None:
    hub()
    printed, model = run(divided=False)
    assert printed.startswith("I don't want a lot for Christmas.") and len(printed) > 60
    Path("oslo-config.json").write_text('{"model_parallelism": {"enable": true, "tensor_parallel_size": 2}}')
    pool.run(RANKS, check_tutorial, printed, full_parameters(model), env=True)
    files = {path.name for path in Path("parallel_ckpt").iterdir()}
    assert {*(f"pytorch_model_tp_{rank}_pp_0.bin" for rank in range(RANKS)), "config.json"} <= files
    # Where the document lists pytorch_model.bin, transformers now writes safetensors, and so do we.
    for directory, file in (("merged_ckpt", "model.safetensors"), ("bin_ckpt", "pytorch_model.bin")):
        assert {file, "config.json"} <= {path.name for path in Path(directory).iterdir()}
        merged = full_parameters(hf.GPT2LMHeadModel.from_pretrained(directory))
        assert all(torch.allclose(merged[name], value.float()) for name, value in full_parameters(model).items())


# Beyond the tutorial --------------------------------------------------------------------------------------------------


def check_stages(config: Any, batch: dict[str, Any], weights: Weights) -> None:
    """An optimizer made before, tied weights, and stages; all ranks get the first rank's weights."""
    model: Any = reference_model("GPT2LMHeadModel", config, dist.get_rank())
    if dist.get_rank() == 0:
        model.load_state_dict(weights)
    optimizer, given = torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters())
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
    assert oslo_models.initialize(model, {"model_parallelism": sizes}) is model
    assert {id(param) for param in model.parameters()} <= {id(param) for param in given.values()}
    whole_size = sum(value.numel() for value in full_parameters(model).values())
    assert sum(param.numel() for param in given.values()) == whole_size  # nothing of other stages is kept
    twin = model_on_stages("GPT2LMHeadModel", config, weights, 2, 2, micro_batch_size=2)
    for each in (model, twin):
        run_micro_batches(each, batch)
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    expected = stage_parameters(twin)
    assert all(torch.equal(param, expected[name]) for name, param in stage_parameters(model).items())
    with pytest.raises(RuntimeError, match="already sharded"):
        oslo_models.initialize(model, {})
    model.save_parallelized("saved")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.from_parallelized("saved")
    assert all(torch.equal(param, expected[name]) for name, param in stage_parameters(model).items())


def test_tutorial_with_stages_matches_one_process(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from support import pipelines

    monkeypatch.chdir(tmp_path)
    config = pipelines.config("gpt2")
    batch = pipelines.batch("GPT2LMHeadModel", config, seed)
    pool.run(4, check_stages, config, batch, reference_model("GPT2LMHeadModel", config, seed).state_dict())


ARCHITECTURES = {
    "AlbertForMaskedLM": "albert",
    "BartForConditionalGeneration": "bart",
    "BertForMaskedLM": "bert",
    "BlenderbotForConditionalGeneration": "blenderbot",
    "BlenderbotSmallForConditionalGeneration": "blenderbot-small",
    "ElectraForTokenClassification": "electra",
    "GPT2ForSequenceClassification": "gpt2",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "RobertaForSequenceClassification": "roberta",
    "T5ForConditionalGeneration": "t5",
}
"""One class of each OSLO 2 architecture, with a test configuration."""


def check_architectures(cases: dict[str, tuple[Any, Weights, dict[str, Any], torch.Tensor]]) -> None:
    lines = []
    for name, (config, weights, batch, logits) in cases.items():
        model: Any = reference_model(name, config, 0)
        model.load_state_dict(weights)
        made = run_block(WITHOUT_ENABLE, **NUMBERS, model=model.eval())["model"]
        with torch.no_grad(), lifted_casts():
            lines += differences(name, made(**batch).logits, logits, TOLERANCE)
        with pytest.raises(RuntimeError, match="the vocabulary is already sharded over 2 ranks"):
            made.resize_token_embeddings(500)
    assert not lines, "\n".join(lines)


def test_architectures_of_the_tutorial_match_one_process(pool: Pool, seed: int) -> None:
    """Masked language modelling, sequence classification and the rest, "as usual"; no resizing afterwards."""
    cases = {}
    for name, variant in ARCHITECTURES.items():
        config = zoo.config_of(name, zoo.config(variant))
        model, batch = reference_model(name, config, seed).eval(), zoo.batch(name, config, seed)
        with torch.no_grad(), lifted_casts():
            cases[name] = config, model.state_dict(), batch, model(**batch).logits
    pool.run(RANKS, check_architectures, cases)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_parallelism": {"tensor_paralel_size": 2}},
            r"unknown keys \['model_parallelism.tensor_paralel_size'\]",
        ),
        ({"kernel_fussion": {"enable": True}}, r"unknown keys \['kernel_fussion'\]; it may have \['model_parallelism'"),
        ({"kernel_fusion": {"colour": "red"}}, r"unknown keys \['kernel_fusion.colour'\]; kernel_fusion may have"),
        ({"kernel_fusion": {"enable": 1}}, "kernel_fusion.enable must be true or false, got 1"),
        ({"kernel_fusion": {"custom_cuda_kernels": ["Fast"]}}, r"must be a list of \['FusedNoRepeatNGram'"),
        ({"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}}, "a GPT2Model has no RMS norm"),
        ({"activation_checkpointing": {"partitioned_checkpointing": True}}, "needs a tensor_parallel_size of at"),
        ({"activation_checkpointing": {"contiguous_checkpointing": True}}, "needs partitioned_checkpointing"),
        ({"model_parallelism": {"enable": "yes"}}, "enable must be true or false"),
        ({"model_parallelism": {"tensor_parallel_size": 7}}, "more than num_attention_heads=6 of GPT2Config"),
        ({"model_parallelism": 2}, "config must be like"),
    ],
)
def test_unsupported_parallel_configurations_are_rejected(config: dict[str, Any], message: str) -> None:
    model = reference_model("GPT2Model", zoo.config("gpt2"), 0)
    with pytest.raises(ValueError, match=message):
        oslo_models.initialize(model, config)
    assert type(model) is hf.GPT2Model


def test_unsupported_models_are_rejected(tmp_path: Path) -> None:
    class Own(hf.GPT2Model):
        pass

    (tmp_path / "off.json").write_text(json.dumps({"model_parallelism": {"enable": False, "tensor_parallel_size": 2}}))
    model = oslo_models.initialize(hf.GPT2Model(zoo.config("gpt2")), tmp_path / "off.json")
    assert type(model) is oslo_models.GPT2Model and not model.is_model_parallelized()
    with pytest.raises(ValueError, match="oslo_models has no Own"):
        oslo_models.initialize(Own(zoo.config("gpt2")), {})
    with pytest.raises(ValueError, match="a Linear is no model of transformers' kind: pass plan="):
        oslo_models.initialize(torch.nn.Linear(1, 1), {})  # type: ignore[arg-type]
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device"):
        oslo_models.initialize(hf.GPT2Model(zoo.config("gpt2")), {})
    resized = hf.GPT2Model(zoo.config("gpt2"))
    resized.more = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"differs from its configuration in: \['more.bias', 'more.weight'\]"):
        oslo_models.initialize(resized, {})


def test_missing_weights_are_rejected(tmp_path: Path) -> None:
    marian = oslo_models.initialize(hf.MarianMTModel(zoo.config("marian")), {})
    marian.save_parallelized(tmp_path / "marian")
    marian.from_parallelized(tmp_path / "marian")  # without its positions, which are computed
    oslo_models.initialize(hf.GPT2Model(zoo.config("gpt2")), {}).save_parallelized(tmp_path / "base")
    model = oslo_models.initialize(hf.GPT2LMHeadModel(zoo.config("gpt2-untied")), {})
    with pytest.raises(ValueError, match=r"lacks \['lm_head.weight'\] of this GPT2LMHeadModel"):
        model.from_parallelized(tmp_path / "base")
