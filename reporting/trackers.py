"""TensorBoard and Weights & Biases: they get the events of metrics.jsonl, by step and under tidy names, and the plan.

Both are optional packages, imported once a flag asks for them. A tracker that fails never ends a run: the run prints
one line and goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast

from configs.tracking import TrackingConfig
from reporting.plan_figures import read_plan_figures
from run_folder.entries import WANDB_RUN
from run_folder.run_yaml import add_to_run_yaml, read_run_yaml

P = ParamSpec("P")

PACKAGES = {"use_tensorboard": "tensorboard", "use_wandb": "wandb"}
"""The package that each flag needs (requirements-tracking.txt)."""

FINISH_SECONDS = 8.0  # for W&B's last uploads; the other ranks report a failure themselves after ten

Settings = Mapping[str, Mapping[str, Any]]
"""A run's settings by section and name, in plain types."""


def scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """An event's finite numbers: `train/loss`, `memory/rank0/after_backward/allocated_gib`."""
    place = [event]
    if "rank" in values:
        place.append(f"rank{values['rank']}")
    if "phase" in values:
        place.append(values["phase"])
    return {
        "/".join((*place, name)): value
        for name, value in values.items()
        if name not in ("step", "rank", "phase") and isinstance(value, int | float) and math.isfinite(value)
    }


class Tracker(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None:
        """Scalars of one step; steps never fall."""

    def close(self, *, finished: bool) -> None:
        """Write what has not been written yet."""


class Trackers:
    """Passes every event to the trackers that work, and closes them after the `end` event."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        """
        Args:
            say: prints a line.
        """
        self.say = say
        self.trackers: dict[str, Tracker] = {}
        self._step = 0

    def open(self, name: str, make: Callable[[], Tracker]) -> None:
        self._guard(name, lambda: self.trackers.update({name: make()}))

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Write an event. Without a step (`epoch`) it belongs to the last one. `start` is known to `open_trackers`."""
        if event == "start":
            return
        self._step = values.get("step", self._step)
        # Over a copy: `_guard` drops trackers that fail.
        for name, tracker in list(self.trackers.items()):
            self._guard(name, tracker.write, self._step, scalars(event, values))
        if event == "end":
            for name, tracker in list(self.trackers.items()):
                self._guard(name, tracker.close, finished=values["status"] != "failed")
            self.trackers.clear()

    def _guard(self, name: str, action: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
        try:
            action(*args, **options)
        except Exception as error:
            self.trackers.pop(name, None)
            self.say(f"{name}: {_first_line(error)}; the run goes on without it")


def open_trackers(
    tracking: TrackingConfig,
    folder: Path,
    settings: Settings,
    figures: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    after_step: int = 0,
) -> Trackers:
    """The trackers that the flags ask for. Call this on rank 0 alone.

    Args:
        folder: the run's; it holds run.yaml.
        figures: further hyperparameters: numbers, strings and lists of them.
        after_step: the step after which a resumed run continues. TensorBoard drops its values of later steps.
    """
    trackers = Trackers(say)
    if tracking.use_tensorboard:
        trackers.open("TensorBoard", lambda: TensorBoard(folder / "tensorboard", settings, figures, after_step))
    if tracking.use_wandb:
        trackers.open("Weights & Biases", lambda: WandB(folder, settings, figures, say))
    if plan := read_plan_figures(folder):
        trackers.write("plan", {"step": after_step} | plan)
    return trackers


class TensorBoard:
    """An event file below RUN/tensorboard; settings are its hyperparameters."""

    def __init__(self, folder: Path, settings: Settings, figures: Mapping[str, Any], after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = cast(
            Any, SummaryWriter(str(folder), flush_secs=10, purge_step=after_step + 1 if after_step else None)
        )  # Any, since torch declares its file_writer as None
        flat = {f"{s}.{name}": value for s, fields in settings.items() for name, value in fields.items()}
        plain = {
            name: value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
            for name, value in (flat | dict(figures)).items()
        }
        # Not add_hparams, which would put them into a run of their own, apart from the scalars.
        experiment, start, self._end = hparams(plain, {"train/loss": 0, "eval/loss": 0})
        self.writer.file_writer.add_summary(experiment)
        self.writer.file_writer.add_summary(start)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, *, finished: bool) -> None:
        if finished:
            self.writer.file_writer.add_summary(self._end)
        self.writer.close()


class WandB:
    """A run of Weights & Biases with its files in RUN/wandb; settings are its config.

    Project, entity, mode and key come from W&B's own environment variables and login. Without a key or a network, the
    run is recorded offline. run.yaml keeps the id of the run, and a resumed run goes on with it.
    """

    def __init__(
        self, folder: Path, settings: Settings, figures: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        import wandb

        # Silent, or it would ask for a key on the terminal while the other ranks wait. Its copy of the console and
        # its look at the git remote are switched off: a URL or a line of output may hold a secret.
        own_settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        wandb.setup(settings=own_settings)
        options: dict[str, Any] = {
            "dir": str(folder),
            "name": folder.resolve().name,
            "config": {**settings, "facts": dict(figures)},
            "settings": own_settings,
        }
        if known := read_run_yaml(folder).get(WANDB_RUN):
            options |= {"id": known, "resume": "allow"}
        try:
            self.run = wandb.init(**options)
        except Exception as error:
            say(f"Weights & Biases: {_first_line(error)}; recording offline")
            self.run = wandb.init(**options, mode="offline")
        if self.run.id != known and not self.run.disabled:
            add_to_run_yaml(folder, **{WANDB_RUN: self.run.id})
        self.run.define_metric("*", step_metric="step")  # W&B's own step counts calls, and a step has several events
        self.place = Path(self.run.dir).parent
        if self.run.disabled:
            say("Weights & Biases: switched off by WANDB_MODE")
        elif self.run.offline:
            say(f"Weights & Biases: recording offline; send it later with: wandb sync {self.place}")
        else:
            say(f"Weights & Biases: {self.run.url}")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step} | values)

    def close(self, *, finished: bool) -> None:
        try:
            self.run.finish(exit_code=0 if finished else 1)
        except TimeoutError:
            raise TimeoutError(f"not everything was sent in time; send it with: wandb sync {self.place}") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
