"""What torch.compile cannot compile ends the run in one line, or runs uncompiled; one graph of the cross-entropy."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._functorch.config as functorch
import torch.distributed as dist
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from planning.model.compiled_loss import compiled_cross_entropy
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.compilation.layers import (
    RECOMPILE_LIMIT,
    CompilationError,
    EagerFallback,
    compilation_named,
    compile_layers,
    num_compiled,
    set_compiler_in_backward,
)
from policies.loss.compiled_cross_entropy import compile_cross_entropy
from policies.loss.summed_loss import summed_cross_entropy, use_summed_loss
from policies.optimizers.compiled_adamw import CompiledAdamW
from policies.wrapping import find_layers
from tasks.causal_lm import CausalLM
from tests.helpers.causal_models import make_batch, make_model
from tests.helpers.checkpoints import with_lora
from tests.helpers.generated import flags
from tests.helpers.no_compiler import losing_compiler
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup
from tests.helpers.replicas import stop_group_after_replicas
from utils.memory_errors import what_ran_out

TASK = CausalLM()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 1), marks=pytest.mark.full), (1,)], ids=["everywhere", "on rank 1 alone"]
)
def test_a_layer_that_does_not_compile_is_named_once_and_no_rank_is_left(
    ranks: tuple[int, ...], tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = flags(tiny_model, samples, tmp_path / "run", "--compile", "--context_length", "64", "--max_train_step", "2")
    # Rank 0 speaks for all. On busy cores it may fail more than a second after the other.
    given = {"grace": {}} if 0 in ranks else {}
    outcomes = process_group.run(losing_compiler(argv, ranks), 2, **given)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if line.startswith("error:")]
    (line,) = said
    assert "--compile: torch.compile failed on a layer" in line
    assert "/nowhere/c++" in line
    assert not any("Traceback" in outcome.stderr for outcome in outcomes)


@pytest.fixture
def no_compiler() -> Iterator[None]:
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": (None, "/nowhere/c++")}):
        yield


@pytest.mark.usefixtures("no_compiler")
def test_a_loss_that_does_not_compile_is_named() -> None:
    model = make_model("llama")
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits, cross_entropy=compile_cross_entropy())
    with (
        pytest.raises(CompilationError, match=r"^--compile: .* failed on the cross-entropy .*/nowhere/c\+\+") as raised,
        compilation_named("a layer of this model", "--compile"),
    ):
        TASK.summed_loss(model, make_batch())
    assert "c++')); give --compile False (" in str(raised.value), "torch's advice behind its error is left out"


@pytest.mark.usefixtures("no_compiler")
def test_an_optimizer_that_does_not_compile_is_named_by_its_own_flag() -> None:
    weight = nn.Parameter(torch.zeros(2, 1024))
    weight.grad = torch.ones_like(weight)
    with (
        pytest.raises(CompilationError, match=r"^--compile_optimizer: .* failed on the update of AdamW") as raised,
        compilation_named("a layer of this model", "--compile"),
    ):
        CompiledAdamW([weight], large=1024).step()
    assert "; give --compile_optimizer False (" in str(raised.value)


def trained(model: Any, fallback: EagerFallback | None) -> tuple[float, list[torch.Tensor]]:
    """The loss of a batch, the second of two, and the gradients of both; compiled if there is a fallback."""
    cross_entropy = summed_cross_entropy if fallback is None else compile_cross_entropy(fallback)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits, cross_entropy=cross_entropy)
    if fallback is not None:
        compile_layers(list(model.model.layers), widths_vary=True, fallback=fallback)
    for seed in (0, 1):
        loss = TASK.summed_loss(model, make_batch(seed))
        loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("fails_in", slow_but(1, ["forward", "backward"]))
def test_what_does_not_compile_runs_as_written_and_says_so_in_one_line(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel\nfits")

    backend = aot_autograd(**{"fw_compiler": nop, "bw_compiler": nop, f"{fails_in[:1]}w_compiler": fail})
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    said: list[str] = []
    torch._dynamo.reset()
    with functorch.patch(force_non_lazy_backward_lowering=False):
        found = trained(make_model("llama"), EagerFallback(said.append))
    loss, gradients = trained(make_model("llama"), None)
    assert found[0] == loss
    assert all(map(torch.equal, found[1], gradients))
    (line,) = said
    assert line.startswith("--compile auto: the run goes on uncompiled: torch.compile failed (backend=")
    assert line.endswith(" raised: RuntimeError: no kernel fits)")


@pytest.mark.parametrize(
    ("recomputed", "num_graphs"), [(Checkpointing("off"), 1), (Checkpointing("full", tile_tokens=16), 3)]
)
def test_one_graph_serves_all_layers_with_adapters_and_none_trains_what_is_frozen(
    recomputed: Checkpointing, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's hidden states come from frozen embeddings."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    wanted = trained(with_lora(make_model("llama")).get_base_model(), None)
    torch._dynamo.reset()
    base = with_lora(make_model("llama")).get_base_model()
    checkpoint_layers(find_layers(base), recomputed)
    compile_layers(list(base.model.layers), widths_vary=True)
    before = num_compiled()
    found = trained(base, None)
    assert num_compiled() - before == num_graphs  # with tiles one before, in and after them
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one is None) is (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_hidden_states_that_nothing_keeps_are_freed_behind_frozen_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --activation_offloading layers keep copies of theirs, in host memory."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    layer = _Layer(nn.Linear(8, 8), nn.Linear(8, 8))
    compile_layers([layer], widths_vary=False)
    numbers = np.ones((4, 8), dtype=np.float32)
    embedded, is_there = torch.from_numpy(numbers), weakref.ref(numbers)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        result = layer(embedded)
    del numbers, embedded
    assert is_there() is None
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@torch._dynamo.config.patch(optimize_ddp=True)  # undoes what compile_layers sets
def test_replicas_compile_a_layer_as_one_graph_which_also_recomputes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, of 1 MiB each, are those of several buckets of DistributedDataParallel."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    layers = nn.ModuleList(_Layer(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(2))
    compile_layers([*layers], widths_vary=False)
    before = num_compiled()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(_Recomputed(layers))
        replica(torch.randn(4, 512, requires_grad=True)).sum().backward()
        del replica
    finally:
        stop_group_after_replicas()
    assert num_compiled() - before == 1


def test_settings_hold_in_the_thread_that_computes_gradients() -> None:
    """Here it is the one that calls backward; a GPU has one of its own."""
    found: list[Any] = []

    def compute() -> None:
        set_compiler_in_backward(torch.device("cpu"), falls_back=True)
        found.extend((torch._dynamo.config.recompile_limit, functorch.force_non_lazy_backward_lowering))
        found.append(torch._inductor.config.deterministic)

    torch.use_deterministic_algorithms(True)
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [RECOMPILE_LIMIT, True, True]


class _Layer(nn.Sequential):
    def forward(self, states: torch.Tensor) -> torch.Tensor:  # not torch's own, which is never compiled
        for product in self:
            states = product(states)
        return states


class _Recomputed(nn.Module):
    """Layers one after the other, each computed again in backward."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = checkpoint(layer, states, use_reentrant=False)
        return states


