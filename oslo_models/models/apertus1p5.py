"""Apertus 1.5: the text model with codes of images and sounds. Every rank holds the models that make codes."""

from transformers import Apertus1p5Config
from transformers.models.apertus1p5 import modeling_apertus1p5 as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.apertus import ApertusBlocksParallel, ApertusParallel
from oslo_models.models.apertus1p5_text import PrunedHead
from oslo_models.models.llava import LlavaParallel


class Apertus1p5Parallel(LlavaParallel):
    """Sharding plan of the Apertus 1.5 family with codes of images and sounds."""

    towers = {}
    projectors = dict.fromkeys(("vision_tokenizer", "audio_tokenizer"), Replicated())
    classes = {"language_model": ApertusBlocksParallel}
    _initialize_constructed = ApertusParallel._initialize_constructed


class Apertus1p5Model(Apertus1p5Parallel, hf.Apertus1p5Model):
    pass


class Apertus1p5ForConditionalGeneration(PrunedHead, Apertus1p5Parallel, hf.Apertus1p5ForConditionalGeneration):
    head_plan = LM_HEAD
