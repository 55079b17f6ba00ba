"""``make pins``, ``make check-pins`` and ``make test-stacks``: the pinned versions, for every supported Python.

uv resolves and installs from PyPI alone and ignores the configuration of pip. The environments share its downloads.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from oslo_models._version import PYTHON

from support import ROOT
from support.commit import day_of_commit

ENVIRONMENTS = ROOT / ".venv-stacks"
UV = Path(sys.executable).with_name("uv")
FIRST_MINOR, LAST_MINOR = (int(version.split(".")[1]) for version in PYTHON)
PYTHONS = [f"3.{minor}" for minor in range(FIRST_MINOR, LAST_MINOR + 1)]
MARKS = "stacks and not quantization"
"""All cases, also those that `make test-zoo` runs: a release may change any type of model."""
FROM_SOURCE = "deepspeed"
"""The only pinned package without a built distribution."""


@dataclass(frozen=True)
class Stack:
    """Versions to test with: ``constraints/NAME.in`` holds requirements, ``constraints/NAME.txt`` pins all versions.

    The pins of the stack ``newest`` hold for all Pythons and all extras, and `make venv` installs them.
    """

    name: str
    python: str

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def pins(self) -> str:
        return f"constraints/{self.name}.txt"

    @property
    def requirements(self) -> tuple[str, ...]:
        """The options of uv for all pinned requirements."""
        if self == NEWEST:
            return ("setup.py", "--all-extras", "--universal", "--python-version", PYTHONS[0])
        return ("setup.py", "--extra", "test", "--python-version", self.python)


NEWEST = Stack("newest", PYTHONS[-1])
STACKS = [Stack("oldest", PYTHONS[0]), Stack("gpu", "3.12"), NEWEST]
IN_TURN = "in-turn"
"""Name of the stack whose turn it is: each day has one."""


class StackError(Exception):
    """A stack cannot be installed; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.stacks", description=__doc__)
    parser.add_argument("command", choices=["pins", "check-pins", "test"])
    parser.add_argument(
        "--stack", action="append", choices=[*(stack.name for stack in STACKS), IN_TURN], help="default: all"
    )
    args, options = parser.parse_known_args()
    if args.command == "test":
        return test_stacks(select(args.stack), options)
    return resolve(make_pins() if args.command == "pins" else pin_checks())


def select(names: list[str] | None) -> list[Stack]:
    """Return the stacks of these names, or all."""
    if names is None:
        return STACKS
    turn = STACKS[day_of_commit() % len(STACKS)].name
    wanted = {turn if name == IN_TURN else name for name in names}
    return [stack for stack in STACKS if stack.name in wanted]


def make_pins() -> dict[str, tuple[str, ...]]:
    """The options of uv that write each file of pins."""
    options = ("--upgrade", "--no-annotate", "--custom-compile-command", "make pins")
    return {
        stack.pins: (*stack.requirements, *options, "-c", f"constraints/{stack.name}.in", "-o", stack.pins)
        for stack in STACKS
    }


def pin_checks() -> dict[str, tuple[str, ...]]:
    """The options of uv that check each file of pins, with metadata alone.

    The requirements of setup.py have to allow the pins. PyPI has to offer a built distribution of each pin for each
    Python, and its requirements have to allow the other pins.
    """
    checks = {f"setup.py with {stack.pins}": (*stack.requirements, "--constraint", stack.pins) for stack in STACKS}
    for stack in STACKS:
        for python in PYTHONS if stack == NEWEST else [stack.python]:
            built = ("--only-binary", ":all:", *(("--no-binary", FROM_SOURCE) if stack == NEWEST else ()))
            checks[f"{stack.pins} on Python {python}"] = (stack.pins, "--python-version", python, *built)
    return checks


