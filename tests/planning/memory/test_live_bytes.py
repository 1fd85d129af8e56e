"""What is counted of tensors on the meta device, and what compiled code writes of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from planning.memory.device_kernels import FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD, KernelsOfCard
from planning.memory.live_bytes import LiveBytes
from policies.adapters.dropout_masks import draw_dropout


def new_tensor(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def test_a_copy_in_another_dtype_is_written_once_its_source_is_gone() -> None:
    weight = new_tensor(10)
    with LiveBytes([weight]) as live:
        source = new_tensor(100)
        copy = source.bfloat16()
        of_weight = weight.bfloat16()
        assert (live.live, live.written) == (400 + 200 + 20, 400)
        source = new_tensor(1)
        assert (live.live, live.written) == (4 + 200 + 20, 4 + 200)
        del copy, of_weight
        assert (live.live, live.written) == (4, 4)


def test_a_copy_that_is_gone_before_its_source_leaves_nothing() -> None:
    with LiveBytes([]) as live:
        source = new_tensor(100)
        copy = source.bfloat16()
        del copy
        others = [new_tensor(50) for _ in range(4)]  # one may get its address
        del source
        assert (live.live, live.written) == (800, 800)
        others.clear()
        assert (live.live, live.written) == (0, 0)


def test_a_mask_of_adapters_dropout_is_never_written() -> None:
    inputs = new_tensor(100)
    with LiveBytes([inputs]) as live:
        dropout = draw_dropout(inputs, 0.1)
        assert (live.live, live.written) == (dropout.mask_or_keys.nbytes, 0)


def test_attention_that_is_recomputed_has_its_output_while_it_computes_gradients() -> None:
    found: list[Any] = []

    class Watched(LiveBytes):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is FUSED_ATTENTION_BACKWARD:
                found.append(found[-1]() is not None)
            outputs = super().__torch_dispatch__(function, types, args, kwargs)
            if function is FUSED_ATTENTION:
                found.append(weakref.ref(outputs[0].untyped_storage()))
            return outputs

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)

    inputs = [new_tensor(1024, torch.bfloat16).view(1, 2, 64, 8).requires_grad_() for _ in range(3)]
    with KernelsOfCard((9, 0), answer=True), Watched(inputs):
        checkpoint(attend, *inputs, use_reentrant=False).sum().backward()
    assert len(found) == 3  # in forward, recomputed, and in backward
    assert found[-1] is True
