"""Reads a run folder for a report. It may come from anyone, and the run may still write: nothing in it is trusted.

Lines and fields that no run writes are left out; such lines are counted, but for a last one that is still being
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from reporting.events import Event, count, event_of, number
from reporting.memory_phases import PHASES
from run_folder.entries import PLAN
from run_folder.lock import is_in_use
from run_folder.run_yaml import NAME as RUN_YAML
from run_folder.run_yaml import read_run_yaml
from utils.small_files import open_regular, read_json

FILES = (RUN_YAML, "metrics.jsonl", "samples.jsonl", PLAN, "oom.json")
"""The files that a report is made from."""

STATUSES = ("finished", "stopped", "failed")
PEAKS = ("peak_allocated_gib", "reserved_gib", "host_rss_gib", "num_alloc_retries")
_MOST_BYTES = 2**30  # of one file


@dataclass
class Session:
    """One session of a run: from its start or a resume to its end or the next resume."""

    world_size: int | None
    num_steps: int | None  # of the whole run, as planned then
    first_step: int | None = None
    last_step: int | None = None
    seconds: float = 0.0  # in its optimizer steps


@dataclass
class RunFiles:
    """The contents of a run folder. Figures are finite numbers or None; events are in the order of their steps."""

    folder: Path
    notes: dict[str, Any] = field(default_factory=dict)  # run.yaml
    train: list[Event] = field(default_factory=list)
    evals: list[Event] = field(default_factory=list)
    memory: list[Event] = field(default_factory=list)
    communication: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    start: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    samples: list[Event] = field(default_factory=list)  # of the last evaluation
    plan: dict[str, Any] = field(default_factory=dict)
    oom: dict[str, Any] = field(default_factory=dict)
    num_unread: int = 0  # lines of metrics.jsonl that are no events
    is_running: bool = False

    @cached_property
    def peaks(self) -> dict[int, Event]:
        """The highest figures of each rank, by rank."""
        highest: dict[int, Event] = {}
        for event in self.memory:
            own = highest.setdefault(event["rank"], dict.fromkeys(PEAKS))
            for name in PEAKS:
                value = event.get(name)
                if value is not None and (own[name] is None or value > own[name]):
                    own[name] = value
        return dict(sorted(highest.items()))

    @property
    def has_allocator(self) -> bool:
        """Whether the device has an allocator to ask. A CPU has none: there the process's memory counts."""
        return any(peaks["reserved_gib"] is not None for peaks in self.peaks.values())

    @property
    def planned_peak_gib(self) -> float | int | None:
        """The planned peak; on a CPU of the process's resident memory, as it is measured there."""
        peak, overhead = number(self.plan.get("peak_gib")), number(self.plan.get("overhead_gib"))
        if self.has_allocator or not self.memory:
            return peak
        return None if peak is None or overhead is None else peak + overhead

    @property
    def status(self) -> str:
        """One of STATUSES, or "running"; "unended": killed, or running elsewhere; "waiting": nothing is there."""
        if self.is_running and not self.end:
            return "running"
        if self.end:
            return str(self.end["status"])
        return "unended" if self.notes or self.train or self.start else "waiting"


def holds_run(folder: Path) -> bool:
    """Whether there is a run to report on."""
    return (folder / RUN_YAML).is_file() or (folder / "metrics.jsonl").is_file()


def read_run(folder: Path) -> RunFiles:
    """The contents of a run folder for a report.

    Raises:
        OSError: if a file is there and cannot be read.
    """
    run = RunFiles(folder)
    if is_readable(folder / RUN_YAML):
        run.notes = read_run_yaml(folder)
    _read_metrics(run)
    run.samples = _last_samples(folder / "samples.jsonl")
    run.plan = _read_object(folder / PLAN)
    run.oom = _read_object(folder / "oom.json")
    run.is_running = is_in_use(folder)
    return run


def is_readable(file: Path) -> bool:
    """Whether this is a regular file of a credible size. Reading a pipe would wait for ever."""
    return file.is_file() and file.stat().st_size <= _MOST_BYTES


def _events(file: Path) -> Iterator[Event | None]:
    """The event of each line, or None if it has none. A last line without a line feed is still being written."""
    if not is_readable(file):
        return
    with open_regular(file) as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield event_of(line)


def _read_metrics(run: RunFiles) -> None:
    # By step, so that a resumed run's events replace those of the steps that it makes again.
    train: dict[int, Event] = {}
    evals: dict[int, Event] = {}
    communication: dict[int, Event] = {}
    memory: dict[tuple[int, int, str], Event] = {}
    for event in _events(run.folder / "metrics.jsonl"):
        if event is None:
            run.num_unread += 1
            continue
        name, figures = event["event"], {key: number(value) for key, value in event.items() if key != "event"}
        if name == "start":
            run.start, run.end = figures, {}
            run.sessions.append(Session(count(event.get("world_size")), count(event.get("num_steps"))))
        elif name == "end" and event.get("status") in STATUSES:
            run.end = figures | {"status": event["status"]}
        elif name == "train":
            train[event["step"]] = figures
            _add_to_session(run, event["step"], figures.get("step_seconds") or 0.0)
        elif name == "eval":
            evals[event["step"]] = figures
        elif name == "communication":
            communication[event["step"]] = figures
        elif name == "checkpoint":
            run.checkpoints.append(figures)
        elif name == "memory" and event["phase"] in PHASES:
            memory[event["step"], event["rank"], event["phase"]] = figures | {"phase": event["phase"]}
        elif name in ("end", "memory"):
            run.num_unread += 1
    run.train, run.evals, run.communication = (
        [events[step] for step in sorted(events)] for events in (train, evals, communication)
    )
    run.memory = [memory[key] for key in sorted(memory)]


def _add_to_session(run: RunFiles, step: int, seconds: float) -> None:
    if not run.sessions:
        run.sessions.append(Session(None, None))
    session = run.sessions[-1]
    session.first_step = step if session.first_step is None else session.first_step
    session.last_step = step
    session.seconds += seconds


def _last_samples(file: Path) -> list[Event]:
    """The samples of the last evaluation that generated any."""
    samples: list[Event] = []
    for event in _events(file):
        if event is None or event["event"] != "sample":
            continue
        if samples and event["step"] != samples[-1]["step"]:
            samples = []
        texts = {
            name: event[name]
            for name in ("dataset", "prompt", "reference", "generated")
            if isinstance(event.get(name), str)
        }
        figures = {"row": count(event.get("row")), "rougeL": number(event.get("rougeL"))}
        samples.append({"step": event["step"], **figures, **texts})
    return samples


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there, or is being written."""
    if not is_readable(file):
        return {}
    try:
        value = read_json(file)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
