"""Builds every distinct rank of a large job in this process, and lists its groups and collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from oslo_models.planning.job import Job, RankRun, distinct_ranks
from oslo_models.planning.memory import GIB, describe, table

MOST_RANKS = 1024


@dataclass(frozen=True)
class DryRun:
    """The distinct ranks of a job. ``str()`` gives a table.

    Attributes:
        job: the model, its sizes and its batch.
        ranks: a rank of each kind, with all tensor-parallel ranks of its stage that equal it.
    """

    job: Job
    ranks: tuple[tuple[RankRun, tuple[int, ...]], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, in bytes."""
        return {
            "model": self.job.cls.__name__,
            **describe(self.job),
            "world_size": self.job.world_size,
            "ranks": [
                {
                    **{"stage": run.stage, "tp_ranks": list(tp_ranks), "parameters": run.parameters},
                    **{"memory": run.total, "groups": run.groups},
                    "collectives": [
                        {**vars(each), "calls": calls} for each, calls in sorted(run.collectives.items(), key=_order)
                    ],
                }
                for run, tp_ranks in self.ranks
            ],
        }

    def __str__(self) -> str:
        lines = []
        for run, tp_ranks in self.ranks:
            replicas = self.job.data_parallel_size * self.job.context_parallel_size
            groups = ", ".join(f"{name} of {size}" for name, size in run.groups.items() if size > 1)
            last = f"-{tp_ranks[-1]}" if len(tp_ranks) > 1 else ""
            lines.append(
                f"stage {run.stage}, tp {tp_ranks[0]}{last} ({len(tp_ranks) * replicas} ranks): "
                f"{run.parameters:,} parameters, {run.total / GIB:.2f} GiB; groups: {groups or 'none'}"
            )
            rows = [("  axis", "ranks", "operation", "calls", "bytes of a call", "MB of a step")]
            for each, calls in sorted(run.collectives.items(), key=_order):
                total = f"{each.payload * calls / 1e6:,.1f}"
                rows.append((f"  {each.axis}", str(each.ranks), each.operation, str(calls), f"{each.payload:,}", total))
            lines.append(table(rows) if len(rows) > 1 else "  no collectives")
        return "\n".join(lines)


def _order(item: tuple[Any, int]) -> tuple[str, str, int]:
    return item[0].axis, item[0].operation, item[0].payload


def dry_run(job: Job, ranks: int) -> DryRun:
    """Build every distinct rank of a job of ``ranks`` ranks, and run its step on the meta device.

    Data-parallel replicas are alike. So are tensor-parallel ranks with shards of equal shapes.

    Raises:
        ValueError: the sizes do not fit the number of ranks or the model.
    """
    shared = job.of_replica
    context = f" x context_parallel_size={job.context_parallel_size}" if job.context_parallel_size > 1 else ""
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--dry-run {ranks}: the number of ranks must be 1 to {MOST_RANKS}")
    if ranks % shared:
        raise ValueError(
            f"--dry-run {ranks} is not a multiple of tensor_parallel_size={job.tensor_parallel_size} x "
            f"pipeline_parallel_size={job.pipeline_parallel_size}{context} = {shared}: use "
            f"{max(ranks // shared, 1) * shared} or {(ranks // shared + 1) * shared}"
        )
    job = replace(job, data_parallel_size=ranks // shared)
    return DryRun(job, tuple((run, tuple(tp_ranks)) for run, tp_ranks in distinct_ranks(job)))
