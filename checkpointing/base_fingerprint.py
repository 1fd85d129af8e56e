"""A digest that tells whether a base model is the one that a checkpoint was trained on, without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from configs.training import TrainConfig
from policies.stored_weights import weight_files

_NUM_SAMPLES, _SAMPLE_BYTES = 16, 2**16


def base_fingerprint(model: nn.Module, train: TrainConfig) -> str | None:
    """A digest of the weights that the run does not train and so does not save; None if it trains all of them."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return None
    return f"random {train.seed}" if train.random_weights else fingerprint_files(weight_files(train.model_name))


def fingerprint_files(paths: Sequence[Path]) -> str:
    """A digest of the files' sizes and of evenly spaced parts of them, headers included.

    Two models of one shape differ nearly everywhere, so a megabyte of each file tells them apart.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
