"""Random numbers: alike on all ranks while the model is built, different per rank while it trains."""

from __future__ import annotations

import os
import random
from typing import Any, cast

import numpy as np
import torch


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed python, numpy, torch and CUDA.

    `rank` is 0 while weights are made, so that all ranks make the same ones, and the rank before training,
    so that dropout masks differ between ranks.
    """
    seed = (seed + 7919 * rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Have every operation give the same bits each time on one device; one that cannot warns. Before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS picks workspaces as they come
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def rng_state() -> dict[str, Any]:
    """Where all of this process's generators are, as tensors, numbers and strings (`torch.load(weights_only=True)`)."""
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


def set_rng_state(state: dict[str, Any]) -> None:
    """Put all generators where `rng_state` found them; those of a device that is not here are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
