"""MiniCPM3: Llama with multi-head latent attention, and multipliers of embeddings, residuals and logits."""

from transformers import MiniCPM3Config
from transformers.models.minicpm3 import modeling_minicpm3 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.youtu import YoutuParallel


class MiniCPM3Model(YoutuParallel, hf.MiniCPM3Model):
    pass


class MiniCPM3ForCausalLM(YoutuParallel, hf.MiniCPM3ForCausalLM):
    head_plan = LM_HEAD


class MiniCPM3ForSequenceClassification(YoutuParallel, hf.MiniCPM3ForSequenceClassification):
    head_plan = SCORE
