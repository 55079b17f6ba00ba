"""The plan and the entries that architectures share, for one import. Each entry stands beside its layer."""

from oslo_models.layers import (
    channels,  # noqa: F401  convolutions with the entries of linear layers
    divided_tower,  # noqa: F401  its entry is data of the plan alone
)
from oslo_models.layers.experts import Experts
from oslo_models.layers.linear import ColumnParallel, InnerRowParallel, RowParallel
from oslo_models.layers.local_attributes import LocalAttributes
from oslo_models.layers.norm import GroupWidthNorm, HeadNorm, WidthNorm
from oslo_models.layers.state_space import StateSpace
from oslo_models.layers.summed import SharedOutput, SummedModule
from oslo_models.layers.vocab_parallel import VocabParallel
from oslo_models.sharding.entry import Entries, LocalValue, Norm, Replicated
from oslo_models.sharding.pipeline_rules import PipelineRules
from oslo_models.sharding.plan import Plan

__all__ = [
    "ColumnParallel",
    "Entries",
    "Experts",
    "GroupWidthNorm",
    "HeadNorm",
    "InnerRowParallel",
    "LocalAttributes",
    "LocalValue",
    "Norm",
    "PipelineRules",
    "Plan",
    "Replicated",
    "RowParallel",
    "SharedOutput",
    "StateSpace",
    "SummedModule",
    "VocabParallel",
    "WidthNorm",
]
