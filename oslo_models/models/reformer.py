"""Reformer: reversible blocks that attend to neighbours or, by hashes, to likes; a rank hashes for its own heads."""

from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init
from transformers.models.reformer import modeling_reformer as hf

from oslo_models.layers.functional import Overridden
from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab
from oslo_models.rng import default_generator

LM_HEAD: Entries = {"lm_head.decoder": Vocab(), "lm_head.bias": Vocab()}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ModelWithLMHead": LM_HEAD,
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": {"classifier.dense": Replicated(), "classifier.out_proj": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


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

    def become_part(self, *args: Any) -> None:
        super().become_part(*args)
        own = {hf.LSHSelfAttention: OwnHashes, hf.ReformerLayer: SeededAlike}
        for module in self.modules() if self.is_tensor_parallelized() else ():
            module.__class__ = own.get(type(module), type(module))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.attention_head_size)
        projections = [f"attention.self_attention.{name}" for name in ("query", "key", "query_key", "value")]
        block: dict[str, Replicated] = {name: Column(heads) for name in projections}
        block |= {name: Norm() for name in ("attention.layer_norm", "feed_forward.layer_norm")}
        block |= {"attention.output.dense": Row(heads), "feed_forward.dense.dense": Column()}
        return Plan(
            embed={"embeddings.word_embeddings": Vocab(), "embeddings.position_embeddings": Replicated()},
            blocks={"encoder.layers": {**block, "feed_forward.output.dense": Row()}},
            head={"encoder.layer_norm": Norm()},
            local={"attention.self_attention.num_attention_heads": heads.local_count},
            optional=projections,  # where a block hashes, keys are queries
            one_stage="its backward pass undoes all blocks in one function of autograd",
        )


globals().update(family(ReformerParallel, hf, HEADS))
