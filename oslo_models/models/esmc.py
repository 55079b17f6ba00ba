"""ESM Cambrian: Llama's blocks for proteins, with bidirectional attention and norms of all queries and keys."""

from typing import ClassVar

from transformers import EsmcConfig
from transformers.models.esmc import modeling_esmc as hf

from oslo_models.layers.entries import Norm, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.olmo2 import Olmo2Parallel


class EsmcParallel(Olmo2Parallel):
    """Sharding plan of the ESM Cambrian family."""

    norms: ClassVar[tuple[str, ...]] = LlamaParallel.norms


class EsmcModel(EsmcParallel, hf.EsmcModel):
    pass


class EsmcForMaskedLM(EsmcParallel, hf.EsmcForMaskedLM):
    head_plan = {"lm_head.dense": Replicated(), "lm_head.layer_norm": Norm(), "lm_head.decoder": VocabParallel()}


class EsmcForSequenceClassification(EsmcParallel, hf.EsmcForSequenceClassification):
    head_plan = CLASSIFIER


class EsmcForTokenClassification(EsmcParallel, hf.EsmcForTokenClassification):
    head_plan = SCORE
