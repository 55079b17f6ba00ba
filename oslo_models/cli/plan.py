"""``oslo-models plan``: its options and output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oslo_models.cli.output import chatter_to_stderr

# torch takes seconds to import: the command line asks this file for its options only.

DESCRIPTION = """\
Show the memory of each rank of a job: weights, gradients, optimizer states, activations, logits, key-value cache and
communication buffers. With --devices, choose the sizes that fit, and say why. Downloads only the configuration, and
starts no processes: one rank of each kind runs a step on torch's meta device, without memory.

MODEL is a name on the hub, a folder, or a config.json file."""
EPILOG = """\
examples:
  oslo-models plan Qwen/Qwen3-8B --task lora --devices 2x24GB --batch 2 --length 2048
  oslo-models plan Qwen/Qwen3-8B --task full --devices 8x80GB --gradient-checkpointing
  oslo-models plan ./checkpoint --task serve --batch 16 --length 4096 --tensor-parallel-size 2
  oslo-models plan Qwen/Qwen3-14B --task qlora --devices 24GB,12GB       shares for unequal devices
  oslo-models plan config.json --devices 4x16GB --picture plan.html      the same as a page for a browser
  oslo-models plan config.json --tensor-parallel-size 8 --pipeline-parallel-size 4 --dry-run 1024
                                                        groups and payload of every distinct rank

