"""A call on pipeline stages computes what one process does, or is refused by name: options that few scripts use."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from oslo_models import registry
from oslo_models.sharding.layer_lists import is_layer_list, layer_lists

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pipelines import model_on_stages, run_micro_batches
from support.pool import Pool
from support.reference import full_parameters, reference_model

# Values with one entry per layer --------------------------------------------------------------------------------------

BY_OTHER_NUMBERS = {
    "rope_parameters": "by the type of the layer",
    "block_repeats": "by the pools of Funnel, which allows one stage only",
    "sscp_conv_stride_size": "by the convolution of an audio encoder",
}
"""Values of configurations that forwards index by something else than the number of a layer, and by what."""


def indexed_values(module: Any) -> set[str]:
    """The values of ``self.config`` that methods other than constructors index by a variable, in a modeling file."""
    found = set()
    for cls in [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ClassDef)]:
        for method in [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]:
            for node in ast.walk(method):
                indexed = node.value if isinstance(node, ast.Subscript) else None
                if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.Slice)):
                    continue
                listed = [indexed] if indexed is not None else []
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "enumerate"):
                    listed = list(node.args)
                for each in listed:
                    if isinstance(each, ast.Attribute) and getattr(each.value, "attr", "") == "config":
                        found.add(each.attr)
    return found


@pytest.mark.stacks
def test_every_list_that_forwards_index_by_layer_is_found_in_every_type() -> None:
    unknown = {}
    for model_type in registry.ARCHITECTURES:
        for name in zoo.heads(model_type):
            module = sys.modules[zoo.original(name).__module__]
            for value in indexed_values(module) - BY_OTHER_NUMBERS.keys():
                if not is_layer_list(value):
                    unknown[value] = model_type
    assert not unknown


def test_lists_of_layers_are_told_from_other_lists_of_that_length() -> None:
    config = CONFIG_MAPPING["granite_swa"](num_hidden_layers=2, eos_token_id=[1, 2])
    assert set(layer_lists(config, 2)) == {"layer_types", "layer_rope_theta"}
    assert not layer_lists(config, 3)
    computed = CONFIG_MAPPING["bamba"](num_hidden_layers=3, attn_layer_indices=[1])
    assert layer_lists(computed, 3)["layers_block_type"].count("full_attention") == 1


LISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "theta of each layer": ("granite_swa", {"layer_rope_theta": [500.0, 10000.0]}),
    "no positions on layer 1": ("granite_swa", {"layer_rope_theta": [500.0, 0]}),
    "theta in a mixture": ("granitemoe_swa", {"layer_rope_theta": [500.0, 10000.0]}),
    "types of layers": ("gemma3_text", {}),
    "computed types": ("bamba", {}),
    "layers without positions": ("smollm3", {"no_rope_layers": [0, 1]}),
}


def check_lists(name: str, config: PreTrainedConfig, weights: dict[str, Tensor], loss: Tensor, folder: str) -> None:
    model = model_on_stages(name, config, weights, 1, 2, micro_batch_size=2)
    batch = pipelines.batch(name, config, 3)
    assert abs(run_micro_batches(model, batch) - loss) < 1e-10
    before = config.to_dict()
    for each in (model.config, model.base_model.config):
        lists = layer_lists(each, config.num_hidden_layers)
        assert lists == layer_lists(config, config.num_hidden_layers)
        assert {key: value for key, value in each.to_dict().items() if key in lists} == {
            key: before[key] for key in lists if key in before
        }
    model.config.save_pretrained(f"{folder}/{model.stage.index}")
    assert type(config).from_pretrained(f"{folder}/{model.stage.index}").num_hidden_layers == config.num_hidden_layers


@pytest.mark.stacks
@pytest.mark.parametrize("kind", LISTS)
def test_lists_follow_the_layers_to_their_stage(pool: Pool, tmp_path: Path, kind: str, seed: int) -> None:
    """The configuration that the user sees is that of the full model, which can be saved."""
    variant, changes = LISTS[kind]
    if variant not in registry.ARCHITECTURES:
        pytest.skip(f"transformers {transformers.__version__} has no {variant}")
    name, config = zoo.lm_head(variant), zoo.config(variant, **changes)
    model = reference_model(name, config, seed)
    with lifted_casts():
        loss = model(**pipelines.batch(name, config, 3)).loss.detach()
    pool.run(2, check_lists, name, config, full_parameters(model), loss, str(tmp_path))
