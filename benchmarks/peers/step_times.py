"""Measures the steps of a trainer of transformers, for the benchmarks that compare finetuning.py with one."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback


class StepTimes(TrainerCallback):
    """Measures the seconds of each step, with all work on the GPU done."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
