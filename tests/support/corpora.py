"""A small tokenizer, source texts, and datasets of distinct tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oslo_models.data.indexed_dataset import write_index

from support import ROOT


def sources() -> list[str]:
    """Texts: the files of this project."""
    return [path.read_text() for path in sorted((ROOT / "oslo_models").rglob("*.py"))]


@cache
def tokenizer(split: str = "", vocabulary: int = 1500, normalizer: str | None = None) -> Any:
    """A byte-level BPE tokenizer of transformers, with the words of GPT-2 or split by an expression."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    if normalizer:
        made.normalizer = getattr(normalizers, normalizer)()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    if split:
        first = pre_tokenizers.Split(Regex(split), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([first, made.pre_tokenizer])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<eod>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sources(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eod>")


@cache
def metaspace_tokenizer(vocabulary: int = 600) -> Any:
    """A tokenizer like Llama's: words begin with their space, and rare characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    made.train_from_iterator(sources(), trainer)
    state = json.loads(made.to_str())
    for byte in range(256):
        state["model"]["vocab"].setdefault(f"<0x{byte:02X}>", len(state["model"]["vocab"]))
    made = Tokenizer.from_str(json.dumps(state))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def expected(texts: Sequence[str], tokenizer: Any, end: int | None) -> list[list[int]]:
    """The documents that preprocessing should make."""
    tail = [] if end is None else [end]
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [ids + tail for ids in found if ids]


def write(
    name: Path, lengths: Sequence[int], dtype: str = "int32", impl: str = "mmap", ends: Sequence[int] | None = None
) -> NDArray[Any]:
    """Write a dataset of the tokens 0, 1, 2, ... and return them."""
    sizes = np.array(lengths, np.int32)
    tokens = np.arange(sizes.sum()).astype(dtype)
    tokens.tofile(f"{name}.bin")
    write_index(f"{name}.idx", sizes, dtype, impl, None if ends is None else np.array(ends))
    return tokens


def texts(seed: int, count: int = 300) -> list[str]:
    """Pieces of source files. Some are empty; some contain non-ASCII characters or an end-of-document token."""
    rng, whole = random.Random(seed), "\n".join(sources())
    starts = [rng.randrange(len(whole)) for _ in range(count)]
    pieces = [whole[start : start + rng.choice((0, 1, 30, 500))] for start in starts]
    return [piece + rng.choice(("", "", " naïve café 文書 x", "<eod> y", "\u00a0z  ")) for piece in pieces]
