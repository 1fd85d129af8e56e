"""The nodes of a run meet at the endpoint before torchrun does, and find each other by name.

Node 0 listens. Each of the others connects, says who it is, and learns who all are. Then each connects to every other.
Lines of JSON over plain sockets: torch, which takes seconds to import, is not needed to see that a name is wrong.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tools.network.identity import CLOCK_SECONDS, differences
from tools.network.names import Endpoint, is_loopback, own_addresses, resolve, way_to
from utils.errors import ConfigError, TrainingError, in_one_line
from utils.small_files import parse_json

GREETING = "finetuning doctor 1"
_SAY_SECONDS = 15.0
_ANSWER_SECONDS = 10.0  # for one line of a node that has connected, and for one connection
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class MeetingPlan:
    """A node's settings for the meeting."""

    endpoint: Endpoint
    num_nodes: int
    node_rank: int | None  # None: node 0 is the one that has the endpoint's address
    local_addr: str
    wait_seconds: float  # for the other nodes to come
    name_seconds: float  # for the endpoint's name to have an address


@dataclass
class Found:
    """The result of the meeting."""

    nodes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Line:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(_ANSWER_SECONDS)
        self._file = connection.makefile("rb")

    def send(self, **values: Any) -> None:
        self.connection.sendall((json.dumps(values) + "\n").encode())

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next line.

        Raises:
            OSError: if none comes in time.
            ValueError: if the other end is not a doctor.
        """
        self.connection.settimeout(seconds or _ANSWER_SECONDS)
        text = self._file.readline(_LONGEST_LINE)
        values = parse_json(text) if text else None
        if not isinstance(values, dict):
            raise ValueError("no line of a doctor")
        return values


def meet_nodes(plan: MeetingPlan, description: dict[str, Any], say: Callable[[str], None]) -> Found:
    """Wait for all nodes, compare them, and connect each to every other.

    Args:
        description: of `describe_node`.

    Raises:
        ConfigError: on every node, if they differ in code, versions or flags, or the options are wrong.
        TrainingError: if a node did not come, or cannot be reached.
    """
    addresses = resolve(plan.endpoint.host, "--rdzv_endpoint", say, plan.name_seconds)
    if all(map(is_loopback, addresses)):
        raise ConfigError(
            f"--rdzv_endpoint: {plan.endpoint.host} is {addresses[0]} here, which no other node can reach; "
            "give the name under which the others know the first node"
        )
    own = own_addresses()
    has_it = any(address in own for address in addresses)
    is_host = has_it if plan.node_rank is None else plan.node_rank == 0
    if is_host != has_it:
        whose = "no address of this node, which is node 0" if is_host else f"this node, which is node {plan.node_rank}"
        raise ConfigError(f"--rdzv_endpoint: {plan.endpoint.host} is {addresses[0]}, {whose}; give the name of node 0")
    with ExitStack() as stack:
        door = stack.enter_context(_listener(addresses[0], 0))  # the others knock here
        hello = {"name": plan.local_addr, "door": door.getsockname()[1], **description}
        if is_host:
            return _host(plan, hello, addresses[0], stack, say)
        return _join(plan, hello, addresses[0], stack, say)


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024)


def _host(
    plan: MeetingPlan, hello: dict[str, Any], address: str, stack: ExitStack, say: Callable[[str], None]
) -> Found:
    """Node 0's part of the meeting."""
    try:
        listener = stack.enter_context(_listener(address, plan.endpoint.port))
    except OSError as error:
        raise ConfigError(
            f"--rdzv_endpoint: port {plan.endpoint.port} of this node cannot be listened on ({error.strerror}); "
            "give a free one, and look for an earlier run that has not ended"
        ) from error
    descriptions, lines = {plan.local_addr: hello}, dict[str, _Line]()
    clocks: dict[str, float] = {}
    deadline, said = time.monotonic() + plan.wait_seconds, time.monotonic()
    while len(descriptions) < plan.num_nodes:
        listener.settimeout(1.0)
        try:
            line = _Line(stack.enter_context(listener.accept()[0]))
            line.send(greeting=GREETING)
            other = line.receive()
            name, clock, _ = str(other["name"]), float(other["clock"]), int(other["door"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):  # nobody in this second, or no doctor
            name = ""
        if name and name != plan.local_addr:
            descriptions[name], lines[name] = other, line
            clocks[name] = clock - time.time()
        if time.monotonic() > deadline:
            raise TrainingError(
                f"{len(descriptions)} of {plan.num_nodes} nodes came to {plan.endpoint} in {plan.wait_seconds:.0f} s: "
                f"{', '.join(descriptions)}; look at the output of the others, and whether a firewall closes the port"
            )
        if time.monotonic() > said + _SAY_SECONDS:
            said = time.monotonic()
            say(f"{len(descriptions)} of {plan.num_nodes} nodes are here: {', '.join(descriptions)}; waiting")
    refused = differences(descriptions)
    notes = [
        f"the clock of {name} is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'} of {plan.local_addr}'s"
        for name, seconds in clocks.items()
        if abs(seconds) > CLOCK_SECONDS
    ]
    doors = {name: int(other["door"]) for name, other in descriptions.items()}
    lost = _tell(lines, refused=refused, doors={} if refused else doors)
    if not refused:
        lost += _knock(doors, plan.local_addr)
        for name, line in lines.items():
            try:
                lost += [str(problem) for problem in line.receive(_ANSWER_SECONDS * (len(doors) + 1))["lost"]]
            except (OSError, ValueError, KeyError, TypeError):
                lost.append(f"{name} ended while the nodes met; its own output says why")
    _tell(lines, lost=lost, notes=notes)
    return _outcome(list(descriptions), refused, lost, notes)


def _tell(lines: dict[str, _Line], **values: Any) -> list[str]:
    lost = []
    for name, line in lines.items():
        try:
            line.send(**values)
        except OSError:
            lost.append(f"{name} ended while the nodes met; its own output says why")
    return lost


def _join(
    plan: MeetingPlan, hello: dict[str, Any], address: str, stack: ExitStack, say: Callable[[str], None]
) -> Found:
    """Any other node's part of the meeting."""
    way_to(address)  # raises at once if there is no route, instead of waiting for node 0
    line = _Line(stack.enter_context(_connect(plan, address, say)))
    try:
        greeted = line.receive().get("greeting") == GREETING
    except (OSError, ValueError):
        greeted = False
    if not greeted:  # a run that has lost this node waits for it at the same place, and its store greets nobody
        note = f"what listens at {plan.endpoint} is no doctor: taken for the torchrun of a run that waits for this node"
        return Found(notes=[note])
    try:
        line.send(**hello)
        told = line.receive(plan.wait_seconds + 2 * _SAY_SECONDS)
        doors, refused = told.get("doors", {}), told.get("refused", [])
        if not refused:
            line.send(lost=_knock(doors, plan.local_addr))
        told = line.receive(_ANSWER_SECONDS * (len(doors) + 2))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{plan.endpoint} ended while the nodes met; its own output says why") from error
    return _outcome(list(doors), refused, told.get("lost", []), told.get("notes", []))


def _outcome(nodes: list[str], refused: list[str], lost: list[str], notes: list[str]) -> Found:
    if refused:
        raise ConfigError("the nodes differ; " + refused[0], "\n".join(refused[1:]))
    if lost:
        raise TrainingError("the nodes do not reach each other: " + lost[0], "\n".join(lost[1:]))
    return Found(nodes, notes)


def _connect(plan: MeetingPlan, address: str, say: Callable[[str], None]) -> socket.socket:
    """Connect to node 0, which may start later than this one."""
    started = said = time.monotonic()
    where = f"{plan.endpoint} ({address})"
    while True:
        try:
            return socket.create_connection((address, plan.endpoint.port), timeout=_ANSWER_SECONDS)
        except OSError as error:
            cause = _cause(error)
        now = time.monotonic()
        if now > started + plan.wait_seconds:
            raise TrainingError(
                f"--rdzv_endpoint: {where} {cause}, for {plan.wait_seconds:.0f} s; look whether node 0 has started "
                "there, and whether a firewall closes the port"
            )
        if now > said + _SAY_SECONDS:
            said = now
            say(f"{where} {cause}; node 0 has not started, or this is not its place; waiting")
        time.sleep(0.5)


def _cause(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "is there, and nothing listens on the port"
    if isinstance(error, TimeoutError):
        return "does not answer"
    return f"cannot be reached ({error.strerror or in_one_line(error)})"


def _knock(doors: dict[str, int], own_name: str) -> list[str]:
    """Connect to every other node by its name; a line for each that cannot be reached."""
    lost = []
    for name, door in doors.items():
        if name == own_name:
            continue
        try:
            socket.create_connection((name, door), timeout=_ANSWER_SECONDS).close()
        except (OSError, UnicodeError) as error:
            why = _cause(error) if isinstance(error, OSError) else str(error)
            lost.append(f"from {own_name}, {name} (port {door}) {why}")
    return lost
