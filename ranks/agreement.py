"""Whether every rank was told, and has found, the same: what differs is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Facts = dict[str, dict[str, Any]]
"""Values of JSON by the names that a user knows, such as "--lr", in groups; a group's key is what to do about them."""

_MOST_NAMED, _MOST_CHARACTERS = 4, 100


class RankFacts(NamedTuple):
    """What one rank tells the others."""

    rank: int
    host: str
    facts: Facts


def differing(own: Facts, first: Facts) -> Facts:
    """Those of rank 0's facts, or of a rank's own, that the two do not share, with the rank's own values."""
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
        others: with those of their facts that differ.
    """
    ranks: dict[tuple[str, str, str], list[RankFacts]] = {}  # by remedy, name and value
    for told in others:
        for remedy, values in told.facts.items():
            for name, value in values.items():
                ranks.setdefault((remedy, name, _shown(value)), []).append(told)
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
    """The facts as the other ranks read them: what JSON makes of them."""
    return dict(json.loads(json.dumps(facts, default=str)))


def named(ranks: list[int]) -> str:
    """Ranks in words, in rising order: "rank 3", "ranks 1-4, 7"."""
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
