"""What compiled code keeps for backward, by the partitioner that inductor uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd


def compiled_layer(layer: nn.Module) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The layer, compiled, and what its forward returns once it is called: the output, and what is kept for backward.

    Inputs and parameters that are kept are left out.
    """
    returned: list[torch.Tensor] = []
    return torch.compile(layer, backend=recording_backend(returned), fullgraph=True), returned


def recording_backend(returned: list[torch.Tensor], decompositions: Any = None) -> Callable[..., Any]:
    """A backend for `torch.compile` that adds to the list what each compiled forward returns, as `compiled_layer`.

    torch forgets what it compiled before: of code that it met with another size, it would keep symbols for sizes.

    Args:
        decompositions: of operators into others, before the partitioner sees them; None: torch's least.
    """
    torch._dynamo.reset()

    def compile_forward(graph: torch.fx.GraphModule, example: Any) -> Any:
        (output,) = [node for node in graph.graph.nodes if node.op == "output"]
        returned.extend(node.meta["val"] for node in output.args[0] if node is not None and node.op != "placeholder")
        return make_boxed_func(graph)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=lambda graph, example: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions,
    )
    return backend
