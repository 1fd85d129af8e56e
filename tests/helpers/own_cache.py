"""Runs whose folder of kept tokens and features is their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import datasets

import finetuning


def with_cache(argv: Sequence[str], folder: Path) -> Callable[[], int | None]:
    """What `ProcessGroup.train` runs instead of the flags. The server of its forks read HF_DATASETS_CACHE before."""
    return partial(_run, tuple(argv), str(folder))


def _run(argv: Sequence[str], folder: str) -> int | None:
    datasets.config.HF_DATASETS_CACHE = folder
    return finetuning.main(argv, ends_process=True)
