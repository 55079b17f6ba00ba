"""Quantisation of a model that is already sharded: right where only weights change, refused where layers are replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from oslo_models import registry

from support import quantized
from support.pool import Pool


def _model(tp: int, pp: int = 1, **sizes: Any) -> Any:
    cls: Any = registry.find("LlamaForCausalLM")
    return cls.from_config_with_parallel(quantized.llama_config(**sizes), tp, pp, seed=1).eval()


class _Wrapper(nn.Module):
    """An adapter around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Any) -> Any:
        return self.base_layer(x)


def _replace_and_wrap(seed: int) -> None:
    model, ids = _model(2), quantized.tokens(seed)
    with torch.no_grad():
        expected = model(ids).logits
        block = model.model.layers[1]
        block.mlp.down_proj = _Wrapper(block.mlp.down_proj)
        assert torch.equal(model(ids).logits, expected)
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
        assert torch.equal(model(ids).logits, expected)
        twin = copy.deepcopy(model)
        plain = nn.Linear(block.mlp.up_proj.in_features, block.mlp.up_proj.out_features, bias=False)
        block.mlp = copy.deepcopy(block.mlp)  # the new parent is noticed too
        block.mlp.up_proj = plain
        with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.up_proj is now a torch\..*Linear"):
            model(ids)
        with pytest.raises(RuntimeError, match="were replaced"):
            model.generate(ids, max_new_tokens=1)
        assert torch.equal(twin(ids).logits, expected)
        del twin.model.layers[1]
        twin(ids)


def test_replaced_layers_are_refused_and_wrapped_ones_are_not(pool: Pool, seed: int) -> None:
    pool.run(2, _replace_and_wrap, seed)


def _refuse_eager_quantization() -> None:
    with pytest.raises(RuntimeError, match="torch.ao.quantization does not quantise sharded layers"):
        torch.ao.quantization.quantize_dynamic(_model(2), {nn.Linear})


def test_eager_quantization_is_refused(pool: Pool) -> None:
    pool.run(2, _refuse_eager_quantization)


def _refuse_float8_training(seed: int) -> None:
    from torchao.float8 import convert_to_float8_training

    model = _model(2, hidden_size=96, intermediate_size=192, head_dim=16)
    with pytest.raises(RuntimeError, match=r"is now a torchao\.float8"):
        convert_to_float8_training(model)(quantized.tokens(seed))


def test_float8_training_is_refused(pool: Pool, seed: int) -> None:
    pytest.importorskip("torchao")
    pool.run(2, _refuse_float8_training, seed)
