"""Groups of slots: while one pipeline stage computes a step of one group, the other stages compute those of others.

A group's next step needs the tokens of its last one, which the last stage draws; with one group, all other stages would
wait for them. These are the micro-batches of pipeline parallelism (GPipe, Huang et al., 2019), for decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.step import Step


def limits_of_groups(limits: BatchLimits, stages: int) -> list[BatchLimits]:
    """The limits of each group: one for each stage, as long as there are rows; these are divided."""
    count = min(stages, limits.rows)
    return [replace(limits, rows=limits.rows // count + (group < limits.rows % count)) for group in range(count)]


class SlotGroups:
    """Schedules several groups; each row stays in the group that it is added to.

    Args:
        limits: of each group.
    """

    def __init__(self, limits: Sequence[BatchLimits]) -> None:
        self._schedulers = [Scheduler(own.rows, own.chunk, Prefixes(own.rows) if own.reuse else None) for own in limits]

    def add(self, row: Any) -> None:
        """Give a row to the group that saves most of its prompt, of those with a free slot, or else has least to do."""
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
        """The next step of each group that has something to do.

        Args:
            consumed: see `Step`.
            ahead: the groups whose last step has yet to be computed.
        """
        for group, scheduler in enumerate(self._schedulers):
            if group not in ahead and not scheduler.is_idle:
                step = scheduler.plan(consumed)
                step.group = group
                yield step

    def rows(self, step: Step) -> list[Any]:
        """The rows that a step computes a token of; it is the last one that was planned for its group."""
        rows = self._schedulers[step.group].rows
        return rows[len(rows) - step.joining :] if step.chunk else rows
