"""A run whose compiled code is what dynamo and AOT autograd trace, executed by torch's own kernels.

What `--compile` captures, guards and recomputes is as under torch's default backend, inductor. Its kernels are not
generated, which takes most of a compilation's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import finetuning


def with_aot_eager(argv: Sequence[str]) -> Callable[[], int | None]:
    """What `ProcessGroup.train` runs instead of the flags."""
    return under_aot_eager(partial(finetuning.main, tuple(argv), ends_process=True))


def under_aot_eager(run: Callable[[], int | None]) -> Callable[[], int | None]:
    """A function for `ProcessGroup.train`, which compiles like that; both can be pickled."""
    return partial(_run, run)


def compile_by(backend: Any) -> Callable[..., Any]:
    """torch.compile by this backend, without options, which are inductor's."""
    by_torch: Any = torch.compile

    def compile_function(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        return by_torch(*args, **kwargs, backend=backend)

    return compile_function


def _run(run: Callable[[], int | None]) -> int | None:
    torch.compile = compile_by("aot_eager")  # of this forked process; nn.Module.compile calls it
    return run()
