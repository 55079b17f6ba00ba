"""Plans that are derived from a model, where none was written for its architecture."""

from oslo_models.modeling.derived.derivation import Derivation, derive_plan
from oslo_models.modeling.derived.report import ShardingReport

__all__ = ["Derivation", "ShardingReport", "derive_plan"]
