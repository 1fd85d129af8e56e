"""A run that notes, at each call of SDPA, whether torch may take cuDNN's kernels there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import finetuning


def noting_attention(argv: Sequence[str], notes: Path) -> Callable[[], int]:
    """What `ProcessGroup.run` runs instead of the flags; `notes` gets pairs: cuDNN allowed, one query per row."""
    return partial(_train, tuple(argv), notes)


def _train(argv: Sequence[str], notes: Path) -> int:
    found: set[tuple[bool, bool]] = set()
    attention = functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not query.is_meta:  # a plan's
            found.add((torch.backends.cuda.cudnn_sdp_enabled(), query.shape[2] == 1))
        return attention(query, *args, **kwargs)

    functional.scaled_dot_product_attention = noted  # type: ignore[assignment]
    status = finetuning.main(argv)
    notes.write_text(json.dumps(sorted(found)))
    return status
