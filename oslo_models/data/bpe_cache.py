"""Byte-level BPE with a cache of words, several times as fast as the tokenizers package.

A byte-level BPE tokenizer first splits a text into words by a regular expression, then encodes each word separately.
The splitting takes most of the time. For ASCII, the expressions of GPT-2, Llama 3 and Qwen 2 have equivalents in
Python's `re`. This module uses these equivalents and caches the tokens of words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

CACHE_SIZE = 1 << 17
"""Maximum number of cached words, some 25 MB. A full cache is cleared."""
CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
SPACE = r"[\t-\r ]"
# from the expression in a tokenizer's file to its equivalent for printable ASCII and white space
PATTERNS = {
    # GPT-2, GPT-Neo, GPT-J, OPT, RoBERTa, Falcon, ...
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+": (
        rf"{CONTRACTIONS}| ?[a-zA-Z]+| ?[0-9]+| ?[!-/:-@[-`{{-~]+|{SPACE}+(?![!-~])|{SPACE}+"
    ),
}
# Llama 3, Qwen 2 and later; they differ in the number of digits per word
for digits, meaning in ((r"\p{N}{1,3}", "[0-9]{1,3}"), (r"\p{N}", "[0-9]")):
    PATTERNS[
        rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ] = (
        rf"(?i:{CONTRACTIONS})|[\t\v\f !-/:-@[-`{{-~]?[a-zA-Z]+|{meaning}| ?[!-/:-@[-`{{-~]+[\r\n]*|{SPACE}*[\r\n]+|"
        rf"{SPACE}+(?![!-~])|{SPACE}+"
    )
GPT2 = next(iter(PATTERNS))
# the characters for bytes 0 to 32 in the vocabulary
BYTES = {byte: 256 + byte for byte in range(33)}
UNSUPPORTED = re.compile(r"[^\t-\r -~]")
# No word of any pattern crosses such a space, and later text does not affect the words before it
BOUNDARY = re.compile(r"(?<=[!-~]) ")


class BpeCache(dict[str, bytes]):
    """Cache of the tokens of words, as bytes. Access encodes unknown words.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        dtype: the dtype of the tokens.
        split: the key of `PATTERNS` that splits texts into words.
    """

    def __init__(self, backend: Any, dtype: str, split: str) -> None:
        super().__init__()
        self._model, self._backend, self._dtype = backend.model, backend, dtype
        self._words = re.compile(PATTERNS[split]).findall
        added = [re.escape(token.content) for token in backend.get_added_tokens_decoder().values() if token.content]
        self._added: Callable[[str], Any] = re.compile("|".join(added)).search if added else lambda text: None

    def __missing__(self, word: str) -> bytes:
        tokens = np.array([token.id for token in self._model.tokenize(word.translate(BYTES))], self._dtype).tobytes()
        if len(word) <= 64:
            if len(self) >= CACHE_SIZE:
                self.clear()
            self[word] = tokens
        return tokens

    def encode(self, texts: list[str]) -> list[bytes]:
        """Return the tokens of each text."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> bytes:
        if self._added(text):
            return self._encode_by_backend([text])[0]
        if not UNSUPPORTED.search(text):
            return b"".join(map(self.__getitem__, self._words(text)))
        runs: list[str] = []
        for _, parts in groupby(BOUNDARY.split(text), lambda part: bool(UNSUPPORTED.search(part))):
            runs.append((" " if runs else "") + " ".join(parts))
        supported = [not UNSUPPORTED.search(run) for run in runs]
        others = iter(self._encode_by_backend([run for run, fast in zip(runs, supported, strict=True) if not fast]))
        return b"".join(
            b"".join(map(self.__getitem__, self._words(run))) if fast else next(others)
            for run, fast in zip(runs, supported, strict=True)
        )

    def _encode_by_backend(self, texts: list[str]) -> list[bytes]:
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype).tobytes() for encoding in found]


def find_pattern(spec: str) -> str | None:
    """Return the key of `PATTERNS` for the content of a tokenizer file; ``None`` if `BpeCache` does not support it."""
    tokenizer = json.loads(spec)
    model, before = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if tokenizer["normalizer"] is not None:  # NFC changes no ASCII text and composes nothing with a space
        spaced = any(" " in token["content"] for token in tokenizer["added_tokens"])
        if tokenizer["normalizer"]["type"] != "NFC" or spaced:
            return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    *first, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last.get("use_regex", True):
        return None if first else GPT2
    if len(first) != 1 or first[0].get("type") != "Split":
        return None
    split = first[0]
    pattern = split["pattern"].get("Regex")
    fits = split["behavior"] == "Isolated" and not split["invert"] and pattern in PATTERNS
    return pattern if fits else None