A GB of --devices is 2^30 bytes, and 8 % of a device stay free for CUDA, NCCL and the allocator.
Exit status: 0; 1 if no sizes fit --devices; 2 for wrong arguments."""


def add_arguments(
    command: argparse.ArgumentParser, size: Callable[[str], int], sizes: Callable[[str], list[int]]
) -> None:
    """Add the options.

    Args:
        size: parses an integer of at least 1.
        sizes: parses several of them.
    """
    add = command.add_argument
    add("model", metavar="MODEL", help="a name on the hub, a folder, or a config.json file")
    tasks = "train all weights, LoRA adapters, or adapters of 4-bit weights; or serve (default: %(default)s)"
    add("--task", choices=("lora", "qlora", "full", "serve"), default="lora", help=tasks)
    add("--devices", metavar="NxSIZE", help="devices at hand, such as 2x24GB: choose the sizes for them")
    numbers: dict[str, Any] = {"metavar": "N", "type": size}
    add("--batch", **numbers, default=1, help="rows of each replica (default: %(default)s)")
    add("--length", **numbers, help="tokens of a row (default: 512, or the positions of a model with fewer)")
    add("--micro-batch-size", **numbers, default=1, help="rows of a micro-batch, with stages (default: %(default)s)")
    add("--tensor-parallel-size", **numbers, help="ranks per layer (default: 1, or chosen for --devices)")
    add("--pipeline-parallel-size", **numbers, help="stages (default: 1, or chosen for --devices)")
    lists: dict[str, Any] = {"metavar": "N,N", "type": sizes}
    add("--tensor-parallel-shares", **lists, help="part of each layer on each rank (default: equal, or chosen)")
    add("--blocks-per-stage", **lists, help="blocks of each stage (default: by parameters, or chosen)")
    orders = "order of the micro-batches of stages: 1f1b or zb-h1 (default: %(default)s)"
    add("--schedule", metavar="NAME", default="1f1b", help=orders)
    add("--expert-parallel-size", **numbers, default=1, help="groups of ranks that divide experts (default: 1)")
    tokens = "divide the tokens of hidden states over the ranks of each layer"
    add("--sequence-parallel", action="store_true", help=tokens)
    rows = "ranks that divide the tokens of each row (default: 1)"
    add("--context-parallel-size", **numbers, default=1, help=rows)
    add("--dtype", metavar="TYPE", help="of the weights, such as bfloat16 (default: as the configuration says)")
    add("--lora-rank", **numbers, default=16, help="rank of the adapters (default: %(default)s)")
    targets = "modules with adapters, separated by commas (default: all linear layers)"
    add("--lora-targets", metavar="NAMES", default="all-linear", help=targets)
    add("--gradient-checkpointing", action="store_true", help="compute each block again in the backward pass")
    kind = "kind of the devices; attention with dropout holds its scores on a CPU (default: %(default)s)"
    add("--device-type", choices=("cuda", "cpu"), default="cuda", help=kind)
    dry = "build every distinct rank of a job of RANKS, up to 1024: groups, parameters and collectives"
    add("--dry-run", metavar="RANKS", type=size, help=dry)
    add("--picture", metavar="FILE", type=Path, help="also write a page for a browser, such as plan.html")
    add("--json", action="store_true", help="print everything as JSON, in bytes")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Return 1 if no sizes fit the devices.

    Raises:
        OSError: there is no such model, or the picture cannot be written.
        ValueError: an option is invalid or does not fit the model.
    """
    from oslo_models.planning import dry_run, memory, picture, sizes

    devices = None if args.devices is None else sizes.parse_devices(args.devices)
    given = (args.tensor_parallel_size, args.pipeline_parallel_size, args.tensor_parallel_shares, args.blocks_per_stage)
    targets = args.lora_targets
    least = 2 if args.sequence_parallel and devices is not None else 1
    with chatter_to_stderr():
        job = memory.make_job(
            args.model,
            task=args.task,
            tensor_parallel_size=given[0] or least,
            pipeline_parallel_size=given[1] or 1,
            expert_parallel_size=args.expert_parallel_size,
            batch=args.batch,
            length=args.length,
            micro_batch_size=args.micro_batch_size,
            dtype=args.dtype,
            lora_rank=args.lora_rank,
            lora_targets=targets if targets == "all-linear" else targets.split(","),
            gradient_checkpointing=args.gradient_checkpointing,
            device_type=args.device_type,
            tensor_parallel_shares=args.tensor_parallel_shares,
            blocks_per_stage=args.blocks_per_stage,
            schedule=args.schedule,
            sequence_parallel=args.sequence_parallel,
            context_parallel_size=args.context_parallel_size,
        )
        found = None if args.dry_run is None else dry_run.dry_run(job, args.dry_run)
        if found is None:
            choice = sizes.choose_sizes(job, devices) if devices is not None and not any(given) else None
            estimate = memory.estimate_job(job) if choice is None else choice.estimate
    if found is not None:
        print(json.dumps(found.as_dict(), indent=1) if args.json else found)
        return 0
    fits = devices is None or devices.fits(estimate)
    if args.picture is not None:
        args.picture.write_text(picture.page(estimate, devices, choice), encoding="utf-8")
    if args.json:
        described: dict[str, Any] = {**estimate.as_dict(), "fits": fits if devices else None}
        print(json.dumps(described | ({"choice": choice.as_dict()} if choice else {}), indent=1))
    else:
        _print(estimate, choice, fits, devices)
    return 0 if fits else 1


def _print(estimate: Any, choice: Any, fits: bool, devices: Any) -> None:
    from oslo_models.planning.sizes import UNEQUAL

    job = estimate.job
    print(
        f"{job.cls.__name__}, {job.task}, {job.batch} x {job.length} tokens, {str(job.dtype).removeprefix('torch.')}: "
        f"tensor_parallel_size={job.tensor_parallel_size} pipeline_parallel_size={job.pipeline_parallel_size}"
        + "".join(f" {name}={','.join(map(str, getattr(job, name)))}" for name in UNEQUAL if getattr(job, name))
        + (" sequence_parallel=True" if job.sequence_parallel else "")
        + (f" context_parallel_size={job.context_parallel_size}" if job.context_parallel_size > 1 else "")
        + (f", {job.data_parallel_size} replicas" if job.data_parallel_size > 1 else "")
    )
    print(estimate)
    if choice is not None:
        print(f"{'recommended' if fits else 'does not fit'}: {choice.reason}")
        for line in choice.help:
            print(f"would fit: {line}")
    elif devices is not None:
        usable = devices.fullest(estimate)[1] / (1 << 30)
        print(f"{'fits' if fits else 'does not fit'}: {usable:.1f} GiB of the fullest device are usable")
