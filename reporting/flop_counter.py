"""`--flop_counter`: counts the floating-point operations of one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from data.batches.counts import BatchCounts
from ranks.collectives import sum_on_host
from ranks.environment import Environment
from run_folder.run_yaml import add_to_run_yaml


class FlopFormula(Protocol):
    """The FLOPs that the mathematics of a step needs, by the formula of the task (`tasks.flops.StepFlops`)."""

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""


class FlopRecorder:
    """Counts the operations of one step: of the first from `start` on."""

    def __init__(
        self, start: int, env: Environment, folder: Path, flops: FlopFormula, say: Callable[[str], None]
    ) -> None:
        self.start, self.env, self.folder, self.flops, self.say = start, env, folder, flops, say
        self.is_done = False

    @contextmanager
    def __call__(self, step: int, counts: BatchCounts) -> Iterator[None]:
        if self.is_done or step < self.start:
            yield
            return
        started = time.perf_counter()
        with FlopCounterMode(display=False, custom_mapping=attention_formulas() | _left_whole()) as counter:
            yield
        seconds = time.perf_counter() - started
        self.is_done = True
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
        except OSError as error:  # a full disk ends no run for a note
            reason = error.strerror or str(error)
            self.say(
                f"flop counter: run.yaml cannot be written ({reason}); it lacks these figures, and the run goes on"
            )


def _left_whole() -> dict[Any, Callable[..., int]]:
    """Formulas (0 FLOPs) that keep FlopCounterMode from decomposing operators that have a kernel of their own.

    Decomposed, they need more memory and round differently, and counting would change the run.
    """
    return dict.fromkeys((torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default), lambda *_: 0)


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """The formulas that FlopCounterMode should use for the fused attention kernels, by operator.

    torch's formulas lack the CPU kernel, fail on grouped heads before torch 2.13, and count the half of a causal
    product that the kernels skip.
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
        """FLOPs of one call. Tensors are passed as their shapes, `[batch, heads, seq, head_dim]`."""
        given = dict(zip(names, args, strict=False)) | kwargs
        batch, heads, num_queries, width = given["query"]
        num_keys, value_width = given["key"][2], given["value"][3]
        pairs = num_queries * num_keys
        if given.get("is_causal") and num_queries == num_keys:
            pairs = num_queries * (num_queries + 1) // 2
        # Forward: scores, and their product with values. Backward: scores again, and four gradients (scores, values,
        # queries, keys).
        widths = 3 * width + 2 * value_width if is_backward else width + value_width
        return 2 * batch * heads * pairs * widths

    return count
