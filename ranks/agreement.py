"""Whether every rank was started with, and has found, the same facts. A difference is refused by its name.

Before there is a process group, `Meeting.check_agreement` compares them, by the same functions. Which facts are
compared: `resolving/agreement.py`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from ranks.collectives import gather_to_all
from utils.errors import ConfigError

Facts = dict[str, dict[str, Any]]
"""JSON values by the names that a user knows, such as "--lr", in groups. The key of a group is the remedy."""

_MOST_NAMED, _MOST_CHARACTERS = 4, 100


class RankFacts(NamedTuple):
    """The facts of one rank."""

    rank: int
    host: str
    facts: Facts


def check_agreement(facts: Facts) -> None:
    """Check over the process group that every rank has found the same facts. Every rank must call this.

    Raises:
        ConfigError: on every rank; it names what differs.
    """
    first, *others = gather_to_all(RankFacts(dist.get_rank(), socket.gethostname(), plain(facts)))
    message = disagreement(first, [own._replace(facts=differing(own.facts, first.facts)) for own in others])
    if message:
        raise ConfigError(message)


def differing(own: Facts, first: Facts) -> Facts:
    """The facts in which a rank differs from rank 0, with the rank's own values."""
    found: Facts = {}
    for remedy in own.keys() | first.keys():
        here, there = own.get(remedy, {}), first.get(remedy, {})
        names = [name for name in here | there if here.get(name) != there.get(name)]
        if names:
            found[remedy] = {name: here.get(name) for name in names}
    return found


def disagreement(first: RankFacts, others: Iterable[RankFacts]) -> str:
    """One line that names each fact on which a rank differs from rank 0, with both values; "" if none does.

    Args:
        others: the other ranks, with their `differing` facts alone.
    """
    ranks: dict[tuple[str, str, str], list[RankFacts]] = {}  # by remedy, name and value
    for other in others:
        for remedy, values in other.facts.items():
            for name, value in values.items():
                ranks.setdefault((remedy, name, _shown(value)), []).append(other)
    if not ranks:
        return ""
    clauses, remedies = [], []
    for (remedy, name, value), who in list(ranks.items())[:_MOST_NAMED]:
        there = _shown(first.facts.get(remedy, {}).get(name))
        clauses.append(f"{name}: {value} on {_with_host(who)}, {there} on {_with_host([first])}")
        remedies += [remedy] if remedy not in remedies else []
    if len(ranks) > _MOST_NAMED:
        clauses.append(f"and {len(ranks) - _MOST_NAMED} more")
    return "; ".join([*clauses, *remedies])


def plain(facts: Mapping[str, Mapping[str, Any]]) -> Facts:
    """The facts after a round trip through JSON, as other ranks read them."""
    # A tuple becomes a list, a Path a text: a rank's own facts must equal the same facts of another.
    return dict(json.loads(json.dumps(facts, default=str)))


def named(ranks: list[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1-4, 7". They must rise."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def _with_host(who: list[RankFacts]) -> str:
    """The ranks and their host: "rank 1 (node-b)", "ranks 8-15 (node-b)"."""
    hosts = list(dict.fromkeys(told.host for told in who))
    more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"{named([told.rank for told in who])} ({hosts[0]}{more})"


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
