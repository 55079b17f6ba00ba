"""Heads that many transformers classes share: the modules after the blocks, and how each is sharded."""

from __future__ import annotations

from oslo_models.sharding.plan import Entries, Replicated, VocabParallel

LM_HEAD: Entries = {"lm_head": VocabParallel()}
SCORE: Entries = {"score": Replicated()}
CLASSIFIER: Entries = {"classifier": Replicated()}
QA_OUTPUTS: Entries = {"qa_outputs": Replicated()}
DENSE_CLASSIFIER: Entries = {"classifier.dense": Replicated(), "classifier.out_proj": Replicated()}
CLASSIFICATION_HEAD: Entries = {"classification_head.dense": Replicated(), "classification_head.out_proj": Replicated()}
