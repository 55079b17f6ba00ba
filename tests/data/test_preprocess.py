"""Preprocessing: the right tokens from every kind of input, constant memory, and resumption after crashes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oslo_models.data import DatasetPreprocessor, preprocess
from oslo_models.data.bpe_cache import GPT2, PATTERNS, find_pattern
from oslo_models.data.indexed_dataset import IMPLS, IndexedDataset
from oslo_models.data.readers import open_documents, open_jsonl
from oslo_models.data.tokenizer_pool import Encoder

from support import ROOT
from support.corpora import expected, texts, tokenizer

pytestmark = pytest.mark.drawn(16, of="file")

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))}


def read(name: Path) -> list[list[int]]:
    return [found.tolist() for found in IndexedDataset(name)]


@pytest.mark.parametrize("impl", IMPLS)
def test_preprocess_writes_the_tokens_of_the_tokenizer(impl: str, tmp_path: Path, seed: int) -> None:
    given_texts, tok = texts(seed), tokenizer()
    for workers, append in ((0, True), (2, False)):
        made = DatasetPreprocessor(tok, 16, impl, append, 7 if append else None, workers)
        done = made.preprocess(iter(given_texts), tmp_path / "a.b", log_interval=10)
        right = expected(given_texts, tok, 7 if append else None)
        assert read(tmp_path / "a.b") == right
        assert (done.inputs, done.documents, done.tokens) == (300, len(right), sum(map(len, right)))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]
    magic = (tmp_path / "a.b.idx").read_bytes()[:6]
    assert magic == (b"MMIDID" if impl == "mmap" else b"TNTIDX")


def test_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path) -> None:
    tok = tokenizer()
    assert DatasetPreprocessor(tok).dtype == "uint16"
    for last, dtype in ((65498, "uint16"), (65499, "int32")):
        large = SimpleNamespace(get_vocab=lambda last=last: {"a": 0, "<eod>": last}, eos_token_id=last)
        assert DatasetPreprocessor(large).dtype == dtype
    DatasetPreprocessor(tok, num_workers=0, dtype="int64").preprocess(["a b"], tmp_path / "a", 0)
    assert IndexedDataset(tmp_path / "a").dtype == np.int64
    with pytest.raises(ValueError, match="holds tokens up to 255"):
        DatasetPreprocessor(tok, num_workers=0, dtype="uint8")


def test_dtype_that_cannot_hold_the_vocabulary_is_refused_before_the_work() -> None:
    words = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 70_000}, eos_token_id=0)
    for dtype in ("uint16", "int16", "uint8"):
        with pytest.raises(ValueError, match=f"{dtype}.*70000.*int32"):
            DatasetPreprocessor(words, dtype=dtype)
    for wanted, dtype in ((None, "int32"), ("int32", "int32"), ("float32", "float32")):
        assert DatasetPreprocessor(words, dtype=wanted).dtype == dtype


def test_eod_token_outside_the_vocabulary_is_rejected() -> None:
    """Otherwise the token would be written, and raise in an embedding, or worse, only during training."""
    tok = tokenizer()
    last = max(tok.get_vocab().values())
    assert DatasetPreprocessor(tok, eod_token_id=last).eod_token_id == last
    for wrong in (last + 1, 10**30, -1, 1.0, "1", True):
        with pytest.raises(ValueError, match=f"eod_token_id={wrong!r} is not in the .*from 0 to {last}, or"):
            DatasetPreprocessor(tok, eod_token_id=wrong)  # type: ignore[arg-type]


def test_tokenizer_may_be_given_by_its_name(tmp_path: Path) -> None:
    """Accept a directory, a file or a hub name; errors list the valid kinds. OSLO 1's ``chunksize`` still works."""
    tok = tokenizer()
    tok.save_pretrained(tmp_path / "tok")
    for name in (tmp_path / "tok", str(tmp_path / "tok"), tmp_path / "tok" / "tokenizer.json"):
        eod = {"eod_token_id": tok.eos_token_id} if str(name).endswith(".json") else {}
        made = DatasetPreprocessor(name, num_workers=0, chunksize=7, **eod)
        assert made.eod_token_id == tok.eos_token_id and made.chunk_size == 7
        made.preprocess(["a def self b"], tmp_path / "a", 0)
        assert [document.tolist() for document in IndexedDataset(tmp_path / "a")] == expected(
            ["a def self b"], tok, tok.eos_token_id
        )
    (tmp_path / "empty").mkdir()
    for wrong in (str(tmp_path / "empty"), "no/such tokenizer"):
        with pytest.raises(ValueError, match=f"name: a directory, a tokenizer.json .*{wrong!r} cannot be loaded"):
            DatasetPreprocessor(wrong)
    with pytest.raises(ValueError, match=r"tokenizer must be a tokenizer of transformers.*; got a int"):
        DatasetPreprocessor(50257)


