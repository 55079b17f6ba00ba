"""The partition of blocks over stages, and the modules of a stage. On the meta device, without processes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oslo_models import registry
from oslo_models.distributed.mesh import Axis
from oslo_models.modeling.apply_plan import apply_plan, layouts_of
from oslo_models.pipeline.partition import partition
from oslo_models.pipeline.split import split_stage
from oslo_models.pipeline.stage import Stage

from support import pipelines, zoo

# partition ------------------------------------------------------------------------------------------------------------

rows = st.lists(st.integers(1, 30), min_size=1, max_size=9)
sides = st.integers(0, 60)


def all_cuts(n: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in combinations(range(1, n), stages - 1):
        ends = (*inner, n)
        yield tuple(zip((0, *ends[:-1]), ends, strict=True))


def weights(costs: list[int], ranges: tuple[tuple[int, int], ...], before: float, after: float) -> list[float]:
    found = [float(sum(costs[start:stop])) for start, stop in ranges]
    found[0] += before
    found[-1] += after
    return found


@given(costs=rows, before=sides, after=sides, data=st.data())
def test_partition_minimizes_the_most_expensive_stage(
    costs: list[int], before: int, after: int, data: st.DataObject
) -> None:
    """Partitions are contiguous and complete, without empty stages; among the cheapest, the most even one is chosen."""
    stages = data.draw(st.integers(1, len(costs)))
    ranges = partition(costs, stages, before, after)
    assert len(ranges) == stages
    assert all(start < stop for start, stop in ranges)
    assert [block for start, stop in ranges for block in range(start, stop)] == list(range(len(costs)))

    def badness(cut: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        own = weights(costs, cut, before, after)
        return max(own), sum(weight**2 for weight in own)

    assert badness(ranges) == min(map(badness, all_cuts(len(costs), stages)))


@given(costs=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40), data=st.data())
def test_partition_of_uneven_block_counts(costs: list[float], data: st.DataObject) -> None:
    """Rounding loses no block, and no stage is heavier than an even share plus one block."""
    stages = data.draw(st.integers(1, len(costs)))
    ranges = partition(costs, stages)
    assert [block for start, stop in ranges for block in range(start, stop)] == list(range(len(costs)))
    heaviest = max(sum(costs[start:stop]) for start, stop in ranges)
    assert heaviest <= (sum(costs) / stages + max(costs)) * (1 + 1e-9)


@given(blocks=st.integers(1, 60), cost=st.floats(0.1, 1e9), data=st.data())
def test_partition_of_equal_blocks_is_even(blocks: int, cost: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    sizes = [stop - start for start, stop in partition([cost] * blocks, stages)]
    assert max(sizes) - min(sizes) <= 1


def test_partition_gives_fewer_blocks_to_a_stage_with_a_heavy_head() -> None:
    assert partition([1] * 8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert partition([1] * 9, 3, before=1, after=2) == ((0, 3), (3, 7), (7, 9))
    assert partition([1] * 3, 3, after=100) == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(("blocks", "stages"), [(0, 1), (1, 2), (3, 8)])
def test_partition_rejects_more_stages_than_blocks(blocks: int, stages: int) -> None:
    with pytest.raises(ValueError, match=rf"{stages} stages cannot share {blocks} blocks"):
        partition([1] * blocks, stages)


def test_partition_of_a_deep_model_is_fast() -> None:
    ranges = partition([float(7 + block % 3) for block in range(128)], 64, before=3, after=40)
    assert len(ranges) == 64


# Modules of a stage ---------------------------------------------------------------------------------------------------


def on_meta(name: str, config: Any) -> Any:
    cls: Any = registry.find(name)
    with torch.device("meta"):
        return cls._from_config(config)


def make_stage(name: str, config: Any, index: int, count: int, **options: Any) -> tuple[Any, Stage]:
    model = on_meta(name, config)
    plan, prefix = model.plan(config), model._prefix()
    layouts = layouts_of(model, plan, prefix, model.head_plan, 1)
    return model, split_stage(model, plan, prefix, model.head_plan, layouts, index, count, **options)


@lru_cache(maxsize=256)
def whole_model(name: str, variant: str) -> Any:
    return on_meta(name, pipelines.config(variant))


def blocks_of(model: Any) -> list[str]:
    """Return the names of all blocks in forward order."""
    plan, prefix = model.plan(model.config), model._prefix()
    return [
        f"{prefix}{stack}.{name}"
        for stack in plan.blocks
        for name, _ in model.get_submodule(prefix + stack).named_children()
    ]


FIRST = r"wte|wpe|shared|embed_tokens|(word|position|token_type)_embeddings|embeddings\.LayerNorm"


def expected_stages(model: Any, name: str, ranges: tuple[tuple[int, int], ...]) -> set[int]:
    """Return the expected stages of a parameter of the full model, from its name alone."""
    blocks = blocks_of(model)

    def stages(stack: str) -> set[int]:
        numbers = [number for number, block in enumerate(blocks) if stack in block]
        return {stage for stage, (start, stop) in enumerate(ranges) for number in numbers if start <= number < stop}

    owner = [number for number, block in enumerate(blocks) if name.startswith(f"{block}.")]
    side = next((side for side in ("encoder", "decoder") if f"{side}." in name and "T5" in type(model).__name__), "")
    if "relative_attention_bias" in name:
        return stages(f"{side}.block")
    if owner:
        return {stage for stage, (start, stop) in enumerate(ranges) if start <= owner[0] < stop}
    if re.search(rf"(^|\.)({FIRST})\.(weight|bias)$", name):
        return {min(stages(side))}
    return {max(stages("encoder" if "encoder.final_layer_norm" in name else ""))}


CASES = [(variant, name) for variant in zoo.FOUNDING for name in zoo.heads(variant)]
CASES += [(variant, zoo.lm_head(variant)) for variant in zoo.VARIANTS if variant not in zoo.FOUNDING]
COUNTS = [2, 3, 4]


@pytest.mark.drawn(22)
@pytest.mark.parametrize(("variant", "name"), CASES, ids=[f"{variant}-{name}" for variant, name in CASES])
def test_each_parameter_is_on_the_stages_that_use_it(variant: str, name: str) -> None:
    """And on no other stage; stages record shared parameters, and the stage that counts each of them."""
    model = whole_model(name, variant)
    tied = model.all_tied_weights_keys
    shapes = {full: tuple(param.shape) for full, param in model.named_parameters(remove_duplicate=False)}
    for count in COUNTS:
        parts = [make_stage(name, model.config, index, count) for index in range(count)]
        ranges = parts[0][1].ranges
        owners: dict[str, set[int]] = {}
        for full in shapes:
            owners.setdefault(tied.get(full, full), set()).update(expected_stages(model, full, ranges))
        for index, (part, stage) in enumerate(parts):
            assert (stage.index, stage.count, stage.ranges) == (index, count, ranges)
            here = {
                stage.full_names.get(key, key): param for key, param in part.named_parameters(remove_duplicate=False)
            }
            assert here.keys() == {full for full in shapes if index in expected_stages(model, full, ranges)}
            assert {full: tuple(param.shape) for full, param in here.items()} == {full: shapes[full] for full in here}
            assert stage.shared_parameters == {root: tuple(sorted(on)) for root, on in owners.items() if len(on) > 1}
            for full, param in here.items():  # tied names are one parameter, and transformers knows that they are tied
                same = {other for other in here if tied.get(other, other) == tied.get(full, full)}
                assert all(here[other] is param for other in same)
            local_names = [local for local, _ in part.named_parameters(remove_duplicate=False)]
            by_root: dict[str, list[str]] = {}
            for local in local_names:
                by_root.setdefault(stage.canonical_name(local), []).append(local)
            sources = {local: part.all_tied_weights_keys.get(local, local) for local in local_names}
            assert all(len({sources[local] for local in group}) == 1 for group in by_root.values())
            assert set(part.all_tied_weights_keys) | set(part.all_tied_weights_keys.values()) <= set(local_names)
        counted = [
            root
            for part, stage in parts
            for root in {
                stage.canonical_name(local) for local, _ in part.named_parameters() if stage.is_first_holder(local)
            }
        ]
        assert sorted(counted) == sorted(owners)


@pytest.mark.parametrize(("variant", "name"), CASES, ids=[f"{variant}-{name}" for variant, name in CASES])
def test_stages_are_balanced_by_parameter_count(variant: str, name: str) -> None:
    """Balance the parameters of blocks, and of the head on the last stage; blocks are numbered from zero."""
    model = whole_model(name, variant)
    blocks = blocks_of(model)

    def size(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters())

    costs = [size(model.get_submodule(block)) for block in blocks]
    after = sum(size(model.get_submodule(key)) for key in model.head_plan if not key.endswith((".weight", ".bias")))
    for count in COUNTS:
        least = min(max(weights(costs, cut, 0, after)) for cut in all_cuts(len(blocks), count))
        for index in range(count):
            part, stage = make_stage(name, model.config, index, count)
            assert max(weights(costs, stage.ranges, 0, after)) == least
            start, stop = stage.ranges[index]
            assert list(blocks_of(part)) == blocks[start:stop]
            for stack in model.plan(model.config).blocks:
                for number, block in enumerate(part.get_submodule(part._prefix() + stack)):
                    seen = {
                        getattr(module, attribute)
                        for module in block.modules()
                        for attribute in ("layer_idx", "layer_id")
                        if getattr(module, attribute, None) is not None
                    }
                    assert seen <= {number}


@pytest.mark.parametrize("variant", ["t5", "t5-gated-untied"])
def test_relative_bias_of_t5_is_in_the_first_block_of_each_stage(variant: str) -> None:
    """The first local block of each stack has the bias, under its local name, and computes with it."""
    name = "T5ForConditionalGeneration"
    model = whole_model(name, variant)
    path = "layer.0.SelfAttention.relative_attention_bias"
    for index in range(4):
        part, stage = make_stage(name, model.config, index, 4)
        expected = {}
        for stack in ("encoder", "decoder"):
            names = [block for block, _ in getattr(part, stack).block.named_children()]
            for block in names:
                attention = getattr(part, stack).block.get_submodule(f"{block}.layer.0.SelfAttention")
                assert attention.has_relative_attention_bias == (block == names[0])
                assert hasattr(attention, "relative_attention_bias") == (block == names[0])
            if names and names[0] != "0":
                expected[f"{stack}.block.{names[0]}.{path}.weight"] = f"{stack}.block.0.{path}.weight"
        assert stage.full_names == expected


def test_blocks_per_stage_determines_the_partition() -> None:
    for index, own in enumerate((["0"], ["1", "2"], ["3"])):
        part, _ = make_stage("GPT2LMHeadModel", pipelines.config("gpt2"), index, 3, blocks_per_stage=(1, 2, 1))
        assert [name for name, _ in part.transformer.h.named_children()] == own


def test_split_stage_rejects_more_stages_than_blocks() -> None:
    message = r"pipeline_parallel_size=5 is more than the 4 blocks of GPT2LMHeadModel; use 1 to 4"
    with pytest.raises(ValueError, match=message):
        make_stage("GPT2LMHeadModel", pipelines.config("gpt2"), 0, 5)


def test_experts_cost_their_computation_for_a_token() -> None:
    """Each of two dense blocks is as wide as two experts. The other two blocks send a token to two of eight experts."""
    changes = {"num_hidden_layers": 4, "mlp_only_layers": [0, 1], "num_experts": 8, "vocab_size": 8}
    config = zoo.config("qwen3_moe", **changes, intermediate_size=64, moe_intermediate_size=32, num_experts_per_tok=2)
    assert make_stage("Qwen3MoeForCausalLM", config, 0, 2)[1].ranges == ((0, 2), (2, 4))


@pytest.mark.parametrize("model_type", ["bamba", "jamba", "mamba2"])
def test_configuration_of_a_stage_can_be_pickled_and_copied(model_type: str) -> None:
    """Transformers derives the types of these blocks; the forward of a stage reads the types of its local blocks."""
    own, full = (zoo.config(model_type, num_hidden_layers=4) for _ in range(2))
    model, stage = make_stage(zoo.main_head(model_type), own, 1, 2)
    with stage.reading_own_layers(model):
        assert own.layer_types != full.layer_types
        assert own.layer_types[:2] == full.layer_types[2:]
    assert own.layer_types == full.layer_types
    for again in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert again.to_dict() == own.to_dict() == full.to_dict()
        assert type(again) is type(full)


@pytest.mark.parametrize("vocab", [50, 150, 200, 250])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_partition_is_equal_on_ranks_with_uneven_shards(variant: str, vocab: int) -> None:
    """With six heads over four ranks, blocks differ in size between ranks; the vocabulary is the same."""
    name = zoo.lm_head(variant)
    config = pipelines.config(variant, vocab_size=vocab)
    for count in (2, 4):
        found = {make_stage(name, config, 0, count)[1].ranges}
        for tp_rank in range(4):
            model = on_meta(name, config)
            plan, prefix = model.plan(config), model._prefix()
            layouts = layouts_of(model, plan, prefix, model.head_plan, 4)
            tp = Axis("tp", tp_rank, (0, 1, 2, 3), None)
            mesh: Any = SimpleNamespace(tp=tp, device=torch.device("cpu"), rank_in=lambda _, rank=tp_rank: rank)
            apply_plan(model, plan, prefix, model.head_plan, mesh, layouts)
            found.add(split_stage(model, plan, prefix, model.head_plan, layouts, 0, count).ranges)
        assert len(found) == 1, found
