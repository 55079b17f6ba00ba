"""Exceptions of deployed models."""

from __future__ import annotations

from oslo_models.deploy.messages import Failure


class EngineError(RuntimeError):
    """The workers died, hang or were closed. The model's `restart()` starts new workers."""


class RanksDisagree(SystemExit):
    """A step of the running batch failed on one rank only. Ends the worker, also inside a call of `generate`."""


class _RemoteTraceback(Exception):
    """The traceback of a worker, set as the cause of the caller's exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised_by_workers(error: BaseException) -> bool:
    """Return whether the workers caused an exception, and not the caller's thread (such as a signal handler)."""
    return isinstance(error, EngineError) or isinstance(error.__cause__, _RemoteTraceback)


def exception_from(failure: Failure, rank: int, pid: int, when: str = "") -> BaseException:
    """Return the caller's exception for the failure of a worker, with the worker's traceback as its cause."""
    error = failure.error
    note = f"raised by rank {rank} (pid {pid}) of the deployed model {when}".rstrip()
    if isinstance(error, Exception):
        error.__cause__ = _RemoteTraceback(f"{note}:\n{failure.text}")
        return error
    return EngineError(f"{note}: {failure.text}")
