"""A run whose compiled code is what dynamo and AOT autograd trace, executed by torch's own kernels.

What `--compile` captures, guards and recomputes is as under torch's default backend, inductor. Its kernels are not
generated, which takes most of a compilation's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import finetuning


def with_aot_eager(argv: Sequence[str]) -> Callable[[], int]:
    """What `ProcessGroup.train` runs instead of the flags."""
    return partial(_train, tuple(argv))


def _train(argv: Sequence[str]) -> int:
    torch.compile = partial(torch.compile, backend="aot_eager")  # of this forked process; nn.Module.compile calls it
    return finetuning.main(argv, ends_process=True)
