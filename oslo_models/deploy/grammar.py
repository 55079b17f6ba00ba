"""Grammars for structured output, by llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from oslo_models.deploy.grammar_check import GrammarChecker, limits, one_line
from oslo_models.locking import locked_property

_KEPT = 4
"""Maximum number of prepared vocabularies per process. Each takes about a second to prepare."""
_prepared: dict[str, Any] = {}  # by digest, oldest first


class MissingVocabulary(LookupError):
    """A worker does not have the vocabulary of a grammar yet. Send the call again with the vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that grammars are matched against.

    Attributes:
        tokenizer: as JSON, in the format of tokenizers.
        size: of the logits.
        ends: tokens that end the text.
    """

    tokenizer: str
    size: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, size: int, ends: list[int]) -> Vocabulary:
        """Return the vocabulary of a fast tokenizer of transformers.

        Raises:
            ValueError: the tokenizer is slow, or there is no end token.
        """
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"structured output needs a fast tokenizer, and {type(tokenizer).__name__} is not one")
        if not ends:
            raise ValueError("structured output needs a model with an end token (eos_token_id)")
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        return cls(json.dumps(backend), max(size, len(tokenizer)), tuple(ends))

    @locked_property
    def checker(self) -> GrammarChecker:
        """The process that compiles grammars for this vocabulary."""
        return GrammarChecker(self.tokenizer, self.size, self.ends)

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "size": self.size, "ends": self.ends}

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.tokenizer, self.size, self.ends)).encode()).hexdigest()

    def prepared(self) -> Any:
        """Return llguidance's form of the vocabulary."""
        made = _prepared.get(self.digest)
        if made is None:
            made = _llguidance().LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.ends))
            _prepared[self.digest] = made
            while len(_prepared) > _KEPT:
                del _prepared[next(iter(_prepared))]
        return made


@dataclass(frozen=True)
class Grammar:
    """Grammar that a text has to match. Sent to workers without the large vocabulary; see `MissingVocabulary`.

    Attributes:
        text: the grammar in llguidance's format.
        digest: of the vocabulary.
        ends: tokens that end the text.
        least: minimum tokens before an end token, unless the grammar allows no other token.
    """

    text: str
    digest: str
    ends: tuple[int, ...] = ()
    least: int = 0
    vocabulary: Vocabulary | None = field(default=None, repr=False)

    @classmethod
    def compiled(cls, kind: str, source: Any, vocabulary: Vocabulary) -> Grammar:
        """Compile the grammar of a request.

        Args:
            kind: ``"json"`` (``source`` is a schema), ``"regex"``, ``"choice"`` (a list of texts) or ``"grammar"``
                (in Lark's notation, as llguidance understands it).

        Raises:
            ValueError: the grammar is invalid, too large or too slow.
        """
        _llguidance()
        return cls(vocabulary.checker.compile(kind, source), vocabulary.digest, vocabulary.ends)

    def with_vocabulary(self, vocabulary: Vocabulary) -> Grammar:
        """Return a copy with the vocabulary, for workers that do not have it yet."""
        return replace(self, vocabulary=vocabulary)

    def processor(self) -> Any:
        """Return a logits processor for one row that forbids all tokens outside the grammar.

        Raises:
            MissingVocabulary: this process does not have the vocabulary.
        """
        prepared = self.vocabulary.prepared() if self.vocabulary else _prepared.get(self.digest)
        if prepared is None:
            raise MissingVocabulary(self.digest)
        return _GrammarProcessor(
            _llguidance().LLMatcher(prepared, self.text, log_level=0, **limits()), self.ends, self.least
        )


class _GrammarProcessor:
    def __init__(self, matcher: Any, ends: tuple[int, ...], least: int) -> None:
        self._matcher, self._ends, self._least = matcher, list(ends), least
        self._seen: int | None = None
        self._begin = 0

    def __call__(self, ids_BL: Any, scores_BV: Any) -> Any:
        import numpy
        import torch

        if self._seen is None:
            self._begin = ids_BL.shape[1]
        else:
            self._matcher.consume_tokens(ids_BL[0, self._seen :].tolist())
        self._seen = ids_BL.shape[1]
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        if self._matcher.is_error():
            raise ValueError(f"the structured output cannot be continued: {one_line(self._matcher.get_error())}")
        allowed = torch.from_numpy(numpy.unpackbits(bits, bitorder="little").astype(bool))
        allowed_V = torch.zeros(scores_BV.shape[1], dtype=torch.bool)
        size = min(len(allowed), len(allowed_V))
        allowed_V[:size] = allowed[:size]
        if self._seen - self._begin < self._least:
            others_V = allowed_V.index_fill(0, torch.tensor(self._ends), False)
            allowed_V = others_V if others_V.any() else allowed_V
        return scores_BV.masked_fill(~allowed_V.to(scores_BV.device), -float("inf"))


@cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError("structured output needs llguidance: pip install 'oslo-models[grammar]'") from error
    return llguidance
