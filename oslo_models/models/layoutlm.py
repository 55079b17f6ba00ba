"""LayoutLM: BERT that also embeds where on the page a word is."""

from transformers.models.layoutlm import modeling_layoutlm as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Replicated

HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": {"classifier": Replicated()},
    "ForTokenClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}


class LayoutLMParallel(BertParallel):
    """How every model of the LayoutLM family divides."""

    tables = ("position", "x_position", "y_position", "h_position", "w_position", "token_type")


globals().update(family(LayoutLMParallel, hf, HEADS))
