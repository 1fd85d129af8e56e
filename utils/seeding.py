"""Random numbers: the same on all ranks while the model is built, different per rank while it trains."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from utils.errors import RunError


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed python, numpy, torch and CUDA.

    `rank` is 0 while weights are made, so that all ranks make the same ones, and the rank before training,
    so that dropout masks differ between ranks.
    """
    seed = (seed + 7919 * rank) % 2**32  # numpy takes 32 bits
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Make every operation give the same bits each time; one that cannot raises. Call this before CUDA starts.

    If torch were only to warn, it would keep its attention's backward pass as it is, whose sums vary from run to run.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS's choice varies
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextmanager
def deterministic_kernels_named() -> Iterator[None]:
    """A context around a run: an operation that has no deterministic kernel ends it in one line, as RunError."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise RunError(
            f"--deterministic: torch has no deterministic kernel for {operation.split()[-1]}, which this run needs; "
            "leave --deterministic out"
        ) from error


def rng_state() -> dict[str, Any]:
    """The state of all generators of this process, in types that `torch.load(weights_only=True)` takes."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def checked_rng_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state, if it is one that `rng_state` returns. numpy would read beyond its numbers at a place that is none.

    Raises:
        ValueError: if it is not; the message is a clause.
    """
    try:
        version, numbers, gauss = state["python"]
        random.Random().setstate((version, tuple(numbers), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        if not (gauss is None or (type(gauss) is float and math.isfinite(gauss))) or not math.isfinite(cached):
            raise ValueError("a number that was drawn ahead is none")
        if not (keys.dtype == torch.int64 and keys.shape == (624,) and keys.min() >= 0 and keys.max() < 2**32):
            raise ValueError("numpy's numbers are none")
        if not (type(position) is int and 0 <= position <= 624 and has_gauss in (0, 1)):
            raise ValueError("numpy's place in its numbers is none")
        np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, float(cached)))
        torch.Generator().set_state(state["torch"])
        if not isinstance(state.get("cuda", state["torch"]), torch.Tensor):
            raise ValueError("CUDA's is no tensor")
    except KeyError as error:
        raise ValueError(f"{error} is missing") from error
    except (TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set all generators to what `rng_state` returned, except those of a device that is not here."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
