"""Reformer: reversible blocks that attend to neighbours or, by hashes, to likes; a rank hashes for its own heads."""

from typing import Any

import torch
from torch import Tensor
from transformers import ReformerConfig
from transformers import initialization as init
from transformers.models.reformer import modeling_reformer as hf

from oslo_models.distributed.rng import default_generator
from oslo_models.layers.custom_layers import Overridden
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel

LM_HEAD: Entries = {"lm_head.decoder": VocabParallel(), "lm_head.bias": VocabParallel()}


class OwnHashes(hf.LSHSelfAttention):
    """Attention that hashes for its heads by their part of the rotations which one process draws for all."""

    def _hash_vectors(self, vectors: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout, width = self.query_key.layouts["weight"], self.attention_head_size
        ((start, stop),) = layout.ranges[self.query_key.tp.rank]

        def own(shape: tuple[int, ...], **options: Any) -> Tensor:
            return torch.randn(layout.shape[0] // width, *shape[1:], **options)[start // width : stop // width]

        before = (generator := default_generator(vectors.device)).get_state()
        with Overridden({torch.randn: own}):
            hashes = super()._hash_vectors(vectors, *args, **kwargs)
        if self.training:  # so that dropouts draw alike in the backward pass, which takes these hashes
            generator.set_state(before)
        return hashes


class SeededAlike(hf.ReformerLayer):
    """A block that takes the seeds of its dropouts from the generator that ranks keep in step, not from the system."""

    def _init_attention_seed(self) -> None:
        self.attention_seed = torch.manual_seed(int(torch.randint(2**62, ()))).initial_seed()

    def _init_feed_forward_seed(self) -> None:
        self.feed_forward_seed = torch.manual_seed(int(torch.randint(2**62, ()))).initial_seed()


class ReformerParallel(ParallelModel):
    """How every model of the Reformer family divides."""

    def initialize_constructed(self) -> None:
        if hasattr(self, "lm_head"):
            init.zeros_(self.lm_head.bias)

    def shard_(self, *args: Any) -> None:
        super().shard_(*args)
        own = {hf.LSHSelfAttention: OwnHashes, hf.ReformerLayer: SeededAlike}
        for module in self.modules() if self.is_tensor_parallelized() else ():
            module.__class__ = own.get(type(module), type(module))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_attention_heads, config.attention_head_size)
        projections = [f"attention.self_attention.{name}" for name in ("query", "key", "query_key", "value")]
        block: dict[str, Replicated] = {name: ColumnParallel(heads) for name in projections}
        block |= {name: Norm() for name in ("attention.layer_norm", "feed_forward.layer_norm")}
        block |= {"attention.output.dense": RowParallel(heads), "feed_forward.dense.dense": ColumnParallel()}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), "embeddings.position_embeddings": Replicated()},
            blocks={"encoder.layers": {**block, "feed_forward.output.dense": RowParallel()}},
            head={"encoder.layer_norm": Norm()},
            local={"attention.self_attention.num_attention_heads": heads.local_count},
            optional=projections,  # where a block hashes, keys are queries
            one_stage="its backward pass undoes all blocks in one function of autograd",
        )


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
