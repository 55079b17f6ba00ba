"""MiniCPM-V 4.7: MiniCPM-V 4.6 with positions of height and width."""

from transformers import MiniCPMV4_7Config, MiniCPMV4_7VisionConfig
from transformers.models.minicpmv4_7 import modeling_minicpmv4_7 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.minicpmv4_6 import MiniCPMV4_6Parallel


class MiniCPMV4_7Model(MiniCPMV4_6Parallel, hf.MiniCPMV4_7Model):
    pass


class MiniCPMV4_7ForConditionalGeneration(MiniCPMV4_6Parallel, hf.MiniCPMV4_7ForConditionalGeneration):
    head_plan = LM_HEAD
