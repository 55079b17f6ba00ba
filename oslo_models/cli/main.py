"""The command line ``oslo-models``: tools for checkpoints, datasets and serving."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from oslo_models._version import __version__
from oslo_models.cli import demo, plan, preprocess, recipes, serve, verify

# torch takes seconds to import: only the functions that need it do so, and --help stays instant.

USER_ERRORS = (ValueError, OSError, RuntimeError, ImportError)
EPILOG = """\
examples:
  oslo-models demo                       train and generate in two processes
  oslo-models list                       the architectures and their classes
  oslo-models list gpt2 llama            the classes of these
  oslo-models inspect checkpoint/        the content of a checkpoint, and whether it is complete
  oslo-models merge checkpoint/ merged/  one file per rank -> a checkpoint for transformers
  oslo-models reshard checkpoint/ tp4/ --tensor-parallel-size 4
  oslo-models recover checkpoint/        finish a save that was interrupted
  oslo-models preprocess wiki.txt --tokenizer gpt2 --output data/wiki   texts -> a dataset of tokens
  oslo-models plan gpt2 --task full --devices 2x24GB   memory of each rank, and sizes that fit
  oslo-models verify gpt2 --tensor-parallel-size 2   is it equal to one process on this machine?
  oslo-models sft recipe.yaml            fine-tune with a recipe of TRL, over the devices of this machine
  oslo-models serve gpt2 --tensor-parallel-size 2   over HTTP, with OpenAI's endpoints

`oslo-models COMMAND --help` shows the options of a command. In Python:
  from oslo_models import GPT2LMHeadModel
  model = GPT2LMHeadModel.from_pretrained_with_parallel("gpt2", tensor_parallel_size=2)
and run it with: torchrun --nproc-per-node=2 script.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 2 for an error of the user, 1 for an internal error (one line on stderr gives the reason).
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command not in recipes.SUMMARIES:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int | None = args.run(args)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.traceback:
            raise
        expected = isinstance(error, USER_ERRORS)
        kind = "error" if expected else f"internal error (--traceback shows where): {type(error).__name__}"
        print(f"oslo-models {args.command}: {kind}: {_one_line(error)}", file=sys.stderr)
        return 2 if expected else 1
    return 0


