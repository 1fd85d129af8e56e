"""cuDNN's attention makes a plan for each shape that it has not seen; where shapes vary, torch takes other kernels.

torch takes cuDNN first on Hopper and later, where its kernels are the fastest of torch's own. On an H200 with torch
2.11 the plans of one new width took 0.11 s for forward and backward, 0.65 s with a mask, and those of each new token
that a batch generates up to 0.3 s. FlashAttention 2 and the memory-efficient kernel have none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def leave_out_cudnn() -> None:
    """Let torch take no kernels of cuDNN for attention, from now on in this process."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """A context, or a decorator, in which torch takes none."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    leave_out_cudnn()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def tag_of_kernels() -> str:
    """What torch's key of kept compiled code has to hold besides: the key says nothing of the kernels it may take."""
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")  # torch's default
    return tag if torch.backends.cuda.cudnn_sdp_enabled() else f"{tag} without cuDNN's attention".lstrip()
