"""Fuzzers for everything that strangers can send: requests, bytes on connections, grammars, images,
checkpoint folders and data files.

A fuzzer draws inputs with hypothesis, which minimises failures. `make test` runs each for some inputs with the seed of
the commit. ``PYTHONPATH=tests python -m support.fuzzing --minutes 60`` runs them for an hour. The corpus keeps failing
inputs, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from oslo_models.checkpoint import open_checkpoint, verify_checkpoint
from oslo_models.cli.main import inspect_checkpoint
from oslo_models.data import DatasetForCausalLM
from oslo_models.data.indexed_dataset import IndexedDataset
from oslo_models.deploy.grammar import Grammar, Vocabulary
from oslo_models.server.app import application
from oslo_models.server.connections import ConnectionLimits
from oslo_models.server.images import FORMATS, read_image

from support import checkpoints, corpora
from support.http_server import call, connect, listening

HANG = 20.0
"""Wall time in seconds after which an input counts as a hang. The machine may be busy."""
MASK_SECONDS = 1.0
"""CPU time limit for one token of a grammar."""


class Fuzzer:
    """Draws inputs and checks what they do.

    Attributes:
        outcomes: number of inputs by outcome.
        longest: seconds that the slowest input took.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.outcomes, self.longest = folder, Counter[str](), 0.0

    def check(self, draw: random.Random) -> str:
        """Draw an input, check its effects, and return the outcome."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources."""

    def run(self, count: int, seed: int, corpus: Path | None = None) -> None:
        """Check ``count`` inputs.

        Raises:
            Exception: an input failed. It is minimal.
        """

        def checked(draw: random.Random) -> None:
            began = time.monotonic()
            self.outcomes[self.check(draw)] += 1
            took = time.monotonic() - began
            self.longest = max(self.longest, took)
            assert took < HANG, f"one input took {took:.1f} s"

        database = None if corpus is None else DirectoryBasedExampleDatabase(corpus)
        options = settings(
            max_examples=count, database=database, deadline=None, suppress_health_check=list(HealthCheck)
        )
        given = hypothesis.given(st.randoms(use_true_random=False))
        hypothesis.seed(seed)(options(given(checked)))()


class Requests(Fuzzer):
    """Requests over HTTP. None gets status 5xx or holds a place afterwards. Errors have less than 4 kB."""

    def __init__(self, folder: Path) -> None:
        from server import test_server_fuzz as requests

        super().__init__(folder)
        self._requests = requests
        words = corpora.tokenizer()
        words.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
        model = requests.CheckingModel(vocabulary=len(words))
        encoder = requests.Encoder(vocabulary=len(words))
        self._app = application(model, words, others=[(encoder, words, "encoder")])

    def check(self, draw: random.Random) -> str:
        drawn = self._requests.Fuzz(0)
        drawn.draw = draw
        path, body = drawn.fields() if draw.random() < 0.7 else drawn.bytes()
        method, target = drawn.target(path)
        headers = drawn.headers()
        status, found, answer = asyncio.run(call(self._app, method, target, body, headers))
        self._requests.require_well_formed(status, found, answer, (method, target, headers, body))
        assert status < 400 or len(answer) < 4096
        _, _, measured = asyncio.run(call(self._app, "GET", "/metrics"))
        assert b"oslo_models_calls_in_flight 0\n" in measured
        return str(status)


PIECES = {
    "regex": [*"ab.*+?|()[]{}^$\\-,", "{0,20}", "{1000}", "(?s:", "[^a]", "(?=", r"\d", r"\p{L}", "é", "\0", "(.*a)"],
    "grammar": [
        *("start: ", "\n", "r0", "r1", "A", ": ", " | ", "(", ")", "*", "+", "?", '"a"', "/a*/", "~3", "%ignore A\n"),
        *("%import common.INT\n", "<|end|>", "start", "[", "]", "/(/", '""', "%json {}", "s: s s |\n", "@x", "//", "é"),
    ],
}
KEYWORDS = [
    *(
        "type",
        "properties",
        "items",
        "required",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "enum",
        "const",
        "pattern",
    ),
    *(
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "format",
        "additionalProperties",
        "prefixItems",
        "x-guidance",
        "a",
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 3, 2**70, 1e300, "", "a", "string", "object", "array", "integer", "number"),
    *("#", "#/$defs/a", "#/properties/a", "date-time", "^(a|b)*$", "(", ["a"], [], {}),
]


