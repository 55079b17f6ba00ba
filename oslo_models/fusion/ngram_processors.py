"""n-gram blocking in ``generate``: transformers' logits processors, computed by `oslo_kernels.ngrams`."""

from __future__ import annotations

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from oslo_kernels.ngrams import block_repeats_


class FusedNoRepeatNGram(NoRepeatNGramLogitsProcessor):
    """Ban tokens that would repeat an n-gram of the same row.

    Args:
        in_place: change the given scores instead of a copy, for callers that no longer need them.
    """

    def __init__(self, ngram_size: int, in_place: bool = False) -> None:
        super().__init__(ngram_size)
        self.in_place = in_place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return block_repeats_(scores if self.in_place else scores.clone(), input_ids, self.ngram_size)


class FusedEncoderNoRepeatNGram(EncoderNoRepeatNGramLogitsProcessor):
    """Ban tokens that would repeat an n-gram of the prompt, or of the encoder's tokens."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Tensor, in_place: bool = False) -> None:
        # does not call transformers' __init__, which builds dictionaries of all n-grams
        self.ngram_size, self.in_place = encoder_ngram_size, in_place
        self.encoder_input_ids = encoder_input_ids.reshape(-1, encoder_input_ids.shape[-1])
        self.batch_size = len(self.encoder_input_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores if self.in_place else scores.clone()
        return block_repeats_(scores, input_ids, self.ngram_size, self.encoder_input_ids)


def fuse_processors(processors: LogitsProcessorList, encoder_ids: Tensor | None, in_place: bool) -> LogitsProcessorList:
    """Return the processors in the same order, with fused n-gram processors.

    Args:
        encoder_ids: the tokens of the prompt or of the encoder, ``[batch, length]``.
        in_place: whether processors may change the given scores.
    """
    fused = LogitsProcessorList()
    for processor in processors:
        if type(processor) is NoRepeatNGramLogitsProcessor:
            processor = FusedNoRepeatNGram(processor.ngram_size, in_place)
        elif type(processor) is EncoderNoRepeatNGramLogitsProcessor and encoder_ids is not None:
            processor = FusedEncoderNoRepeatNGram(processor.ngram_size, encoder_ids, in_place)
        fused.append(processor)
    return fused
