"""RoBERTa: BERT with positions that count the padding out."""

from transformers.models.roberta import modeling_roberta as hf

from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Norm, Replicated, Vocab

LM_HEAD: Entries = {
    "lm_head.dense": Replicated(),
    "lm_head.layer_norm": Norm(),
    "lm_head.decoder": Vocab(),
    "lm_head.bias": Vocab(),
}
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForCausalLM": LM_HEAD,
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": {"classifier.dense": Replicated(), "classifier.out_proj": Replicated()},
    "ForMultipleChoice": {"classifier": Replicated()},
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class RobertaParallel(BertParallel):
    """How every model of the RoBERTa family divides."""


globals().update(family(RobertaParallel, hf, HEADS))
