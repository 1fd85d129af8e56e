"""Planned and measured memory of a run, and the account of memory that ran out."""

from __future__ import annotations

from typing import Any, NamedTuple

from reporting.events import number
from reporting.report.run_files import RunFiles
from reporting.report.settings import as_text

PLANNED_PARTS = ("params", "grads", "optimizer", "activations")
_ON_CPUS = ("params_gib", "grads_gib", "optimizer_gib", "peak_allocated_gib")
_MOST_CHARACTERS = 4000  # of a command


class PlanRow(NamedTuple):
    """One line: "planned" or "measured", with the maximum of each part, and of their sum, over all ranks."""

    source: str
    gib: list[float | int | None]  # by PLANNED_PARTS, then the peak


def plan_rows(run: RunFiles) -> list[PlanRow]:
    """Both lines; empty if there is no plan or nothing was measured.

    On a CPU only parts that are counted tensor by tensor are compared, and the resident memory of the whole process.
    """
    if number(run.plan.get("peak_gib")) is None or not run.memory:
        return []

    def measured(name: str) -> float | int | None:
        if not run.has_allocator and name not in _ON_CPUS:
            return None
        return max((event[name] for event in run.memory if event.get(name) is not None), default=None)

    names = [f"{part}_gib" for part in PLANNED_PARTS]
    return [
        PlanRow("planned", [*(number(run.plan.get(name)) for name in names), run.planned_peak_gib]),
        PlanRow("measured", [measured(name) for name in (*names, "peak_allocated_gib")]),
    ]


class SuggestedChange(NamedTuple):
    what: str  # the change, in words
    saves: str
    command: str


class OomAccount(NamedTuple):
    """oom.json as text."""

    headline: str
    rows: list[tuple[str, str]]
    changes: list[SuggestedChange]


def oom_account(run: RunFiles) -> OomAccount | None:
    """The account in oom.json; None if memory did not run out."""
    oom = run.oom
    if not oom:
        return None
    whose = "host" if oom.get("whose") == "host" else "device"
    headline = f"ran out of {whose} memory"
    if oom.get("rank") is not None:
        headline += f" on rank {as_text(oom['rank'])}"
    if isinstance(oom.get("phase"), str):
        headline += f" in {as_text(oom['phase']).replace('_', ' ')}"
    if number(oom.get("step")):
        headline += f", step {as_text(oom['step'])}"
    rows = [(name, as_text(oom[key])) for key, name in (("module", "in"), ("batch", "batch")) if oom.get(key)]
    sizes = {
        "asked": "asked for",
        "params": "parameters",
        "grads": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
        "other": "other",
        "allocated": "allocated in total",
        "reserved": "reserved",
        "free": "free",
        "capacity": "device memory",
    }
    for key, name in sizes.items():
        size = number(oom.get(f"{key}_gib"))
        if size is not None:
            rows.append((name, f"{size:,.3f} GiB{_largest(oom, key)}"))
    if oom.get("fragmented") is True:
        rows.append(("fragmentation", "enough was reserved and unused, but in pieces too small"))
    if isinstance(oom.get("host_memory"), dict) and oom["host_memory"]:
        rows.append(("host memory, GiB", as_text(oom["host_memory"])))
    if isinstance(oom.get("error"), str):
        rows.append(("error", as_text(oom["error"])))
    changes = oom.get("changes")
    found = (
        [_change(change) for change in changes[:10] if isinstance(change, dict)] if isinstance(changes, list) else []
    )
    return OomAccount(headline, rows, found)


def _largest(oom: dict[str, Any], owner: str) -> str:
    largest = oom.get("largest")
    of_owner = largest.get(owner) if isinstance(largest, dict) else None
    if not isinstance(of_owner, list):
        return ""
    entries = [entry for entry in of_owner[:3] if isinstance(entry, dict) and number(entry.get("gib")) is not None]
    names = ", ".join(f"{as_text(entry.get('name'))} {entry['gib']:.3f}" for entry in entries)
    return names and f" (largest: {names})"


def _change(change: dict[str, Any]) -> SuggestedChange:
    saves, command = number(change.get("saves_gib")), change.get("command")
    return SuggestedChange(
        as_text(change.get("what", "")),
        "" if saves is None else f"{saves:,.2f} GiB",
        command[:_MOST_CHARACTERS] if isinstance(command, str) else "",
    )
