"""One module makes process groups, and one module calls collectives of torch.distributed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

GROUPS = {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "init_device_mesh"}
COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("batch_isend_irecv", "isend", "irecv", "send", "recv", "send_object_list", "recv_object_list"),
}


def calls_of_torch_distributed(source: str) -> Iterator[str]:
    """Yield the torch.distributed functions that a module calls, under any imported name."""
    tree = ast.parse(source)
    modules, functions = {"torch.distributed"}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            functions |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            module, _, name = ast.unparse(node.func).rpartition(".")
            if module in modules:
                yield name
            elif not module and name in functions:
                yield functions[name]


def callers(names: set[str]) -> dict[str, set[str]]:
    """Return the modules of the library that call these functions. The self-test is a separate program."""
    package = ROOT / "oslo_models"
    found = {
        str(path.relative_to(package)): names & set(calls_of_torch_distributed(path.read_text()))
        for path in sorted(Path(package).rglob("*.py"))
        if package / "testing" not in path.parents
    }
    return {path: called for path, called in found.items() if called}


def test_process_groups_are_made_in_mesh_and_by_workers_of_a_deployment() -> None:
    """A worker of a deployment joins the world of its engine before there is a mesh."""
    assert callers(GROUPS) == {
        "deploy/model_runner.py": {"init_process_group"},
        "distributed/mesh.py": {"init_process_group", "new_group"},
        "planning/fake_rank.py": {"init_process_group"},
    }


def test_collectives_of_torch_are_called_in_collectives_only() -> None:
    assert callers(COLLECTIVES).keys() == {"distributed/collectives.py"}


def test_calls_are_found_under_every_name() -> None:
    imports = ("import torch", "import torch.distributed as dist", "from torch import distributed as d")
    calls = ("torch.distributed.all_reduce(x)", "dist.send(x, 1)", "d.barrier()", "g(x)", "x.scatter(0, i, y)")
    source = "\n".join([*imports, "from torch.distributed import all_gather as g", *calls])
    assert set(calls_of_torch_distributed(source)) == {"all_reduce", "send", "barrier", "all_gather"}
