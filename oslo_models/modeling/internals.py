"""`ParallelModelInternals`: the members of `ParallelModel` that other files of this package use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from oslo_models.pipeline.sharded_model import ShardedModel

if TYPE_CHECKING:
    from torch import Tensor

    from oslo_models.distributed.input_check import InputCheck
    from oslo_models.distributed.mesh import ParallelMesh
    from oslo_models.distributed.stopping import UserErrors
    from oslo_models.fusion.swap import Fusion
    from oslo_models.layers.token_division import TokenDivision
    from oslo_models.modeling.attention_choice import AttentionChoice
    from oslo_models.modeling.attention_outputs import AttentionOutputs
    from oslo_models.modeling.replaced_layers import ShardedLayers
    from oslo_models.sharding.layout import Layout


class ParallelModelInternals(ShardedModel, Protocol):
    """`ParallelModel` from the view of the functions that implement its methods."""

    attention_outputs: AttentionOutputs | None
    check_inputs: InputCheck | None
    full_layouts: dict[str, Layout]
    has_exact_rollouts: bool
    sharded_layers: ShardedLayers | None
    token_division: TokenDivision | None
    training: bool
    _attention_choice: AttentionChoice | None
    _full_class: type
    _fuses_ngrams_by_default: bool
    _fusion: Fusion | None
    _peft_config: Any
    _user_errors: UserErrors | None

    def adopt_adapters(self, are_new: bool = False) -> None: ...
    def fuse(self) -> Any: ...
    def fuse_ngram_blocking(self, wanted: bool | None) -> None: ...
    def start_mtp_heads(self, loss_weight: float) -> None: ...
    def unfuse(self) -> Any: ...
    def use_lazy_logits(self) -> bool: ...
    def _at(self, phase: str, steps: int = 0) -> None: ...
    def _compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...
    def _copied_config(self) -> Any: ...
    def _invariant_functions(self) -> Any: ...
    def _full_names(self, state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Layout]]: ...
    def _release_caches(self) -> None: ...
    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None: ...
    def _shard(
        self, mesh: ParallelMesh, blocks_per_stage: Sequence[int] | None, sequence_parallel: bool = False
    ) -> None: ...
    def _size(self, axis: str) -> int: ...
    def _start_pipeline(self, are_random: bool) -> None: ...
    def _tied_names(self) -> dict[str, str]: ...
