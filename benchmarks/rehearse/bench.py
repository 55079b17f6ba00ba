"""`Bench`: the interface of a case, in its own process, to announce readiness, to measure, and to report rows."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from benchmarks.rehearse.timing import Cpu, Gpu

TRACE = 4000
"""Characters of a traceback that a row keeps, from its end."""


class CompilerWatch(logging.Handler):
    """Detects silent fallbacks of torch.compile: recompile limits and skipped CUDA graphs.

    Counts start at the last `reset`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.limits: list[str] = []
        self._skips = self._graphs = 0
        logging.getLogger("torch._dynamo").addHandler(self)
        self.reset()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "hit config." in message and "limit" in message:
            self.limits.append(message.splitlines()[0])

    def reset(self) -> None:
        self.limits.clear()
        self._skips, self._graphs = self._count("inductor", "cudagraph_skips"), self._count("stats", "unique_graphs")

    @staticmethod
    def _count(kind: str, name: str) -> int:
        module = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds
        return 0 if module is None else int(module.counters[kind][name])

    @property
    def skips(self) -> int:
        """CUDA graphs that Inductor skipped."""
        return self._count("inductor", "cudagraph_skips") - self._skips

    @property
    def graphs(self) -> int:
        """Graphs that dynamo captured."""
        return self._count("stats", "unique_graphs") - self._graphs

    def trouble(self) -> str:
        """Return the reason why a figure is invalid, or an empty string."""
        found = [*self.limits[:1], *([f"{self.skips} CUDA graphs were skipped"] if self.skips else [])]
        return "; ".join(found)


class Bench:
    """The connection of a case with the process that started it.

    Attributes:
        device: Device of the tensors; the CPU in a dry run.
        dry: Whether sizes are tiny and figures meaningless, because there is no GPU.
        timer: Timer for this device.
        watch: Log of torch.compile.
    """

    def __init__(self, rows: IO[str], turn: IO[str], dry: bool) -> None:
        self._rows, self._turn, self._is_ready = rows, turn, False
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self.timer = Cpu() if dry else Gpu()
        self.watch = CompilerWatch()

    def pick(self, real: Any, tiny: Any) -> Any:
        """``real`` on a GPU, ``tiny`` in a dry run."""
        return tiny if self.dry else real

    def compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        """``torch.compile`` by Inductor; in a dry run without it, since Inductor compiles slowly."""
        return torch.compile(function, **({"backend": "aot_eager"} if self.dry else options))

    def ready(self) -> None:
        """Wait until nothing else runs on the machine. Call it after slow work that is not measured."""
        if not self._is_ready:
            self.timer.synchronize()
            self._say({"kind": "ready"})
            if not self._turn.readline():
                sys.exit("the process that started this one is gone")
            self._is_ready = True

    def end(self) -> None:
        """Report that all rows are written, so the process may be killed."""
        self._say({"kind": "end"})

    def row(
        self, peer: str, metric: str, value: float | None, unit: str, *, target: float | None = None, **more: Any
    ) -> None:
        """Report a figure. It counts as failed if torch.compile hit a limit or skipped CUDA graphs for this peer.

        Args:
            target: Target of the figure: a minimum, or a maximum if the unit is a time or a memory.
            more: Further fields of the row.
        """
        state, trouble = "measured", self.watch.trouble()
        if trouble:
            state, more["error"] = "failed", trouble
        self._say({"kind": "row", "peer": peer, "metric": metric, "value": value, "unit": unit, "state": state,
                   **({} if target is None else {"target": target}), **more})  # fmt: skip

    def fail(self, peer: str, error: str, metric: str = "") -> None:
        """Report a failure."""
        self._say({"kind": "row", "peer": peer, "metric": metric, "value": None, "unit": "", "state": "failed",
                   "error": error[-TRACE:]})  # fmt: skip

    def skip(self, peer: str, reason: str) -> None:
        """Report that a peer cannot be measured here."""
        self._say({"kind": "row", "peer": peer, "metric": "", "value": None, "unit": "", "state": "skipped",
                   "error": reason})  # fmt: skip

    @contextmanager
    def attempt(self, peer: str, metric: str = "") -> Iterator[None]:
        """Run the block. An exception becomes a row, and the code after the block continues."""
        self.watch.reset()
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("oslo_models", "oslo_kernels", "benchmarks", "torch"):
                self.fail(peer, traceback.format_exc(), metric)
            else:
                self.skip(peer, f"{error.name} is not installed")
        except Exception:  # noqa: BLE001 -- whatever it is, it is the result of the case
            self.fail(peer, traceback.format_exc(), metric)

    def check(self, name: str, found: Any, expected: Any, tolerance: float = 0.0) -> None:
        """Report whether two tensors, or other values, agree: relative to the largest element of ``expected``."""
        if not isinstance(expected, torch.Tensor):
            error = 0.0 if found == expected else float("inf")
        elif found.shape != expected.shape:
            error = float("inf")
        else:
            found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
            error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if error <= tolerance:  # not for NaN
            self.row("oslo_models", name, error, "error")
        elif error == float("inf"):
            self.fail("oslo_models", f"{found} instead of {expected}", name)
        else:
            self.fail("oslo_models", f"off by {error:.1e}, more than {tolerance:.1e}", name)

    def _say(self, message: dict[str, Any]) -> None:
        self._rows.write(json.dumps(message) + "\n")
        self._rows.flush()
