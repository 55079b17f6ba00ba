"""Lets the machines of a recipe meet: the address of this machine, and a rendezvous that ends when all have met."""

from __future__ import annotations

import copy
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "oslo-models"
"""Name of the rendezvous in torch's registry."""
PORT = 29400
"""Default port, as in torchrun."""


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a recipe meet.

    Attributes:
        is_host: whether this machine is the HOST of ``rdzv_endpoint``.
        address: a name or address of this machine that the others can reach.
    """

    is_host: bool
    address: str


def find_meeting(endpoint: str) -> Meeting:
    """Return the meeting at HOST:PORT. Torch would compare HOST with the name of this machine only.

    Raises:
        ValueError: HOST is unknown, or other machines could not reach the ranks of this machine.
    """
    try:
        host, port = parse_rendezvous_endpoint(endpoint, PORT)
    except ValueError as error:
        raise ValueError(f"rdzv_endpoint={endpoint}: {error} Give HOST:PORT") from error
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(target)
            own, there = probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise ValueError(
            f"rdzv_endpoint={endpoint}: this machine cannot reach {host}: {error}; give a name or an address that "
            "all machines know"
        ) from error
    _check_own_name(endpoint)
    is_host = own == there or ipaddress.ip_address(there).is_loopback
    return Meeting(is_host, host if is_host else own)


def _check_own_name(endpoint: str) -> None:
    """Raise ``ValueError`` if gloo would listen on a loopback address, which the other machines cannot reach."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        found = "no address"
    if found == "no address" or ipaddress.ip_address(found).is_loopback:
        raise ValueError(
            f"rdzv_endpoint={endpoint}: the name of this machine, {name}, stands for {found}, where the ranks of "
            "other machines cannot reach it; start the command with GLOO_SOCKET_IFNAME=INTERFACE (`ip addr` lists "
            "them), or change /etc/hosts"
        )


class SingleRendezvous(RendezvousHandler):
    """Rendezvous of torchrun that needs its store only until all machines have met.

    Torch's launcher asks the store for more machines while the ranks run. A machine whose network is down would wait
    there for minutes after its ranks have ended, and its error would hide theirs.
    """

    def __init__(self, handler: Any) -> None:
        self._handler, self._has_met = handler, False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return str(self._handler.get_run_id())

    @property
    def use_agent_store(self) -> bool:
        return bool(self._handler.use_agent_store)

    def next_rendezvous(self) -> Any:
        info = self._handler.next_rendezvous()
        self._has_met = True
        self._handler._stop_heartbeats()
        return info

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._has_met

    def set_closed(self) -> None:
        self._has_met = True

    def shutdown(self) -> bool:
        return self._has_met or bool(self._handler.shutdown())


def _create_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    inner = copy.copy(parameters)
    inner.backend = "c10d"
    return SingleRendezvous(rendezvous_handler_registry.create_handler(inner))


rendezvous_handler_registry.register(BACKEND, _create_rendezvous)
