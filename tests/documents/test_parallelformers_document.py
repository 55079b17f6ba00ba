"""The document of parallelformers (Apache-2.0) runs as printed, with the replacements of `documents.ADAPTED`."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import pytest
import torch
import transformers as hf

import oslo_models
from oslo_models.deploy import options as serving

from support import deployment, zoo
from support.documents import ADAPTED, run_block
from support.pool import Pool

CREATION = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("EleutherAI/gpt-neo-2.7B")
tokenizer = AutoTokenizer.from_pretrained("EleutherAI/gpt-neo-2.7B")
"""

PARALLELIZATION = """
from parallelformers import parallelize

parallelize(model, num_gpus=2, fp16=True, verbose='detail')
"""

INFERENCE = """
inputs = tokenizer("Parallelformers is", return_tensors="pt")

outputs = model.generate(
    **inputs,
    num_beams=5,
    no_repeat_ngram_size=4,
    max_length=15,
)

print(f"Output: {tokenizer.batch_decode(outputs)[0]}")
"""

STATES = """
model.memory_allocated()
model.memory_reserved()
model.memory_chached()
"""

ON_THE_GPU = """
model.cuda()

print(torch.cuda.memory_summary(0))
print(torch.cuda.memory_summary(1))
"""

ON_THE_CPU = """
model.cpu()

print(torch.cuda.memory_summary(0))
print(torch.cuda.memory_summary(1))
"""
MOVED = {  # without a GPU, weights move to the CPU both times
    "model.cuda()": 'model.to("cpu")',
    "print(torch.cuda.memory_summary(0))": "print(sum(param.numel() for param in model.parameters()))",
    "print(torch.cuda.memory_summary(1))": "",
}


def test_parallelformers_document_runs_as_printed(pool: Pool, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start(1)  # and with it the server that workers are forked from
    monkeypatch.setattr(serving, "ProcessExecutor", deployment.ForkedExecutor)
    half, variables = hub(torch.float32).half().eval(), dict(os.environ)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = run_block(CREATION, PARALLELIZATION, INFERENCE, STATES)
    model, inputs = made["model"], made["inputs"]
    assert "cpu:1:\n" in printed.getvalue() and "Output: Parallelformers is" in printed.getvalue()
    assert isinstance(model, oslo_models.GPT2LMHeadModel) and model.dtype == torch.float16
    torch.testing.assert_close(model(**inputs).logits, half(**inputs).logits, rtol=0.02, atol=0.02)
    assert dict(os.environ) == variables
    pids = model._engine.pids
    model.restart()
    assert model._engine.pids != pids
    torch.testing.assert_close(model(**inputs).logits, half(**inputs).logits, rtol=0.02, atol=0.02)
    for original, adapted in MOVED.items():
        monkeypatch.setitem(ADAPTED, original, adapted)
    monkeypatch.delitem(ADAPTED, ".cuda()")
    for block in (ON_THE_GPU, ON_THE_CPU):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_block(block, model=model)
        assert int(printed.getvalue()) == half.num_parameters()
        assert not hasattr(model, "health") and torch.equal(model(**inputs).logits, half(**inputs).logits)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in half.state_dict().items())


def test_unsupported_parallelformers_arguments_are_rejected() -> None:
    model = hf.GPT2Model(zoo.config("gpt2"))
    with pytest.raises(ValueError, match="tensor_parallel_size=7 is more than num_attention_heads=6"):
        oslo_models.parallelize(model, num_gpus=7)
    with pytest.raises(ValueError, match=r"parallelize has no arguments \['master_port'\]"):
        oslo_models.parallelize(model, num_gpus=2, master_port=29500)
    assert type(model) is hf.GPT2Model and len(model.state_dict())
