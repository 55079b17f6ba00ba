"""`ReplicaScheduler`: accelerate's scheduler, with one step per replica."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler


class ReplicaScheduler(AcceleratedScheduler):
    """accelerate's scheduler with a given number of steps per call, in place of one step per process."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool, repeats: int) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)  # one step for each call
        self.repeats = repeats

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, if the optimizer has stepped."""
        steps = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.repeats if steps else 1):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises after this many steps
            if total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)
