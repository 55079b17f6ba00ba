"""Plan entries of task heads, the modules after the base model, that several architectures share."""

from __future__ import annotations

from oslo_models.layers.entries import Entries, Norm, Replicated, VocabParallel

LM_HEAD: Entries = {"lm_head": VocabParallel()}
SCORE: Entries = {"score": Replicated()}
CLASSIFIER: Entries = {"classifier": Replicated()}
QA_OUTPUTS: Entries = {"qa_outputs": Replicated()}
DENSE_CLASSIFIER: Entries = {"classifier.dense": Replicated(), "classifier.out_proj": Replicated()}
CLASSIFICATION_HEAD: Entries = {"classification_head.dense": Replicated(), "classification_head.out_proj": Replicated()}
SPAN_PREDICTION: Entries = {
    "start_logits.dense": Replicated(),
    "end_logits.dense_0": Replicated(),
    "end_logits.dense_1": Replicated(),
    "answer_class.dense_0": Replicated(),
    "answer_class.dense_1": Replicated(),
    "end_logits.LayerNorm": Norm(),
}
