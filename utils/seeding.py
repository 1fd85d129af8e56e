"""Random numbers: alike on all ranks while the model is built, different per rank while it trains."""

from __future__ import annotations

import random

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
