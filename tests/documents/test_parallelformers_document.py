"""The document of parallelformers (Apache-2.0) runs as printed, with the replacements of `documents.ADAPTED`."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

import oslo_models

from support import zoo
from support.documents import ADAPTED, run_block
from support.pool import Pool
from support.ports import free_port

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


def test_arguments_of_processes_have_their_documented_meaning(
    pool: Pool, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arguments of the original, in its order; the workers meet at the given address and port."""
    model, port = hub().eval(), free_port()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits.detach()
    oslo_models.parallelize(model, False, 2, None, "127.0.0.1", port, "gloo", None, "spawn", True, 3)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)
    with pytest.raises(OSError, match="in use"):  # the store of the workers listens there
        socket.create_server(("127.0.0.1", port))
    model.cpu()


def test_unsupported_parallelformers_arguments_are_rejected() -> None:
    model = hf.GPT2Model(zoo.config("gpt2"))
    for options, message in (
        ({"num_gpus": 7}, "tensor_parallel_size=7 is more than num_attention_heads=6"),
        ({"num_gpus": 2, "colour": "red"}, r"parallelize has no argument \['colour'\]"),
        ({"num_gpus": 2, "backend": "mpi"}, "backend='mpi': .* workers use 'gloo'"),
        ({"num_gpus": 2, "init_method": "fork"}, "fresh processes"),
        ({"num_gpus": 2, "daemon": False}, "end with the application"),
        ({"num_gpus": 2, "master_port": 0}, "master_port must be an integer of at least 1"),
        ({"num_gpus": 2, "master_addr": 7}, "master_addr must be an address"),
        ({"num_gpus": 2, "fp16": 2}, r"in order, the arguments are parallelize\(model, fp16, num_gpus\)"),
        ({}, "parallelize needs num_gpus="),
        ({"tensor_parallel_size": 1, "deployment": True}, "pass num_gpus= instead"),
    ):
        with pytest.raises(ValueError, match=message), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oslo_models.parallelize(model, **options)
    with pytest.raises(ValueError, match="fp16 must be True or False, got 2"):
        oslo_models.parallelize(model, 2, 2)
    assert type(model) is hf.GPT2Model and len(model.state_dict())


def check_parallelize_of_oslo(ids: torch.Tensor, expected: torch.Tensor) -> None:
    model = hf.GPT2LMHeadModel.from_pretrained("gpt2", dtype=torch.float64)
    assert oslo_models.parallelize(model, tensor_parallel_size=2, micro_batch_size=1, seed=None) is model
    assert model.is_tensor_parallelized() and type(model) is oslo_models.GPT2LMHeadModel
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)


def test_parallelize_of_oslo_shards_an_existing_model(pool: Pool, hub: Any) -> None:
    """`oslo.parallelize(model, tensor_parallel_size=2)` has the same name as parallelformers' function."""
    model, ids = hub().eval(), torch.tensor([[5, 6, 7]])
    pool.run(2, check_parallelize_of_oslo, ids, model(ids).logits.detach())
    resized = oslo_models.parallelize(model, tensor_parallel_size=1, resize_token_embeddings=400)
    assert resized is model and model.config.vocab_size == 400 and model.mesh.tp.size == 1
