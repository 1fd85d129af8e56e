"""The table of a report: each run's results, as text to read and as numbers for a CSV file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

from reporting.events import Event, figures, number
from reporting.log_line import clock
from reporting.report.curves import total_tokens, wait_percent
from reporting.report.run_files import RunFiles
from reporting.report.settings import num_machines

Figure = float | int | str | None


class FigureRow(NamedTuple):
    """One line of the table."""

    group: str
    name: str
    unit: str
    values: list[Figure]  # by run
    texts: list[str]  # by run, "" if there is none
    best: list[bool]  # by run: whether it is the best of several, if higher or lower is better


class _FigureLine(NamedTuple):
    group: str
    name: str
    unit: str
    value: Callable[[RunFiles], Figure]
    text: Callable[[Any], str]
    better: Literal["", "low", "high"] = ""


def figure_rows(runs: Sequence[RunFiles], price_per_hour: float | None) -> list[FigureRow]:
    """The lines for which at least one run has a value."""
    rows = []
    for line in _lines(price_per_hour):
        values = [line.value(run) for run in runs]
        if all(value is None for value in values):
            continue
        texts = ["" if value is None else line.text(value) for value in values]
        counts = [run.status != "failed" for run in runs]
        rows.append(FigureRow(line.group, line.name, line.unit, values, texts, _best(values, counts, line.better)))
    return rows


def _best(values: Sequence[Figure], counts: Sequence[bool], better: str) -> list[bool]:
    """Whether each value is the best of those that count; False throughout if these are all equal."""
    numbers = [v for v, counted in zip(values, counts, strict=True) if counted and isinstance(v, int | float)]
    if not better or len(set(numbers)) < 2:
        return [False] * len(values)
    best = min(numbers) if better == "low" else max(numbers)
    return [counted and value == best for value, counted in zip(values, counts, strict=True)]


def _lines(price_per_hour: float | None) -> Iterable[_FigureLine]:
    loss, gib, percent = _form(".4f"), gib_text, _form(".1f")
    yield _FigureLine("Run", "status", "", lambda run: run.status, str)
    yield _FigureLine("Run", "optimizer steps", "", lambda run: len(run.train) or None, _form(",d"))
    yield _FigureLine("Run", "steps planned", "", lambda run: run.start.get("num_steps"), _form(",.0f"))
    yield _FigureLine("Run", "tokens trained on", "", lambda run: total_tokens(run) or None, _form(",.0f"))
    yield _FigureLine(
        "Run", "trained parameters", "", lambda run: run.start.get("num_trainable_parameters"), _form(",.0f")
    )
    yield _FigureLine("Run", "parameters", "", lambda run: run.start.get("num_parameters"), _form(",.0f"))
    yield _FigureLine("Run", "ranks", "", lambda run: run.start.get("world_size"), _form(",.0f"))

    yield _FigureLine("Quality", "training loss, first step", "", lambda run: _at(run.train, 0, "loss"), loss)
    yield _FigureLine("Quality", "training loss, last step", "", lambda run: _at(run.train, -1, "loss"), loss)
    yield _FigureLine("Quality", "evaluation loss, best", "", lambda run: _get(_best_eval(run), "loss"), loss, "low")
    yield _FigureLine("Quality", "evaluation loss, best, at step", "", _best_step, _form(",.0f"))
    yield _FigureLine("Quality", "evaluation loss, last", "", lambda run: _at(run.evals, -1, "loss"), loss, "low")
    yield _FigureLine("Quality", "perplexity, best", "", _best_perplexity, _form(",.3f"), "low")
    for name, shown in (("rouge1", "ROUGE-1"), ("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L")):
        yield _FigureLine("Quality", f"{shown}, best", "", _highest(name), _form(".2f"), "high")

    for name, shown, form, better in (
        ("tokens_per_second", "tokens per second", ",.0f", "high"),
        ("tokens_per_second_per_device", "tokens per second per device", ",.0f", "high"),
        ("model_tflops_per_device", "model TFLOP/s per device", ",.3g", "high"),
        ("step_seconds", "seconds per step", ",.3f", ""),
    ):
        yield _FigureLine("Speed", f"{shown}, median", "", _median(name), _form(form), better)  # type: ignore[arg-type]
    yield _FigureLine("Speed", "seconds per step, planned", "", _planned("seconds_per_step"), _form(",.3f"))
    yield _FigureLine("Speed", "data wait, share of the steps", "%", _data_wait, percent)
    for name, shown in (("exposed_seconds", "tensors of other ranks"), ("straggler_seconds", "slower ranks")):
        yield _FigureLine("Speed", f"wait for {shown}, share of a step", "%", _waited(name), percent)

    yield _FigureLine("Memory", "peak planned", "GiB", lambda run: run.planned_peak_gib, gib)
    yield _FigureLine("Memory", "peak measured, fullest rank", "GiB", measured_peak, gib, "low")
    yield _FigureLine("Memory", "measured against planned", "%", _off_plan, _form("+.1f"))
    yield _FigureLine("Memory", "peak reserved, fullest rank", "GiB", _peak("reserved_gib"), gib)
    yield _FigureLine("Memory", "host memory, fullest rank", "GiB", _peak("host_rss_gib"), gib)
    yield _FigureLine("Memory", "allocator retries", "", _peak("num_alloc_retries"), _form(",.0f"))

    yield _FigureLine("Time and price", "time", "s", wall_seconds, _clock)
    yield _FigureLine("Time and price", "in optimizer steps", "s", _in_steps, _clock)
    yield _FigureLine("Time and price", "held up by checkpoints", "s", _in_checkpoints, _clock)
    yield _FigureLine("Time and price", "machines", "", lambda run: num_machines(run.notes), _form(",d"))
    of_one = partial(machine_price, price_per_hour=price_per_hour)
    all_in = partial(_price, price_per_hour=price_per_hour)
    per_token = partial(_token_price, price_per_hour=price_per_hour)
    yield _FigureLine("Time and price", "price of a machine", "per hour", of_one, _form(",.2f"))
    yield _FigureLine("Time and price", "price", "", all_in, _money, "low")
    yield _FigureLine("Time and price", "price, planned", "", _planned("price"), _money)
    yield _FigureLine("Time and price", "price per million tokens", "", per_token, _money, "low")


def _clock(seconds: float) -> str:
    return clock(seconds) if seconds >= 60 else f"{seconds:.3g} s"


def gib_text(gib: float | None) -> str:
    """Three decimals; of less than a tenth, three digits."""
    return "" if gib is None else f"{gib:,.3f}" if abs(gib) >= 0.1 or gib == 0 else f"{gib:.3g}"


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.2g}"


def _form(form: str) -> Callable[[Any], str]:
    return lambda value: format(value, form)


def _planned(name: str) -> Callable[[RunFiles], Figure]:
    return lambda run: number(run.plan.get(name))


def _get(event: Event | None, name: str) -> Figure:
    return None if event is None else event.get(name)


def _at(events: Sequence[Event], place: int, name: str) -> Figure:
    return events[place].get(name) if events else None


def _best_eval(run: RunFiles) -> Event | None:
    return min((event for event in run.evals if event.get("loss") is not None), key=lambda e: e["loss"], default=None)


def _best_step(run: RunFiles) -> Figure:
    return _get(_best_eval(run), "step")


def _best_perplexity(run: RunFiles) -> float | None:
    best = _best_eval(run)
    return None if best is None or best["loss"] > 50 else math.exp(best["loss"])


def _highest(name: str) -> Callable[[RunFiles], Figure]:
    return lambda run: max(figures(run.evals, name), default=None)


def _median(name: str) -> Callable[[RunFiles], Figure]:
    """Over the last three quarters of the steps, as in the table at a run's end: the first ones warm up."""

    def value(run: RunFiles) -> Figure:
        values = figures(run.train[len(run.train) // 4 :], name)
        return median(values) if values else None

    return value


def _data_wait(run: RunFiles) -> float | None:
    measured = [event for event in run.train if wait_percent(event) is not None]
    total = sum(figures(measured, "step_seconds"))
    return 100 * sum(figures(measured, "data_wait_seconds")) / total if total else None


def _waited(name: str) -> Callable[[RunFiles], Figure]:
    """The median over the steps in which communication was measured."""

    def value(run: RunFiles) -> Figure:
        step_seconds = {event["step"]: event.get("step_seconds") for event in run.train}
        pairs = [(event.get(name), step_seconds.get(event["step"])) for event in run.communication]
        shares = [100 * waited / seconds for waited, seconds in pairs if waited is not None and seconds]
        return median(shares) if shares else None

    return value


def _peak(name: str) -> Callable[[RunFiles], Figure]:
    return lambda run: max(figures(run.peaks.values(), name), default=None)


def measured_peak(run: RunFiles) -> Figure:
    """The highest allocated memory of any rank, in GiB."""
    return _peak("peak_allocated_gib")(run)


def _off_plan(run: RunFiles) -> float | None:
    planned, measured = run.planned_peak_gib, measured_peak(run)
    return 100 * (measured / planned - 1) if planned and isinstance(measured, int | float) else None


def _in_steps(run: RunFiles) -> float | None:
    return sum(figures(run.train, "step_seconds")) if run.train else None


def _in_checkpoints(run: RunFiles) -> float | None:
    return sum(figures(run.checkpoints, "blocked_seconds")) if run.checkpoints else None


def wall_seconds(run: RunFiles) -> float | None:
    """From the first step's preparation to the end, all sessions together; before the end, the time in steps."""
    seconds = run.end.get("seconds")
    return seconds if seconds is not None else _in_steps(run)


def machine_price(run: RunFiles, price_per_hour: float | None) -> float | None:
    """The price of one machine: the given one, or else the run's own --price_per_hour."""
    if price_per_hour is not None:
        return price_per_hour
    settings = run.notes.get("settings")
    planning = settings.get("planning_config") if isinstance(settings, dict) else None
    return number(planning.get("price_per_hour")) if isinstance(planning, dict) else None


def price_per_second(run: RunFiles, price_per_hour: float | None) -> float | None:
    """The price of all machines of the run."""
    of_one = machine_price(run, price_per_hour)
    return None if of_one is None else of_one * num_machines(run.notes) / 3600


def _price(run: RunFiles, price_per_hour: float | None) -> float | None:
    per_second, seconds = price_per_second(run, price_per_hour), wall_seconds(run)
    return None if per_second is None or seconds is None else seconds * per_second


def _token_price(run: RunFiles, price_per_hour: float | None) -> float | None:
    paid, tokens = _price(run, price_per_hour), total_tokens(run)
    return 1e6 * paid / tokens if paid is not None and tokens else None
