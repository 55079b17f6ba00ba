"""Grammars that generated text has to follow, by llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

_KEPT = 4
"""Vocabularies that a process keeps; each takes about a second to prepare."""
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
"""Without a bound, a model may write spaces until its tokens are used up."""
_UNFORCED = '%llguidance {"no_forcing": true}\nstart: @main'
"""Where only one text can follow, llguidance would allow only the tokens of its tokenizer, which may be special."""
_prepared: dict[str, Any] = {}  # by digest, oldest first


class MissingVocabulary(LookupError):
    """A worker has not been sent the vocabulary of a grammar yet: send the call again with it."""


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
        """That of a fast tokenizer of transformers.

        Raises:
            ValueError: the tokenizer is a slow one, or nothing ends a text.
        """
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"structured output needs a fast tokenizer, and {type(tokenizer).__name__} is none")
        if not ends:
            raise ValueError("structured output needs a model with an end token (eos_token_id)")
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        return cls(json.dumps(backend), max(size, len(tokenizer)), tuple(ends))

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.tokenizer, self.size, self.ends)).encode()).hexdigest()

    def prepared(self) -> Any:
        """llguidance's form of it."""
        made = _prepared.get(self.digest)
        if made is None:
            made = _llguidance().LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.ends))
            _prepared[self.digest] = made
            while len(_prepared) > _KEPT:
                del _prepared[next(iter(_prepared))]
        return made


@dataclass(frozen=True)
class Grammar:
    """What a text has to be. Sent to workers without the vocabulary, which is large; see `MissingVocabulary`.

    Attributes:
        text: the grammar in llguidance's format.
        digest: of the vocabulary.
    """

    text: str
    digest: str
    vocabulary: Vocabulary | None = field(default=None, repr=False)

    @classmethod
    def compiled(cls, kind: str, source: Any, vocabulary: Vocabulary) -> Grammar:
        """A grammar of a request.

        Args:
            kind: ``"json"`` (``source`` is a schema), ``"regex"``, ``"choice"`` (a list of texts) or ``"grammar"``
                (in Lark's notation, as llguidance understands it).

        Raises:
            ValueError: it is invalid or too complex.
        """
        matcher, prepared = _llguidance().LLMatcher, vocabulary.prepared()
        make: Mapping[str, Callable[[Any], dict[str, Any]]] = {
            "json": lambda schema: {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}},
            "regex": lambda regex: json.loads(matcher.grammar_from_regex(regex))["grammars"][0],
            "choice": lambda texts: {"lark_grammar": "start: " + " | ".join(map(json.dumps, texts))},
            "grammar": lambda lark: {"lark_grammar": lark},
        }
        grammars = [{"lark_grammar": _UNFORCED}, {**make[kind](source), "name": "main"}]
        text = json.dumps({"grammars": grammars})
        if error := matcher.validate_grammar(text, prepared):
            raise ValueError(f"the {kind} for structured output cannot be used: {error:.500}")
        return cls(text, vocabulary.digest)

    def with_vocabulary(self, vocabulary: Vocabulary) -> Grammar:
        """Itself with what workers need that do not have the vocabulary yet."""
        return replace(self, vocabulary=vocabulary)

    def processor(self) -> Any:
        """A logits processor that forbids everything else, for one row.

        Raises:
            MissingVocabulary: this process does not have it.
        """
        prepared = self.vocabulary.prepared() if self.vocabulary else _prepared.get(self.digest)
        if prepared is None:
            raise MissingVocabulary(self.digest)
        return _GrammarProcessor(_llguidance().LLMatcher(prepared, self.text))


class _GrammarProcessor:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._seen: int | None = None

    def __call__(self, ids_BL: Any, scores_BV: Any) -> Any:
        import numpy
        import torch

        if self._seen is not None:
            self._matcher.consume_tokens(ids_BL[0, self._seen :].tolist())
        self._seen = ids_BL.shape[1]
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]  # the rest is the state of the parser
            raise ValueError(f"the structured output cannot be continued: {reason:.500}")
        allowed = torch.from_numpy(numpy.unpackbits(bits, bitorder="little").astype(bool))
        allowed_V = torch.zeros(scores_BV.shape[1], dtype=torch.bool)
        size = min(len(allowed), len(allowed_V))
        allowed_V[:size] = allowed[:size]
        return scores_BV.masked_fill(~allowed_V.to(scores_BV.device), -float("inf"))


@cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError("structured output needs llguidance: pip install 'oslo-models[grammar]'") from error
    return llguidance
