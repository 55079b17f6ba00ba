"""Reads the embedding settings of a checkpoint from the files of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from oslo_models.config.sources import checking

POOLINGS = ("mean", "cls", "last", "max")
"""Pooling of token vectors: the mean over all tokens, the first token, the last token, or the maximum."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EmbeddingConfig:
    """Embedding settings of a checkpoint.

    Attributes:
        pooling: one of `POOLINGS`.
        prompt: prefix of each text.
        max_length: limit of tokens in a text with its prompt; ``None``: the limit of the model.
        lower_case: whether texts are converted to lower case.
    """

    pooling: str = "mean"
    prompt: str = ""
    max_length: int | None = None
    lower_case: bool = False

    def prepare(self, text: str) -> str:
        """Return the text for the tokenizer."""
        text = self.prompt + text
        return text.lower() if self.lower_case else text


def read_embedding_config(name: str, pooling: str | None = None) -> EmbeddingConfig | None:
    """Read the embedding settings of a checkpoint. Return ``None`` if it has no such files.

    Args:
        name: a directory or a name on the hub.
        pooling: replaces the pooling of the checkpoint.

    Raises:
        ValueError: the checkpoint uses a module or setting that the server does not support; the message names it.
    """
    with checking(name):
        return _read_settings(name, pooling)


def _read_settings(name: str, pooling: str | None) -> EmbeddingConfig | None:
    modules = _read(name, "modules.json") or []
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in modules}
    if pooling is None and (unknown := sorted(set(kinds) - set(_MODULES))):
        raise ValueError(
            f"{name}: modules.json has {', '.join(unknown)}, which the server does not support; pass a pooling for "
            "vectors without it"
        )
    folder = str(kinds.get("Pooling", {}).get("path", "1_Pooling"))
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        raise ValueError(f"{name}: path={folder!r:.80} in its modules.json leads out of the checkpoint")
    stated = _read(name, f"{folder}/config.json")
    if not modules and stated is None:
        return None
    prompts = _read(name, "config_sentence_transformers.json") or {}
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    stated = stated or {}
    if prompt and not stated.get("include_prompt", True):
        raise ValueError(f"{name}: pooling without the tokens of the default prompt (include_prompt) is not supported")
    text = _read(name, "sentence_bert_config.json") or {}
    length = text.get("max_seq_length")
    if not (isinstance(prompt, str) and (length is None or (isinstance(length, int) and length > 0))):
        raise ValueError(f"{name}: its prompt is no text, or max_seq_length={length!r:.80} is no length")
    return EmbeddingConfig(pooling or _pooling(name, stated), prompt, length, bool(text.get("do_lower_case")))


def _pooling(name: str, stated: dict[str, Any]) -> str:
    """Return the pooling of a configuration: from its booleans, or from the name in newer files."""
    modes = stated.get(
        "pooling_mode", [key for key, value in stated.items() if key.startswith("pooling_mode_") and value]
    )
    modes = [modes] if isinstance(modes, str) else list(modes)
    found = [_MODES.get(mode, {"lasttoken": "last"}.get(mode, mode)) for mode in modes] or ["mean"]
    if len(found) > 1 or found[0] not in POOLINGS:
        raise ValueError(
            f"{name}: its pooling is {' with '.join(modes)}, which the server does not support; pass one of "
            f"{', '.join(POOLINGS)} for other vectors"
        )
    return found[0]


def _read(name: str, file: str) -> Any:
    """Return the content of a JSON file in a checkpoint; ``None`` if the file does not exist."""
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        path = cached_file(name, file, _raise_exceptions_for_gated_repo=False, **missing) if name else None
    except OSError:  # not a name on the hub
        path = None
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
