"""The wheel and the editable install; and ``kernels/`` is no package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from oslo_kernels import build

from support import ROOT

pytestmark = pytest.mark.drawn(2, of="file")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the files for packaging: building would leave files in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("oslo_models", "kernels", "tests", "benchmarks"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, copy / folder, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    (copy / "kernels/oslo_kernels/csrc").mkdir(exist_ok=True)
    (copy / "kernels/oslo_kernels/csrc/probe.cu").write_text("// a source file\n")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.iterdir()
    return built


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with this environment's packages, without editable installs; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    base = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv" if sys.version_info >= (3, 11) else None, base))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def pip(*args: str | Path, python: Path | None = None) -> None:
    chosen = ["--python", str(python)] if python else []
    run(sys.executable, "-m", "pip", *chosen, "--quiet", "--disable-pip-version-check", *args)


def run(*command: str | Path, folder: Path = Path("/")) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_install(python: Path, where: Path) -> None:
    """Both packages come from ``where``, work, and answer for help without torch."""
    found = run(
        python,
        "-c",
        "import oslo_models, oslo_kernels, oslo_models.cli.main, sys;"
        "print(oslo_models.__file__, oslo_kernels.__file__, oslo_models.__version__, 'torch' in sys.modules);"
        "from oslo_models import GPT2LMHeadModel; import transformers;"
        "assert issubclass(GPT2LMHeadModel, transformers.GPT2LMHeadModel)",
    ).split()
    assert all(Path(path).is_relative_to(where) for path in found[:2])
    assert found[2:] == [version(), "False"]
    assert "usage: oslo-models" in run(python.parent / "oslo-models", "--help")
    assert run(python, "-m", "oslo_models", "--version").split() == ["oslo-models", version()]


def version() -> str:
    values: dict[str, str] = {}
    exec((ROOT / "oslo_models" / "_version.py").read_text(), values)
    return values["__version__"]


def test_wheel_holds_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"oslo_models-{version()}.dist-info"
    assert {name.split("/")[0] for name in names} == {"oslo_models", "oslo_kernels", info}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "oslo_models").rglob("*.py")}
    assert modules <= set(names), "a folder of oslo_models has no __init__.py"
    assert {"oslo_kernels/__init__.py", "oslo_kernels/csrc/probe.cu"} <= set(names)
    assert {"oslo_models/__init__.pyi", "oslo_models/py.typed"} <= set(names), "type checkers find no types"
    compiled = [name for name in names if name.startswith("oslo_kernels/csrc/ngrams-cuda-") and name.endswith(".so")]
    assert len(compiled) == (build.find_nvcc() is not None) == ("any" not in wheel.name)


def test_wheel_installs_and_imports(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    pip("install", "--no-deps", "--no-index", wheel, python=python)
    check_install(python, tmp_path / "environment")
    if build.find_nvcc() is not None:
        alone = "from oslo_kernels import build; build.find_nvcc = None; build.load('ngrams.cpp', cuda=True)"
        run(python, "-c", alone)


def test_editable_install_imports(source: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", source, python=python)
    check_install(python, source)
    (source / "oslo_models" / "added.py").write_text("NEW = 1\n")
    assert run(python, "-c", "from oslo_models import added; print(added.NEW)") == "1\n"
    run(python, "-c", "import importlib.util as u; assert all(u.find_spec(n) is None for n in ('tests', 'benchmarks'))")


def test_kernels_folder_is_no_package() -> None:
    """transformers imports a package named ``kernels`` when it finds one. No import needs Triton."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    paths = [str(ROOT), str(ROOT / "kernels")]
    code = f"import sys; sys.path[:0] = {paths}; sys.modules['triton'] = None; import transformers.modeling_utils"
    code += "; import oslo_models.fusion.rules, oslo_kernels.ngrams, oslo_kernels.softmax"
    run(sys.executable, "-c", code, folder=ROOT)
