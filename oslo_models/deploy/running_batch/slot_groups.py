"""Groups of slots: each pipeline stage computes a step of another group at the same time.

The next step of a group needs the tokens of its last step, which the last stage draws. With one group, all other stages
would wait for them. Groups are the micro-batches of pipeline parallelism (GPipe, Huang et al., 2019), for decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.speculation import Drafts
from oslo_models.deploy.running_batch.step import Step


def limits_of_groups(limits: BatchLimits, stages: int) -> list[BatchLimits]:
    """Return the limits of each group: one group per stage, at most one per row. The rows are divided evenly."""
    count = min(stages, limits.rows)
    return [replace(limits, rows=limits.rows // count + (group < limits.rows % count)) for group in range(count)]


class SlotGroups:
    """Schedules several groups. A row stays in its group.

    Args:
        limits: of each group.
        drafts: of each group.
    """

    def __init__(self, limits: Sequence[BatchLimits], drafts: Sequence[Drafts]) -> None:
        self._schedulers = [
            Scheduler.of(own, Prefixes(own.rows, is_exact=own.has_states) if own.reuse else None, each)
            for own, each in zip(limits, drafts, strict=True)
        ]

    @property
    def is_idle(self) -> bool:
        return all(scheduler.is_idle for scheduler in self._schedulers)

    def add(self, row: Any) -> None:
        """Add a row to the group with a free slot and the longest cached prefix, else to the least loaded group."""
        groups = self._schedulers
        free = [each for each in groups if each.load < each.slots]
        saved, group = max(((each.reusable(row), each) for each in free), default=(0, None), key=lambda pair: pair[0])
        chosen = group if group is not None and saved else min(groups, key=lambda each: each.load)
        chosen.add(row)

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """See `Scheduler.drop`."""
        for scheduler in self._schedulers:
            scheduler.drop(unwanted)

    def clear(self) -> None:
        """Drop everything."""
        for scheduler in self._schedulers:
            scheduler.clear()

    def forget_prefixes(self) -> None:
        """See `Scheduler.forget_prefixes`."""
        for scheduler in self._schedulers:
            scheduler.forget_prefixes()

    def plan(self, consumed: int, ahead: Collection[int] = ()) -> Iterator[Step]:
        """Yield the next step of each group that is not idle.

        Args:
            consumed: see `Step`.
            ahead: groups that still have a step to compute. They are left out.
        """
        for group, scheduler in enumerate(self._schedulers):
            if group not in ahead and not scheduler.is_idle:
                step = scheduler.plan(consumed)
                step.group = group
                yield step

    def rows(self, step: Step) -> list[Any]:
        """Return the rows that get a token in ``step``. It must be the last step planned for its group."""
        rows = [] if step.encodes else self._schedulers[step.group].rows
        return rows[len(rows) - step.joining :] if step.chunk else rows
