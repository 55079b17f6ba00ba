"""`DatasetPreprocessor`: converts texts to a binarised dataset in constant memory and resumes after a crash."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from oslo_models.data import readers as sources
from oslo_models.data.arguments import integer
from oslo_models.data.indexed_dataset import CODES, check_impl
from oslo_models.data.tokenizer_pool import Encoder, TokenizerPool
from oslo_models.data.writer import Output, WriteProgress

CHARACTERS = 1 << 20
"""Characters at which a chunk ends. Limits the memory of a process for long documents."""
COMMIT_SECONDS = 5.0
"""Seconds between two commits, the maximum work lost in a crash."""
UINT16_BELOW = 65500
"""Megatron stores larger vocabularies as int32."""


class DatasetPreprocessor:
    """Tokenises documents and writes them as ``name.bin`` and ``name.idx``. Megatron reads these files too.

    Args:
        tokenizer: a transformers tokenizer, or its name: a directory, a ``tokenizer.json`` or a name on the Hugging
            Face hub. Fast tokenizers encode a chunk in one call.
        chunk_size: the maximum number of documents sent to a process at once; ``chunksize`` is an alias.
        binarization_impl: ``mmap`` writes Megatron's current format, ``lazy`` and ``cached`` the older fairseq format.
        append_eod: whether a token marks the end of each document.
        eod_token_id: the end-of-document token. Defaults to the tokenizer's end-of-sequence token, or its separator.
        num_workers: the number of tokenising processes. Defaults to one per core. With 0 this process tokenises.
        dtype: the dtype of stored tokens. Defaults to ``uint16`` if the vocabulary has less than 65500 tokens, else
            ``int32``.

    Raises:
        ValueError: invalid arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        chunk_size: int = 1024,
        binarization_impl: str = "mmap",
        append_eod: bool = True,
        eod_token_id: int | None = None,
        num_workers: int | None = None,
        *,
        dtype: str | None = None,
        chunksize: int | None = None,
    ) -> None:
        check_impl(binarization_impl)
        chunk_size = integer("chunk_size", chunk_size if chunksize is None else chunksize)
        num_workers = None if num_workers is None else integer("num_workers", num_workers)
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} is not at least 1")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers={num_workers} is not at least 0")
        if dtype is not None and dtype not in CODES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(CODES)}")
        tokenizer = as_tokenizer(tokenizer)
        if append_eod and eod_token_id is None:
            ends = (getattr(tokenizer, name, None) for name in ("eos_token_id", "sep_token_id"))
            eod_token_id = next((end for end in ends if end is not None), None)
            if eod_token_id is None:
                raise ValueError(
                    "append_eod=True needs eod_token_id: the tokenizer has no eos_token and no sep_token; "
                    "pass an id, or append_eod=False"
                )
        vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        if eod_token_id is not None and not _is_id(eod_token_id, vocab_size):
            raise ValueError(
                f"eod_token_id={eod_token_id!r} is not in the tokenizer's vocabulary: pass an integer from 0 to "
                f"{vocab_size - 1}, or add a token to the tokenizer"
            )
        dtype = dtype or ("uint16" if vocab_size < UINT16_BELOW else "int32")
        if vocab_size - 1 > (most := _largest(dtype)):
            raise ValueError(
                f"dtype={dtype!r} holds tokens up to {most}, and the tokenizer has tokens up to {vocab_size - 1}: "
                "pass dtype='int32', or none"
            )
        self.tokenizer, self.chunk_size, self.binarization_impl = tokenizer, chunk_size, binarization_impl
        self.append_eod, self.eod_token_id = append_eod, eod_token_id
        self.num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
        self.dtype = dtype

    def preprocess(
        self,
        iterable: Iterable[Any],
        save_file_name: str | os.PathLike[str],
        log_interval: int = 1000,
        *,
        text_key: str = "text",
        resume: bool = True,
    ) -> WriteProgress:
        """Write ``save_file_name.bin`` and ``.idx``. Documents without tokens are omitted.

        The files appear once they are complete. Until then all data is in ``save_file_name.partial``. After a crash,
        the same call resumes from there. The files equal an uninterrupted run byte for byte.

        Args:
            iterable: texts, such as an open file with one document per line; rows with the column ``text_key``; or a
                Hugging Face dataset. Read once, a few chunks ahead.
            save_file_name: the path of the files without their endings.
            log_interval: documents between two updates of the progress bar; 0 shows none.
            text_key: the column of texts in rows.
            resume: whether to resume an interrupted call, if any.

        Returns:
            The number of written documents and tokens.

        Raises:
            ValueError: an item is not a text, the input or tokenizer differs from the interrupted call, or another
                process writes the same files.
        """
        encoder = Encoder(self.tokenizer, self.eod_token_id if self.append_eod else None, self.dtype)
        settings = {"tokenizer": encoder.fingerprint(), "eod": encoder.end, "impl": self.binarization_impl}
        with Output(os.fspath(save_file_name), self.dtype, settings, resume) as output:
            texts = sources.texts_of(iterable, text_key)
            digest = self._skip(texts, output)
            pool = TokenizerPool(encoder, self.num_workers)
            try:
                self._write(pool.encode(self._chunks(texts)), output, digest, log_interval)
            finally:
                pool.close()
            output.finish(self.binarization_impl)
            return output.progress

    def _skip(self, texts: Iterator[str], output: Output) -> Any:
        """Skip the texts written before the interruption and check that they are unchanged."""
        digest, done = hashlib.blake2b(digest_size=16), output.progress.inputs
        count = 0
        for text in islice(texts, done):
            count += 1
            digest.update(_bytes(text))
        if done and (count, digest.hexdigest()) != (done, output.progress.digest):
            raise ValueError(
                f"{output.folder} holds the first {done} documents of another input than this one; "
                "delete it or pass resume=False to start over"
            )
        return digest

    def _chunks(self, texts: Iterator[str]) -> Iterator[list[str]]:
        chunk, characters = [], 0
        for text in texts:
            chunk.append(text)
            characters += len(text)
            if len(chunk) == self.chunk_size or characters >= CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _write(self, encoded: Iterable[Any], output: Output, digest: Any, log_interval: int) -> None:
        start, before, committed = time.monotonic(), output.progress.tokens, time.monotonic()
        options = {
            "unit": " documents",
            "unit_scale": True,
            "dynamic_ncols": True,
            "smoothing": 0,
            "disable": not log_interval,
        }
        with tqdm(desc=os.path.basename(output.name), initial=output.progress.inputs, **options) as bar:
            shown = 0
            for chunk, (lengths, tokens) in encoded:
                for text in chunk:
                    digest.update(_bytes(text))
                output.append(len(chunk), lengths, tokens)
                now, shown = time.monotonic(), shown + len(chunk)
                if now - committed >= COMMIT_SECONDS:
                    output.commit(digest.hexdigest())
                    committed = now
                if log_interval and shown >= log_interval:
                    speed = (output.progress.tokens - before) / max(now - start, 1e-9)
                    bar.set_postfix_str(f"{tqdm.format_sizeof(speed)} tokens/s", refresh=False)
                    bar.update(shown)
                    shown = 0
            bar.update(shown)
        output.commit(digest.hexdigest())

    @staticmethod
    def open_jsonl(file: str | os.PathLike[str], json_key: str, on_error: str = "stop") -> Iterator[str]:
        """Yield the texts under ``json_key`` from a file with one JSON object per line (``.gz`` and ``.zst`` too).

        If ``file`` does not exist, ``.jsonl`` is appended. For an invalid line, ``on_error="stop"`` raises ValueError
        with its number, ``"skip"`` warns and continues.
        """
        return sources.open_jsonl(file, json_key, on_error)


