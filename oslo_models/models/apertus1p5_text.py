"""Apertus 1.5, its text model: Apertus with an LM head that may lack the last tokens, such as codes of images."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Apertus1p5TextConfig, PreTrainedModel
from transformers.models.apertus1p5 import modeling_apertus1p5 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.apertus import ApertusParallel


class PrunedHead(PreTrainedModel):
    """Loss of a model whose LM head may lack the last tokens."""

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        """The loss with the vocabulary size of the logits, since the forward passes the size of this rank's head."""
        loss: Callable[..., Tensor] = super().loss_function

        def of_full_vocabulary(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
            return loss(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)

        return of_full_vocabulary

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        PreTrainedModel.loss_function.fset(self, value)


class Apertus1p5TextModel(ApertusParallel, hf.Apertus1p5TextModel):
    pass


class Apertus1p5TextForCausalLM(PrunedHead, ApertusParallel, hf.Apertus1p5TextForCausalLM):
    head_plan = LM_HEAD
