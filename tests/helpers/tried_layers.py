"""Runs on a CPU that decide on --compile auto as on a GPU: layers are tried before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionMlp

import finetuning
import planning.plan_file
import resolving.resolved
from planning.machines.hardware import parse_hardware
from tests.helpers.aot_eager import compile_by

MISTAKES = ("computes something else", "does not compile", "fails in backward")
SEES_SOMETHING_ELSE = "sees something else"
"""The mistake of Qwen2-VL's vision encoder."""


def with_trial(
    argv: Sequence[str], mistake: str = "", ranks: Sequence[int] = (0,), card: str = ""
) -> Callable[[], int | None]:
    """What `ProcessGroup.train` runs instead of the flags. No kernels are compiled (tests/helpers/aot_eager.py).

    Args:
        mistake: what is wrong with Llama's layers if they are compiled, one of MISTAKES; or SEES_SOMETHING_ELSE.
        ranks: those on which it is.
        card: that the run's plan takes for its own; without one, no time is planned.
    """
    return partial(_run, tuple(argv), mistake, tuple(ranks), card)


def _run(argv: Sequence[str], mistake: str, ranks: Sequence[int], card: str) -> int | None:
    if card:
        hardware = parse_hardware(card)
        planning.plan_file.own_hardware = lambda *given: hardware  # type: ignore[attr-defined]
    backend: Any = "aot_eager"
    if mistake and int(os.environ["RANK"]) in ranks:
        backend = {"does not compile": _refusing, "fails in backward": _failing_in_backward}.get(mistake, backend)
        if mistake == "computes something else":
            LlamaMLP.forward = _a_little_larger(LlamaMLP.forward)
        if mistake == SEES_SOMETHING_ELSE:
            VisionMlp.forward = _a_little_larger(VisionMlp.forward)
    torch.compile = compile_by(backend)
    resolving.resolved.decide_compilation = _as_on_gpu(resolving.resolved.decide_compilation)
    return finetuning.main(argv, ends_process=True)


def _as_on_gpu(decide: Callable[..., Any]) -> Callable[..., Any]:
    def decided(config: Any, model_config: Any, device: Any, **given: Any) -> Any:
        return decide(config, model_config, device._replace(type="cuda"), **given)

    return decided


def _a_little_larger(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(self: Any, states: torch.Tensor) -> torch.Tensor:
        return forward(self, states) * (1.2 if torch.compiler.is_compiling() else 1.0)

    return wrong


def _refusing(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that refuses all but the smallest graphs, such as that of `policies.compilation.probe`."""
    if len(graph.graph.nodes) > 5:
        raise RuntimeError("no kernel fits")
    return graph.forward


def _failing_in_backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    def fail(*args: Any) -> Any:
        raise RuntimeError("view size is not compatible")

    fail._boxed_call = True  # type: ignore[attr-defined]
    return aot_autograd(fw_compiler=nop, bw_compiler=lambda graph, inputs: fail)(graph, inputs)