def as_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer unchanged, or load it by name: a directory, a ``tokenizer.json`` or a name on the hub.

    Raises:
        ValueError: the argument is neither a tokenizer nor the name of a tokenizer.
    """
    wanted = "tokenizer must be a tokenizer of transformers, or its name: a directory, a tokenizer.json or a name on "
    if not isinstance(tokenizer, (str, os.PathLike)):
        if not callable(getattr(tokenizer, "get_vocab", None)):
            raise ValueError(f"{wanted}the hub; got a {type(tokenizer).__name__}")
        return tokenizer
    import transformers

    name = os.fspath(tokenizer)
    try:
        if os.path.isfile(name):
            return transformers.PreTrainedTokenizerFast(tokenizer_file=name)
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # each kind of tokenizer raises different errors
        raise ValueError(f"{wanted}the hub; {name!r} cannot be loaded as one: {error}") from error


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < vocab_size


def _largest(dtype: str) -> int:
    """Return the largest token id that a dtype represents exactly."""
    kind = np.dtype(dtype)
    return int(np.iinfo(kind).max) if kind.kind in "iu" else 1 << (np.finfo(kind).nmant + 1)


def _bytes(text: str) -> bytes:
    """Encode a text with a length prefix, so that concatenations of texts are unambiguous."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data
