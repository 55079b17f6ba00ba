"""The tokens of a text from those of its words: byte-level BPE, several times as fast as by the tokenizers package.

Such a tokenizer first splits a text into words by a regular expression, and makes the tokens of each word by itself.
The splitting is what takes its time. For ASCII the expressions of GPT-2 and its kind mean the same in Python's own
engine, and the tokens of words that were met before are remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

REMEMBERED = 1 << 17
"""Words after which the memory is emptied; these take some 25 MB."""
CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
SPACE = r"[\t-\r ]"
# by the expression in a tokenizer's file, what it means where all characters are ASCII and not control characters
PATTERNS = {
    # GPT-2, GPT-Neo, GPT-J, OPT, RoBERTa, Falcon, ...
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+": (
        rf"{CONTRACTIONS}| ?[a-zA-Z]+| ?[0-9]+| ?[!-/:-@[-`{{-~]+|{SPACE}+(?![!-~])|{SPACE}+"
    ),
}
# Llama 3 and Qwen 2 and later, which differ in how many digits make a word
for digits, meaning in ((r"\p{N}{1,3}", "[0-9]{1,3}"), (r"\p{N}", "[0-9]")):
    PATTERNS[
        rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ] = (
        rf"(?i:{CONTRACTIONS})|[\t\v\f !-/:-@[-`{{-~]?[a-zA-Z]+|{meaning}| ?[!-/:-@[-`{{-~]+[\r\n]*|{SPACE}*[\r\n]+|"
        rf"{SPACE}+(?![!-~])|{SPACE}+"
    )
GPT2 = next(iter(PATTERNS))
# bytes as the characters that stand for them in the vocabulary
BYTES = {byte: 256 + byte for byte in range(33)}
UNUSUAL = re.compile(r"[^\t-\r -~]")
# No word goes over such a place, in any of the patterns, and what follows decides nothing about what precedes
CUT = re.compile(r"(?<=[!-~]) ")


class BpeCache(dict[str, bytes]):
    """The tokens of words, as bytes.

    Args:
        backend: of the tokenizers package.
        dtype: of the tokens.
        split: the expression of `PATTERNS` that splits texts into words.
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
            if len(self) >= REMEMBERED:
                self.clear()
            self[word] = tokens
        return tokens

    def encode(self, texts: list[str]) -> list[bytes]:
        """The tokens of each text."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> bytes:
        if self._added(text):
            return self._slowly([text])[0]
        if not UNUSUAL.search(text):
            return b"".join(map(self.__getitem__, self._words(text)))
        runs: list[str] = []
        for _, parts in groupby(CUT.split(text), lambda part: bool(UNUSUAL.search(part))):
            runs.append((" " if runs else "") + " ".join(parts))
        usual = [not UNUSUAL.search(run) for run in runs]
        slow = iter(self._slowly([run for run, plain in zip(runs, usual, strict=True) if not plain]))
        return b"".join(
            b"".join(map(self.__getitem__, self._words(run))) if plain else next(slow)
            for run, plain in zip(runs, usual, strict=True)
        )

    def _slowly(self, texts: list[str]) -> list[bytes]:
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype).tobytes() for encoding in found]


def splitting(spec: str) -> str | None:
    """The expression that splits texts, when a tokenizer (its file's content) is of the kind that can be remembered."""
    tokenizer = json.loads(spec)
    model, before = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if tokenizer["normalizer"] is not None:  # NFC leaves ASCII as it is, and composes nothing with a space
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