ALPHABET = st.one_of(
    st.sampled_from(list(" \t\n\r\v\f'\x1c\x85\u00a0\u200b\u2028\u017f\u0130\u0661\u0301\u212a\u037eⅧßé文😀\x00\x7f")),
    st.sampled_from(["  ", "\n\n", " \n", "'s", "'LL", "<eod>", "123", "4567", " 8", "ab", " Cd", "_", "...", "\r\n"]),
    st.characters(exclude_categories=("Cs",)),
)


@pytest.mark.parametrize("normalizer", [None, "NFC"])
@pytest.mark.parametrize("split", PATTERNS)
@settings(max_examples=100)
@given(pieces=st.lists(ALPHABET, max_size=30))
def test_bpe_cache_gives_the_tokens_of_the_tokenizer(split: str, normalizer: str | None, pieces: list[str]) -> None:
    tok = tokenizer("" if split == GPT2 else split, normalizer=normalizer)
    encoder = Encoder(tok, None, "int32")
    assert find_pattern(encoder._spec) == split
    text = "".join(pieces)
    assert encoder.encode([text]).tokens.tolist() == tok.encode(text, add_special_tokens=False)


def test_bpe_cache_recognises_tokenizers_of_transformers() -> None:
    import transformers as hf

    alphabet = {token: number for number, token in enumerate(["<|endoftext|>", "a", "b", "ab", "Ġ"])}
    for cls, split in ((hf.GPT2Tokenizer, GPT2), (hf.Qwen2Tokenizer, list(PATTERNS)[2])):
        made = cls(vocab=alphabet, merges=[("a", "b")])
        encoder = Encoder(made, None, "int32")
        assert find_pattern(encoder._spec) == split
        assert encoder.encode(["ab ba"]).tokens.tolist() == made.encode("ab ba", add_special_tokens=False) != []


def test_bpe_cache_is_not_used_for_other_tokenizers(tmp_path: Path, seed: int) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "def": 2, "self": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=made, sep_token="[SEP]")
    assert find_pattern(Encoder(plain, None, "int32")._spec) is None

    class Own(PreTrainedTokenizerFast):  # cannot be pickled by its name, and overrides a method
        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return super().encode(*args, **kwargs)[::-1]

    own, given_texts = Own(tokenizer_object=made, sep_token="[SEP]"), ["def self x", "", "self"]
    for tok in (plain, own):
        DatasetPreprocessor(tok, num_workers=0).preprocess(given_texts, tmp_path / "a", 0)
        assert read(tmp_path / "a") == expected(given_texts, tok, 1)
    with pytest.raises(ValueError, match="num_workers=0"):
        DatasetPreprocessor(own, num_workers=1).preprocess(given_texts, tmp_path / "b", 0)
    lowered = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    lowered.normalizer = normalizers.Lowercase()
    assert find_pattern(Encoder(PreTrainedTokenizerFast(tokenizer_object=lowered), None, "int32")._spec) is None


def test_lone_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n{"text": "\\ud83d\\ude00"}\n')
    DatasetPreprocessor(tokenizer(), num_workers=1).preprocess(open_jsonl(tmp_path / "a", "text"), tmp_path / "a", 0)
    assert read(tmp_path / "a") == expected(["x \ufffd y", "😀"], tokenizer(), 0)


