"""torch.compile, one layer at a time: layers are alike, so one graph serves all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from utils.errors import ConfigError, RunError, in_one_line


class CompilationError(RunError):
    """A layer does not compile. It is found in the first step, when layers are called, perhaps by one rank alone."""


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer at its first call. Raises ConfigError if there is none."""
    if not layers:
        raise ConfigError("--compile: this model names no repeated layers, which are what is compiled; leave it out")
    for layer in layers:
        layer.compile()


@contextmanager
def compilation_named() -> Iterator[None]:
    """A context around a run: an error of torch.compile leaves it as CompilationError, in one line."""
    try:
        yield
    except RuntimeError as error:
        dynamo = sys.modules.get("torch._dynamo.exc")  # importing it takes a second, and nothing else raises its errors
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        raise CompilationError(
            f"--compile: torch.compile failed on a layer of this model ({in_one_line(error)}); leave --compile out "
            "(TORCH_LOGS=+dynamo,+inductor shows where it failed)"
        ) from error
