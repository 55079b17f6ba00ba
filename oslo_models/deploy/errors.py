"""The exceptions that callers of a deployed model get."""

from __future__ import annotations

from oslo_models.deploy.messages import Failure


class EngineError(RuntimeError):
    """The workers died, hang or were closed; the model's `restart()` starts new ones."""


class _RemoteTraceback(Exception):
    """The traceback of a worker: the cause of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised_by_workers(error: BaseException) -> bool:
    """Whether a call raised this because of the workers, and not because of its own thread (a signal handler, say)."""
    return isinstance(error, EngineError) or isinstance(error.__cause__, _RemoteTraceback)


def exception_from(failure: Failure, rank: int, pid: int, when: str = "") -> BaseException:
    """The exception that a caller gets for the failure of a worker, with the worker's traceback as its cause."""
    error = failure.error
    note = f"raised by rank {rank} (pid {pid}) of the deployed model {when}".rstrip()
    if isinstance(error, Exception):
        error.__cause__ = _RemoteTraceback(f"{note}:\n{failure.text}")
        return error
    return EngineError(f"{note}: {failure.text}")
