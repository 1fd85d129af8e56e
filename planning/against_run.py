"""Compares the planned memory of a run with the measured one, part by part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from planning.out_of_memory.report import read_plan
from reporting.events import figures, number
from run_folder.entries import PLAN
from utils.atomic_write import write_atomically

APART = 0.1
"""Fraction of the measured peak: if the plan is further off, a line names the part that is most of it."""

TENSORS = ("params", "grads", "optimizer")
"""The parts that are counted tensor by tensor, on any device."""

PARTS = (*TENSORS, "activations", "other")


def compare_with_plan(
    folder: Path, events: Iterable[Mapping[str, Any]], peaks_gib: Iterable[float], *, has_allocator: bool
) -> list[str]:
    """Lines that show planned and measured memory side by side; none if the run had no plan. Call this on rank 0.

    What was measured is added to plan.json, as `measured`.

    Args:
        events: the run's.
        peaks_gib: of every rank, allocated.
        has_allocator: whether the device has an allocator that knows its peak. A CPU has none: `peaks_gib` are those
            of resident memory there, libraries included, and are compared with all that was planned for the process.
    """
    plan = read_plan(folder)
    if plan is None or not _is_whole(plan):
        return []
    measured = measure(plan, [event for event in events if event["event"] == "memory"], max(peaks_gib))
    if not has_allocator:
        parts = {name: measured[name] if name.removesuffix("_gib") in TENSORS else None for name in measured}
        measured = parts | {"peak_gib": None, "resident_gib": max(peaks_gib)}
    _add(folder / PLAN, plan | {"measured": measured})
    return lines(plan, measured)


def _is_whole(plan: Mapping[str, Any]) -> bool:
    """Whether the figures that are compared are there. Anybody may have written into the file since."""
    at_peak = plan.get("at_peak")
    planned = [plan.get(f"{name}_gib") for name in ("peak", "overhead", *PARTS)]
    planned += [at_peak.get(part) for part in PARTS[:-1]] if isinstance(at_peak, dict) else [None]
    return all(number(figure) is not None for figure in planned) and isinstance(plan.get("peak_phase"), str)


def measure(plan: Mapping[str, Any], memory: list[Mapping[str, Any]], peak_gib: float) -> dict[str, float | None]:
    """The measured memory by the plan's names. Each part is the most that any rank held of it.

    `other_gib` is the peak less a fraction of each part, the one that the plan has at its own peak: the parts at the
    measured peak are not known.
    """
    parts = {part: max(figures(memory, f"{part}_gib"), default=0.0) for part in PARTS[:-1]}
    at_peak = sum(size * _share_at_peak(plan, part) for part, size in parts.items())
    return {
        "peak_gib": peak_gib,
        **{f"{part}_gib": size for part, size in parts.items()},
        "other_gib": peak_gib - at_peak,
    }


def _share_at_peak(plan: Mapping[str, Any], part: str) -> float:
    """The fraction of a part's largest size that is there at the peak, in the plan."""
    most = float(plan[f"{part}_gib"])
    return float(plan["at_peak"][part]) / most if most else 1.0


def lines(plan: Mapping[str, Any], measured: Mapping[str, float | None]) -> list[str]:
    """The figures for people, and a line on the parts if the peaks are more than APART apart."""
    peak = measured["peak_gib"]
    if peak is None:
        resident, planned = measured["resident_gib"] or 0.0, resident_gib(plan)
        pairs = [f"{part} {plan[f'{part}_gib']:.3f} / {measured[f'{part}_gib']:.3f}" for part in TENSORS]
        return [
            f"memory planned / measured, GiB: resident {_compared(planned, resident)}, planned in "
            f"{plan['peak_phase']}; {', '.join(pairs)}"
        ]
    found = [
        f"memory planned / measured, GiB: peak {_compared(plan['peak_gib'], peak)}, planned in {plan['peak_phase']}"
    ]
    if abs(plan["peak_gib"] - peak) > APART * peak:
        apart = [(part, float(plan[f"{part}_gib"]), measured[f"{part}_gib"] or 0.0) for part in PARTS]
        apart.sort(key=lambda figures: -abs(figures[1] - figures[2]))
        texts = [f"{part} {planned:.2f} / {size:.2f}" for part, planned, size in apart]
        found.append(
            f"the plan is more than {100 * APART:.0f} % off; most of it lies in {apart[0][0]}: {', '.join(texts)}"
        )
    return found


def resident_gib(plan: Mapping[str, Any]) -> float:
    """The planned resident memory of a rank on a CPU: its tensors, and the process with its heap."""
    return float(plan["peak_gib"] + plan["overhead_gib"])


def _compared(planned: float, measured: float) -> str:
    return f"{planned:.2f} / {measured:.2f} ({100 * (planned / measured - 1):+.1f} %)"


def _add(path: Path, contents: Mapping[str, Any]) -> None:
    """Write plan.json anew. A disk that refuses keeps the plan as it was: the figures were printed."""
    with suppress(OSError):
        write_atomically(path, json.dumps(contents, indent=1) + "\n")
