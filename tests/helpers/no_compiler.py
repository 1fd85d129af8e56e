"""A run on ranks some of which have no C++ compiler, which torch.compile needs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import finetuning


def without_compiler(argv: Sequence[str], ranks: Sequence[int]) -> Callable[[], int]:
    """What `ProcessGroup.run` runs instead of the flags."""
    return partial(_train, tuple(argv), tuple(ranks))


def _train(argv: Sequence[str], ranks: Sequence[int]) -> int:
    import torch._inductor.config as inductor

    inductor.force_disable_caches = True
    if int(os.environ["RANK"]) in ranks:
        inductor.cpp.cxx = (None, "/nowhere/c++")
    return finetuning.main(argv, ends_process=True)
