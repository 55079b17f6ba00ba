"""Compiles the grammars of requests in a separate process, so that a native parser cannot crash the server.

`GrammarChecker` starts the process, which runs this module. Both sides send a length and then JSON. No answer is
unpickled. The kernel kills the process when a grammar takes more than `CPU_SECONDS`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from oslo_models.starting import import_path, python_module

MOST_BYTES = 1 << 16
MOST_DEPTH = 64
MOST_RULES = 1000
MOST_PARTS = 4096
"""Alternatives of a Lark grammar, options of a choice, or keys and items of a schema."""
FIRST_MASK_SECONDS = 0.3
"""CPU time limit to compile a grammar and compute its first mask."""
CPU_SECONDS = 1.0
"""CPU time after which the kernel ends the process."""
WAIT_SECONDS = 10.0
"""Wall time limit for an answer, including the wait for a core."""
START_SECONDS = 60.0
"""Wall time limit to start the process and prepare a vocabulary."""
MOST_MEMORY = 8 << 30
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
"""Without this bound, a model may generate spaces until its token limit."""
UNFORCED = '%llguidance {"no_forcing": true}\nstart: @main'
"""Disables forcing: for a forced text, llguidance allows only its tokenizer's tokens, which may be special tokens."""
_LENGTH = struct.Struct("<Q")
_STACK = 4 << 20
"""Stack size in bytes: half of a worker's stack, so that a grammar that passes here cannot overflow a worker."""
_BRACKETS = re.compile(r"\\.|[(\[{]|[)\]}]", re.DOTALL)


def check_size(kind: str, source: Any) -> None:
    """Raise ``ValueError`` for a grammar that is too large for its parser. Does not parse it."""
    size, depth, rules, parts = _measure(kind, source)
    limits = ((size, MOST_BYTES, "bytes"), (depth, MOST_DEPTH, "levels"))
    for found, most, what in (*limits, (rules, MOST_RULES, "rules"), (parts, MOST_PARTS, "parts")):
        if found > most:
            raise ValueError(f"the {kind} for structured output has {found} {what}, more than {most}; simplify it")


def _measure(kind: str, source: Any) -> tuple[int, int, int, int]:
    """Count bytes, levels of nesting, rules, and parts."""
    if kind == "choice":
        return sum(len(text.encode()) for text in source), 0, 0, len(source)
    if kind == "json":
        depth, parts, size = 0, 0, 0
        level: list[Any] = [source]
        while level and depth <= MOST_DEPTH and parts <= MOST_PARTS:  # not recursive: the schema may be deep
            size += sum(len(each.encode()) if isinstance(each, str) else 8 for each in level)
            below = [item for each in level if isinstance(each, dict) for item in each.values()]
            keys = [key for each in level if isinstance(each, dict) for key in each]
            below += [item for each in level if isinstance(each, list) for item in each]
            size, parts, depth, level = (
                size + sum(len(str(key).encode()) for key in keys),
                parts + len(below),
                depth + 1,
                below,
            )
        return size, depth, 0, parts
    if len(source) > MOST_BYTES:
        return len(source), 0, 0, 0
    depth = deepest = 0
    for bracket in _BRACKETS.findall(source):
        depth = max(0, depth + (bracket in "([{") - (bracket in ")]}"))
        deepest = max(deepest, depth)
    rules = source.count(":") if kind == "grammar" else 0
    return len(source.encode()), deepest, rules, source.count("|")


_checkers: weakref.WeakSet[GrammarChecker] = weakref.WeakSet()


