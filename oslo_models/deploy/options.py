"""The arguments that only ``deploy=True`` accepts, and the choice of an executor."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field, fields
from functools import partial
from os import PathLike
from typing import Any

import torch

from oslo_models.deploy import torchrun_executor as torchrun
from oslo_models.deploy.forking import start_fork_server
from oslo_models.deploy.handshake import check_secret
from oslo_models.deploy.process_executor import ProcessExecutor, StartExecutor, worker_environment
from oslo_models.deploy.running_batch.admission import (
    default_limits,
    longest,
    reason_against_draft_model,
    reason_against_drafts,
    with_states,
)
from oslo_models.deploy.running_batch.draft_loading import read_draft_config
from oslo_models.deploy.running_batch.limits import (
    DEFAULT_DRAFTED,
    DEFAULT_LIMITS,
    DRAFTED_BY_HEADS,
    BatchLimits,
    check_drafted,
)
from oslo_models.distributed.mesh import check_size

BACKENDS = ("auto", "process", "ray", "torchrun")


@dataclass(frozen=True)
class DeployOptions:
    """The arguments of the constructors that only ``deploy=True`` accepts.

    Attributes:
        deploy_backend: how workers are started: ``"process"`` on this host, ``"torchrun"`` by the processes of a
            launcher, ``"ray"`` as Ray actors. ``"auto"`` uses the launcher if there is one, Ray if it runs and this
            host has too few GPUs, else this host.
        max_batch_size: maximum rows of the running batch, which computes `generate` calls from several threads
            together; 1 computes calls one after another. Default 8 on CPUs, 64 on GPUs, or fewer if the cache would
            not fit into 16 GiB per GPU.
        max_batch_length: tokens of a row, prompt and answer together. Longer calls are computed between the steps.
        prefill_chunk_size: prompt tokens that are computed in one step, before all other rows get a token. Default 256
            on CPUs, 2048 on GPUs.
        reuse_prefixes: prompts of the running batch reuse the keys and values of a prefix that they share with an
            earlier call.
        speculative_tokens: maximum drafted tokens of a row in one step of the running batch, for speculative decoding.
            With ``mtp_heads=True``, the heads of the model draft them, by default 1. Without heads and
            ``speculative_model``, they are the tokens that followed the last occurrence of the newest tokens in the row
            (prompt lookup), and by default, none are drafted.
        speculative_model: directory or name of a small model with the same vocabulary that drafts tokens, by default 4.
            One rank loads it in full.
        threads_per_worker: number of torch threads in each worker on CPUs. By default the threads of this process are
            divided among the workers.
        verbose: ``"simple"`` or ``"detail"`` prints the memory of each device.
        deploy_secret: known to the processes of a launcher and nobody else. Required if the processes are on several
            hosts, to authenticate each other.
        master_addr, master_port: the address of this host and the port at which its workers meet. By default the
            loopback interface and a free port.
    """

    deploy_backend: str = "auto"
    max_batch_size: int | None = None
    max_batch_length: int = DEFAULT_LIMITS.length
    prefill_chunk_size: int | None = None
    reuse_prefixes: bool = DEFAULT_LIMITS.reuse
    speculative_tokens: int | None = None
    speculative_model: str | PathLike[str] | None = None
    threads_per_worker: int | None = None
    verbose: str | bool | None = None
    deploy_secret: str | None = field(default=None, repr=False)
    master_addr: str | None = None
    master_port: int | None = None

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> DeployOptions:
        """Remove the arguments from ``kwargs`` and return them."""
        return cls(**{each.name: kwargs.pop(each.name) for each in fields(cls) if each.name in kwargs})

    def check(self) -> None:
        """Raise ``ValueError`` for values that are invalid for any number of ranks."""
        if self.deploy_backend not in BACKENDS:
            raise ValueError(f"deploy_backend={self.deploy_backend!r} is none of {', '.join(map(repr, BACKENDS))}")
        check_size("max_batch_length", self.max_batch_length)
        for name in ("max_batch_size", "prefill_chunk_size", "threads_per_worker"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if not isinstance(self.reuse_prefixes, bool):
            raise ValueError(f"reuse_prefixes must be True or False, got {self.reuse_prefixes!r}")
        if self.speculative_tokens is not None:
            check_drafted(self.speculative_tokens)
        if self.speculative_model is not None and not isinstance(self.speculative_model, (str, PathLike)):
            raise ValueError(
                f"speculative_model must be a directory or a name, got {type(self.speculative_model).__name__}"
            )
        if self._drafted and self.max_batch_size == 1:
            name = "speculative_tokens" if self.speculative_model is None else "speculative_model"
            raise ValueError(
                f"{name}={getattr(self, name)!r} is for the running batch, and max_batch_size=1 turns it off: use a "
                "larger max_batch_size, or prompt_lookup_num_tokens or assistant_model of generate"
            )
        if self.verbose not in (None, False, True, "simple", "detail"):
            raise ValueError(f"verbose must be None, 'simple' or 'detail', got {self.verbose!r}")
        if self.deploy_secret is not None:
            check_secret("deploy_secret", self.deploy_secret)
        if self.master_port is not None:
            check_size("master_port", self.master_port)
        if not isinstance(self.master_addr, (str, type(None))):
            raise ValueError(f"master_addr must be an address of this host, got {self.master_addr!r}")

    @property
    def _drafted(self) -> int:
        return self.speculative_tokens or (0 if self.speculative_model is None else DEFAULT_DRAFTED)

    def limits(self, config: Any, ranks: int, has_heads: bool = False) -> BatchLimits:
        """Return the limits of the running batch for a model on ``ranks`` ranks.

        Args:
            has_heads: whether the model is loaded with its MTP heads.

        Raises:
            OSError: there is no ``speculative_model``.
            ValueError: rows of the model cannot have drafted tokens, or ``speculative_model`` cannot draft them, or
                both are given.
        """
        length = longest(config, BatchLimits(length=self.max_batch_length))
        default = default_limits(config, length, ranks if torch.cuda.device_count() else 0)
        rows, chunk = self.max_batch_size or default.rows, self.prefill_chunk_size or default.chunk
        drafted, draft_model = self._drafted, str(self.speculative_model or "")
        if has_heads and draft_model:
            raise ValueError(
                f"speculative_model={draft_model!r} and mtp_heads=True both draft tokens: leave one of them out"
            )
        if has_heads and rows > 1:
            drafted = drafted or DRAFTED_BY_HEADS
        if drafted and (reason := reason_against_drafts(config, length)) is not None:
            given = f"speculative_tokens={drafted}" if self._drafted else "mtp_heads=True"
            raise ValueError(
                f"{given} is not possible for model_type={config.model_type!r}: {reason}. Leave it out, or use a "
                "smaller max_batch_length for a model with a window"
            )
        if draft_model:
            reason = reason_against_draft_model(config, read_draft_config(draft_model), length)
            if reason is not None:
                raise ValueError(
                    f"speculative_model={draft_model!r} cannot draft tokens: {reason}. Choose another decoder"
                )
        by_heads = has_heads and bool(drafted)
        limits = BatchLimits(rows, length, chunk, self.reuse_prefixes, drafted, draft_model, by_heads)
        return with_states(config, limits)

    def threads(self, ranks: int) -> int:
        """Return the number of torch threads of each worker."""
        return self.threads_per_worker or max(1, torch.get_num_threads() // ranks)

    def backend(self, ranks: int) -> str:
        """Choose the backend.

        Raises:
            ValueError: no backend has room for ``ranks`` ranks, or the requested backend cannot be used here.
        """
        launched, devices = torchrun.is_launched(), torch.cuda.device_count()
        chosen = self.deploy_backend
        if chosen == "auto":
            by_ray = 0 < devices < ranks and "ray" in sys.modules and sys.modules["ray"].is_initialized()
            chosen = "torchrun" if launched else "ray" if by_ray else "process"
        if chosen == "ray" and importlib.util.find_spec("ray") is None:
            raise ValueError("deploy_backend='ray' needs Ray: pip install 'oslo-models[ray]'")
        if launched and chosen != "torchrun":
            raise ValueError(
                f"deploy_backend={chosen!r} would serve one model in each of the {torchrun.launched_size()} processes "
                "of the launcher: start the script with python, or leave deploy_backend out"
            )
        if chosen == "torchrun":
            if not launched:
                raise ValueError(
                    "deploy_backend='torchrun' is for scripts that a launcher starts: "
                    f"`torchrun --nproc-per-node={ranks} app.py`"
                )
            if ranks > torchrun.launched_size():
                raise ValueError(
                    f"tensor_parallel_size x pipeline_parallel_size = {ranks} is more than the "
                    f"{torchrun.launched_size()} processes that the launcher started"
                )
            torchrun.spans_hosts(self.deploy_secret)
        if chosen != "process" and (self.master_addr, self.master_port) != (None, None):
            raise ValueError(f"master_addr and master_port are for workers on this host, not for workers of {chosen}")
        if chosen == "process" and 0 < devices < ranks:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise ValueError(
                f"tensor_parallel_size x pipeline_parallel_size = {ranks} is more than the {devices} GPUs that are "
                f"visible here (CUDA_VISIBLE_DEVICES is {visible}); for several hosts, start the script with "
                "`torchrun --nnodes=... --nproc-per-node=... app.py`, or pip install 'oslo-models[ray]' and call "
                "ray.init() first"
            )
        return chosen


OF_DEPLOYMENT = tuple(each.name for each in fields(DeployOptions))
"""The names of the arguments that only ``deploy=True`` accepts."""


def prepare(backend: str, cls: type[Any]) -> None:
    """Start the fork server early, so that the imports of the workers overlap with argument checks."""
    if backend == "process":
        own = {base.__module__ for base in cls.__mro__ if base.__module__.startswith("oslo_models.models.")}
        start_fork_server(worker_environment(0), sorted(own))


def executor_of(backend: str, stages: int, options: DeployOptions) -> StartExecutor:
    """Return the executor constructor of a backend."""
    if backend == "ray":
        from oslo_models.deploy.ray_executor import RayExecutor

        return partial(RayExecutor, stages=stages)
    if backend == "torchrun":
        return partial(torchrun.TorchrunExecutor, secret=options.deploy_secret)
    place: dict[str, Any] = {"host": options.master_addr, "port": options.master_port}
    return partial(ProcessExecutor, **{key: value for key, value in place.items() if value is not None})