@pytest.mark.slow
def test_no_number_of_a_layer_is_an_input_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those would be tensors on the CPU, and arithmetic with them C++ kernels beside a GPU's own."""
    graph_inputs: list[Any] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graph_inputs.extend(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
        return nop(graph, inputs)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    model = with_lora(make_model("llama"), lora_dropout=0.1, lora_alpha=24)
    trained(model.get_base_model(), EagerFallback(pytest.fail))
    tensors = [value for value in graph_inputs if isinstance(value, torch.Tensor)]
    assert any(tensor.dim() == 3 and isinstance(tensor.shape[1], torch.SymInt) for tensor in tensors)
    assert all(tensor.dtype != torch.float64 for tensor in tensors)


def test_memory_that_runs_out_while_compiling_is_no_error_of_the_compiler() -> None:
    def short_of_memory(module: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    compiled = torch.compile(torch.sin, backend=short_of_memory)
    with pytest.raises(BackendCompilerFailed) as raised, compilation_named("a layer of this model", "--compile"):
        compiled(torch.zeros(2))
    assert what_ran_out(raised.value) == "device"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "weights_train"),
    [
        ({"label_smoothing": 0.1}, None),
        ({"label_smoothing": 0.1}, False),
        ({}, True),  # weights train in losses of pairs alone, which have neither
        ({"by_probability": True}, None),
        ({"by_probability": True}, False),
    ],
    ids=str,
)
def test_the_cross_entropy_compiles_once_for_any_number_of_tokens_and_keeps_what_is_planned(
    how: dict[str, Any], weights_train: bool | None
) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled, vocab = compile_cross_entropy(), 500
    both: Any = [(compiled, "cpu"), (compiled_cross_entropy, "meta")]
    for num_tokens in (64, 37, 1, 0, 5, 64):
        logits = torch.randn(num_tokens, vocab, requires_grad=True)
        targets = torch.randint(0, vocab, (num_tokens,))
        targets[:2] = -100
        weights = None if weights_train is None else torch.rand(num_tokens, requires_grad=weights_train)
        found, wanted = (f(logits, targets, weights=weights, **how) for f in (compiled, summed_cross_entropy))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        trained = [logits, *([weights] if weights is not None and weights_train else [])]
        gradients = [torch.autograd.grad(loss, trained, torch.full_like(loss, 0.3)) for loss in (found, wanted)]
        for of_compiled, of_written in zip(*gradients, strict=True):
            assert torch.allclose(of_compiled, of_written, rtol=1e-5, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1
    found, planned = (kept_of_logits(partial(loss, **how), device, weights_train) for loss, device in both)
    assert found == planned


def kept_of_logits(loss: Callable[..., torch.Tensor], device: str, weights_train: bool | None) -> int:
    """The bytes that a loss keeps for backward, of logits in bf16; targets and their weights aside."""
    kept: list[int] = []
    logits = torch.ones(64, 500, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.ones(64, dtype=torch.int64, device=device)
    weights = None if weights_train is None else torch.ones(64, device=device, requires_grad=weights_train)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.nbytes * t.is_floating_point() * (t is not weights)), lambda _: None
    ):
        loss(logits, targets, weights=weights)
    return sum(kept)
