"""Texts and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from transformers import ByT5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """The text of a single token.

    Attributes:
        text: readable form. As in OpenAI's API, a part of a character is ``bytes:`` with escaped bytes.
        bytes: the token's part of the answer, with its leading space.
    """

    text: str
    bytes: bytes


class TokenTexts:
    """Looks up tokens of one tokenizer. Unlike ``decode``, it keeps leading spaces and parts of characters.

    A token that only the model has, in a padded vocabulary, has an empty text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, TokenText] = {}

    @cached_property
    def _bytes_of(self) -> Callable[[int], bytes]:
        return _conversion(self._tokenizer)

    @cached_property
    def _added(self) -> dict[int, bytes]:
        return {token: str(text).encode() for token, text in self._tokenizer.added_tokens_decoder.items()}

    def __getitem__(self, token: int) -> TokenText:
        found = self._found.get(token)
        if found is None:
            data = self._added.get(token)
            if data is None:  # models may have more rows of logits than the tokenizer has tokens
                data = b"" if self._tokenizer.convert_ids_to_tokens(token) is None else self._bytes_of(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            found = self._found[token] = TokenText(text, data)
        return found


def _conversion(tokenizer: Any) -> Callable[[int], bytes]:
    """Return the function from tokens to bytes for the tokenizer's decoder."""
    name = tokenizer.convert_ids_to_tokens
    if isinstance(tokenizer, ByT5Tokenizer):
        return lambda token: name(token).encode("latin-1")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [] if backend is None else _steps(json.loads(backend.to_str())["decoder"])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        stands_for = {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}
        return lambda token: b"".join(stands_for.get(char) or char.encode() for char in name(token))
    replaced = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    replaced += [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    if not replaced:
        return lambda token: tokenizer.decode([token]).encode()

    def convert(token: int) -> bytes:
        text = name(token)
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return convert


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder in the ``tokenizers`` format."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