class Grammars(Fuzzer):
    """Grammars. Each is compiled or refused in one line, and its tokens cost little."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        words = corpora.tokenizer()
        self._vocabulary = Vocabulary.of(words, len(words), [0])

    def close(self) -> None:
        self._vocabulary.checker.close()

    def _schema(self, draw: random.Random, depth: int = 4) -> Any:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(VALUES)
        if draw.random() < 0.2:
            return [self._schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return {draw.choice(KEYWORDS): self._schema(draw, depth - 1) for _ in range(draw.randint(0, 4))}

    def _draw(self, draw: random.Random) -> tuple[str, Any]:
        kind = draw.choice(["regex", "grammar", "json", "choice"])
        if kind == "json":
            schema = {"a": self._schema(draw)} if draw.random() < 0.1 else self._schema(draw, 5)
            if not isinstance(schema, dict):
                raise TypeError(f"{schema!r} is no object")
            return kind, schema
        if kind == "choice":
            return kind, [draw.choice(["", "a", '"', "\\", "\n", "\0", "é"]) * draw.randint(1, 300)] * draw.randint(
                1, 3
            )
        text = "".join(draw.choice(PIECES[kind]) for _ in range(draw.randint(0, 40)))
        if kind == "grammar" and draw.random() < 0.7:
            text = "start: r0 r1 A\nr0: A | r1 r1 |\nr1: A A? | r0\nA: /[a-f]{1,30}/\n" + text
        return kind, text * draw.choice([1, 1, 1, 50])

    def check(self, draw: random.Random) -> str:
        try:
            kind, source = self._draw(draw)
        except (TypeError, ValueError):  # a schema that is no object never gets here
            return "no object"
        process = self._vocabulary.checker._process
        try:
            grammar = Grammar.compiled(kind, source, self._vocabulary)
        except ValueError as error:
            assert len(str(error)) < 400 and "\n" not in str(error), error
            return "refused" if process in (None, self._vocabulary.checker._process) else "its process ended"
        processor = grammar.with_vocabulary(self._vocabulary).processor()
        ids_BL, size = torch.tensor([[5]]), self._vocabulary.size
        for _ in range(6):
            began = time.thread_time()
            try:
                scores_BV = processor(ids_BL, torch.zeros(1, size))
            except ValueError as error:
                assert len(str(error)) < 400 and "\n" not in str(error), error
                return "ended"
            finally:
                assert time.thread_time() - began < MASK_SECONDS
            allowed = [token for token in scores_BV[0].isfinite().nonzero().flatten().tolist() if token]
            if not allowed:
                return "complete"
            ids_BL = torch.cat([ids_BL, torch.tensor([[allowed[draw.randrange(len(allowed))]]])], 1)
        return "in use"


def damage(draw: random.Random, data: bytes) -> bytes:
    """Return data with some damage."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0:
                del changed[at:]
            case 1:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 2:
                changed[at : at + 8] = draw.choice([0, 1, -1, 1 << 28, 1 << 40, -(1 << 63)]).to_bytes(
                    8, "little", signed=True
                )
            case 3:
                changed[at:at] = bytes(draw.choice([1, 100]))
            case _:
                changed[at : at + 4] = draw.choice([b"null", b"-1e9", b'"": ', b"[[[[", b"\xff\xff\xff\x7f"])
    return bytes(changed)


