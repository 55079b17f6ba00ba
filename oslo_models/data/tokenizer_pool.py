"""Tokenises texts in worker processes. `TokenizerPool` starts them; this file is also the worker program."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oslo_models.data.bpe_cache import BpeCache, find_pattern
from oslo_models.starting import import_path, python_module

CACHE = 1 << 17
"""Words in the cache of the tokenizers package. Its default is 10,000."""


class Encoded(NamedTuple):
    """Non-empty documents of a chunk: [documents] lengths, and concatenated tokens."""

    lengths: NDArray[np.int32]
    tokens: NDArray[Any]


class Encoder:
    """Tokenises like ``tokenizer.encode(text, add_special_tokens=False)`` and appends ``end`` to each document.

    Args:
        tokenizer: a transformers tokenizer.
        end: the token after each document, if any.
        dtype: the dtype of the tokens.
    """

    def __init__(self, tokenizer: Any, end: int | None, dtype: str) -> None:
        self.end, self.dtype = end, dtype
        self._tokenizer = None if _is_plain(tokenizer) else tokenizer
        self._spec, self._split = "", False
        if self._tokenizer is None:
            spec = json.loads(tokenizer.backend_tokenizer.to_str())
            spec["truncation"] = spec["padding"] = None  # set by earlier calls
            self._spec = json.dumps(spec)
            self._split = bool(getattr(tokenizer, "split_special_tokens", False))
        self._backend: Any = None
        self._cache: BpeCache | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_backend": None, "_cache": None}

    def fingerprint(self) -> str:
        """Return a hash of all inputs of the tokenisation."""
        spec = self._spec
        if self._tokenizer is not None:
            spec = f"{type(self._tokenizer).__name__} {sorted(self._tokenizer.get_vocab().items())}"
        return hashlib.blake2b(f"{spec} {self._split}".encode(), digest_size=16).hexdigest()

    def encode(self, texts: list[str]) -> Encoded:
        """Return the tokens of a chunk of documents. Documents without tokens are omitted."""
        try:
            found = self._encode(texts)
        except (UnicodeEncodeError, TypeError):  # JSON may contain unpaired surrogates
            found = self._encode([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts])
        end = b"" if self.end is None else np.array([self.end], self.dtype).tobytes()
        documents = [tokens + end for tokens in found if tokens]
        lengths = np.array([len(tokens) for tokens in documents], np.int64) // np.dtype(self.dtype).itemsize
        return Encoded(lengths.astype(np.int32), np.frombuffer(b"".join(documents), self.dtype))

    def _encode(self, texts: list[str]) -> list[bytes]:
        """Return the tokens of each text, as bytes."""
        if self._tokenizer is not None:
            found = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
            return [np.array(ids, self.dtype).tobytes() for ids in found]
        if self._backend is None:
            from tokenizers import Tokenizer

            self._backend = Tokenizer.from_str(self._spec)
            self._backend.encode_special_tokens = self._split
            if split := find_pattern(self._spec):
                self._cache = BpeCache(self._backend, self.dtype, split)
            elif hasattr(self._backend.model, "_resize_cache"):
                self._backend.model._resize_cache(CACHE)
        if self._cache is not None:
            return self._cache.encode(texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype).tobytes() for encoding in encodings]


def _is_plain(tokenizer: Any) -> bool:
    """Return whether the tokenizer's Python methods add nothing to the tokenizers package."""
    methods = (getattr(type(tokenizer), name, None) for name in ("encode", "_encode_plus", "__call__"))
    plain = all(getattr(method, "__module__", "").startswith("transformers.tokenization_") for method in methods)
    return plain and hasattr(tokenizer, "backend_tokenizer")


class TokenizerPool:
    """Pool of processes that encode chunks of texts.

    The processes are started, not forked, since threads and CUDA do not survive a fork. They do not import the main
    script, so it needs no ``if __name__ == "__main__"``.

    Args:
        encoder: the encoder for each process.
        workers: the number of processes; 0 encodes in this process.
    """

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder, self._workers = encoder, [_Worker(encoder) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(workers, 1))

    def encode(self, chunks: Iterable[list[str]]) -> Iterator[tuple[list[str], Encoded]]:
        """Yield chunks and their tokens in order. At most two chunks per process are read ahead."""
        waiting: deque[tuple[list[str], Future[Encoded]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, self._threads.submit(self._ask, chunk)))
            if len(waiting) > 2 * len(self._workers):
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()

    def _ask(self, chunk: list[str]) -> Encoded:
        if not self._workers:
            return self._encoder.encode(chunk)
        worker = self._idle.get()
        try:
            return worker.ask(chunk)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)


class _Worker:
    """Handle of a worker process in the parent process."""

    def __init__(self, encoder: Encoder) -> None:
        try:
            self._message = pickle.dumps(encoder)
        except Exception as error:
            raise ValueError(f"the tokenizer cannot be sent to a process ({error}); use num_workers=0") from error
        # one thread each, since there is one process per core
        environment = {"PYTHONPATH": import_path(), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            python_module(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def ask(self, chunk: list[str]) -> Encoded:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(self._message + pickle.dumps(chunk))
            self._message = b""
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RuntimeError(
                f"a process that encodes ended with exit code {self._process.wait()}; was there too little memory? "
                "Finished work is kept: start again, with fewer num_workers"
            ) from None
        if isinstance(answer, str):
            raise ValueError(f"the tokenizer failed: {answer}")
        assert isinstance(answer, Encoded)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Read chunks from stdin and write answers to stdout until the parent process closes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the output of tokenizers out of the answers
    encoder: Encoder | None = None
    answer: Encoded | str
    while True:
        try:
            encoder = encoder or pickle.load(requests)
            chunk = pickle.load(requests)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - a tokenizer may fail in any way; the other side says so
            answer = f"{type(error).__name__}: {error}; num_workers=0 encodes without processes"
            chunk = None
        if chunk is not None:
            try:
                assert encoder is not None
                answer = encoder.encode(chunk)
            except Exception as error:  # noqa: BLE001 - as above
                answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    from oslo_models.data.tokenizer_pool import main as run  # pickle classes of this module, not of __main__

    run()
