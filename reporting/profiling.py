"""A closer look at a few optimizer steps: counts their floating-point operations, or traces what ran when.

`step_recorder` returns the context that the loop puts around each step. It does nothing unless asked for by a flag.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.flop_counter import FlopCounterMode

from configs.tracking import TrackingConfig
from data.batches.counts import BatchCounts
from ranks.collectives import sum_on_host
from ranks.environment import Environment
from run_folder.run_yaml import add_to_run_yaml

WAIT, WARMUP, ACTIVE = 1, 2, 3  # in steps, as llama-recipes documents them

StepRecorder = Callable[[int, BatchCounts], AbstractContextManager[None]]
"""recorder(step, counts): a context for one optimizer step, steps counted from 1. Every rank enters all of them."""


class FlopFormula(Protocol):
    """What the mathematics of a step needs, by the formula of the task (`tasks.flops.StepFlops`)."""

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""


def step_recorder(
    tracking: TrackingConfig, env: Environment, folder: Path, flops: FlopFormula, say: Callable[[str], None]
) -> StepRecorder:
    """The context for each step that --flop_counter or --use_profiler asks for.

    Args:
        folder: the run's. say: prints a line; called on rank 0.
    """
    if tracking.flop_counter:
        return _FlopRecorder(tracking.flop_counter_start, env, folder, flops, say)
    if tracking.use_profiler:
        return _TraceRecorder(trace_folder(tracking, folder), env, say)
    return lambda step, counts: nullcontext()


def trace_folder(tracking: TrackingConfig, folder: Path) -> Path:
    return Path(tracking.profiler_dir) if tracking.profiler_dir else folder / "profiler"


def num_steps_needed(tracking: TrackingConfig) -> int:
    """How many optimizer steps a run needs for what it is to record; 0 if that is nothing."""
    if tracking.flop_counter:
        return tracking.flop_counter_start
    return WAIT + WARMUP + ACTIVE + 1 if tracking.use_profiler else 0


class _FlopRecorder:
    """Counts one step: the first that is `start` or later."""

    def __init__(
        self, start: int, env: Environment, folder: Path, flops: FlopFormula, say: Callable[[str], None]
    ) -> None:
        self.start, self.env, self.folder, self.flops, self.say = start, env, folder, flops, say
        self.done = False

    @contextmanager
    def __call__(self, step: int, counts: BatchCounts) -> Iterator[None]:
        if self.done or step < self.start:
            yield
            return
        started = time.perf_counter()
        with FlopCounterMode(display=False, custom_mapping=attention_formulas() | _left_whole()) as counter:
            yield
        seconds = time.perf_counter() - started
        self.done = True
        (counted,) = sum_on_host(counter.get_total_flops())
        self._report(step, counted / self.env.world_size, self.flops.count(counts) / self.env.world_size, seconds)

    def _report(self, step: int, counted: float, model: float, seconds: float) -> None:
        if not self.env.is_rank_zero:
            return
        self.say(
            f"flop counter | step {step} | counted {counted / 1e12:.4g} TFLOP per device, "
            f"{counted / seconds / 1e12:.4g} TFLOP/s (counting slows this step) | "
            f"model {model / 1e12:.4g} TFLOP per device | counted / model {counted / max(1.0, model):.3f}"
        )
        figures = {"step": step, "counted_flops_per_device": counted, "model_flops_per_device": model}
        try:
            add_to_run_yaml(self.folder, flop_counter=figures | {"step_seconds": seconds})
        except OSError as error:  # a note is worth no run
            reason = error.strerror or str(error)
            self.say(
                f"flop counter: run.yaml cannot be written ({reason}); it lacks these figures, and the run goes on"
            )


class _TraceRecorder:
    """Writes one trace per rank, of the first steps after waiting and warm-up."""

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
            self._stop()  # writes what was recorded before the failure
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


def _left_whole() -> dict[Any, Callable[..., int]]:
    """Formulas (0 FLOPs) for operators that FlopCounterMode would otherwise decompose.

    Decomposed, they need more memory and round differently. They have a kernel of their own beside a composite one.
    """
    return dict.fromkeys((torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default), lambda *_: 0)


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """The formulas that FlopCounterMode should use for the fused attention kernels, by operator.

    Its own formulas know no CPU kernel, fail on grouped heads before torch 2.13, and count the half of a causal product
    that the kernels leave out.
    """
    aten = torch.ops.aten
    kernels = [
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ]
    return {kernel: _attention_formula(kernel) for kernel in kernels}


def _attention_formula(kernel: Any) -> Callable[..., int]:
    names = [argument.name for argument in kernel.default._schema.arguments]
    is_backward = "backward" in str(kernel)

    def count(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        """FLOPs of one call. Tensors are given as their shapes, [batch, heads, seq, head_dim]."""
        given = dict(zip(names, args, strict=False)) | kwargs
        batch, heads, num_queries, width = given["query"]
        num_keys, value_width = given["key"][2], given["value"][3]
        pairs = num_queries * num_keys
        if given.get("is_causal") and num_queries == num_keys:
            pairs = num_queries * (num_queries + 1) // 2
        # Forward: scores, and their product with the values. Backward: the scores again, and the gradients of scores,
        # values, queries and keys.
        widths = 3 * width + 2 * value_width if is_backward else width + value_width
        return 2 * batch * heads * pairs * widths

    return count
