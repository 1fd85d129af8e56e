"""Lines to read before a run's figures: how it ended, and what is missing."""

from __future__ import annotations

from typing import Any, NamedTuple

from reporting.report.curves import MOST_RANKS
from reporting.report.memory_tables import oom_account
from reporting.report.run_files import RunFiles
from reporting.report.settings import as_text
from utils.wording import plural


class Notice(NamedTuple):
    kind: str  # "bad" or "note"
    text: str


def notices_of(run: RunFiles) -> list[Notice]:
    """The notices of a run, its status first."""
    step = run.train[-1]["step"] if run.train else 0
    planned = run.start.get("num_steps")
    where = f"after step {step}" + (f" of {planned:,.0f}" if planned is not None else "")
    texts = {
        "failed": Notice("bad", f"failed {where}"),
        "stopped": Notice("bad", f"stopped {where}"),
        "unended": Notice("bad", f"has not ended: it was killed {where}, or runs on another machine"),
        "running": Notice("note", f"is running: {where}"),
        "waiting": Notice("note", "has written nothing yet"),
    }
    found = [texts[run.status]] if run.status in texts else []
    if account := oom_account(run):
        found.append(Notice("bad", account.headline))
    if run.num_unread:
        found.append(
            Notice("bad", f"left out: {plural(run.num_unread, 'line')} of metrics.jsonl without an event of a run")
        )
    if len(run.sessions) > 1:
        starts = [session.first_step for session in run.sessions[1:] if session.first_step is not None]
        after = ", ".join(str(step - 1) for step in starts)
        found.append(Notice("note", f"was resumed after step {after}" if after else "was resumed"))
    num_ranks = len(run.peaks)
    if num_ranks > MOST_RANKS:
        which = f"{MOST_RANKS} of {num_ranks} ranks, the fullest and emptiest among them"
        found.append(Notice("note", f"shows the memory of {which}"))
    return found


class SessionRow(NamedTuple):
    steps: str
    ranks: str
    seconds: float
    resumed: str


def session_rows(run: RunFiles) -> list[SessionRow]:
    """The sessions of a resumed run; empty if it was never resumed."""
    if len(run.sessions) < 2:
        return []
    resumes = run.notes.get("resumed")
    notes = [note if isinstance(note, dict) else {} for note in resumes] if isinstance(resumes, list) else []
    rows = []
    for index, session in enumerate(run.sessions):
        note: dict[str, Any] = notes[index - 1] if 0 < index <= len(notes) else {}
        steps = f"{session.first_step} to {session.last_step}" if session.first_step is not None else "none"
        said = f"from step {as_text(note['step'])}, {as_text(note.get('time', ''))}" if "step" in note else ""
        rows.append(SessionRow(steps, str(session.world_size or ""), session.seconds, said))
    return rows
