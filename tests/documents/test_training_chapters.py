"""The training chapters of OSLO's documents run as printed, with the replacements of `documents.ADAPTED`.

The strings below are the code blocks of OSLO's USAGE document ("3D Parallelism", "Activation Checkpointing",
"Additional Parameters"; Apache-2.0); `documents.ADAPTED` lists every replacement in them. A chapter is a sequence of
blocks. Every rank runs them in one namespace, as in a script that a launcher starts. The results have to match
transformers on one process.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers as hf
from torch import Tensor

from support import ROOT
from support.documents import (
    ADAPTED,
    BATCH_SIZE,
    needs_deepspeed,
    reference_training,
    run_block,
    samples,
    steps_of,
    weight_differences,
    without_stages,
)
from support.float64 import lifted_casts
from support.pipelines import Weights, gradient_differences
from support.pool import Pool
from support.ports import free_port
from support.reference import TOLERANCE, differences, full_parameters

# 3D Parallelism: Model Parallelism ------------------------------------------------------------------------------------

FROM_THE_HUB = """
from oslo import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    "gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
)
"""

FROM_A_PATH = """
from oslo import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    "/path/to/model",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
)
"""

FROM_A_CONFIGURATION = """
from oslo import GPT2LMHeadModel, GPT2Config

config = GPT2Config.from_pretrained("gpt2")
# config = GPT2Config.from_json_file("path/to/config")
# config = GPT2Config.from_dict(YOUR_CONFIG_DICT)

model = GPT2LMHeadModel.from_config_with_parallel(
    config,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
)
"""

SAVING = """
model.save_pretrained_with_parallel(
    save_directory="/path/to/model"
)
"""

MERGING = """
model.save_pretrained_with_parallel(
    save_directory="/path/to/merge",
    save_with_merging=True,
)
"""

# 3D Parallelism: Data Parallelism, Training ---------------------------------------------------------------------------

WRAPPING = """
from torch.cuda import current_device
from torch.nn.parallel.distributed import DistributedDataParallel
from oslo import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    pretrained_model_name_or_path="gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
)

model_ddp = DistributedDataParallel(
    model.gpu_modules(),
    process_group=model.mpu.get_data_parallel_group(),
    device_ids=[current_device()],
    output_device=current_device(),
)
"""

LOADING = """
from torch.utils.data import Dataset, DataLoader, DistributedSampler

# Prepare your dataset object
dataset: Dataset = ...

dataloader = DataLoader(
    dataset=dataset,
    num_workers=4,
    batch_size=16,
    shuffle=False,
    sampler=DistributedSampler(
        dataset=dataset,
        num_replicas=model.mpu.get_data_parallel_world_size(),
        rank=model.mpu.get_data_parallel_rank(),
    )
)
"""

OPTIMIZER = """
from torch.optim import Adam

optimizer = Adam(
    params=model.gpu_parameters(),
    lr=3e-5,
    weight_decay=3e-7,
)
"""

WITHOUT_PIPELINE = """
for sample in loader:
    optimizer.zero_grad()

    # forward
    output = model_ddp(
        input_ids=sample["input_ids"].cuda(),
        attention_mask=sample["attention_mask"].cuda(),
        labels=sample["labels"].cuda(),
    )
    # backward
    loss = output.loss
    loss.backward()
    # step
    optimizer.step()
"""

WITH_PIPELINE = """
for sample in loader:
    optimizer.zero_grad()

    # forward
    for micro_output in model_ddp(
        input_ids=sample["input_ids"].cuda(),
        attention_mask=sample["attention_mask"].cuda(),
        labels=sample["labels"].cuda(),
    ):
        # backward
        micro_loss = micro_output.loss
        micro_loss.backward()
    # step
    optimizer.step()
"""

MIXED_PRECISION = """
import torch

scaler = torch.cuda.amp.GradScaler()

for sample in loader:
    optimizer.zero_grad()

    with torch.cuda.amp.autocast():
        # forward
        for micro_output in model_ddp(
            input_ids=sample["input_ids"].cuda(),
            attention_mask=sample["attention_mask"].cuda(),
            labels=sample["labels"].cuda(),
        ):
            # backward
            micro_loss = micro_output.loss
            scaler.scale(micro_loss).backward()
        # step
        scaler.step(optimizer)
        scaler.update()
"""

# Activation Checkpointing, Additional Parameters ----------------------------------------------------------------------

MICRO_BATCH_SIZE = """
from oslo import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    pretrained_model_name_or_path="gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    micro_batch_size=4,
)
"""

RESIZE_TOKEN_EMBEDDINGS = """
from oslo import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    pretrained_model_name_or_path="gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    resize_token_embeddings=len(tokenizer),
)
"""

SEED = """
from oslo import GPT2LMHeadModel

