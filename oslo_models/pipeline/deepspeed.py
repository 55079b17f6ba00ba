"""Makes a DeepSpeed engine reduce gradients only when the pipeline has completed them.

The engine reduces gradients over the replicas in every ``engine.backward``. In a loop over micro-batches, gradients are
complete only after the last micro-batch. Gradients of tied weights must also be summed over the stages before.
"""

from __future__ import annotations

from contextlib import suppress
from types import CellType
from typing import Any

from oslo_models.pipeline.sharded_model import ShardedModel


class DeepSpeedAdapter:
    """Tells the DeepSpeed engine that wraps a pipeline's model when gradients are complete.

    Args:
        engine: a ``deepspeed.DeepSpeedEngine``.

    Raises:
        ValueError: the configuration of the engine does not work with pipeline stages.
    """

    def __init__(self, engine: Any) -> None:
        _check(engine)
        self._engine = engine
        # With "managed_gradient_accumulation": false, the engine reduces no gradients before `engine.step`.
        self._is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
        # The boundary set by the user. It is usually unset, and the engine counts its steps.
        self._boundary = engine._is_gradient_accumulation_boundary

    @classmethod
    def find(cls, model: ShardedModel) -> DeepSpeedAdapter | None:
        """Find the engine that wraps the model by its registered hook. Returns ``None`` without an engine.

        Raises:
            ValueError: the configuration of the engine does not work with pipeline stages.
            RuntimeError: ZeRO manages the parameters of the model, but the hook is missing.
        """
        for hook in reversed(model._forward_pre_hooks.values()):
            for cell in getattr(hook, "__closure__", None) or ():
                content = _content(cell)
                if getattr(content, "module", None) is model and hasattr(content, "zero_optimization_stage"):
                    return cls(content)
        marks = ("_hp_mapping", "ds_id")  # set by ZeRO stages 1 and 2, and by stage 3
        if any(getattr(param, mark, None) is not None for param in model.parameters() for mark in marks):
            raise RuntimeError(
                "ZeRO has the parameters of this model, but no engine of a known version of DeepSpeed wraps it, so the "
                "gradients of micro-batches would get lost; install the version of DeepSpeed that the extra "
                '"oslo-models[deepspeed]" asks for'
            )
        return None

    def set_boundary(self, is_last: bool) -> None:
        """Tell the engine whether the next backward completes the gradients."""
        if self._is_managed:
            self._engine.set_gradient_accumulation_boundary(self._boundary if is_last else False)


def _check(engine: Any) -> None:
    """Raise ``ValueError`` for settings that would lose gradients or make DeepSpeed fail."""
    stage, (dtype, accumulated) = int(engine.zero_optimization_stage()), engine.get_data_types()
    unsupported = {
        f"ZeRO stage {stage}": (
            stage >= 2,
            "ZeRO stage 2 and 3 reduce and free gradients after every micro-batch, before the gradients of the batch "
            'are complete and summed over the stages; set "zero_optimization": {"stage": 1} or 0, or '
            "pipeline_parallel_size=1",
        ),
        "overlap_comm": (
            stage == 1 and engine.zero_overlap_comm(),
            'gradients would be reduced before they are summed over the stages; set "overlap_comm": false',
        ),
        "grad_accum_dtype": (
            dtype != accumulated,
            f"the optimizer would move gradients of {dtype} into buffers of {accumulated} before they are summed over "
            'the stages; leave it out of "data_types"',
        ),
        "wall_clock_breakdown": (
            engine.wall_clock_breakdown(),
            "the engine's timers expect one forward for each backward; set it to false",
        ),
    }
    for setting, (applies, reason) in unsupported.items():
        if applies:
            raise ValueError(f"{setting} of DeepSpeed cannot be used with pipeline parallelism: {reason}")


def _content(cell: CellType) -> Any:
    with suppress(ValueError):  # an empty cell
        return cell.cell_contents
    return None
