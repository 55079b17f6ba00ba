"""Benchmarks of the data pipeline.

The texts are pieces of the sources of Python's standard library, on which the tokenizer is trained too.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.definitions import Peer, Result
from benchmarks.preprocessing import ours

VOCABULARY = 32000


# Runners --------------------------------------------------------------------------------------------------------------


def preprocess(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, megabytes: int) -> Result:
    """Tokens per second from JSON lines to a dataset on disk. All peers must write the same bytes."""
    from oslo_models.data.indexed_dataset import IndexedDataset

    folder = tiny.parent
    tokenizer, source = _tokenizer(folder), _texts(folder, megabytes)
    output = folder / peer.name
    seconds = peer.load(cls, folder, tokenizer=tokenizer, source=source, output=output)
    tokens = int(IndexedDataset(output).lengths.sum(dtype=np.int64))
    files = [Path(f"{output}{ending}") for ending in (".bin", ".idx")]
    sums = [float(zlib.crc32(file.read_bytes())) for file in files]
    for file in files:
        file.unlink()
    return Result({"preprocessing": tokens / seconds}, [tokens, *sums])


def preprocess_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, megabytes: int) -> Result:
    """Peak memory of the process and its children, for ten times as much input as the reference."""
    folder = tiny.parent
    tokenizer, peaks = _tokenizer(folder), []
    for size in (megabytes // 10, megabytes):
        source, output = _texts(folder, size), folder / peer.name
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_peak, args=(tokenizer, source, output, writer))
        process.start()
        peaks.append(reader.recv())
        process.join()
        source.unlink()
    small = {f"{megabytes // 10} MB of input": {"peak memory": peaks[0]}}
    return Result({"peak memory": peaks[1]}, [], small)


def _peak(tokenizer: Path, source: Path, output: Path, writer: Any) -> None:
    with _peak_of_all() as peaks:
        ours(tokenizer, source, output)
    writer.send(sum(peaks.values()))


@contextmanager
def _peak_of_all() -> Iterator[dict[str, float]]:
    """The peak (VmHWM) of this process and of its children, in MB, by process."""
    peaks: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
        for process in ("self", *children):
            try:
                lines = Path(f"/proc/{process}/status").read_text().splitlines()
            except FileNotFoundError:
                continue
            for line in lines:
                if line.startswith("VmHWM:"):
                    peaks[process] = int(line.split()[1]) * 1024 / 1e6

    def watch() -> None:
        while not done.wait(0.05):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()
        look()


def index_samples(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, documents: int, length: int) -> Result:
    """The sample index of a corpus with 500 tokens per document: time and peak memory to build it, and random access.

    Samples are read 64 at a time, as a data loader does. The file of tokens is sparse: only document sizes exist.
    """
    from benchmarks.instruments import PeakMemory
    from oslo_models.data import DatasetForCausalLM
    from oslo_models.data.indexed_dataset import write_index

    name = tiny.parent / "synthetic"
    sizes = np.random.default_rng(0).lognormal(5.7, 1.0, documents)
    sizes = np.maximum(sizes * (500 / sizes.mean()), 1).astype(np.int32)
    write_index(f"{name}.idx", sizes, "uint16")
    with Path(f"{name}.bin").open("wb") as file:
        file.truncate(2 * int(sizes.sum(dtype=np.int64)))
    del sizes
    memory = PeakMemory()
    with memory.watched():
        start = time.perf_counter()
        dataset = DatasetForCausalLM(name, length)
        building = time.perf_counter() - start
    size = sum(file.stat().st_size for file in Path(f"{name}.index").rglob("*.npy")) / 1e6
    chosen = random.Random(0).choices(range(len(dataset)), k=min(50_000, len(dataset)))
    batches = [chosen[start : start + 64] for start in range(0, len(chosen), 64)]
    for batch in batches:  # maps the pages, without disk reads: the file is sparse
        dataset.__getitems__(batch)
    start = time.perf_counter()
    for batch in batches:
        dataset.__getitems__(batch)
    speed = len(chosen) / (time.perf_counter() - start)
    shutil.rmtree(f"{name}.index")
    values = {"building": building, "random access": speed, **memory.growth}
    return Result(values, [], {"index": dict.fromkeys(memory.growth, size)})


def blend(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, datasets: int, samples: int) -> Result:
    """The time to order a blend with random weights; each dataset's share is checked at every prefix."""
    from oslo_models.data import DatasetBlender

    weights = np.random.default_rng(0).random(datasets) + 0.01
    parts = [range(samples // datasets)] * datasets
    start = time.perf_counter()
    blender = DatasetBlender(parts, weights.tolist())
    blender[0]
    seconds = time.perf_counter() - start
    number, sample = blender._blended()
    place = np.arange(len(blender))
    share = (weights / weights.sum())[number]
    assert (sample < share * (place + 1) + 1e-6).all() and (share * place < sample + 1 + 1e-6).all()
    counts = np.bincount(number, minlength=datasets)
    assert (np.abs(counts - weights / weights.sum() * len(blender)) < 1 + 1e-6).all()
    return Result({"building": seconds})


# Texts ----------------------------------------------------------------------------------------------------------------


def _sources() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    return [text for path in paths if len(text := path.read_text("utf-8", "replace")) > 100]


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    if not path.exists():
        part = path.with_suffix(".part")
        make(part)
        part.rename(path)
    return path


def _tokenizer(folder: Path) -> Path:
    def make(path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        options = {"special_tokens": ["<eod>"], "initial_alphabet": alphabet, "show_progress": False}
        tokenizer.train_from_iterator(_sources(), trainers.BpeTrainer(vocab_size=VOCABULARY, **options))
        tokenizer.save(str(path))

    return _once(folder / "tokenizer.json", make)


def _texts(folder: Path, megabytes: int) -> Path:
    """JSON lines with texts of 200 to 4000 characters."""

    def make(path: Path) -> None:
        rng, sources, size = random.Random(0), _sources(), 0
        with path.open("w", encoding="utf-8") as file:
            while size < megabytes * 1_000_000:
                source = rng.choice(sources)
                start = rng.randrange(len(source))
                size += file.write(json.dumps({"text": source[start : start + rng.randrange(200, 4000)]}) + "\n")

    return _once(folder / f"texts-{megabytes}.jsonl", make)
