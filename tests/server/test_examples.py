"""The files of docs/examples: their commands match this version, and all named files exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("yaml")

import yaml

from oslo_models.cli.main import make_parser
from oslo_models.server.guard import PROBES
from oslo_models.server.lifecycle import READY

from support import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def options(command: list[str]) -> Any:
    """The options of a command that begins with ``oslo-models``."""
    return make_parser().parse_args(command[1:])


def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    text = (EXAMPLES / "oslo-models.service").read_text()
    command = re.search(r"ExecStart=((?:.*\\\n)*.*)", text)
    assert command is not None
    parsed = options(shlex.split(command[1].replace("\\\n", "")))
    assert parsed.api_key_file and parsed.drain_seconds < int(re.findall(r"TimeoutStopSec=(\d+)", text)[0])
    assert "XDG_CACHE_HOME=" in text  # the folder of compiled code: ProtectHome and ProtectSystem leave no other
    assert "KillMode=mixed" in text and "kill -HUP $MAINPID" in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "oslo-models"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "oslo-models.service"
    unit.write_text(text.replace("/opt/oslo-models/bin/oslo-models", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "oslo-models.service" not in done.stderr, done.stderr


def test_dockerfile_names_existing_files() -> None:
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", "")
    for sources in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / source).exists() for source in sources.split())
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)", text, re.M)[0])
    assert options([*entry, "gpt2"]).host == "0.0.0.0"
    extras = re.findall(r"/src\[(.*?)\]", text)[0].split(",")
    assert all(f'"{extra}": ' in (ROOT / "setup.py").read_text() for extra in extras)
    (url,) = re.findall(r"http://127.0.0.1:8000(\S+?)'", text)
    assert url == READY


def containers(file: str) -> list[tuple[Any, Any]]:
    documents = list(yaml.safe_load_all((EXAMPLES / file).read_text()))
    specs = [each["spec"]["template"]["spec"] for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    return [(spec, container) for spec in specs for container in spec["containers"]]


def test_kubernetes_deployment_is_probed_and_drained() -> None:
    ((spec, container),) = containers("kubernetes.yaml")
    parsed = options(["oslo-models", "serve", *container["args"]])
    paused = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert parsed.drain_seconds + paused < spec["terminationGracePeriodSeconds"]
    paths = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == PROBES
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def test_kubernetes_hosts_run_the_server_by_torchrun() -> None:
    ((spec, container),) = containers("kubernetes-hosts.yaml")
    begin = container["args"].index("oslo-models")
    parsed = options(container["args"][begin:])
    sizes = dict(each.lstrip("-").split("=") for each in container["command"] if "=" in each)
    assert parsed.tensor_parallel_size * parsed.pipeline_parallel_size == 16
    assert int(sizes["nnodes"]) * int(sizes["nproc-per-node"]) == 16 and parsed.deploy_secret_file
    assert parsed.drain_seconds < 30 < spec["terminationGracePeriodSeconds"]
    script = container["readinessProbe"]["exec"]["command"][2]
    assert READY in script
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "POD_INDEX": "1"}).returncode == 0
    compile(script, "probe", "exec")