def resolve(tasks: dict[str, tuple[str, ...]]) -> int:
    """Run ``uv pip compile`` for each task, and print what failed."""
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda options: uv("pip", "compile", *options), tasks.values()))
    for task, done in zip(tasks, results, strict=True):
        print(f"{task}: " + (f"does not resolve\n{done.stderr}" if done.returncode else "resolves"))
    return int(any(done.returncode for done in results))


def test_stacks(stacks: list[Stack], options: list[str]) -> int:
    """Run the tests marked ``stacks`` in the environment of each stack, and print a table."""
    rows, failed = [], False
    for stack in stacks:
        began = time.monotonic()
        try:
            install(stack)
        except StackError as error:
            print(f"stack {stack.name}: {error}", file=sys.stderr)
            failed = True
            continue
        installed = time.monotonic()
        code, counts = run_tests(stack, options)
        failed |= code != 0
        seconds = (f"{installed - began:.0f} s", f"{time.monotonic() - installed:.0f} s")
        rows.append((stack.name, stack.python, *versions(stack), *map(str, counts), *seconds))
    names = ("stack", "Python", "torch", "transformers", "passed", "failed", "skipped", "installing", "testing")
    print("\n".join("| " + " | ".join(row) + " |" for row in [names, ("---",) * len(names), *rows]))
    return int(failed)


def install(stack: Stack) -> None:
    """Create the environment of a stack, unless it was created from the same setup.py and constraints."""
    stamp = stack.folder / "installed-from.txt"
    wanted = (ROOT / "setup.py").read_text() + (ROOT / stack.pins).read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing the stack {stack.name} into {stack.folder.relative_to(ROOT)}", file=sys.stderr)
    shutil.rmtree(stack.folder, ignore_errors=True)
    python = stack.folder / "bin" / "python"
    library = ("--editable", ".[test]", "--constraint", stack.pins)
    for command in (
        ("venv", "--python", str(find_python(stack.python)), str(stack.folder)),
        ("pip", "install", "--python", str(python), *library),
    ):
        done = uv(*command)
        if done.returncode:
            raise StackError(f"uv {' '.join(command)} failed:\n{done.stderr}")
    stamp.write_text(wanted)


def find_python(version: str) -> Path:
    """Return an interpreter from ``PATH``, pyenv or uv.

    Raises:
        StackError: there is none.
    """
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [Path(folder) / name for folder in os.get_exec_path()]
    candidates += sorted(pyenv.glob(f"{version}.*/bin/{name}"))
    managed = uv("python", "find", "--managed-python", "--no-python-downloads", version)
    candidates += [Path(managed.stdout.strip())] if managed.returncode == 0 else []
    question = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if candidate.is_file():  # pyenv puts scripts of inactive versions on PATH too
            done = subprocess.run([candidate, "-c", question], capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return candidate
    raise StackError(f"there is no {name} on PATH, in {pyenv} or among the versions of uv; install Python {version}")


def run_tests(stack: Stack, options: list[str]) -> tuple[int, tuple[int, int, int]]:
    """Return pytest's exit code and the numbers of passed, failed and skipped tests."""
    report = ENVIRONMENTS / f"{stack.name}.xml"
    report.unlink(missing_ok=True)
    marked = [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if "mark.stacks" in path.read_text()]
    command = [
        stack.folder / "bin" / "python",
        "-m",
        "pytest",
        "--quiet",
        "-m",
        MARKS,
        "-p",
        "no:cacheprovider",
    ]
    command += ["--numprocesses", "2", "--dist", "loadfile", f"--junitxml={report}", *options, *marked]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if not report.exists():
        return code or 1, (0, 0, 0)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    wrong = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return code, (tests - skipped - wrong, wrong, skipped)


def versions(stack: Stack) -> tuple[str, str]:
    """The installed versions of torch and transformers."""
    listed = uv("pip", "freeze", "--python", str(stack.folder / "bin" / "python")).stdout
    found = dict(re.findall(r"^(torch|transformers)==(.*)$", listed, flags=re.MULTILINE))
    return found["torch"], found["transformers"]


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [UV, "--no-config", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
