"""`ShardedModel`: the interface of models with parallel axes that packages below `oslo_models.modeling` rely on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from oslo_models.sharding.model_protocol import TransformersModel

if TYPE_CHECKING:
    from oslo_models.distributed.mesh import ParallelMesh
    from oslo_models.pipeline.stage import Stage
    from oslo_models.sharding.layout import Layout
    from oslo_models.sharding.plan import Entries, Plan


class ShardedModel(TransformersModel, Protocol):
    """Part of a model on one rank; see `oslo_models.modeling.base.ParallelModel`."""

    mesh: ParallelMesh | Any  # Any in place of None, as in `ParallelModel`
    layouts: dict[str, Layout]
    stage: Stage | None
    pipeline: Any  # a `Pipeline`, whose file imports this one, or None
    micro_batch_size: int
    gather_logits: bool | None
    labels_of: Mapping[str, str]
    loss_inputs: tuple[str, ...]
    loss_is_mean: bool
    loss_needs_full_logits: bool
    share_logits: bool
    share_loss: bool
    schedule: str
    token_division: Any  # a `TokenDivision` or None
    _forward_pre_hooks: dict[int, Any]
    _generates: bool

    def plan(self, config: Any) -> Plan: ...
    def head_entries(self, config: Any) -> Entries: ...
    def attention_groups(self, config: Any) -> int: ...
    def replicated_attentions(self, config: Any) -> Collection[str]: ...
    def joined_attentions(self, config: Any) -> Mapping[str, int]: ...
    def sampled_attentions(self, config: Any) -> Collection[str]: ...
    def _prefix(self) -> str: ...
    def is_tensor_parallelized(self) -> bool: ...
    def is_pipeline_parallelized(self) -> bool: ...
    def is_model_parallelized(self) -> bool: ...
    def save_pretrained_with_parallel(self, *args: Any, **kwargs: Any) -> None: ...
    def _mark_parameters(self) -> None: ...
    def generating(self) -> AbstractContextManager[None]: ...
