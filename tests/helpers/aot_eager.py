"""A run whose compiled code is what dynamo and AOT autograd trace, executed by torch's own kernels.

What `--compile` captures, guards and recomputes is as under torch's default backend, inductor. Its kernels are not
generated, which takes most of a compilation's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import finetuning


def with_aot_eager(argv: Sequence[str]) -> Callable[[], int | None]:
    """What `ProcessGroup.train` runs instead of the flags."""
    return under_aot_eager(partial(finetuning.main, tuple(argv), ends_process=True))


def under_aot_eager(run: Callable[[], int | None]) -> Callable[[], int | None]:
    """A function for `ProcessGroup.train`, which compiles like that; both can be pickled."""
    return partial(_run, run)


def _run(run: Callable[[], int | None]) -> int | None:
    torch.compile = partial(torch.compile, backend="aot_eager")  # of this forked process; nn.Module.compile calls it
    return run()
