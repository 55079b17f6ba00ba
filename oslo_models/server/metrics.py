"""Counters and histograms of the server, in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms, in seconds."""

_HELP = {
    "requests_total": "Requests by route and status.",
    "request_seconds": "From the end of the headers to the end of the answer, by route.",
    "time_to_first_token_seconds": "From the request to its first token, of answers that are generated as a stream.",
    "time_per_token_seconds": "Between the tokens of such an answer, on average.",
    "queue_seconds": "From the request to the start of its computation, of such an answer.",
    "prompt_tokens_total": "Tokens of prompts.",
    "reused_prompt_tokens_total": "Tokens of them that were not computed again.",
    "generated_tokens_total": "Tokens generated.",
    "drafted_tokens_total": "Tokens drafted by speculative decoding.",
    "accepted_tokens_total": "Tokens of them that were generated.",
    "cancelled_calls_total": "Calls cancelled because their client left or the server ended.",
    "rejected_requests_total": "Requests answered with status 429.",
    "worker_restarts_total": "Restarts of the workers of a model that had died, by model.",
    "dropped_log_lines_total": "Lines of the log that could not be written.",
    "calls_in_flight": "Answers that are computed or wait.",
    "calls_waiting": "Answers in flight that no worker has begun, as far as is known.",
    "calls_limit": "Answers that may be in flight.",
}
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Collects metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, _Labels], float] = defaultdict(float)
        self._times: dict[tuple[str, _Labels], list[float]] = {}  # counts by bucket, then the sum
        self._gauges: dict[str, Callable[[], float]] = {}

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Register a metric by a function for its current value. Values with a name in ``_total`` may only grow."""
        self._gauges[name] = value

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += by

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        with self._lock:
            row = self._times.setdefault((name, tuple(sorted(labels.items()))), [0.0] * (len(BUCKETS) + 2))
            row[bisect.bisect_left(BUCKETS, seconds)] += 1
            row[-1] += seconds

    def text(self) -> str:
        """Return all metrics in format version 0.0.4."""
        with self._lock:
            counts, times = dict(self._counts), {key: list(row) for key, row in self._times.items()}
        lines: list[str] = []
        for name, about in _HELP.items():
            counted = {labels: value for (key, labels), value in counts.items() if key == name}
            timed = {labels: row for (key, labels), row in times.items() if key == name}
            kind = "counter" if name.endswith("_total") else "gauge" if name in self._gauges else "histogram"
            lines += [f"# HELP oslo_models_{name} {about}", f"# TYPE oslo_models_{name} {kind}"]
            if name in self._gauges:
                lines.append(f"oslo_models_{name} {self._gauges[name]():g}")
            lines += [f"oslo_models_{name}{_braces(labels)} {value:.17g}" for labels, value in counted.items()]
            for labels, row in timed.items():
                lines += _histogram(f"oslo_models_{name}", labels, row)
        return "\n".join(lines) + "\n"


def _histogram(name: str, labels: _Labels, row: list[float]) -> list[str]:
    lines, total = [], 0.0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), row[:-1], strict=True):
        total += count
        lines.append(f"{name}_bucket{_braces((*labels, ('le', bound)))} {total:g}")
    return [*lines, f"{name}_sum{_braces(labels)} {row[-1]:.17g}", f"{name}_count{_braces(labels)} {total:g}"]


def _braces(labels: _Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{key}="{quoted(value)}"' for key, value in labels) + "}" if labels else ""