class GrammarChecker:
    """Compiles grammars in another process, one at a time. Starts the process on first use and after it has died.

    Args:
        tokenizer: as JSON, in the format of tokenizers.
        size: of the logits.
        ends: tokens that end the text.
    """

    def __init__(self, tokenizer: str, size: int, ends: tuple[int, ...]) -> None:
        self._vocabulary = [tokenizer, size, list(ends)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by: int | None = None
        """Signal that ended the last process; 0: an exit; ``None``: it exceeded its time."""
        self._ends = 0
        """Number of calls of `end`."""
        _checkers.add(self)

    def compile(self, kind: str, source: Any) -> str:
        """Return the grammar in the format of llguidance.

        Raises:
            ValueError: the grammar is invalid, too large or too slow.
        """
        check_size(kind, source)
        with self._lock:
            ends = self._ends
            answer = self._answer(kind, source)
            if answer is None and self._ended_by == signal.SIGKILL and self._ends == ends:  # killed by others
                answer = self._answer(kind, source)
        if answer is None:
            raise ValueError(f"the {kind} for structured output is too complex: {self._why_ended()}")
        if "error" in answer:
            raise ValueError(f"the {kind} for structured output cannot be used: {one_line(answer['error'])}")
        return str(answer["text"])

    def _answer(self, kind: str, source: Any) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._ask([kind, source], WAIT_SECONDS)

    def _why_ended(self) -> str:
        if self._ended_by is None or self._ended_by == signal.SIGPROF:
            return "its parser took too long"
        return f"its parser failed with signal {self._ended_by}" if self._ended_by else "its parser failed"

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            python_module(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # parsers print what clients sent
            start_new_session=True,  # Ctrl-C in a terminal is for the application only
            env={**os.environ, "PYTHONPATH": import_path()},
        )
        answer = self._ask(self._vocabulary, START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            why = self._why_ended() if answer is None else one_line(answer["error"])
            raise ValueError(f"structured output cannot be used with this model: {why}")

    def _ask(self, message: Any, seconds: float) -> Any:
        """Send a message and return the answer; ``None`` if the process has died or exceeded ``seconds``."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        body = json.dumps(message).encode()
        try:
            self._process.stdin.write(_LENGTH.pack(len(body)) + body)
            self._process.stdin.flush()
            return json.loads(_read(self._process.stdout, time.monotonic() + seconds))
        except TimeoutError:
            self._ended_by = None
        except (OSError, EOFError, ValueError):  # the pipe closes a moment before the process ends
            self._ended_by = 0
            with suppress(subprocess.TimeoutExpired):
                self._ended_by = max(0, -self._process.wait(1.0))
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None

    def end(self) -> None:
        """End the process, also while another thread waits for its answer. Does not wait for that thread."""
        self._ends += 1
        if (process := self._process) is not None:
            process.kill()
        if self._lock.acquire(blocking=False):  # else that thread closes the pipes
            try:
                self.close()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the process sees its input close
            self.close()


def end_grammar_processes() -> None:
    """End the processes of all checkers. They start again on use."""
    for checker in list(_checkers):
        checker.end()


def one_line(text: str) -> str:
    """Return the beginning of a parser's message, without quotations of client data."""
    first = next(iter(text[:1000].strip().splitlines()), "")
    return re.sub(r"\"[^\"]*(\"|$)", "...", first)[:200]


def limits() -> dict[str, Any]:
    """Return the parser limits as keyword arguments of llguidance. They are the same here and in the workers.

    The limits count work and not time, so that all ranks come to the same result.
    """
    import llguidance

    parser_limits = llguidance.LLParserLimits(step_max_items=10_000, step_lexer_fuel=100_000, verbose_errors=False)
    return {"limits": parser_limits}


def _read(pipe: Any, deadline: float) -> bytes:
    """Read a message from the descriptor, not from a buffer.

    Raises:
        EOFError: the process ended.
        TimeoutError: the message did not arrive in time.
    """
    data, length = b"", _LENGTH.size
    while len(data) < length:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        more = os.read(pipe.fileno(), 1 << 16)
        if not more:
            raise EOFError
        data += more
        if length == _LENGTH.size <= len(data):
            length += _LENGTH.unpack_from(data)[0]
    return data[_LENGTH.size :]


# In the process -------------------------------------------------------------------------------------------------------


def compiled(kind: str, source: Any, prepared: Any) -> str:
    """Compile a grammar and compute its first mask.

    Raises:
        ValueError: the grammar is invalid or too slow.
    """
    from llguidance import LLMatcher

    began = time.process_time()
    made: dict[str, Any]
    if kind == "json":
        made = {"json_schema": {**source, "x-guidance": JSON_OPTIONS}}
    elif kind == "regex":
        made = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]
    else:
        made = {"lark_grammar": "start: " + " | ".join(map(json.dumps, source)) if kind == "choice" else source}
    text = json.dumps({"grammars": [{"lark_grammar": UNFORCED}, {**made, "name": "main"}]})
    if error := LLMatcher.validate_grammar(text, prepared, **limits()):
        raise ValueError(error)
    matcher = LLMatcher(prepared, text, log_level=0, **limits())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if time.process_time() - began > FIRST_MASK_SECONDS:
        raise ValueError(f"it takes more than {FIRST_MASK_SECONDS:g} s to compile; simplify it")
    return text


def main() -> None:
    """Compile grammars from stdin and answer on stdout, until the other side closes the pipes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    prepared: Any = None
    while head := requests.read(_LENGTH.size):
        message = json.loads(requests.read(_LENGTH.unpack(head)[0]))
        answer: dict[str, str] = {}
        try:
            if prepared is None:
                from llguidance import LLTokenizer

                tokenizer, size, ends = message
                prepared = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends)
            else:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, even in native code
                kind, source = message
                answer["text"] = compiled(kind, source, prepared)
        except Exception as error:  # noqa: BLE001  the other side reports it
            answer["error"] = str(error)[:1000]
        signal.setitimer(signal.ITIMER_PROF, 0)
        body = json.dumps(answer).encode()
        answers.write(_LENGTH.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(_STACK)
    working = threading.Thread(target=main)
    working.start()
    working.join()
