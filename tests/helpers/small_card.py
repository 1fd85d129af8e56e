"""A GPU that rank 0's plan believes in, so that a run on CPUs decides as it would on one with so much memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import finetuning
from planning import plan_file
from planning.machines.hardware import parse_hardware


def on_small_card(argv: Sequence[str], memory_gib: float, ranks: int, card: str = "GPU") -> Callable[[], int]:
    """What `ProcessGroup.run` runs instead of the flags."""
    return partial(_train, tuple(argv), memory_gib, ranks, card)


def _train(argv: Sequence[str], memory_gib: float, ranks: int, card: str) -> int:
    hardware = parse_hardware(f"{ranks}xGPU", device_memory_gib=memory_gib)
    hardware = replace(hardware, card=replace(hardware.card, name=card))
    plan_file.own_hardware = lambda *given: hardware  # type: ignore[attr-defined]
    status = finetuning.main(argv)
    if status:
        finetuning.leave(status)  # as finetuning.py does
    return status