class _Commands:
    """Adds the subcommands to a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(self, name: str, run: object, summary: str, text: str, **options: Any) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        command = self._commands.add_parser(
            name, help=summary, description=dedent(text), formatter_class=raw, **options
        )
        command.set_defaults(run=run)
        return command


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="oslo-models",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Hugging Face models, pre-parallelized: tensor, pipeline and data parallel.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"oslo-models {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    commands = _Commands(parser)
    showing = commands.add(
        "demo", demo.run, "see it work: train, save, merge, reload, generate", demo.DESCRIPTION, epilog=demo.EPILOG
    )
    demo.add_arguments(showing)
    _add_list(commands)
    _add_checkpoint_commands(commands)
    texts = commands.add("preprocess", preprocess.run, "turn texts into a dataset of tokens", preprocess.DESCRIPTION)
    texts.epilog = preprocess.EPILOG
    preprocess.add_arguments(texts)

    planned = commands.add("plan", plan.run, "show the memory of each rank, and the sizes that fit", plan.DESCRIPTION)
    planned.epilog = plan.EPILOG
    plan.add_arguments(planned, _size, _sizes)

    verified = commands.add("verify", verify.run, "compare parallel ranks with one process", verify.DESCRIPTION)
    verified.epilog = verify.EPILOG
    _add_sizes(verified)
    verify.add_arguments(verified, _size)

    for task, summary in recipes.SUMMARIES.items():
        usage = f"oslo-models {task} RECIPE.yaml [--key value ...]"
        commands.add(task, recipes.run, summary, recipes.DESCRIPTIONS[task], usage=usage, allow_abbrev=False)

    served = commands.add("serve", _serve, "answer over HTTP, as OpenAI's API does", serve.DESCRIPTION)
    _add_sizes(served)
    serve.add_arguments(served, _size)
    return parser


def _add_list(commands: _Commands) -> None:
    listing = commands.add(
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


def _add_checkpoint_commands(commands: _Commands) -> None:
    """Add the commands that read and write checkpoints."""
    inspect = commands.add(
        "inspect",
        _inspect,
        "show the content of a checkpoint and whether it is complete",
        """\
        Show the content of a checkpoint directory: its format, parallel sizes, files and parameters.
        Reads names and shapes only, unless --verify is given.

        examples:
          oslo-models inspect checkpoint/
          oslo-models inspect checkpoint/ --verify     read every byte and compare with the recorded checksums
          oslo-models inspect checkpoint/ --json       every tensor of every file""",
    )
    inspect.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint")
    inspect.add_argument("--verify", action="store_true", help="compare every file with its recorded checksum")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON, for other programs")

    merge = commands.add(
        "merge",
        _merge,
        "turn split files into one checkpoint for transformers",
        """\
        Write a checkpoint of split files (pytorch_model_tp=0_pp=0.bin ...) as one that transformers loads.
        Needs one process; holds one tensor at a time in memory.

        examples:
          oslo-models merge checkpoint/ merged/
          oslo-models merge checkpoint/ merged/ --format bin""",
    )
    _add_input_and_output(merge)

    reshard = commands.add(
        "reshard",
        _reshard,
        "write a checkpoint as split files at other sizes",
        """\
        Write a checkpoint, split or merged, as split files for other parallel sizes. Starts a process for each rank,
        which holds that rank's part in memory. Loading does not need it: from_pretrained_with_parallel reshards as it
        reads.

        examples:
          oslo-models reshard gpt2/ gpt2-tp4/ --tensor-parallel-size 4
          oslo-models reshard old/ new/ --tensor-parallel-size 2 --pipeline-parallel-size 2""",
    )
    _add_input_and_output(reshard)
    _add_sizes(reshard)

    recovering = commands.add(
        "recover",
        _recover,
        "finish a save that was interrupted",
        """\
        Finish a save that was interrupted in its last step, when its files were complete but not in their places.
        Reading a checkpoint changes nothing in its folder; only this command and the next save do.

        examples:
          oslo-models recover checkpoint/""",
    )
    recovering.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint")


def _add_sizes(command: argparse.ArgumentParser) -> None:
    for axis, what in (("tensor", "ranks per layer"), ("pipeline", "stages")):
        command.add_argument(f"--{axis}-parallel-size", metavar="N", type=_size, default=1, help=f"{what} (default: 1)")
    shares = "part of each layer on each rank, such as 2,1,1 (default: equal)"
    command.add_argument("--tensor-parallel-shares", metavar="N,N", type=_sizes, help=shares)
    blocks = "blocks of each stage, such as 20,12 (default: by parameters)"
    command.add_argument("--blocks-per-stage", metavar="N,N", type=_sizes, help=blocks)


def _add_input_and_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint to read")
    command.add_argument("output", metavar="OUT", type=Path, help="the directory to write")
    command.add_argument(
        "--format",
        choices=("safetensors", "bin"),
        default=None,
        help="file format (default: as save_pretrained_with_parallel writes)",
    )


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return size


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _one_line(error: BaseException) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text or type(error).__name__


def _list(args: argparse.Namespace) -> None:
    from oslo_models import registry

    unknown = [kind for kind in args.model_types if kind not in registry.ARCHITECTURES]
    if needed := "; ".join(filter(None, map(registry.needed_release, unknown))):
        raise ValueError(needed)
    if unknown:
        raise ValueError(
            f"no architecture {', '.join(unknown)}; there are: {', '.join(sorted(registry.ARCHITECTURES))}"
        )
    for kind in args.model_types or sorted(registry.ARCHITECTURES):
        print(kind)
        for name in sorted(registry.model_classes(kind)):
            print(f"  {name}")


def _inspect(args: argparse.Namespace) -> None:
    found = inspect_checkpoint(args.directory, args.verify)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    manifest = found["manifest"] or {}
    if found["split"]:
        tp, pp = found["split"]
        shares = f", tensor_parallel_shares={manifest['tp_shares']}" if "tp_shares" in manifest else ""
        print(f"{args.directory}: split checkpoint, tensor_parallel_size={tp}, pipeline_parallel_size={pp}{shares}")
    else:
        print(f"{args.directory}: merged checkpoint")
    if manifest.get("architectures"):
        print(f"  architecture: {', '.join(manifest['architectures'])}")
    if manifest.get("versions"):
        print("  written with: " + ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()))
    else:
        print("  no manifest: not written by oslo_models, or by an old version; nothing to verify against")
    for name, file in found["files"].items():
        tensors = file["tensors"].values()
        types = ", ".join(sorted({tensor["dtype"].removeprefix("torch.") for tensor in tensors}))
        elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
        print(f"  {name}: {_bytes(file['size'])}, {len(tensors)} tensors, {elements:,} elements, {types}")
    if args.verify and manifest:
        print("  every file has the size and the checksum that the manifest records")


def inspect_checkpoint(directory: Path, verify: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint as plain data, file by file (a split checkpoint has one file per rank).

    Args:
        verify: compare the checksums of the files with the manifest first.

    Returns:
        ``split`` (its ``(tp, pp)``, or ``None`` when it is merged), ``manifest`` (``None`` without one; without its
        tables of files and tensors) and ``files``: by name its ``tp`` and ``pp`` rank, ``size`` and ``tensors``, which
        gives the type of each tensor and its shape *in that file*.
    """
    from oslo_models.checkpoint import verify_checkpoint
    from oslo_models.checkpoint.locate import open_files
    from oslo_models.distributed.mesh import Axis

    found = open_files(directory, None)
    if verify:
        verify_checkpoint(found, Axis.alone("world"))
    ranks = {name: {"tp": t, "pp": p} for (t, p), name in found.grid.items()}
    files = {}
    for name, file in found.files.items():
        tensors = {key: {"dtype": str(view.dtype), "shape": list(view.shape)} for key, view in file.views.items()}
        files[name] = {**ranks.get(name, {}), "size": file.size, "tensors": tensors}
        file.close()
    manifest = found.manifest and {
        key: value for key, value in found.manifest.items() if key not in ("files", "tensors")
    }
    return {"split": found.split, "manifest": manifest, "files": files}


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _merge(args: argparse.Namespace) -> None:
    from oslo_models.cli.convert import convert

    convert(args.directory, args.output, merging=True, safe_serialization=_SAFE[args.format])
    print(f"{args.output}: a checkpoint that transformers loads")


def _reshard(args: argparse.Namespace) -> None:
    from oslo_models.cli.convert import launch

    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    unequal = {"tensor_parallel_shares": args.tensor_parallel_shares, "blocks_per_stage": args.blocks_per_stage}
    launch(args.directory, args.output, *sizes, _SAFE[args.format], **unequal)
    print(f"{args.output}: split files for tensor_parallel_size={sizes[0]}, pipeline_parallel_size={sizes[1]}")


def _recover(args: argparse.Namespace) -> None:
    from oslo_models.checkpoint import recover

    if not args.directory.is_dir():
        raise NotADirectoryError(f"there is no directory {args.directory}")
    found = recover(args.directory)
    print(f"{args.directory}: " + ("the interrupted save is finished" if found else "no save was interrupted"))


def _serve(args: argparse.Namespace) -> None:
    try:
        from oslo_models.server import command as server
    except ModuleNotFoundError as error:
        if error.name in ("fastapi", "uvicorn"):
            raise ImportError(f'{error.name} is not installed: pip install "oslo-models[serve]"') from error
        raise
    server.run(args)


_SAFE = {None: None, "safetensors": True, "bin": False}
