"""What is counted of tensors on the meta device, and what compiled code writes of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from planning.memory.device_kernels import FUSED_ATTENTION_BACKWARD, KernelsOfCard
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


def test_attention_has_its_output_while_it_computes_gradients() -> None:
    shape, peaks = (1, 2, 64, 8), []

    class Watched(LiveBytes):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is FUSED_ATTENTION_BACKWARD:
                peaks.append(self.live)
            return super().__torch_dispatch__(function, types, args, kwargs)

    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    with KernelsOfCard((9, 0), answer=True), Watched(inputs):
        F.scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()
    half = inputs[0].nbytes
    sums_of_queries, per_query = 2 * half, 64 * 2 * 4
    # Its output and that's gradient, which is one number until it is needed as a whole.
    assert half + sums_of_queries + per_query <= peaks[0] <= 2 * half + sums_of_queries + 2 * per_query + 4
