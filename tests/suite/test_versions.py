"""The tested versions: stated once, warned about above, refused below."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from oslo_models._version import PYTHON, TESTED
from oslo_models.installed import check_versions, installed_version, require_first_version

from support import ROOT
from support.stacks import STACKS, StackError, find_python


def last_tested(library: str) -> str:
    major, minor = TESTED[library][1].split(".")
    return f"{major}.{int(minor) - 1}"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/install.md"])
def test_documentation_states_the_tested_versions(page: str) -> None:
    stated = f"Python {PYTHON[0]} to {PYTHON[1]}, " + ", ".join(
        f"{library} {TESTED[library][0]} to {last_tested(library)}" for library in TESTED
    )
    assert stated in (ROOT / page).read_text()


def test_uses_of_other_libraries_state_the_pinned_versions() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints/newest.txt").read_text(), flags=re.M))
    rows = (ROOT / "docs/ecosystem.md").read_text().splitlines()
    stated = {
        each
        for row in rows
        if row.startswith("| ")
        for each in re.findall(r"([a-z][\w-]*) (\d[\d.]+)", row.split(" | ")[1])
    }
    assert {"torch", "transformers", "peft"} <= {library for library, _ in stated}
    wrong = {(library, version) for library, version in stated if not f"{pins[library]}.".startswith(f"{version}.")}
    assert wrong == set()


def installed(folder: Path, torch: str = "2.14.1", transformers: str = "5.24.0") -> list[str]:
    for name in (f"torch-{torch}.dist-info", f"transformers-{transformers}.dist-info", "torchaudio-9.0.dist-info"):
        (folder / name).mkdir()
    return [str(folder / "missing"), str(folder)]


@pytest.mark.parametrize("torch", ["2.11.0", "2.11.0+cu130", "2.15.3"])
def test_tested_versions_are_silent(tmp_path: Path, torch: str) -> None:
    path = installed(tmp_path, torch)
    assert installed_version("torch", path) == torch and installed_version("accelerate", path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions(path)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0"])
def test_newer_versions_warn_once(tmp_path: Path, version: str) -> None:
    with pytest.warns(UserWarning) as seen:
        check_versions(installed(tmp_path, version, "5.25.0"))
    (warning,) = seen
    for part in (f"torch {version}", "transformers 5.25.0", "torch>=2.11,<2.16", "python -m oslo_models.testing"):
        assert part in str(warning.message)


def test_older_versions_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=re.escape("pip install 'transformers>=5.17,<5.25'")):
        check_versions(installed(tmp_path, transformers="5.9.1"))


def test_older_optional_libraries_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for version, is_old in (("0.20.9", True), ("0.21.0", False), ("1.0", False)):
        folder = tmp_path / version
        (folder / f"peft-{version}.dist-info").mkdir(parents=True)
        with pytest.raises(ImportError, match=r"pip install 'peft>=0\.21'") if is_old else nullcontext():
            require_first_version("peft", [str(folder)])
    require_first_version("peft", [str(tmp_path)])


def test_import_checks_the_versions_without_importing_them(tmp_path: Path) -> None:
    """The warning points at the line that imports oslo_models."""
    installed(tmp_path, "2.16.0")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport oslo_models\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
    assert done.stderr.count("UserWarning") == 1 and done.stderr.startswith("<string>:2: UserWarning: oslo_models")


def test_stacks_are_at_the_ends_of_the_tested_versions() -> None:
    pins = {stack.name: (ROOT / stack.pins).read_text() for stack in STACKS}
    for library in TESTED:
        assert f"{library}=={TESTED[library][0]}.0\n" in pins["oldest"]
    assert f"transformers=={last_tested('transformers')}." in pins["newest"]


def test_a_missing_interpreter_is_named() -> None:
    assert find_python(f"{sys.version_info[0]}.{sys.version_info[1]}").exists()
    with pytest.raises(StackError, match=r"no python2\.99 on PATH"):
        find_python("2.99")
