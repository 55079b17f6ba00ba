"""Reformer: reversible blocks with local and LSH attention; each rank computes the hashes of its local heads."""

from typing import Any

import torch
from torch import Tensor
from transformers import ReformerConfig
from transformers.models.reformer import modeling_reformer as hf

from oslo_models.contracts import require
from oslo_models.distributed.rng import default_generator
from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.sharding.layout import EvenSplit

LM_HEAD: Entries = {"lm_head.decoder": VocabParallel(), "lm_head.bias": VocabParallel()}


class ShardedLSHSelfAttention(hf.LSHSelfAttention):
    """LSH attention that uses its heads' slice of the random rotations that a single process would draw."""

    def _hash_vectors(self, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = getattr(self.query_key, "base_layer", self.query_key)  # an adapter may wrap the layer
        layout, width = layer.layouts["weight"], self.attention_head_size
        ((start, stop),) = layout.ranges[layer.tp.rank]

        def local_rotations(shape: tuple[int, ...], **options: Any) -> Tensor:
            return torch.randn(layout.shape[0] // width, *shape[1:], **options)[start // width : stop // width]

        before = (generator := default_generator(vectors.device)).get_state()
        with FunctionOverrides({torch.randn: local_rotations}):
            hashes = super()._hash_vectors(vectors, *args, **kwargs)
        if self.training:  # the backward pass reuses these hashes and has to draw the same dropout masks
            generator.set_state(before)
        return hashes


class SynchronizedReformerLayer(hf.ReformerLayer):
    """Block that seeds its dropout from the generator that the ranks share, not from the system."""

    def _init_attention_seed(self) -> None:
        self.attention_seed = torch.manual_seed(int(torch.randint(2**62, ()))).initial_seed()

    def _init_feed_forward_seed(self) -> None:
        self.feed_forward_seed = torch.manual_seed(int(torch.randint(2**62, ()))).initial_seed()


class ReformerParallel(ParallelModel):
    """Sharding plan of the Reformer family."""

    zeros = ("lm_head.bias",)

    def _shard(self, *args: Any) -> None:
        require("models.reformer")
        super()._shard(*args)
        classes = {hf.LSHSelfAttention: ShardedLSHSelfAttention, hf.ReformerLayer: SynchronizedReformerLayer}
        for module in self.modules() if self.is_tensor_parallelized() else ():
            module.__class__ = classes.get(type(module), type(module))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_attention_heads, config.attention_head_size)
        projections = [f"attention.self_attention.{name}" for name in ("query", "key", "query_key", "value")]
        block: dict[str, Replicated] = {name: ColumnParallel(heads) for name in projections}
        block["attention.self_attention"] = LocalAttributes({"num_attention_heads": heads.local_count})
        block |= {name: Norm() for name in ("attention.layer_norm", "feed_forward.layer_norm")}
        block |= {"attention.output.dense": RowParallel(heads), "feed_forward.dense.dense": ColumnParallel()}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), "embeddings.position_embeddings": Replicated()},
            blocks={"encoder.layers": {**block, "feed_forward.output.dense": RowParallel()}},
            head={"encoder.layer_norm": Norm()},
            optional=projections,  # blocks that hash share queries and keys
        ).with_rules(single_stage_reason="the backward pass of all its reversible blocks is one autograd function")


class ReformerModel(ReformerParallel, hf.ReformerModel):
    pass


class ReformerModelWithLMHead(ReformerParallel, hf.ReformerModelWithLMHead):
    head_plan = LM_HEAD


class ReformerForMaskedLM(ReformerParallel, hf.ReformerForMaskedLM):
    head_plan = LM_HEAD


class ReformerForSequenceClassification(ReformerParallel, hf.ReformerForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class ReformerForQuestionAnswering(ReformerParallel, hf.ReformerForQuestionAnswering):
    head_plan = QA_OUTPUTS
