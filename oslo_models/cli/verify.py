"""``oslo-models verify``: its options and output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from oslo_models.cli.output import chatter_to_stderr

# torch takes seconds to import: the command line asks this file for its options only.

DESCRIPTION = """\
Compare a checkpoint at parallel sizes with plain transformers in one process, on this machine and with the installed
versions: the loss, the gradient of every parameter, greedy tokens, and the merged files byte for byte. Starts a process
for each rank, on GPUs where there are enough. Run it before a long job, and after an upgrade."""
EPILOG = """\
examples:
  oslo-models verify ./checkpoint --tensor-parallel-size 2
  oslo-models verify gpt2 --tensor-parallel-size 3 --pipeline-parallel-size 2 --json
  oslo-models verify gpt2 --tensor-parallel-size 3 --tensor-parallel-shares 2,1,1
  oslo-models verify ./large --tensor-parallel-size 2 --blocks 2       the first two blocks only
  oslo-models verify ./merged --tensor-parallel-size 2 --ranks-from ./split
                                                        are the split files of these ranks still the same weights?

Exit status: 0 if everything agrees; 1 on a difference above the bound of the dtype; 2 for wrong arguments."""


def add_arguments(command: argparse.ArgumentParser, size: Callable[[str], int]) -> None:
    """Add the options, except the parallel sizes.

    Args:
        size: parses an integer of at least 1.
    """
    add = command.add_argument
    add("model", metavar="MODEL", help="a directory, or a name on the hub")
    groups = "groups of tensor-parallel ranks that divide experts (default: %(default)s)"
    add("--expert-parallel-size", metavar="N", type=size, default=1, help=groups)
    add("--text", metavar="FILE", type=Path, help="text to compare on (default: a built-in one)")
    add("--length", metavar="N", type=size, default=64, help="tokens of the text (default: %(default)s)")
    add("--dtype", metavar="TYPE", default="float32", help="of the weights on both sides (default: %(default)s)")
    few = "compare the first N blocks of each stack (default: all that fit into one process)"
    add("--blocks", metavar="N", type=size, help=few)
    add("--ranks-from", metavar="DIR", type=Path, help="split files that the ranks load in place of MODEL")
    add("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the certificate. Return 1 on a difference."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    with chatter_to_stderr():
        from oslo_models.planning.certificate import verify

        disable_progress_bar()
        set_verbosity_error()
        found = verify(
            args.model,
            args.tensor_parallel_size,
            args.pipeline_parallel_size,
            args.expert_parallel_size,
            tensor_parallel_shares=args.tensor_parallel_shares,
            blocks_per_stage=args.blocks_per_stage,
            text=None if args.text is None else args.text.read_text(encoding="utf-8"),
            length=args.length,
            dtype=args.dtype,
            blocks=args.blocks,
            ranks_from=args.ranks_from,
        )
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    return 0 if found.passed else 1
