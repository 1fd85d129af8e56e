"""Check, before anything is loaded, that this machine can train, or that the nodes of a run can work together.

On one machine:
    python -m tools.doctor [-- FLAGS]
On every node of several, without a launcher, which would only say that it found no rendezvous:
    python -m tools.doctor --rdzv_endpoint HOST:PORT [--nnodes N] [--node_rank K] [--local_addr NAME] [-- FLAGS]
Under the run's launcher, to measure the network, and what it means for a step with these flags:
    torchrun [...] -m tools.doctor [--json FILE] [FLAGS]

--json writes the speeds into a file that plans take by --network_speeds. FLAGS are those of finetuning.py. Exit
status: 0 all is well; 2 refused: it would be so again; 1 a node was not there, or FILE could not be written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# Before the imports below, which take a while.
if __name__ == "__main__":
    from tools.beginning import begin_tool

    begin_tool()

from configs.flags import parse_flags
from tools.ending import status_of
from tools.network.identity import describe_node
from tools.network.meeting import MeetingPlan, meet_nodes
from tools.network.names import (
    NAME_SECONDS,
    check_hostname,
    check_local_address,
    check_nccl_interfaces,
    is_loopback,
    parse_endpoint,
    resolve,
    way_to,
)
from tools.network.one_machine import check_machine
from utils.errors import ConfigError
from utils.printing import print_line


def say(line: str) -> None:
    print_line(f"doctor: {line}")


def check_node(given: argparse.Namespace, misplaced: Sequence[str], flags: Sequence[str]) -> None:
    """Check this node's names and routes, and meet the others.

    Args:
        misplaced: words before the `--` that are none of the doctor's own flags.
        flags: those of the run, after `--`.

    Raises:
        ConfigError, TrainingError: with what is wrong, and the remedy.
    """
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: without a launcher, a run's flags come after --; to measure its network, give "
            f"torchrun [...] -m tools.doctor {shlex.join(misplaced)}"
        )
    if flags:
        parse_flags(flags)
    nnodes = given.nnodes or ("1" if given.rdzv_endpoint is None else "2")
    num_nodes = number_of_nodes(nnodes)
    if given.node_rank is not None and not 0 <= given.node_rank < max(num_nodes, most_nodes(nnodes)):
        raise ConfigError(f"--node_rank: {given.node_rank} is none of {nnodes} nodes, counted from 0")
    if given.rdzv_endpoint is None and most_nodes(nnodes) > 1:
        raise ConfigError("--rdzv_endpoint: is required without a launcher; give HOST:PORT of the first node")
    endpoint = None if given.rdzv_endpoint is None else parse_endpoint(given.rdzv_endpoint)
    described = describe_node(flags)
    if num_nodes == 1 or endpoint is None:
        check_machine(described["versions"], say)
        return
    local_addr = given.local_addr or socket.getfqdn()  # as torchrun takes it
    own = check_local_address(local_addr, given.name_seconds, say)
    address = resolve(endpoint.host, "--rdzv_endpoint", say, given.name_seconds)[0]
    way = way_to(address)
    check_hostname(way)
    check_nccl_interfaces()
    if way != own and not is_loopback(way):
        say(f"this node is {own} to the others, and reaches {endpoint.host} from {way}")
    plan = MeetingPlan(endpoint, num_nodes, given.node_rank, local_addr, given.wait_seconds, given.name_seconds)
    found = meet_nodes(plan, described, say)
    for note in found.notes:
        say(note)
    if found.nodes:
        say(f"{len(found.nodes)} nodes reach each other by name and run the same code: {', '.join(found.nodes)}")


def number_of_nodes(text: str) -> int:
    """The number of nodes that a run starts with, from torchrun's N or MIN:MAX.

    Raises:
        ConfigError: if it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--nnodes: {text!r} is not a number of nodes; give N, or MIN:MAX")
    return int(parts[0])


def most_nodes(text: str) -> int:
    return int(text.split(":")[-1])


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # Under a launcher all words but --json are the run's flags.
    if "RANK" in os.environ and not {"-h", "--help"} & set(words):
        under_launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        under_launcher.add_argument("--json", type=Path)
        options, rest = under_launcher.parse_known_args([word for word in words if word != "--"])
        return status_of(lambda: check_ranks(rest, options.json))
    flags = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(
        prog="python -m tools.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nnodes", help="N or MIN:MAX, as for torchrun; default: 2 with an endpoint, else 1")
    parser.add_argument(
        "--rdzv_endpoint", help="HOST:PORT of node 0, as for torchrun; without it this machine alone is checked"
    )
    parser.add_argument("--node_rank", type=int, help="0 for the host of the endpoint; default: by its address")
    parser.add_argument("--local_addr", help="this node's name for the others; default: its own full name")
    parser.add_argument("--wait_seconds", type=float, default=600.0, help="for the other nodes to come")
    parser.add_argument("--name_seconds", type=float, default=NAME_SECONDS, help="for a name to have an address")
    given, misplaced = parser.parse_known_args(words[: words.index("--")] if "--" in words else words)
    return status_of(lambda: check_node(given, misplaced, flags))


def check_ranks(flags: Sequence[str], report: Path | None) -> None:
    from tools.network import ranks  # imports torch, which takes seconds

    ranks.check_ranks(flags, say, report)


if __name__ == "__main__":
    sys.exit(main())
