"""Two hosts on this machine, made of namespaces: each has its own name, network, processes and ``/etc/hosts``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NETWORK = "10.77.0"


@dataclass(frozen=True)
class Host:
    """A host that ends with the block of `two_hosts`.

    Attributes:
        name: by which the other host knows it.
        pid: a process in its namespaces.
        interface: its network interface.
    """

    name: str
    pid: int
    interface: str

    def command(self, *arguments: str, folder: Path | None = None) -> list[str]:
        """Return a command that runs on this host."""
        return ["nsenter", "-t", str(self.pid), "-a", f"--wdns={folder or Path.cwd()}", *arguments]

    def start(self, folder: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[str]:
        """Start a command with its output in ``NAME.out`` and ``NAME.err`` in a folder."""
        with (folder / f"{self.name}.out").open("w") as out, (folder / f"{self.name}.err").open("w") as err:
            command = self.command(*arguments, folder=folder)
            return subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **environment}, text=True)

    def disconnect(self) -> None:
        """Take the network of this host down."""
        subprocess.run(self.command("ip", "link", "set", self.interface, "down"), check=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Context manager with two connected hosts, ``one`` and ``two``. Skips the test where namespaces are forbidden."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("hosts need unshare, nsenter and ip")
    names = folder / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{NETWORK}.1 one\n{NETWORK}.2 two\n")
    processes: list[subprocess.Popen[Any]] = []
    try:
        hosts = []
        for name in ("one", "two"):
            prepare = f"hostname {name} && mount --bind '{names}' /etc/hosts && ip link set lo up"
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            new = ["unshare", "-n", "-u", "-p", "-m", "-f", "--mount-proc", "--kill-child", "sh", "-c"]
            processes.append(
                process := subprocess.Popen([*new, f"{prepare} && echo ready && exec cat"], text=True, **pipes)
            )
            if process.stdout is None or process.stdout.readline() != "ready\n":
                process.kill()
                pytest.skip(f"this user may not make namespaces: {process.communicate()[1].strip()}")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            hosts.append(Host(name, int(children.split()[0]), f"link-{name}"))
        one, two = hosts
        link = ["ip", "link", "add", one.interface, "netns", str(one.pid), "type", "veth", "peer", "name"]
        made = subprocess.run([*link, two.interface, "netns", str(two.pid)], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"this machine makes no virtual network: {made.stderr.strip()}")
        for number, host in enumerate(hosts, start=1):
            address = ("ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", host.interface)
            subprocess.run(host.command(*address), check=True)
            subprocess.run(host.command("ip", "link", "set", host.interface, "up"), check=True)
        yield hosts
    finally:
        for process in processes:  # its children end with it
            process.kill()
            process.communicate()
