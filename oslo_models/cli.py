"""The command line ``oslo-models``: what can be done with checkpoints and the zoo without writing a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from oslo_models._version import __version__

# torch takes seconds to import: only the functions that need it do so, and --help stays instant.

USER_ERRORS = (ValueError, OSError, RuntimeError, NotImplementedError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, or 2 when what the user asked for cannot be done (one line on stderr says why).
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        args.run(args)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("oslo-models: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"oslo-models {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="oslo-models",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Hugging Face models, pre-parallelized: tensor, pipeline and data parallel.",
        epilog=dedent("""\
            examples:
              oslo-models demo                       see it work: two processes train and generate as one
              oslo-models list                       which architectures there are, with their classes
              oslo-models list gpt2 llama            the classes of these
              oslo-models inspect checkpoint/        what a checkpoint holds and whether it is whole
              oslo-models merge checkpoint/ whole/   one file per rank -> what transformers loads
              oslo-models reshard checkpoint/ four/ --tensor-parallel-size 4

            `oslo-models COMMAND --help` says more. In Python:
              from oslo_models import GPT2LMHeadModel
              model = GPT2LMHeadModel.from_pretrained_with_parallel("gpt2", tensor_parallel_size=2)
            and run it with: torchrun --nproc-per-node=2 script.py
            """),
    )
    parser.add_argument("--version", action="version", version=f"oslo-models {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(name: str, run: object, summary: str, text: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=dedent(text), formatter_class=raw)
        command.set_defaults(run=run)
        return command

    add(
        "demo",
        _demo,
        "see it work on this machine",
        """\
        Show on this machine, without downloads, that parallel models give what one process gives.""",
    )

    listing = add(
        "list",
        _list,
        "show the architectures and their classes",
        """\
        Show the architectures of the zoo and their model classes.

        examples:
          oslo-models list
          oslo-models list gpt2 t5""",
    )
    listing.add_argument("model_types", metavar="MODEL_TYPE", nargs="*", help="show only these, such as gpt2")

    inspect = add(
        "inspect",
        _inspect,
        "show what a checkpoint holds and whether it is whole",
        """\
        Show what a checkpoint directory holds: its format, the sizes that it was saved at, its files and parameters.
        Reads names and shapes; weights only where a checksum is to be verified.

        examples:
          oslo-models inspect checkpoint/
          oslo-models inspect checkpoint/ --verify     read every byte and compare with the recorded checksums""",
    )
    inspect.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint")
    inspect.add_argument("--verify", action="store_true", help="compare every file with its recorded checksum")

    merge = add(
        "merge",
        _merge,
        "turn split files into one checkpoint for transformers",
        """\
        Write a checkpoint of split files (pytorch_model_tp=0_pp=0.bin ...) as one that transformers loads.
        Needs one process; holds one tensor at a time in memory.

        examples:
          oslo-models merge checkpoint/ whole/
          oslo-models merge checkpoint/ whole/ --format bin""",
    )
    _add_input_and_output(merge)

    reshard = add(
        "reshard",
        _reshard,
        "write a checkpoint as split files at other sizes",
        """\
        Write a checkpoint, split or merged, as split files for other parallel sizes. Needs one process; holds one rank's
        part in memory. Not needed for loading: from_pretrained_with_parallel reshards by itself, reading only its part.

        examples:
          oslo-models reshard gpt2/ gpt2-tp4/ --tensor-parallel-size 4
          oslo-models reshard old/ new/ --tensor-parallel-size 2 --pipeline-parallel-size 2""",
    )
    _add_input_and_output(reshard)
    for axis, what in (("tensor", "ranks per layer"), ("pipeline", "stages")):
        reshard.add_argument(f"--{axis}-parallel-size", metavar="N", type=_size, default=1, help=f"{what} (default: 1)")
    return parser


def _add_input_and_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint to read")
    command.add_argument("output", metavar="OUT", type=Path, help="the directory to write")
    command.add_argument(
        "--format", choices=("safetensors", "bin"), default=None, help="how to write (default: as the library does)"
    )


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return size


def _one_line(error: BaseException) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text or type(error).__name__


def _demo(args: argparse.Namespace) -> None:
    raise NotImplementedError("there is no demo yet")


def _list(args: argparse.Namespace) -> None:
    from oslo_models import registry

    unknown = [kind for kind in args.model_types if kind not in registry.ARCHITECTURES]
    if unknown:
        raise ValueError(f"no architecture {', '.join(unknown)}; there are: {', '.join(sorted(registry.ARCHITECTURES))}")
    for kind in args.model_types or sorted(registry.ARCHITECTURES):
        print(kind)
        for name in sorted(registry.model_classes(kind)):
            print(f"  {name}")


def _inspect(args: argparse.Namespace) -> None:
    raise NotImplementedError("inspect is not there yet")


def _merge(args: argparse.Namespace) -> None:
    raise NotImplementedError("merge is not there yet")


def _reshard(args: argparse.Namespace) -> None:
    raise NotImplementedError("reshard is not there yet")
