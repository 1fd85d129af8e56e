"""Profiles a few optimizer steps: counts their floating-point operations, or traces their operators and kernels.

`step_recorder` returns the context that the loop puts around each step. It does nothing unless a flag asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from configs.tracking import TrackingConfig
from data.batches.counts import BatchCounts
from ranks.environment import Environment
from reporting.flop_counter import FlopFormula, FlopRecorder

WAIT, WARMUP, ACTIVE = 1, 2, 3  # in steps, as llama-recipes documents them

StepRecorder = Callable[[int, BatchCounts], AbstractContextManager[None]]
"""recorder(step, counts): a context for one optimizer step, steps counted from 1. Every rank enters all of them."""


def step_recorder(
    tracking: TrackingConfig, env: Environment, folder: Path, flops: FlopFormula, say: Callable[[str], None]
) -> StepRecorder:
    """The context for each step, as --flop_counter or --use_profiler asks for.

    Args:
        folder: the run's.
        say: prints a line; called on rank 0.
    """
    if tracking.flop_counter:
        return FlopRecorder(tracking.flop_counter_start, env, folder, flops, say)
    if tracking.use_profiler:
        traces = Path(tracking.profiler_dir) if tracking.profiler_dir else folder / "profiler"
        return _TraceRecorder(traces, env, say)
    return lambda step, counts: nullcontext()


def num_steps_needed(tracking: TrackingConfig) -> int:
    """The optimizer steps that a run needs for its trace or count; 0 if none is asked for."""
    if tracking.flop_counter:
        return tracking.flop_counter_start
    return WAIT + WARMUP + ACTIVE + 1 if tracking.use_profiler else 0


class _TraceRecorder:
    """Writes a trace of each rank: of the first ACTIVE steps after WAIT and WARMUP."""

    def __init__(self, folder: Path, env: Environment, say: Callable[[str], None]) -> None:
        self.folder, self.env, self.say, self.num_steps = folder, env, say, 0
        activities = [ProfilerActivity.CPU]
        if env.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler: profile | None = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank{env.rank}", use_gzip=True),
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
        )

    @contextmanager
    def __call__(self, step: int, counts: BatchCounts) -> Iterator[None]:
        if self.profiler is None:
            yield
            return
        if self.num_steps == 0:
            self.profiler.start()
        try:
            yield
        except BaseException:
            self._stop()  # writes the steps before the failure, and lets a later run in this process profile
            raise
        self.num_steps += 1
        self.profiler.step()
        if self.num_steps == WAIT + WARMUP + ACTIVE:
            self._stop()
            if self.env.is_rank_zero:
                self.say(f"profiler | steps {step - ACTIVE + 1} to {step} | a trace of each rank in {self.folder}")

    def _stop(self) -> None:
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.stop()
