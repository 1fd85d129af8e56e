"""Workarounds for other libraries' versions, each with the version that ends it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def import_bitsandbytes_without_inductor() -> None:
    """Import bitsandbytes, if it is installed, before peft does; peft imports it for every adapter (`peft.helpers`)."""
    with without_inductor(), contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes")


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """A context in which bitsandbytes is imported without the compiler.

    Its import calls torch.compile for devices without kernels of its own, and so loads inductor: 1.3 of 7 seconds of a
    start. Without the compiler it falls back to uncompiled functions. Ends when it compiles at a first call.
    """
    before = os.environ.get(_NO_DYNAMO)
    os.environ[_NO_DYNAMO] = "1"  # torch.compile looks here each time; torch._dynamo, which is imported, looked before
    try:
        yield
    finally:
        del os.environ[_NO_DYNAMO]
        if before is not None:
            os.environ[_NO_DYNAMO] = before


_NO_DYNAMO = "TORCHDYNAMO_DISABLE"


def record_outputs_as_before(model: nn.Module) -> None:
    """Let a model of transformers that has become a sharding unit return hidden states, if it is asked for them.

    transformers looks up what a model records by the name of its class, and `fully_shard` gives it another class. Ends
    when it asks the model itself (not in 5.23).
    """
    from transformers.utils import output_capturing

    recorded = getattr(model, "_can_record_outputs", None)
    if recorded is not None:
        dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(type(model)), recorded)


@contextlib.contextmanager
def no_draws_on_meta() -> Iterator[None]:
    """A context in which transformers initializes no tensor on the meta device, which has no values.

    Torch computes each such draw in Python, in a fifth of the time of a plan. Under `torch.device("meta")` transformers
    skips them itself, and would make buffers there, too. Ends when it looks at each tensor's own device (not in 5.23).
    """
    from transformers import initialization

    functions: dict[str, Any] = initialization.TORCH_INIT_FUNCTIONS
    before = dict(functions)
    functions.update({name: functools.partial(_unless_on_meta, function) for name, function in before.items()})
    try:
        yield
    finally:
        functions.update(before)


def _unless_on_meta(function: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return tensor if tensor.is_meta else function(tensor, *args, **options)


def no_buffer_sync() -> dict[str, Any]:
    """The option of DistributedDataParallel that leaves buffers alone in forward.

    torch 2.13 renamed `broadcast_buffers` to `forward_sync_buffers`. Ends when requirements.txt asks for torch 2.13.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def return_freed_tensors() -> None:
    """Make glibc give the memory of every freed tensor back to the system, from now on.

    Otherwise it learns to keep blocks of up to 32 MB, and the rest of an aligned block of torch's does not fit the next
    request: merging a model of 700 MB layer by layer, it kept two thirds of it. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3  # in malloc.h


def return_free_memory() -> None:
    """Give back to the system, once, the memory of freed tensors that glibc keeps. Without glibc this does nothing.

    Unlike `return_freed_tensors` it does not affect later tensors: training in host memory reuses the same memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""The option that lets `varlen_attn` take fewer key than query heads.

Added in torch 2.12; before, the kernel took them without the option. Ends when requirements.txt asks for torch 2.12.
"""

SHARDS_INTEGERS: bool = TorchVersion(torch.__version__) >= "2.12"
"""Whether `fully_shard` takes parameters of integer types; before 2.12 it asks them to require gradients, and fails.

Ends when requirements.txt asks for torch 2.12.
"""


LEAKS_WHEN_PACKED = ("biogpt", "bloom", "falcon", "mamba", "mamba2", "minimax", "mpt", "opt")
"""Model types that in transformers 5.23 take no note of position ids (in the attention mask, or in Mamba's state), so
that the documents of a packed row see each other, without an error. A type goes when a test no longer finds it leaking
(tests/policies/attention/test_attention.py). Other types with a state are padded, too; the rest are found by
`policies.attention.packing_leaks` once there are weights."""

LEAKS_BY_MASKS = ("gpt_oss",)
"""Model types that in transformers 5.23 leak likewise with the masks that transformers makes, and are kept apart by our
attention by offsets, which needs no mask."""

POSITIONS_AFTER_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Model types that count positions from the padding id on if none are given, so that position ids from 0 on, which
packed rows have, mean other positions. `python -m benchmarks.family_losses` finds them."""

WINDOW_ONLY_IN_MASK = ("phimoe",)
"""Model types that in transformers 5.23 have a sliding window in the mask alone, and do not tell their attention."""


WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
"""Model types whose attention passes sinks as `s_aux`: a score of each head beside those of the keys, without a value.

transformers has no SDPA for them. The same in 5.17 and 5.23 (Flint came with 5.23). Others with sinks have heads of
other sizes (MiMo-V2-Flash) or sparse attention (DeepSeek V4, Hunyuan V4), and keep transformers' attention."""


def has_sinks(model_config: PreTrainedConfig) -> bool:
    """Whether this model's attention has sinks (policies/attention/sinks.py)."""
    return model_config.get_text_config().model_type in WITH_SINKS


def attention_of_capped_scores(model_config: PreTrainedConfig) -> dict[str, Any]:
    """The options of `from_config` and `from_pretrained` for attention with soft-capped scores, as Gemma 2's.

    Until 5.20, transformers used SDPA for it, which silently leaves out the cap: other losses, no error. Ends when
    requirements.txt asks for transformers 5.21.
    """
    return {"attn_implementation": "eager"} if caps_scores(model_config) else {}


def caps_scores(model_config: PreTrainedConfig) -> bool:
    """Whether this model's attention scores are soft-capped."""
    return getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None


def list_text_model(model_config: PreTrainedConfig) -> None:
    """Let `AutoModelForCausalLM` know the class of this model, if transformers lists it among models of image and text.

    So it does with the text model of Mistral Small 4 (5.17 to 5.23). Its config has no parts, as theirs have. Ends when
    transformers lists it among causal models.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(model_config)
    listed = AutoModelForImageTextToText._model_mapping
    if kind.sub_configs or kind not in listed or kind in AutoModelForCausalLM._model_mapping:
        return
    model_class: Any = listed[kind]
    if model_class.__name__.endswith("ForCausalLM"):
        AutoModelForCausalLM.register(kind, model_class, exist_ok=True)  # else its own configs are passed over


def must_be_exact(model: nn.Module, name: str) -> bool:
    """Whether this family's tensor of that name stays in fp32, rather than in half precision.

    transformers keeps those that the family names, a list that is not public. Only `from_pretrained` does;
    `from_config` does not look. A few families forget the bias by which routers choose experts (MiniMax-M2,
    Kimi-Linear); it differs by less than bf16 resolves.
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in ("e_score_correction_bias", *kept))


def loses_prefix(model: nn.Module) -> bool:
    """Whether a prefix that peft passes as `past_key_values` is left out when this model generates.

    transformers 5.24 renamed the argument to `cache`, and takes its own one if both are given. Ends with the first peft
    that passes `cache`; requirements.txt asks for transformers below 5.24 until then.
    """
    return "past_key_values" not in inspect.signature(type(model).forward).parameters


def all_gather(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Gather every rank's part. torch 2.13 renamed the function, and warns of the old name.

    Ends when requirements.txt asks for torch 2.13.
    """
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(whole, part, group=group, async_op=async_op)


def reduce_scatter(
    part: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce over the ranks, and give each its part. Renamed as `all_gather`."""
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return scatter(part, whole, op=op, group=group, async_op=async_op)
