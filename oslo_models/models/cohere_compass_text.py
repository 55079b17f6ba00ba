"""Cohere Compass, its text model: Cohere 2 with rotary positions chosen by the kind of block."""

from transformers import CohereCompassTextConfig
from transformers.models.cohere_compass import modeling_cohere_compass as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.cohere2 import Cohere2Parallel


class CohereCompassTextModel(Cohere2Parallel, hf.CohereCompassTextModel):
    pass


class CohereCompassForCausalLM(Cohere2Parallel, hf.CohereCompassForCausalLM):
    head_plan = LM_HEAD


class CohereCompassTextForSequenceClassification(Cohere2Parallel, hf.CohereCompassTextForSequenceClassification):
    head_plan = SCORE
