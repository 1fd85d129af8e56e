"""Workarounds for other libraries' versions, each with the version that ends it."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion


def no_buffer_sync() -> dict[str, Any]:
    """The option of DistributedDataParallel that leaves buffers alone in forward.

    torch 2.13 renamed `broadcast_buffers` to `forward_sync_buffers`. Ends when requirements.txt asks for torch 2.13.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def return_freed_tensors() -> None:
    """From now on, glibc gives the memory of every freed tensor back to the system.

    It would otherwise learn to keep blocks of up to 32 MB, and what is left of torch's aligned ones does not fit the
    next request: merging layer by layer, it kept two thirds of a model of 700 MB. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3  # in malloc.h


def return_free_memory() -> None:
    """Give back to the system, once, the memory of freed tensors that glibc keeps. Without glibc this does nothing.

    Unlike the above it leaves later tensors alone: training in host memory uses the same memory again and again.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""The option that lets `varlen_attn` take fewer key than query heads.

Added in torch 2.12; before, the kernel takes them without being told. Ends when requirements.txt asks for torch 2.12.
"""

SHARDS_INTEGERS: bool = TorchVersion(torch.__version__) >= "2.12"
"""Whether `fully_shard` takes parameters of integer types; before 2.12 it asks them to require gradients, and fails.

Ends when requirements.txt asks for torch 2.12.
"""


def attention_of_capped_scores(model_config: Any) -> dict[str, Any]:
    """What `from_config` and `from_pretrained` are told about attention whose scores are soft-capped, as Gemma 2's.

    Until 5.20 transformers took SDPA for it, which left the cap out without a word: other losses, no error. Ends when
    requirements.txt asks for transformers 5.21.
    """
    return {"attn_implementation": "eager"} if caps_scores(model_config) else {}


def caps_scores(model_config: Any) -> bool:
    """Whether this model's attention scores are soft-capped."""
    return getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None


def must_be_exact(model: Any, name: str) -> bool:
    """Whether this family's tensor of that name is not to be rounded to half precision: transformers keeps it in fp32.

    That holds for `from_pretrained` alone, `from_config` does not ask, and the list has no public name.
    """
    return any(part in name for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ())
