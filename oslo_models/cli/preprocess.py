"""``oslo-models preprocess``: its options, and the run of a `DatasetPreprocessor` with them."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

# transformers takes a second to import: the command line asks this file for its options only.

DESCRIPTION = """\
Turn texts into a binarised dataset: NAME.bin holds the tokens, NAME.idx the position of each document. The format
of Megatron-LM, NeMo and GPT-NeoX; oslo_models.DatasetForCausalLM reads it. Input of any size is streamed and
tokenised on all cores. When the command is interrupted or killed, run it again: it resumes where it stopped.

The ending of an input gives its format:
  .txt                 each line is a document, including its line break
  .jsonl               each line is a JSON object; --text-key names the text in it
  .parquet             a table; --text-key names the column (needs pyarrow)
  .txt.gz, .jsonl.zst  and so on: compressed (.zst needs zstandard)"""
EPILOG = """\
examples:
  oslo-models preprocess wiki.txt --tokenizer gpt2 --output data/wiki
  oslo-models preprocess part-*.jsonl.gz --tokenizer ./tokenizer.json --eod '<|endoftext|>' --output data/web
  oslo-models preprocess code.parquet --text-key content --tokenizer ./llama --skip-malformed --output data/code

Then, in Python:
  from oslo_models import DatasetForCausalLM
  dataset = DatasetForCausalLM("data/wiki", max_seq_length=1024, end_weight=0.9)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="+", type=Path, help="a file; several become one dataset, in this order")
    add("--output", "-o", metavar="NAME", required=True, help="path of the dataset, without .bin and .idx")
    add("--tokenizer", "-t", metavar="NAME", required=True, help="a directory, a tokenizer.json, or a name on the hub")
    add("--text-key", metavar="KEY", default="text", help="key or column of the text (default: %(default)s)")
    add("--eod", metavar="TOKEN", help="the token after each document (default: the end of sequence, or the separator)")
    add("--no-eod", action="store_true", help="put no token after documents")
    add(
        "--skip-malformed",
        action="store_true",
        help="skip lines and rows that cannot be read, with a warning (default: stop)",
    )
    add("--workers", metavar="N", type=int, default=None, help="processes that tokenise (default: one per core)")
    add("--chunk-size", metavar="N", type=int, default=1024, help="documents sent to a process at once (default: 1024)")
    formats = "mmap: Megatron's current format; lazy, cached: the older one of fairseq (default: mmap)"
    add("--format", choices=("mmap", "lazy", "cached"), default="mmap", help=formats)
    add("--dtype", help="of the tokens (default: uint16 if the vocabulary is below 65500, else int32)")
    add("--restart", action="store_true", help="start over and discard the files of an interrupted run")


def run(args: argparse.Namespace) -> None:
    """Preprocess.

    Raises:
        ValueError: an option is invalid, or an input cannot be read.
        OSError: there is no such file.
    """
    from oslo_models.data import DatasetPreprocessor
    from oslo_models.data.preprocess import as_tokenizer
    from oslo_models.data.readers import SKIPPING

    if missing := [str(path) for path in args.inputs if not path.is_file()]:
        raise FileNotFoundError(f"no file {', '.join(missing)}")
    if args.eod is not None and args.no_eod:
        raise ValueError("--eod and --no-eod exclude each other")
    tokenizer = as_tokenizer(args.tokenizer)
    preprocessor = DatasetPreprocessor(
        *(tokenizer, args.chunk_size, args.format, not args.no_eod, _eod(tokenizer, args.eod), args.workers),
        dtype=args.dtype,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show  # until the block ends
        try:
            done = preprocessor.preprocess(_texts(args), args.output, resume=not args.restart)
        except ValueError as error:
            raise ValueError(str(error).replace(SKIPPING, "--skip-malformed")) from error
    print(
        f"{args.output}.bin, {args.output}.idx: {done.documents:,} documents, {done.tokens:,} tokens, "
        f"{preprocessor.dtype}; {done.inputs - done.documents:,} documents without tokens were left out"
    )


def _texts(args: argparse.Namespace) -> Iterator[str]:
    from oslo_models.data import open_documents

    on_error = "skip" if args.skip_malformed else "stop"
    # opened first, so that an unknown file extension is reported before any work
    return chain.from_iterable([open_documents(path, args.text_key, on_error) for path in args.inputs])


def _eod(tokenizer: Any, token: str | None) -> int | None:
    if token is None:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(f"--eod {token!r} is not a token of the tokenizer")
    return vocabulary[token]


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    print(f"oslo-models preprocess: {message}", file=sys.stderr)
