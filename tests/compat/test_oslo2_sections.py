"""The sections `activation_checkpointing` and `kernel_fusion` of OSLO 2's configuration, and its `tp_mapping`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_layers import GradientCheckpointingLayer

import oslo_models
from oslo_models.compat import oslo2_sections

from support import token_counts, zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, full_gradients, reference_model, shard_differences
from support.token_divisions import counting_exchanges, is_divided

CHECKPOINTING = ("partitioned_checkpointing", "contiguous_checkpointing", "cpu_checkpointing")


def check_checkpointed_step(
    variant: str, seed: int, partitioned: bool, sizes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, int]:
    """Check gradients against one process; return the numbers of partitioned hidden states and of blocks."""
    name = zoo.lm_head(variant)
    model = reference_model(name, zoo.config(variant), seed)
    batch, kept = zoo.batch(name, model.config, seed), []
    with lifted_casts():
        model(**batch).loss.backward()
    expected = full_gradients(model)
    other: Any = reference_model(name, zoo.config(variant), seed).eval()
    section = {"enable": True, **(dict.fromkeys(CHECKPOINTING, True) if partitioned else {})}
    config = {"model_parallelism": {"tensor_parallel_size": 2, **sizes}, "activation_checkpointing": section}
    keep = oslo2_sections._PartitionedCheckpoint._keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oslo2_sections._PartitionedCheckpoint, "_keep", lambda *a: kept.append(keep(*a)) or kept[-1])
        oslo_models.initialize(other, config)
        assert other.training
        with lifted_casts(), counting_exchanges() as exchanges, token_counts.counting() as counts:
            other(**batch).loss.backward()
    own = {key: param.grad for key, param in other.named_parameters(remove_duplicate=False)}
    lines = shard_differences(other, "gradient of", own, expected, TOLERANCE)
    assert not lines, "\n".join(lines)
    assert all(own.numel() == parts[other.mesh.tp.rank] < shape.numel() for own, shape, _, parts in kept)
    assert bool(exchanges["exchange"]) == ("context_parallel_size" in sizes)
    assert is_divided(counts) == ("sequence_parallel" in sizes)
    return len(kept), sum(isinstance(module, GradientCheckpointingLayer) for module in other.modules())


@pytest.mark.stacks
@pytest.mark.parametrize(("variant", "partitioned"), [("gpt2", True), ("gpt2", False), ("bart", True)])
def test_activation_checkpointing_gives_the_gradients_of_one_process(
    pool: Pool, variant: str, partitioned: bool, seed: int
) -> None:
    for kept, blocks in pool.run(2, check_checkpointed_step, variant, seed, partitioned):
        assert blocks > 1 and kept == (blocks if partitioned else 0)


@pytest.mark.stacks
@pytest.mark.parametrize(
    ("partitioned", "sizes"),
    [
        (False, {"sequence_parallel": True}),
        (False, {"context_parallel_size": 2, "tensor_parallel_size": 1}),
        (True, {"context_parallel_size": 2}),
    ],
)
def test_divided_tokens_give_the_gradients_of_one_process(
    pool: Pool, partitioned: bool, sizes: dict[str, Any], seed: int
) -> None:
    ranks = 4 if partitioned else 2
    for kept, blocks in pool.run(ranks, check_checkpointed_step, "gpt2", seed, partitioned, sizes):
        assert kept == (blocks if partitioned else 0)


def test_kernel_fusion_fuses(seed: int) -> None:
    model = reference_model("GPT2LMHeadModel", zoo.config("gpt2"), seed).eval()
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 8, "no_repeat_ngram_size": 2, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    names = vars(model).keys()
    kernels = {"memory_efficient_fusion": False, "custom_cuda_kernels": ["FusedNoRepeatNGram"]}
    oslo_models.initialize(model, {"kernel_fusion": {"enable": True, **kernels}})
    assert model._fusion is not None and torch.equal(model.generate(prompt, **options), expected)
    assert model._fuses_ngrams
    model.deparallelize()
    assert type(model) is hf.GPT2LMHeadModel and vars(model).keys() == names
    oslo_models.initialize(model, {"kernel_fusion": {"enable": False}, "activation_checkpointing": {"enable": False}})
    assert model._fusion is None and not model.training
    t5 = reference_model("T5ForConditionalGeneration", zoo.config("t5"), seed)
    oslo_models.initialize(t5, {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}})
    assert t5._fusion is not None


@dataclass
class Column:
    name: str | tuple[str, ...]


class Row(Column):
    pass


class Update(Column):
    pass


def initialize_by_mapping(seed: int) -> None:
    """On each rank: a class without a plan in the library."""
    sizes = {"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6}
    torch.manual_seed(seed)
    model = hf.AlignTextModel(hf.AlignTextConfig(**sizes, vocab_size=50, max_position_embeddings=32)).double().eval()
    ids = torch.randint(3, 50, (2, 7))
    expected = model(ids).last_hidden_state
    mapping = {"AlignPreTrainedModel": [Column(("query", "key", "value")), Row("output.dense")]}
    oslo_models.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}}, tp_mapping=mapping)
    assert torch.allclose(model(ids).last_hidden_state, expected, rtol=0, atol=1e-10)
    kinds = {row.name.rpartition("layer.0.")[2]: row.sharding for row in model.sharding_report()}
    assert (kinds["attention.self.query"], kinds["attention.output.dense"]) == ("columns", "rows"), kinds


def test_tp_mapping_of_a_class_that_the_zoo_lacks(pool: Pool, seed: int) -> None:
    pool.run(2, initialize_by_mapping, seed)


def test_tp_mapping_names_layers_of_the_model(seed: int) -> None:
    def of(entries: Any, key: Any = hf.GPT2PreTrainedModel) -> Any:
        model = hf.GPT2LMHeadModel(zoo.config("gpt2"))
        return oslo_models.initialize(model, {}, tp_mapping={key: entries})

    own = [Column(("attn.c_attn", "c_fc")), Row("c_proj"), Update("num_heads")]
    assert isinstance(of(own), oslo_models.GPT2LMHeadModel)
    assert isinstance(of(own, "GPT2PreTrainedModel"), oslo_models.GPT2LMHeadModel)
    for entries, key, message in (
        ([Column("q_proj")], hf.GPT2PreTrainedModel, "tp_mapping names 'q_proj', which GPT2LMHeadModel lacks"),
        (own, hf.BertPreTrainedModel, "tp_mapping has no entry for GPT2LMHeadModel"),
    ):
        with pytest.raises(ValueError, match=message):
            of(entries, key)
    with pytest.raises(ValueError, match="tp_mapping must be a dictionary"):
        oslo_models.initialize(hf.GPT2LMHeadModel(zoo.config("gpt2")), {}, tp_mapping=own)  # type: ignore[arg-type]
