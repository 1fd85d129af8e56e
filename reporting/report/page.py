"""Makes one self-contained HTML page of runs, which can be mailed and opened without a network.

Tables are written here, by Jinja, which escapes every text. Curves are drawn in the browser, by uPlot, from numbers
that the page holds as JSON. The page's own Content-Security-Policy lets nothing else run or load.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from reporting.memory_phases import PHASES
from reporting.report.curves import MEMORY_COLUMNS, PARTS, curves_of, shown_ranks
from reporting.report.figures import FigureRow, figure_rows, gib_text, price_per_second
from reporting.report.memory_tables import oom_account, plan_rows
from reporting.report.notices import notices_of, session_rows
from reporting.report.run_files import RunFiles, read_run
from reporting.report.settings import differing, setting_rows
from run_folder.entries import REPORT, is_report
from run_folder.run_yaml import now
from utils.atomic_write import FileWriteError, write_atomically
from utils.errors import ConfigError, in_one_line
from utils.printing import printable

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("uplot/uPlot.iife.js", "drawing.js", "charts.js", "page.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
_MOST_SAMPLES = 4  # of a run
_MOST_SAMPLE_CHARACTERS = 1500


def report_page(folders: Sequence[Path], *, price_per_hour: float | None = None, is_live: bool = False) -> str:
    """The page, as HTML.

    Args:
        price_per_hour: of each machine; None takes each run's own.
        is_live: the page asks its own server for news.

    Raises:
        OSError: if a file of a run cannot be read.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: few runs make a page

    runs = [read_run(folder) for folder in folders]
    names = short_names(folders)
    rows = figure_rows(runs, price_per_hour)
    settings = setting_rows([run.notes for run in runs])
    scripts = [_asset(name) for name in _SCRIPTS]
    # docs/decisions.md, "A report trusts nothing in a run folder".
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(_hash_of(script) for script in scripts),
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        runs=runs,
        groups=_grouped(rows),
        settings=settings,
        differing=differing(settings),
        given=[row for row in settings if any(row.given)],
        notices=[(name, notice) for name, run in zip(names, runs, strict=True) for notice in notices_of(run)],
        sessions=[session_rows(run) for run in runs],
        peaks=[{rank: run.peaks[rank] for rank in sorted(shown_ranks(run))} for run in runs],
        gib_text=gib_text,
        some_on_cpu=any(run.memory and not run.has_allocator for run in runs),
        plans=[plan_rows(run) for run in runs],
        accounts=[oom_account(run) for run in runs],
        commands=[as_command(run) for run in runs],
        samples=[[_cut(sample) for sample in run.samples[:_MOST_SAMPLES]] for run in runs],
        is_live=is_live,
        written=now(),
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        styles=[_asset(name) for name in _STYLES],
        scripts=scripts,
        data=_as_json(_data(runs, names, rows, price_per_hour, is_live)),
    )


def write_report(folders: Sequence[Path], target: Path, *, price_per_hour: float | None = None) -> int:
    """Write the page to a file. Returns its size in bytes.

    Raises:
        ConfigError: if the file is there and is no report: it may be someone's work.
        OSError: if a run cannot be read, or the page cannot be written.
    """
    if os.path.lexists(target) and not is_report(target):
        raise ConfigError(f"--out: {target} is there and is no report of runs; give another file, or move it away")
    page = report_page(folders, price_per_hour=price_per_hour).encode()
    write_atomically(target, page)
    return len(page)


def write_at_end(folder: Path) -> str:
    """Write the page of a run that has just ended into its folder. Returns a line on the result.

    It raises nothing: a page about a run must not change how the run ends.
    """
    try:
        write_report([folder], folder / REPORT)
    except Exception as error:
        reason = error.strerror if isinstance(error, FileWriteError) else in_one_line(error)
        return f"--report: the page could not be written ({reason}); python -m tools.report {folder} may"
    return f"report {folder / REPORT}"


def short_names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: as many last parts of its path as are needed to tell all runs apart."""
    paths = [folder.absolute() for folder in folders]
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def as_command(run: RunFiles) -> str:
    command = run.notes.get("command")
    return command[:4000] if isinstance(command, str) else ""


def _data(
    runs: Sequence[RunFiles],
    names: Sequence[str],
    rows: Sequence[FigureRow],
    price_per_hour: float | None,
    is_live: bool,
) -> dict[str, Any]:
    """The data of the page's scripts."""
    return {
        "live": is_live,
        "parts": PARTS,
        "phases": PHASES,
        "memory_columns": MEMORY_COLUMNS,
        "runs": [
            {
                "name": name,
                "price_per_second": price_per_second(run, price_per_hour),
                "planned_peak_gib": run.planned_peak_gib,
                **curves_of(run, num_runs=len(runs)),
            }
            for name, run in zip(names, runs, strict=True)
        ],
        "figures": [
            {"name": f"{row.name} ({row.unit})" if row.unit else row.name, "values": row.values} for row in rows
        ],
    }


def _grouped(rows: Sequence[FigureRow]) -> dict[str, list[FigureRow]]:
    groups: dict[str, list[FigureRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _cut(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with its long texts cut."""
    return {
        name: value[:_MOST_SAMPLE_CHARACTERS] + " […]"
        if isinstance(value, str) and len(value) > _MOST_SAMPLE_CHARACTERS
        else value
        for name, value in sample.items()
    }


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash_of(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _as_json(value: Any) -> str:
    """JSON for a script element; no text of a run can end that element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
