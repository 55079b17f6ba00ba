"""The last residual of a block also computes the next block's norm, unless an operation is in between."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from oslo_models.fusion import norms

from support import zoo
from support.fusion import LOGITS, as_on_a_gpu
from support.reference import differences, parallel_model, reference_step, step_differences


def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A hook that changes hidden states in place."""
    with torch.no_grad():
        output.mul_(2)
    return output


@pytest.mark.parametrize("between", ["nothing", "hook of the norm", "hook of the block", "checkpointing", "inference"])
def test_norms_ahead_of_their_call_match(between: str, seed: int) -> None:
    step = reference_step(zoo.lm_head("llama"), zoo.config("llama"), seed)
    model, plain = (parallel_model(step.name, step.config, step.weights, 1) for _ in range(2))
    as_on_a_gpu(model)
    for each in (model, plain):
        block = each.model.layers[0]
        if between == "hook of the norm":
            each.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: output * 1)
        elif between == "hook of the block":
            block.register_forward_hook(scaled)
        elif between == "checkpointing":
            each.gradient_checkpointing_enable()
    with mock.patch.object(norms, "add_norm", wraps=norms.add_norm) as called:
        if between in ("nothing", "hook of the norm", "checkpointing"):
            assert not step_differences(model, step, without=LOGITS)
        else:
            with torch.inference_mode(between == "inference"), torch.set_grad_enabled(False):
                found, expected = (each(step.batch["input_ids"]).logits for each in (model, plain))
            assert not differences("logits", found, expected, 1e-5)
    with_residual = sum(call.args[1] is not None for call in called.call_args_list)
    wanted = {"nothing": 4, "hook of the norm": 3, "checkpointing": 4, "hook of the block": 4, "inference": 2}
    assert with_residual == wanted[between], with_residual


def test_copies_of_hidden_states_go_without_the_norm() -> None:
    x, norm = torch.randn(2, 4), norms.FusedRMSNorm()
    norm.weight = nn.Parameter(torch.ones(4))
    norm.remember(x, torch.zeros(2, 4))
    assert norm(x) is x._oslo_norm.normed
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(copied, x) and copied._oslo_norm.norm is None
    x.add_(1)
    norm.variance_epsilon = 1e-5
    assert norm(x).abs().sum() > 0