def test_open_documents_reads_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    rows = [{"n": 1, "body": "one\n"}, {"n": 2, "body": "two é\n"}, {"n": 3, "body": "three"}]
    lines = "\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"
    plain = "".join(row["body"] for row in rows).encode()
    for ending, data in ((".txt", plain), (".jsonl", lines)):
        (tmp_path / f"a.b{ending}").write_bytes(data)
        (tmp_path / f"a.b{ending}.gz").write_bytes(gzip.compress(data))
        (tmp_path / f"a.b{ending}.zst").write_bytes(zstandard.compress(data))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.b.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert list(open_documents(path, "body")) == [row["body"] for row in rows], path.name
    assert list(open_jsonl(tmp_path / "a.b", "body")) == [row["body"] for row in rows]
    with pytest.raises(ValueError, match=r"no column 'text'; there are n, body"):
        list(open_documents(tmp_path / "a.b.parquet"))
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match="ending"):
        open_documents(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError):
        open_documents(tmp_path / "absent.txt")


def test_preprocess_reads_rows_and_hugging_face_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"body": f"text {number}", "n": number} for number in range(600)]
    dataset, right = Dataset.from_list(rows), expected([row["body"] for row in rows], tokenizer(), 0)
    made = DatasetPreprocessor(tokenizer(), num_workers=0)
    for given_rows in (rows, dataset, dataset.to_iterable_dataset(), (row["body"] for row in rows), dataset["body"]):
        made.preprocess(given_rows, tmp_path / "a", 0, text_key="body")
        assert read(tmp_path / "a") == right
    with pytest.raises(ValueError, match="no column 'text'; there are body, n"):
        made.preprocess(dataset, tmp_path / "a", 0)
    for wrong, message in (("text", "got one text"), ([1], "document 0 is int"), ([{"x": "y"}], "'text' is NoneType")):
        with pytest.raises(ValueError, match=message):
            made.preprocess(wrong, tmp_path / "c", 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "not JSON"),
        ('{"texts": "x", "n": 1}', "no key 'text': its keys are 'texts', 'n'"),
        ('["text"]', "no key 'text': it is no object"),
        ('{"text": 3}', "the value of 'text' is int"),
        (b'{"text": "\xff"}', "not JSON"),
    ],
)
def test_bad_jsonl_line_is_named(line: str | bytes, message: str, tmp_path: Path) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + bad + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: {message}.*on_error='skip'"):
        list(DatasetPreprocessor.open_jsonl(tmp_path / "a.jsonl", "text"))
    with pytest.warns(UserWarning, match=rf"skipped: .*a\.jsonl, line 3: {message}"):
        assert list(open_jsonl(tmp_path / "a", "text", on_error="skip")) == ["a", "b"]