SEED = 42

model = GPT2LMHeadModel.from_pretrained_with_parallel(
    pretrained_model_name_or_path="gpt2",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    seed=SEED,
)
"""


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-5, weight_decay=3e-7)


# 3D Parallelism -------------------------------------------------------------------------------------------------------


def check_model_parallelism(weights: Weights) -> None:
    model = run_block(FROM_THE_HUB, SAVING, MERGING)["model"]
    assert model.is_tensor_parallelized() and model.is_pipeline_parallelized() and model.is_model_parallelized()
    assert not model.is_data_parallelized() and isinstance(model, hf.GPT2LMHeadModel)
    assert not weight_differences(model, weights, 0)
    model.save_pretrained_with_parallel("bin", save_with_merge=True, safe_serialization=False)
    from_split = run_block(FROM_A_PATH)["model"]
    assert not weight_differences(from_split, weights, 0)
    for directory in ("path/to/merge", "bin"):
        merged = run_block(FROM_A_PATH.replace("/path/to/model", directory))["model"]
        assert not weight_differences(merged, weights, 0)
    for maker in ("from_pretrained(", 'from_json_file("gpt2/config.json")', "from_dict(YOUR_CONFIG_DICT)"):
        block = FROM_A_CONFIGURATION
        if maker != "from_pretrained(":
            block = block.replace('from_pretrained("gpt2")', maker)
        made = run_block(block, YOUR_CONFIG_DICT=model.config.to_dict())["model"]
        assert {name: param.shape for name, param in made.named_parameters()} == {
            name: param.shape for name, param in model.named_parameters()
        }
    options = FROM_THE_HUB.replace("2,\n)", "2,\n    torch_dtype=torch.bfloat16, pad_token_id=7)")
    halved = run_block(options, torch=torch)["model"]
    assert halved.dtype == torch.bfloat16 and halved.config.pad_token_id == 7


def test_model_parallelism_chapter_runs_as_printed(pool: Pool, hub: Any) -> None:
    """From the hub, a merged directory, split files and a configuration; both ways of saving."""
    weights = full_parameters(hub())
    pool.run(4, check_model_parallelism, weights, env=True)
    split = {f"pytorch_model_tp={tp}_pp={pp}.bin" for tp in range(2) for pp in range(2)}
    assert {*split, "config.json"} <= {path.name for path in Path("path/to/model").iterdir()}
    # Where the document lists pytorch_model.bin, transformers now writes safetensors, and so do we.
    for directory, file in (("path/to/merge", "model.safetensors"), ("bin", "pytorch_model.bin")):
        assert {file, "config.json"} <= {path.name for path in Path(directory).iterdir()}
        loaded = full_parameters(hf.GPT2LMHeadModel.from_pretrained(directory))
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def check_training(
    loop: str, losses: list[Tensor], gradients: Weights, weights: Weights, tolerance: float = TOLERANCE
) -> None:
    pipelined = loop != WITHOUT_PIPELINE
    wrapping = WRAPPING if pipelined else without_stages(WRAPPING)
    made = run_block(wrapping, LOADING, OPTIMIZER, given=samples())
    model = made["model"]
    assert len(made["dataloader"]) == len(steps_of(model.mpu.get_data_parallel_world_size())) > 1
    seen: list[Tensor] = []

    def watched(**batch: Any) -> Any:
        seen.clear()
        outputs = made["model_ddp"](**batch)
        for output in outputs if pipelined else [outputs]:
            seen.append(output.loss)
            yield output

    call = watched if pipelined else lambda **batch: next(watched(**batch))
    exact = tolerance == TOLERANCE
    with lifted_casts() if exact else contextlib.nullcontext():
        run_block(loop, **{**made, "loader": made["dataloader"], "model_ddp": call})
    loss = torch.stack([value.detach() for value in seen]).sum()
    assert len(seen) == (BATCH_SIZE if pipelined else 1)
    replica, largest = model.mpu.get_data_parallel_rank(), max(grad.abs().max() for grad in gradients.values())
    lines = differences("loss", loss.to(losses[replica].dtype), losses[replica], tolerance)
    lines += gradient_differences(model, gradients, tolerance if exact else tolerance * largest.item())
    if exact:
        lines += weight_differences(model, weights)
    assert not lines, "\n".join(lines)


def test_training_chapter_without_pipeline_matches_one_process(pool: Pool, hub: Any) -> None:
    model = hub().eval()
    pool.run(4, check_training, WITHOUT_PIPELINE, *reference_training(model, adam(model), 2), env=True)


def test_training_chapter_with_pipeline_matches_one_process(pool: Pool, hub: Any) -> None:
    """On all three axes; after the loop, the gradients of its last step remain."""
    model = hub().eval()
    pool.run(8, check_training, WITH_PIPELINE, *reference_training(model, adam(model), 2), env=True)


def test_mixed_precision_chapter_runs_as_printed(pool: Pool, hub: Any) -> None:
    """The step matches float32 to bfloat16 precision; the gradients are unscaled."""
    model = hub(torch.float32).eval()
    pool.run(4, check_training, MIXED_PRECISION, *reference_training(model, adam(model), 1), 0.03, env=True)


def launched(*command: str) -> str:
    """Return the output of a script in which each rank prints its position at the end."""
    Path("YOUR_SCRIPT.py").write_text(
        without_stages(FROM_THE_HUB).replace("from oslo import", ADAPTED["from oslo import"])
        + "import torch\n"
        + "torch.distributed.barrier()\n"
        + "print(f'rank {model.mpu.get_tensor_parallel_rank()} {model.num_parameters()}\\n', end='', flush=True)\n"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    variables = {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **variables, "PATH": binaries}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LAUNCHERS = {
    "torch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"],
    "deepspeed": ["deepspeed", "--num_gpus=2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_commands_of_the_chapter_run(hub: Any, launcher: str, warm_launchers: None) -> None:
    if launcher == "deepspeed":
        needs_deepspeed()
    hub()
    printed = launched(*LAUNCHERS[launcher], f"--master_port={free_port()}", "YOUR_SCRIPT.py")
    assert printed.count("rank 0 ") == printed.count("rank 1 ") == 1, printed


# Activation Checkpointing ---------------------------------------------------------------------------------------------


def check_activation_checkpointing() -> None:
    model, (batch,) = run_block(FROM_THE_HUB)["model"].train(), steps_of(1)[0]
    calls: list[int] = []
    for block in model.transformer.h:
        block.attn.register_forward_pre_hook(lambda *_: calls.append(1))

    def step() -> tuple[int, dict[str, Tensor]]:
        calls.clear()
        model.zero_grad()
        torch.manual_seed(0)
        for micro_output in model(**batch):
            micro_output.loss.backward()
        return len(calls), {name: param.grad.clone() for name, param in model.named_parameters()}

    plain, expected = step()
    run_block("model.gradient_checkpointing_enable()", model=model)
    repeated, gradients = step()
    run_block("model.gradient_checkpointing_disable()", model=model)
    again, _ = step()
    assert (repeated, again) == (2 * plain, plain)
    assert all(torch.equal(gradients[name], grad) for name, grad in expected.items())


def test_activation_checkpointing_chapter_runs_as_printed(pool: Pool, hub: Any) -> None:
    """The backward pass recomputes blocks while checkpointing is enabled."""
    hub(torch.float32)
    pool.run(4, check_activation_checkpointing, env=True)


# Additional Parameters ------------------------------------------------------------------------------------------------


def check_additional_parameters() -> list[float]:
    (batch,) = steps_of(1)[0]
    with torch.no_grad():
        model = run_block(FROM_THE_HUB)["model"]
        assert len(list(model(**batch))) == BATCH_SIZE  # the default is 1
        model = run_block(MICRO_BATCH_SIZE)["model"]
        assert len(list(model(**batch))) == BATCH_SIZE // 4
        model.set_micro_batch_size(1)
        run_block("model.set_micro_batch_size(4)", model=model)
        assert len(list(model(**batch))) == BATCH_SIZE // 4
        resized = run_block(RESIZE_TOKEN_EMBEDDINGS, tokenizer=range(300))["model"]
        assert resized.config.vocab_size == 300
        logits = list(resized(**batch))[-1].logits
        assert not resized.mpu.is_pipeline_last_stage() or logits.shape[-1] == 300
    run_block(SEED)
    return [torch.rand(()).item(), float(numpy.random.rand()), random.random()]


def test_additional_parameters_chapter_runs_as_printed(pool: Pool, hub: Any) -> None:
    hub(torch.float32)
    drawn = pool.run(4, check_additional_parameters, env=True)
    assert drawn == [drawn[0]] * 4
    torch.manual_seed(42)
    expected = [torch.rand(()).item(), numpy.random.RandomState(42).rand(), random.Random(42).random()]
    assert drawn[0] == expected
