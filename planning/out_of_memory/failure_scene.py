"""Where a run was when its memory ran out, read from the stack of the error: phase, module and batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from policies.loss.head_gradients import loss_with_gradients
from tasks.micro_batch import TensorBatch
from utils.memory_errors import causes

PHASES = ("load", "data", "forward", "backward", "optimizer_step", "evaluation", "generation", "saving")
"""Phases in which memory may run out, in the words of a plan's `peak_phase`."""

_OF_ACTIVITY = {"loading": "load", "evaluating": "evaluation", "generating": "generation", "saving": "saving"}
_AFTER_MARK = {"before_forward": "forward", "after_forward": "forward", "after_backward": "optimizer_step"}


@dataclass(frozen=True)
class FailedBatch:
    """The micro-batch that was computed."""

    rows: int
    width: int  # tokens of a row, with padding
    longest_row: int  # tokens of the longest row, without padding; under packing the row itself
    targets_width: int | None  # tokens of a row of targets that are apart from the inputs, as an encoder-decoder's
    num_label_tokens: int | None = None  # that have a loss; None if the rows were not a batch yet

    def __str__(self) -> str:
        targets = "" if self.targets_width is None else f", targets of {self.targets_width:,}"
        return f"{self.rows} x {self.width:,} tokens (rows x width){targets}, longest row {self.longest_row:,}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FailedLayer:
    """Where in the model it happened."""

    module: str  # its name
    index: int | None = None  # of the layer that it is or belongs to, counted from 0; None outside of layers
    num_layers: int | None = None


def stack_of(error: BaseException) -> list[FrameType]:
    """The frames of the error's traceback and of its causes' tracebacks, the outermost first."""
    frames = []
    for cause in causes(error):
        trace = cause.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
    return frames


def phase_of(frames: Iterable[FrameType], activity: str, mark: str) -> str:
    """Which of PHASES it was.

    Args:
        activity: of the main thread (`supervision.main_thread.Position`).
        mark: the last of `reporting.memory_ledger.PHASES` that the step had reached; "" at its start.
    """
    if activity != "training":
        return _OF_ACTIVITY[activity]
    # This module of torch runs the engine, so whoever is further down the stack was called by backward.
    by_autograd = any(frame.f_globals.get("__name__") == "torch.autograd.graph" for frame in frames)
    # Forward has the head's gradients, too. What checkpointing computes again is inside of backward.
    if by_autograd and not any(frame.f_code is loss_with_gradients.__code__ for frame in frames):
        return "backward"
    return _AFTER_MARK.get(mark, "data")


def batch_of(frames: Iterable[FrameType]) -> FailedBatch | None:
    """The micro-batch that the outermost frame with one worked on: its tensors are in host memory."""
    for frame in frames:
        values = frame.f_locals
        for value in values.values():
            if isinstance(value, TensorBatch):
                return _batch(vars(value) | getattr(value, "inputs", {}))
        if isinstance(values.get("input_ids"), np.ndarray | torch.Tensor):
            return _batch(values)
    return None


def _batch(values: dict[str, Any]) -> FailedBatch:
    input_ids, mask, targets = (values.get(name) for name in ("input_ids", "attention_mask", "decoder_input_ids"))
    rows, width = input_ids.shape  # type: ignore[union-attr]
    if isinstance(mask, torch.Tensor):  # numpy asks torch for no memory
        mask = mask.numpy() if mask.device.type == "cpu" else None
    longest = width if mask is None else int(mask.sum(1).max())
    targets_width = None if targets is None else int(targets.shape[1])
    return FailedBatch(rows, width, longest, targets_width, values.get("num_label_tokens"))


def largest_module(frames: Iterable[FrameType]) -> nn.Module | None:
    """The module with the most weights that a frame holds: the model, as far as it was built."""
    modules = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, nn.Module)]
    return max(modules, key=lambda module: sum(p.numel() for p in module.parameters()), default=None)


def layer_of(frames: Sequence[FrameType], model: nn.Module) -> FailedLayer | None:
    """The innermost module of the model that was called."""
    names = {id(module): name for name, module in model.named_modules()}
    called = [names.get(id(frame.f_locals.get("self"))) for frame in frames]
    name = next((name for name in reversed(called) if name), None)
    if name is None:
        return None
    for found in re.finditer(r"\.(\d+)(?=\.|$)", name):
        stack = model.get_submodule(name[: found.start()])
        if isinstance(stack, nn.ModuleList):
            return FailedLayer(name, int(found[1]), len(stack))
    return FailedLayer(name)
