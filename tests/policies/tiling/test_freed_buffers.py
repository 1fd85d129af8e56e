"""Inductor's code of a tiled layer frees its buffers after their last use.

The code is generated and run with kernels that compute nothing, which takes no C++ compiler. Its buffers are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.async_compile import AsyncCompile

from policies.compilation.layers import compile_layers
from policies.tiling.tiles import Tiles, tile_parts

TOKENS, HIDDEN = 512, 64
OF_HIDDEN = TOKENS * HIDDEN * 4  # bytes of hidden states


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(hidden))


class Layer(nn.Module):
    """Its first and its last tensors are as wide as hidden states, those between are narrow, and its peak is the end.

    `sort` stands for attention: an operator of which inductor does not know what it takes for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = (nn.Parameter(torch.randn(size)) for size in ((HIDDEN, 4), (4, HIDDEN)))
        self.square, self.high = (nn.Parameter(torch.randn(HIDDEN, size)) for size in (HIDDEN, 8 * HIDDEN))
        self.mlp = Mlp()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        narrow = (hidden @ self.square) @ self.narrow
        wide = narrow.sort(dim=1).values @ self.wide
        high = wide @ self.high
        output: torch.Tensor = self.mlp(high @ self.high.t() + wide)
        return output


@pytest.fixture(autouse=True)
def kernels_that_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_kernel(*args: Any, **kwargs: Any) -> Callable[..., None]:
        return lambda *tensors: None

    torch._dynamo.reset()
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", no_kernel)
    # simdlen 1: no compiler is asked which vectors this processor has.
    with inductor.patch({"force_disable_caches": True, "cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()


def held_at_sort(*, recomputed: bool) -> int:
    """Bytes that the layer's code has made and not freed when the sort begins."""
    layer: Any = Layer()
    tile_parts([layer.mlp], Tiles(128))
    if recomputed:  # as by policies.activations.checkpointing, whose forward calls this
        layer.forward = MethodType(lambda self, hidden: self.compiled_forward(self, hidden), layer)
    compile_layers([layer], widths_vary=False)
    hidden = torch.randn(1, TOKENS, HIDDEN)
    with torch.no_grad():
        layer(hidden)
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(hidden)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    place = [event.name() for event in events].index("aten::sort")
    return sum(event.nbytes() for event in events[:place] if event.name() == "[memory]")


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_dead_buffer_waits_for_a_later_one_of_its_size(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = held_at_sort(recomputed=recomputed)
    torch._dynamo.reset()
    monkeypatch.setattr("policies.compilation.layers.AROUND_TILES", {})
    kept = held_at_sort(recomputed=recomputed)
    assert (freed // OF_HIDDEN, kept // OF_HIDDEN) == (0, 1)
    assert kept - freed == OF_HIDDEN
