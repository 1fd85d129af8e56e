"""The attention of a model whose rows are shared: the function that it would have called, between two exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from policies.attention.choice import WITHOUT_MASKS
from policies.attention.functions import attention_by_flash_4, attention_by_offsets
from policies.context_parallel.exchange import to_heads, to_tokens
from ranks.context_group import ContextGroup

_OVER = "_over_"
_FUNCTIONS = dict(zip(WITHOUT_MASKS, (attention_by_offsets, attention_by_flash_4), strict=True))


def share_attention(model: PreTrainedModel, group: ContextGroup) -> None:
    """Let a model with attention by offsets compute rows that are shared by the group's ranks."""
    whole = model.config.get_text_config()._attn_implementation
    # Plans in this process, which have no group, may be of as many ranks: they have another name.
    name = f"{whole}{_OVER}{group.size}_ranks" if group.name else f"{whole}{_OVER}ranks_{group.size}"
    AttentionInterface.register(name, over_ranks(_FUNCTIONS[whole], group))
    model.set_attn_implementation(name)


@contextmanager
def whole_rows(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model computes rows that each rank has whole."""
    name = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name.split(_OVER)[0])
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def over_ranks(attend: Callable[..., tuple[torch.Tensor, None]], group: ContextGroup) -> Callable[..., Any]:
    """An attention function that takes this rank's tokens, and calls `attend` with this rank's heads of whole rows."""
    size, rank, name = group.size, group.rank, group.name

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:
            raise ValueError("attention over ranks takes no mask")
        query, key, value = to_heads(query, key, value, size, name)
        sinks = None if s_aux is None else s_aux.chunk(size)[rank]
        output, _ = attend(module, query, key, value, None, s_aux=sinks, **options)
        return to_tokens(output, size, name), None

    return attention
