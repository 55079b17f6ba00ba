"""The stub of the package, and what mypy makes of it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import oslo_models
from oslo_models import registry

from support import ROOT, stub

SCRIPT = """\
from oslo_models import GPT2LMHeadModel, LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained_with_parallel("llama", tensor_parallel_size=2)
model.fuse().save_pretrained_with_parallel("merged", save_with_merging=True)
reveal_type(model)
reveal_type(model.fuse().unfuse())
model.mpu.get_tensor_parallel_rank()
reveal_type(GPT2LMHeadModel.from_config_with_parallel(model.config, seed=0))
LlamaForCausalLM.from_pretrained_with_parallel("llama", tensor_parallel_size="2")
model.fuse(backends="triton")
from oslo_models import LlamaForCausal
"""
MESSAGES = [
    'script.py:5: note: Revealed type is "oslo_models.models.llama.LlamaForCausalLM"',
    'script.py:6: note: Revealed type is "oslo_models.models.llama.LlamaForCausalLM"',
    'script.py:8: note: Revealed type is "oslo_models.models.gpt2.GPT2LMHeadModel"',
    'script.py:9: error: Argument "tensor_parallel_size" to "from_pretrained_with_parallel" of "ParallelModel" has '
    'incompatible type "str"; expected "int"  [arg-type]',
    'script.py:10: error: Unexpected keyword argument "backends" for "fuse" of "FusableModel"; '
    'did you mean "backend"?  [call-arg]',
    'script.py:11: error: Module "oslo_models" has no attribute "LlamaForCausal"',
]
CONFIGURATION = """\
[mypy]
follow_imports = skip
[mypy-oslo_models,oslo_models.modeling.*,oslo_models.models.gpt2,oslo_models.models.llama]
follow_imports = silent
"""


def test_names_of_the_stub_are_the_objects_of_the_package() -> None:
    imports = [node for node in ast.parse(stub.STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname: str(node.module) for node in imports for alias in node.names}
    exported = set(dir(oslo_models))
    assert exported <= modules.keys()
    for name in exported:
        assert getattr(importlib.import_module(modules[name]), name) is getattr(oslo_models, name), name
    if not registry.NEWER:
        assert exported == modules.keys()


def test_stale_stub_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stub", "--check"])
    stub.main()
    monkeypatch.setattr(registry, "ARCHITECTURES", dict.fromkeys(["llama"], "Llama"))
    with pytest.raises(SystemExit, match=r"^oslo_models/__init__.pyi is stale: run `make stub`$"):
        stub.main()


def test_mypy_knows_classes_constructors_and_arguments(tmp_path: Path) -> None:
    """Only the modules of these classes are analysed: torch, transformers and the other classes take minutes."""
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", "cache", "script.py"]
    path = {"MYPYPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    lines = [line.partition("; maybe")[0] for line in done.stdout.splitlines() if "defined in" not in line]
    assert lines == MESSAGES, done.stderr