def state(folder: Path) -> dict[str, Any]:
    """Return all names, kinds and contents of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
    }


class Checkpoints(Fuzzer):
    """Damaged checkpoint folders. Reading never writes. It raises an error, or gives the tensors that were saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kinds: dict[str, dict[str, bytes]] = {}
        for kind, options in {"merged": {}, "split": {}, "shards": {"max_shard_size": 300}}.items():
            checkpoints.save("merged" if kind == "shards" else kind, folder / kind, **options)
            self._kinds[kind] = {path.name: path.read_bytes() for path in (folder / kind).iterdir()}
        self._expected = checkpoints.model()[0]

    def check(self, draw: random.Random) -> str:
        files = dict(self._kinds[draw.choice(list(self._kinds))])
        if draw.random() < 0.5:
            del files[checkpoints.MANIFEST]
        bad = self.folder / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        signed = False
        for name in draw.sample(sorted(files), draw.randint(1, 2)):
            match draw.randrange(8):
                case 0:
                    del files[name]
                case 1:
                    (bad / name).symlink_to(draw.choice(["/etc/passwd", "/dev/zero", name, "config.json", "/nowhere"]))
                    del files[name]
                case 2:
                    os.mkfifo(bad / name)
                    del files[name]
                case 3 if name == checkpoints.MANIFEST:
                    files[name], signed = self._signed(draw, files[name]), True
                case 4:
                    (bad / ".oslo_journal").mkdir(exist_ok=True)
                    (bad / ".oslo_journal" / name).write_bytes(damage(draw, files[name]))
                case _:
                    files[name] = damage(draw, files[name])
        for name, data in files.items():
            if not (bad / name).is_symlink():
                (bad / name).write_bytes(data)
        before = state(bad)
        with contextlib.suppress(OSError, ValueError):
            inspect_checkpoint(bad)
        try:
            reader = open_checkpoint(bad)
            try:
                verify_checkpoint(reader, checkpoints.ALONE)
                tensors = {name: reader.read_region(name, _whole(info.shape)) for name, info in reader.tensors.items()}
            finally:
                reader.close()
        except (OSError, ValueError) as error:
            assert len(str(error)) < 5000, error
            return type(error).__name__
        finally:
            assert state(bad) == before
        if checkpoints.MANIFEST in files and not signed:
            assert tensors.keys() <= self._expected.keys()
            wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor, self._expected[name])]
            assert not wrong, (wrong, sorted(before))
        return "read"

    @staticmethod
    def _signed(draw: random.Random, data: bytes) -> bytes:
        """Change an entry of a manifest, and its checksum."""
        content = json.loads(data)
        del content["checksum"]
        place: Any = content
        while True:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
                place = place[key]
                continue
            place[key] = draw.choice([None, -1, 1 << 62, "../x", [], {}, [[0, 1 << 40]], True])
            break
        content["checksum"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        return json.dumps(content).encode()


def _whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


class Data(Fuzzer):
    """Damaged datasets and caches. Opening or reading raises ``ValueError`` or ``OSError``, or gives whole samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for impl in ("mmap", "lazy"):
            corpora.write(folder / impl, [30, 0, 7, 100, 1, 1, 50] * 6, "uint16", impl)
            len(DatasetForCausalLM(str(folder / impl), 16))  # builds the cache
        self._files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def check(self, draw: random.Random) -> str:
        impl = draw.choice(["mmap", "lazy"])
        bad = self.folder / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        files = {path: data for path, data in self._files.items() if path.parts[0].startswith(impl)}
        chosen = draw.choice(sorted(files))
        for path, data in files.items():
            (bad / path).parent.mkdir(parents=True, exist_ok=True)
            (bad / path).write_bytes(damage(draw, data) if path == chosen else data)
        size, entries = sum(map(len, files.values())), len(list(bad.rglob("*")))
        try:
            dataset = DatasetForCausalLM(str(bad / impl), 16, binarization_impl=draw.choice(["mmap", "lazy", "cached"]))
            for index in range(min(len(dataset), 50)):
                assert dataset[index].shape == (16,)
            batch = dataset.__getitems__(list(range(min(len(dataset), 50))))
            assert all(np.array_equal(one, dataset[index]) for index, one in enumerate(batch))
            sequences = IndexedDataset(str(bad / impl))
            assert all(len(sequences.get(number)) == sequences.lengths[number] for number in range(len(sequences)))
        except (OSError, ValueError) as error:
            return type(error).__name__
        finally:
            written = sum(path.stat().st_size for path in bad.rglob("*") if path.is_file())
            assert written < 20 * size + 10_000 and len(list(bad.rglob("*"))) < entries + 8, (
                "a damaged length was believed"
            )
        return "read"


class Connections(Fuzzer):
    """Bytes on connections of a real server. It stays up, and no answer has status 5xx."""

    def __init__(self, folder: Path) -> None:
        from server import test_server_fuzz as requests

        super().__init__(folder)
        words = corpora.tokenizer()
        app = application(requests.CheckingModel(vocabulary=len(words)), words)
        self._stack = contextlib.ExitStack()
        limits = ConnectionLimits(64, 5.0)
        self._url = self._stack.enter_context(listening(app, limits, h11_max_incomplete_event_size=1 << 15))
        self._head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def close(self) -> None:
        self._stack.close()

    def _body(self, draw: random.Random) -> bytes:
        body = json.dumps({"prompt": "def", "max_tokens": draw.choice([1, 2, -1])}).encode()
        if draw.random() < 0.5:
            size = draw.choice([len(body), len(body) + 5, 0, -1, 1 << 70])
            return b"Content-Length: %d\r\n\r\n" % size + body
        sizes = [draw.choice([len(body), 0, 1 << 40, -5])] if draw.random() < 0.5 else [len(body)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (size, body) for size in sizes)
        return b"Transfer-Encoding: chunked\r\n\r\n" + chunks + draw.choice([b"0\r\n\r\n", b"", b"0\r\nx: y\r\n\r\n"])

    def check(self, draw: random.Random) -> str:
        data = b"".join(self._head + self._body(draw) for _ in range(draw.choice([1, 1, 1, 3])))
        if draw.random() < 0.7:
            data = damage(draw, data)
        if draw.random() < 0.3:
            data = draw.choice([b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\n", b"\r\n" * 50, b"GET / HTTP/0.9\r\n"]) + data
        statuses = self._statuses(data, draw.choice([1, 7, 100, 1 << 16]))
        assert all(status < 500 for status in statuses), (statuses, data)
        assert self._statuses(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n") == [200]
        return " ".join(map(str, statuses)) or "no answer"

    def _statuses(self, data: bytes, size: int | None = None) -> list[int]:
        """Send bytes, and return the status of each answer.

        Args:
            size: send pieces of this many bytes, and read until the server is silent. By default, wait for one answer.
        """
        answer = b""
        with connect(self._url) as connected, contextlib.suppress(ConnectionError, TimeoutError):
            connected.settimeout(HANG if size is None else 0.05)
            for at in range(0, len(data), size or len(data)):
                connected.sendall(data[at : at + (size or len(data))])
            while more := connected.recv(1 << 16):
                answer += more
                if size is None:
                    break
        return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", answer)]


class Images(Fuzzer):
    """Damaged images of chats. Each is read within the limit of pixels, or refused in one line."""

    PIXELS = 10_000

    def __init__(self, folder: Path) -> None:
        from server.test_server_images import picture

        super().__init__(folder)
        self._images = {kind: picture(seed, name) for seed, (kind, name) in enumerate(FORMATS.items())}

    def check(self, draw: random.Random) -> str:
        kind = draw.choice(list(FORMATS))
        data = damage(draw, self._images[draw.choice([kind, kind, kind, draw.choice(list(FORMATS))])])
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if draw.random() < 0.2:
            url = damage(draw, url.encode()).decode("latin-1")
        try:
            image = read_image(url, self.PIXELS)
        except ValueError as error:
            assert len(str(error)) < 200 and "\n" not in str(error), error
            return str(error).split(",")[0][:24]
        assert image.mode == "RGB" and image.width * image.height <= self.PIXELS
        return "read"


class Files(Fuzzer):
    """Damaged files of documents and datasets, beside json, gzip, zstandard and pyarrow."""

    def __init__(self, folder: Path) -> None:
        from data import test_drawn_damage as files

        super().__init__(folder)
        self._cases, self._number = files.CASES, 0

    def check(self, draw: random.Random) -> str:
        case = draw.choice(list(self._cases))
        self._number += 1
        own = self.folder / str(self._number)
        own.mkdir()
        self._cases[case](draw, own)
        shutil.rmtree(own)
        return case


FUZZERS: dict[str, Callable[[Path], Fuzzer]] = {
    "requests": Requests,
    "connections": Connections,
    "grammars": Grammars,
    "images": Images,
    "checkpoints": Checkpoints,
    "data": Data,
    "files": Files,
}


def fuzz(name: str, count: int, seed: int, folder: Path, corpus: Path | None = None) -> Fuzzer:
    """Run a fuzzer for some inputs, and return it."""
    fuzzer = FUZZERS[name](folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzzer.run(count, seed, corpus)
    finally:
        fuzzer.close()
    return fuzzer


def main() -> None:
    """Run the fuzzers in turn until the time is over, and print figures after each round."""
    parser = argparse.ArgumentParser(prog="python -m support.fuzzing", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(FUZZERS)} (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, in all (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="failing inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the first round")
    args = parser.parse_args()
    names, end, totals = args.names or list(FUZZERS), time.monotonic() + 60 * args.minutes, dict[str, Counter[str]]()
    seed = args.seed
    while time.monotonic() < end:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                done = fuzz(name, 500, seed, Path(folder), args.corpus)
            totals.setdefault(name, Counter()).update(done.outcomes)
            counts = ", ".join(f"{outcome} {count}" for outcome, count in totals[name].most_common())
            print(
                f"{name}: seed {seed}, longest {done.longest:.2f} s; in all {totals[name].total()}: {counts}",
                flush=True,
            )
        seed += 1


if __name__ == "__main__":
    main()
