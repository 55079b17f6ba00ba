"""Three programs that tokenise JSON lines into a binarised dataset: ours, Megatron-LM's loop, and ``datasets.map``.

Each uses two processes and returns its duration in seconds. The datasets must be equal byte for byte.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

PROCESSES = 2


def ours(tokenizer: Path, source: Path, output: Path) -> float:
    """`DatasetPreprocessor` with two processes."""
    from oslo_models.data import DatasetPreprocessor

    preprocessor = DatasetPreprocessor(_load(tokenizer), num_workers=PROCESSES)
    start = time.perf_counter()
    preprocessor.preprocess(preprocessor.open_jsonl(source, "text"), output, 0)
    return time.perf_counter() - start


def megatron_loop(tokenizer: Path, source: Path, output: Path) -> float:
    """The loop of Megatron-LM's ``tools/preprocess_data.py``: one pool, a task for each line, handed over 32 by 32."""
    from oslo_models.data.indexed_dataset import write_index

    start, lengths = time.perf_counter(), []
    with (
        multiprocessing.get_context("fork").Pool(PROCESSES, _begin, (tokenizer,)) as pool,
        source.open(encoding="utf-8") as lines,
        Path(f"{output}.bin").open("wb") as data,
    ):
        for ids in pool.imap(_encode, lines, 32):
            tokens = np.array(ids, np.uint16)
            data.write(tokens.tobytes())
            lengths.append(len(tokens))
    write_index(f"{output}.idx", np.array(lengths, np.int32), "uint16")
    return time.perf_counter() - start


def _begin(tokenizer: Path) -> None:
    global loaded
    loaded = _load(tokenizer)


def _encode(line: str) -> list[int]:
    ids: list[int] = loaded(json.loads(line)["text"])["input_ids"]
    ids.append(loaded.eos_token_id)
    return ids


def datasets_map(tokenizer: Path, source: Path, output: Path) -> float:
    """``datasets.map(batched=True)`` with two processes, and writing; loading the texts is not counted."""
    import datasets

    from oslo_models.data.indexed_dataset import write_index

    datasets.disable_progress_bars()
    cache = Path(f"{output}.cache")
    texts = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(cache))
    tok = _load(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tok(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"ids": [[*ids, tok.eos_token_id] for ids in found]}

    start, lengths = time.perf_counter(), []
    mapped = texts.map(encode, batched=True, num_proc=PROCESSES, remove_columns=texts.column_names)
    with Path(f"{output}.bin").open("wb") as data:
        for batch in mapped.with_format("numpy").iter(batch_size=1000):
            lengths += [len(ids) for ids in batch["ids"]]
            np.concatenate(batch["ids"]).astype(np.uint16).tofile(data)
    write_index(f"{output}.idx", np.array(lengths, np.int32), "uint16")
    seconds = time.perf_counter() - start
    shutil.rmtree(cache)
    return seconds


def _load(tokenizer: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<eod>")
