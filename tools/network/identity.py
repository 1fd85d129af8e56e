"""The facts in which the nodes of a run must agree: the code, versions of libraries, flags, and the time."""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = r"torch|transformers|peft|accelerate|bitsandbytes|nvidia-nccl-.*"
CLOCK_SECONDS = 2.0  # clocks that differ by more get a line: times of files and logs would confuse


def describe_node(argv: Sequence[str]) -> dict[str, Any]:
    """Versions, flags and the time of this node, as JSON values."""
    versions = {
        dist.name.lower(): dist.version
        for dist in metadata.distributions()
        if dist.name and re.fullmatch(_LIBRARIES, dist.name.lower())
    }
    versions = {"python": platform.python_version(), "this repository": code_digest(), **dict(sorted(versions.items()))}
    return {"versions": versions, "flags": list(argv), "clock": time.time()}


def code_digest(root: Path = ROOT) -> str:
    """Twelve hex digits that name the code of this repository, committed or not; tests do not count.

    An image holds no .git, and a commit says nothing of files that were changed since.
    """
    digest = hashlib.sha256()
    rooms = [root / "datasets", *(file.parent for file in root.glob("*/__init__.py") if file.parent.name != "tests")]
    for file in sorted([*root.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))]):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def differences(nodes: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each fact in which the nodes, by name, differ."""
    (first, wanted), *others = nodes.items()
    found = []
    for name, other in others:
        for what in sorted(wanted["versions"].keys() | other["versions"].keys()):
            one, two = (node["versions"].get(what, "none") for node in (wanted, other))
            if one != two:
                found.append(f"{what}: {first} has {one}, {name} has {two}; give all nodes the same")
        if wanted["flags"] != other["flags"]:
            found.append(
                f"flags: {first} has {_words(wanted, other)}, {name} has {_words(other, wanted)}; give the same"
            )
    return found


def _words(node: dict[str, Any], other: dict[str, Any]) -> str:
    """The first of a node's flags that the other has not in its place, and the next word."""
    pairs = list(zip(node["flags"], [*other["flags"], *[None] * len(node["flags"])], strict=False))
    at = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    if at is None:
        return "fewer flags"
    start = at if at == 0 or node["flags"][at].startswith("--") else at - 1
    return " ".join(node["flags"][start : at + 2 if start == at else at + 1])
