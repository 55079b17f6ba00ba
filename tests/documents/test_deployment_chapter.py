"""The chapter "Deployment Launcher" of OSLO's USAGE document (Apache-2.0) runs as printed; see `support.documents`.

`test_serve.py` runs its Flask script, as a script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from support import pipelines, zoo
from support.documents import ADAPTED, run_block, steps_of
from support.faults import gone
from support.float64 import lifted_casts
from support.pipelines import Weights, gradient_differences, model_on_stages
from support.pool import Pool
from support.reference import full_gradients, full_parameters, reference_model

DEPLOYMENT = """
from oslo import GPTNeoForCausalLM

model = GPTNeoForCausalLM.from_pretrained_with_parallel(
    "EleutherAI/gpt-neo-2.7B",
    tensor_parallel_size=4,
    pipeline_parallel_size=1,
    deployment=True
)

# The features such as model.fuse() can be used together !
"""

TRAINING = """
# The following loop is required only for training !

for micro_output in model(
    input_ids=sample["input_ids"].cuda(),
    attention_mask=sample["attention_mask"].cuda(),
    labels=sample["labels"].cuda(),
):
    micro_loss = micro_output.loss
    micro_loss.backward()
"""


def megabytes_of_shared_files(pid: int) -> float:
    """Return the size of a process's mappings below /dev/shm."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            start, _, stop = line.split()[0].partition("-")
            found += int(stop, 16) - int(start, 16)
    return found / 2**20


def test_deployment_chapter_runs_as_printed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Load a merged checkpoint on two tensor-parallel ranks, then its sharded checkpoint on two stages."""
    monkeypatch.chdir(tmp_path)
    whole: Any = reference_model("GPTNeoForCausalLM", zoo.config("gpt_neo"), seed, torch.float32).eval()
    whole.save_pretrained("merged")
    ids = torch.randint(3, whole.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    expected, logits = whole.generate(**batch, **options), whole(**batch).logits.detach()
    for name, tp, pp in (("merged", 2, 1), ("split", 1, 2)):
        monkeypatch.setitem(ADAPTED, "EleutherAI/gpt-neo-2.7B", name)
        sizes = DEPLOYMENT.replace("tensor_parallel_size=4", f"tensor_parallel_size={tp}")
        block = sizes.replace("pipeline_parallel_size=1", f"pipeline_parallel_size={pp}")
        model = run_block(block)["model"]
        pids = model._engine.pids
        assert model.fuse() is model and "yes" in str(model.fusion_report())
        assert torch.equal(model.generate(**batch, **options), expected)
        torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-4, atol=1e-4)  # no loop over micro-batches
        for memory in (model.memory_allocated(), model.memory_reserved(), model.memory_cached()):
            assert set(memory) == {"cpu:0", "cpu:1"} and all(value > 0 for value in memory.values())
        assert len(pids) == 2 and all(megabytes_of_shared_files(pid) < 1 for pid in pids)
        if name == "merged":
            model.save_pretrained_with_parallel("split")
        plain = model.cpu()
        assert gone(pids) and isinstance(plain, hf.GPTNeoForCausalLM)
        weights = plain.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in whole.state_dict().items())


def check_loop(config: Any, weights: Weights, gradients: Weights) -> None:
    model = model_on_stages("GPT2LMHeadModel", config, weights, 1, 2, micro_batch_size=4, share_loss=True)
    with lifted_casts():
        made = run_block(TRAINING, model=model, sample=steps_of(1)[0][0])
    assert made["micro_loss"].item() > 0  # on every stage
    lines = gradient_differences(model, gradients)
    assert not lines, "\n".join(lines)


def test_training_loop_of_the_chapter_matches_one_process(pool: Pool, hub: Any) -> None:
    model = hub()
    pipelines.run_reference_step(model, steps_of(1)[0])
    gradients = {name: grad for name, grad in full_gradients(model).items() if grad is not None}
    pool.run(2, check_loop, model.config, full_parameters(model), gradients)
