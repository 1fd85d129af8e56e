"""Checks that need no other node: the addresses of names, which of them are this node's own, the route to another."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from utils.errors import ConfigError, TrainingError

NAME_SECONDS = 50.0  # for a name to become known: a pod's is unknown until the pod has an address
_PAUSE_SECONDS = 1.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet, as torchrun's --rdzv_endpoint names it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """The host and port of HOST:PORT.

    Raises:
        ConfigError: if it is none.
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--rdzv_endpoint: {text!r} is not HOST:PORT; give the first node's name, such as node-0:29500"
        )
    return Endpoint(host.strip("[]"), int(port))


def own_addresses() -> dict[str, str]:
    """The addresses of this node, and the network interface that has each."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def addresses_of(name: str) -> list[str]:
    """The addresses of a name, the first one first.

    Raises:
        OSError: if it has none.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of more than 63 bytes, say
        raise OSError(str(error)) from error
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def resolve(name: str, what: str, say: Callable[[str], None], seconds: float = NAME_SECONDS) -> list[str]:
    """The addresses of a name, which may have none yet.

    Args:
        what: the option that names it.

    Raises:
        TrainingError: if it has none for so long.
    """
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            return addresses_of(name)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"{what}: no machine has the name {name!r} ({error.strerror or error}; asked for {seconds:.0f} s); "
                    "correct it, or look whether that node has started"
                ) from error
            if not told:
                say(f"{what}: {name!r} has no address yet ({error.strerror or error}); asking for {seconds:.0f} s")
            told = True
        time.sleep(_PAUSE_SECONDS)


def way_to(address: str) -> str:
    """The address that this node sends from to reach another.

    Raises:
        TrainingError: if no route leads there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError as error:
            raise TrainingError(
                f"no route leads from this node to {address} ({error.strerror}); look at `ip route`"
            ) from error
        return str(probe.getsockname()[0]).partition("%")[0]


def check_local_address(local_addr: str, seconds: float, say: Callable[[str], None]) -> str:
    """The address under which this node offers itself to the others.

    Raises:
        ConfigError, TrainingError: if it has none, if only this node can reach it, or if it is another node's.
    """
    own = own_addresses()
    found = resolve(local_addr, "--local_addr", say, seconds)
    mine = [address for address in found if address in own]
    if not mine and not any(map(is_loopback, found)):
        raise ConfigError(
            f"--local_addr: {local_addr} is {found[0]}, which is no address of this node "
            f"({_listed(own)}); give a name or an address of this node"
        )
    reachable = [address for address in mine if not is_loopback(address)]
    if not reachable:
        raise ConfigError(
            f"--local_addr: {local_addr} is {found[0]} here, which no other node can reach; give a name for one of "
            f"{_listed(own)}, or the address itself"
        )
    return reachable[0]


def check_hostname(way: str) -> None:
    """Refuse a node whose ranks would offer each other an address that no other node can reach.

    gloo takes the address of the node's own name, or 127.0.0.1 if it has none, unless a variable names an interface.

    Args:
        way: the address that this node sends from to reach another.
    """
    own, name = own_addresses(), socket.gethostname()
    chosen = os.environ.get(_INTERFACE)
    if chosen:
        unknown = [interface for interface in chosen.split(",") if interface not in own.values()]
        if unknown:
            raise ConfigError(
                f"{_INTERFACE}={chosen}: this node has no interface {unknown[0]!r}; it has {_listed(own)}"
            )
        return
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = addresses_of(name)
    if not any(address in own and not is_loopback(address) for address in found):
        what = f"is {found[0]}, which no other node can reach" if found else "has no address"
        raise ConfigError(
            f"this node's own name, {name}, {what}, and gloo takes that address; correct /etc/hosts, or "
            f"export {_INTERFACE}={own.get(way, 'eth0')}"
        )


def check_nccl_interfaces() -> None:
    """Refuse a variable that leaves NCCL no interface: it would say so after the weights are read, by an error code."""
    own, text = own_addresses(), os.environ.get(_NCCL_INTERFACE, "")
    if text and not interfaces_for_nccl(text, set(own.values())):
        raise ConfigError(
            f"{_NCCL_INTERFACE}={text}: this node has no such interface; it has {_listed(own)}; correct or unset it"
        )


def interfaces_for_nccl(text: str, interfaces: Iterable[str]) -> set[str]:
    """The interfaces that NCCL would use: it takes names or their beginnings, with commas; after "=" whole names; after
    "^" all others."""
    is_excluding, rest = text.startswith("^"), text.removeprefix("^")
    is_exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    wanted = [name.partition(":")[0] for name in names if name]  # a port may follow
    return {
        interface
        for interface in interfaces
        if is_excluding != any(interface == name or (not is_exact and interface.startswith(name)) for name in wanted)
    }


def _listed(own: dict[str, str]) -> str:
    return ", ".join(f"{address} ({name})" for address, name in own.items() if not is_loopback(address)) or "none"
