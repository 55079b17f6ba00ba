"""Cohere Compass, its text model: Cohere 2 with rotary positions chosen by the kind of block."""

from transformers import CohereCompassTextConfig
from transformers.models.cohere_compass import modeling_cohere_compass as hf
from transformers.models.cohere_compass.modeling_cohere_compass import CohereCompassPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.cohere2 import Cohere2Parallel


class CohereCompassParallel(Cohere2Parallel):
    """Sharding plan of the Cohere Compass family."""


class CohereCompassTextModel(CohereCompassParallel, hf.CohereCompassTextModel):
    pass


class CohereCompassForCausalLM(CohereCompassParallel, hf.CohereCompassForCausalLM):
    head_plan = LM_HEAD


class CohereCompassTextForSequenceClassification(CohereCompassParallel, hf.CohereCompassTextForSequenceClassification):
    head_plan = SCORE