def test_preprocessor_rejects_bad_arguments() -> None:
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    for keywords, message in (
        ({}, "append_eod=True needs eod_token_id"),
        ({"binarization_impl": "disk"}, "binarization_impl='disk'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"dtype": "uint32"}, "dtype='uint32'"),
    ):
        with pytest.raises(ValueError, match=message):
            DatasetPreprocessor(bare, **keywords)
    assert DatasetPreprocessor(bare, append_eod=False).eod_token_id is None


# Crashes --------------------------------------------------------------------------------------------------------------


def test_preprocess_resumes_after_a_kill_at_fifty_points(tmp_path: Path) -> None:
    """Kill every writing step, including the last ones; some runs are killed twice."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "preprocess_crashes.py"), str(tmp_path), "50"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("50 kills at ")


ENDLESS = """
import itertools, sys, time
from support.corpora import texts, tokenizer
from oslo_models.data import DatasetPreprocessor, preprocess

def slowly():
    for text in itertools.cycle(texts(int(sys.argv[2]))):
        time.sleep(0.001)
        yield text

preprocess.COMMIT_SECONDS = 0.05
DatasetPreprocessor(tokenizer(), 16, num_workers=2).preprocess(slowly(), sys.argv[1], 0)
"""


def test_preprocess_resumes_after_a_kill_and_leaves_no_process(tmp_path: Path, seed: int) -> None:
    """Worker processes end with their parent, and a new run reuses the written documents."""
    name, tok = tmp_path / "a", tokenizer()
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(name), str(seed)], env=ENVIRONMENT)
    state, inputs = tmp_path / "a.partial/progress.json", 0
    deadline = time.monotonic() + 120
    while inputs < 100 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        inputs = json.loads(state.read_text())["inputs"] if state.exists() else 0
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    with pytest.raises(ValueError, match="another process is writing"):
        DatasetPreprocessor(tok, num_workers=0).preprocess([], name, 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    inputs = json.loads(state.read_text())["inputs"]
    given_texts = (texts(seed) * (inputs // 300 + 2))[: inputs + 50]
    encoded = 0

    def counted(self: Encoder, chunk: list[str]) -> Any:
        nonlocal encoded
        encoded += len(chunk)
        return encode(self, chunk)

    encode = Encoder.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "encode", counted)
        DatasetPreprocessor(tok, num_workers=0).preprocess(given_texts, name, 0)
    assert encoded == 50  # the others were not encoded again
    assert read(name) == expected(given_texts, tok, 0)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.02)


def interrupted(name: Path, count: int = 40, **keywords: Any) -> None:
    """Run preprocessing that fails after some commits."""

    def broken() -> Iterator[str]:
        yield from (f"text {number}" for number in range(count))
        raise RuntimeError("no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "COMMIT_SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="no more"):
            DatasetPreprocessor(tokenizer(), 4, num_workers=0, **keywords).preprocess(broken(), name, 0)


def test_preprocess_rejects_resuming_with_other_arguments(tmp_path: Path) -> None:
    name, made = tmp_path / "a", DatasetPreprocessor(tokenizer(), num_workers=0)
    interrupted(name)
    others = [f"text {number}" for number in range(100)]
    for changed in (["text zero", *others[1:]], others[:8]):
        with pytest.raises(
            ValueError, match=r"a\.partial holds the first \d+ documents of another input.*resume=False"
        ):
            made.preprocess(changed, name, 0)
    with pytest.raises(ValueError, match="started with another dtype and eod"):
        DatasetPreprocessor(tokenizer(), eod_token_id=5, num_workers=0, dtype="int32").preprocess(others, name, 0)
    with pytest.raises(ValueError, match="started with another tokenizer"):
        DatasetPreprocessor(tokenizer(vocabulary=400), num_workers=0).preprocess(others, name, 0)
    assert not name.with_suffix(".idx").exists()
    made.preprocess(others, name, 0)
    assert read(name) == expected(others, tokenizer(), 0)
    interrupted(name)
    assert read(name) == expected(others, tokenizer(), 0)  # the old dataset remains until the new one is complete
    made.preprocess(others[:3], name, 0, resume=False)
    assert read(name) == expected(others[:3], tokenizer(), 0)


def test_death_of_a_tokenizer_process_is_reported(tmp_path: Path) -> None:
    class Dying:
        eos_token_id = 1

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

        def __reduce__(self) -> tuple[Any, ...]:
            return os._exit, (7,)

    with pytest.raises(RuntimeError, match="exit code 7"):
        DatasetPreprocessor(Dying(), num_workers=1).preprocess(["x"], tmp_path / "a", 0)


# Memory ---------------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from support.preprocess_crashes import Numbers
from oslo_models.data import DatasetPreprocessor

class Ends(Numbers):
    def encode(self, text, add_special_tokens):
        return [1] * (len(text) // 64)

texts = ("x" * (64 << number % 12) for number in range(int(sys.argv[2])))
DatasetPreprocessor(Ends(), num_workers=0).preprocess(texts, sys.argv[1], 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_preprocess_memory_is_constant(tmp_path: Path) -> None:
    peaks = []
    for count in (1200, 12000):  # 26 and 260 MB
        command = [sys.executable, "-c", PEAK, str(tmp_path / "a"), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 8, f"{peaks} MB"


def test_preprocess_reads_input_lazily(tmp_path: Path) -> None:
    taken = 0

    def counted() -> Iterator[str]:
        nonlocal taken
        for number in range(200):
            taken = number
            yield f"text {number}"

    class Seen(Exception):
        pass

    def stop(self: Any, *_: Any) -> None:
        raise Seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oslo_models.data.writer.Output.append", stop)
        with pytest.raises(Seen):
            DatasetPreprocessor(tokenizer(), 4, num_workers=1).preprocess(counted(), tmp_path / "a", 0)
    assert taken < 16


def test_preprocess_imports_no_torch() -> None:
    code = "import sys; from oslo_models import DatasetPreprocessor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
