"""How fast groups of ranks exchange tensors, and the file of measured speeds that tools.doctor writes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.small_files import read_json


@dataclass(frozen=True)
class Speed:
    """The time of a collective is `latency_seconds` plus `seconds_per_byte` for each byte of the whole tensor."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float, num_calls: float) -> float:
        return num_calls * self.latency_seconds + num_bytes * self.seconds_per_byte

    @property
    def gigabytes_per_second(self) -> float:
        return 1e-9 / self.seconds_per_byte


@dataclass(frozen=True)
class GroupSpeeds:
    """The speeds of collectives in one kind of group. All groups of the kind work at once, as in a step."""

    size: int
    all_gather: Speed
    reduce_scatter: Speed
    all_reduce: Speed


@dataclass(frozen=True)
class Speeds:
    world: GroupSpeeds
    node: GroupSpeeds  # the ranks of one node
    between: GroupSpeeds  # the ranks with the same number on each node

    def to_dict(self) -> dict[str, Any]:
        """The speeds in plain types, as in the doctor's file."""
        return asdict(self)


def read_speeds(path: Path) -> Speeds:
    """The speeds in a file of tools.doctor.

    Raises:
        ConfigError: if the file is not one of tools.doctor.
    """
    try:
        found = read_json(path)["speeds"]
        groups = {name: _group(found[name]) for name in ("world", "node", "between")}
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _refused(path, "holds no speeds of ranks") from None
    if groups["world"].size != groups["node"].size * groups["between"].size:
        raise _refused(path, "has groups whose sizes do not fit together")
    return Speeds(**groups)


def _group(found: Any) -> GroupSpeeds:
    speeds = {name: Speed(**found[name]) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    size, numbers = found["size"], [value for speed in speeds.values() for value in asdict(speed).values()]
    # type() and not isinstance(): JSON's true is an int to Python.
    plain = all(type(number) in (int, float) and math.isfinite(number) and number >= 0 for number in numbers)
    if type(size) is not int or size < 1 or not plain:
        raise ValueError
    if size > 1 and not all(speed.seconds_per_byte > 0 for speed in speeds.values()):
        raise ValueError
    return GroupSpeeds(size, **speeds)


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--network_speeds: {path} {reason}; give the file that torchrun ... -m tools.doctor --json FILE wrote"
    )
