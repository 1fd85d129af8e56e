"""A compiled layer is held against the written one: all kinds of a model, mistakes of each result, experts in doubt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from policies.adapters.lora_layers import use_lean_forward
from policies.compilation import proof
from policies.compilation.layer_calls import calls_of, one_of_each_kind
from policies.compilation.layers import EagerFallback, compile_layers, num_compiled
from policies.compilation.routing import Choice, RouterChoices, near_ties
from policies.compilation.trial import what_fails_compiled
from policies.wrapping import find_layers
from tests.helpers.checkpoints import with_lora
from tests.helpers.pairwise import slow_but
from tests.helpers.small_configs import SMALL, VOCAB

FOUR = SMALL | {"num_hidden_layers": 4, "head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONFIGS: dict[str, tuple[PreTrainedConfig, list[str]]] = {  # and the layers that stand for the model's kinds
    "llama": (LlamaConfig(**FOUR), ["3"]),
    "qwen3_moe": (Qwen3MoeConfig(**FOUR, **EXPERTS, mlp_only_layers=[0]), ["0", "3"]),
    "gemma3": (Gemma3TextConfig(**FOUR, sliding_window=16, sliding_window_pattern=2), ["2", "3"]),
    "gpt_oss": (
        GptOssConfig(**FOUR | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
        ["2", "3"],
    ),
    "qwen3_next": (Qwen3NextConfig(**FOUR, **EXPERTS, **DELTA), ["2", "3"]),
}
Run = Callable[[], Any]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        yield


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name][0], dtype=dtype)
    return model.train()


def compiled(model: nn.Module) -> tuple[dict[str, nn.Module], EagerFallback]:
    """The layers by their names, set to be compiled, and what calls them."""
    layers, fallback = find_layers(model), EagerFallback(None)
    compile_layers(layers, widths_vary=True, fallback=fallback)
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(layer)]: layer for layer in reversed(layers)}, fallback


def ids_of(seed: int, width: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, width), generator=torch.Generator().manual_seed(seed))


def tried(model: nn.Module) -> str | None:
    layers, fallback = compiled(model)
    return what_fails(model, layers, fallback)


def what_fails(model: nn.Module, layers: dict[str, nn.Module], fallback: EagerFallback) -> str | None:
    dtype = next(model.parameters()).dtype
    return what_fails_compiled(model, layers, lambda: model(input_ids=ids_of(0, 40), use_cache=False), fallback, dtype)


def one_step(model: nn.Module, seed: int, width: int) -> list[torch.Tensor]:
    """The gradients of a batch."""
    model.zero_grad()
    logits = model(input_ids=ids_of(seed, width), use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", slow_but(1, ["qwen3_moe", "gemma3", "llama", "gpt_oss"], num_slow=1))
def test_layers_that_pass_are_compiled_once_for_all_batches_and_the_trial_leaves_nothing(name: str) -> None:
    model = make(name, torch.bfloat16)
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    assert tried(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
    num_before = num_compiled()
    assert num_before
    for seed, width in ((1, 40), (2, 56)):  # other tokens go to other experts
        found = one_step(model, seed, width)
        with torch.compiler.set_stance("force_eager"):
            assert all(map(torch.equal, found, one_step(model, seed, width)))
    assert num_compiled() == num_before


@pytest.mark.parametrize("name", CONFIGS)
def test_one_layer_stands_for_its_kind(name: str) -> None:
    model = make(name)
    layers, _ = compiled(model)
    assert [name.rpartition(".")[2] for name in one_of_each_kind(layers)] == CONFIGS[name][1]


def test_only_what_follows_a_trained_weight_needs_a_gradient() -> None:
    model: Any = with_lora(make("qwen3_moe"), target_modules=["q_proj"]).get_base_model()
    use_lean_forward(model)  # calls no module of an adapter
    layers, _ = compiled(model)
    calls = calls_of(layers, lambda: model(input_ids=ids_of(0, 8), use_cache=False))
    assert [call.needs_gradient for call in calls] == [False, True, True, True]
    assert all(call.states()[0].shape == (2, 8, SMALL["hidden_size"]) for call in calls)


class _Wrong(torch.autograd.Function):
    """The identity, with a gradient that is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 1.1 * gradient


@pytest.mark.parametrize("wrong", slow_but(1, ["gradient", "mask", "number"], num_slow=1))
def test_a_mistake_in_compiled_code_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe", torch.bfloat16)
    layer: Any = model.get_submodule("model.layers.3.self_attn.o_proj")
    compute = layer.forward

    def forward(values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = compute(values)
        if not torch.compiler.is_compiling():
            return output
        if wrong == "gradient":
            return _Wrong.apply(output)  # type: ignore[no-any-return]
        if wrong == "mask":
            return output.roll(1, dims=1)
        return output / (output != output[0, 0])

    monkeypatch.setattr(layer, "forward", forward)
    found = tried(model)
    assert found is not None
    assert found.startswith("model.layers.3 (Qwen3MoeDecoderLayer) computes something else if it is compiled: ")
    assert ("gradient of" in found) is (wrong == "gradient")


def test_layers_that_branch_by_their_values_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    mlp: Any = model.get_submodule("model.layers.3.mlp")
    compute = mlp.forward

    def forward(values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = compute(values)
        for _ in range(int((values[:, :2] > 0).sum())):  # which a graph unrolls
            output = output + 1
        return output

    monkeypatch.setattr(mlp, "forward", forward)
    found = tried(model)
    assert found == "model.layers.3 (LlamaDecoderLayer) is compiled again for other tokens of the same number"


def test_ranks_that_need_each_other_try_a_layer_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose outputs moved too much tried it once more by itself, and waited for the others' part of its rows."""
    trials, found = list[object](), list[bool]()

    class Counted(proof._Trial):
        def __init__(self, *args: Any) -> None:
            trials.append(args)
            super().__init__(*args)

    def on_any(here: bool) -> bool:
        found.append(here)
        return True

    monkeypatch.setattr(proof, "_Trial", Counted)
    for of_others, num_trials in ((bool, 1), (on_any, 2)):
        trials.clear()
        model = make("llama")
        layers, fallback = compiled(model)
        run = functools.partial(model, input_ids=ids_of(0, 40), use_cache=False)
        assert what_fails_compiled(model, layers, run, fallback, torch.float32, on_any=of_others) is None
        assert len(trials) == num_trials
    assert found == [False]


def test_dropout_does_not_hide_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    for layer in find_layers(model):
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    assert tried(model) is None
    mlp: Any = model.get_submodule("model.layers.3.mlp.0")
    compute = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda v: compute(v) * (1.05 if torch.compiler.is_compiling() else 1))
    found = tried(model)
    assert found is not None
    assert "computes something else" in found
    assert all(module.training for module in model.modules())


def test_tokens_whose_experts_a_rounding_may_change_are_known() -> None:
    scores = torch.tensor([[9.0, 5.0, 1.0, 0.0], [9.0, 5.0, 4.999, 0.0], [9.0, 8.999, 1.0, 0.0]])
    noise = torch.tensor([[0.01, -0.01, 0.01, -0.01]])
    choices = [Choice(scores, 2)]
    assert near_ties(choices, [Choice(scores + noise, 2)], 3).tolist() == [False, True, False]
    assert near_ties(choices, [Choice(scores, 2)], 3).tolist() == [False] * 3
    of_groups = [Choice(scores.view(3, 2, 2), 1)]  # two groups of each token
    assert near_ties(of_groups, [Choice((scores + noise).view(3, 2, 2), 1)], 3).tolist() == [False, False, True]
    assert near_ties([Choice(scores, 4)], [Choice(scores + noise, 4)], 3).tolist() == [False] * 3


def test_experts_that_a_rounding_always_changes_are_no_proof() -> None:
    model = make("qwen3_moe")
    gate: Any = model.get_submodule("model.layers.3.mlp.gate")
    with torch.no_grad():
        gate.weight.copy_(gate.weight[:1].expand_as(gate.weight))
    found = tried(model)
    assert found is not None
    assert "layers.3 (Qwen3MoeDecoderLayer) cannot be compared: one rounding may change the experts of 100%" in found


@pytest.mark.slow
def test_a_model_whose_compiled_layers_fail_in_backward_trains_as_it_was_written() -> None:
    """aot_eager's backward of Qwen3-Next's delta rule takes a view of what it cannot."""
    model = make("qwen3_next")
    layers, fallback = compiled(model)
    found = what_fails(model, layers, fallback)
    assert found is not None
    assert found.startswith("model.layers.2 (Qwen3NextDecoderLayer) could not be tried (RuntimeError: view size")
    fallback.give_up()
    found_gradients = one_step(model, 1, 40)
    with torch.compiler.set_stance("force_eager"):
        assert all(map(torch.equal, found_gradients, one_step(model, 1, 40)))


def test_choices_of_the_highest_are_seen_in_any_form() -> None:
    scores = torch.randn(6, 4)
    with RouterChoices() as router:
        scores.topk(2)
        torch.topk(scores, k=3, dim=0)
        scores.argmax(-1)
        scores.argmax()
        torch.arange(4).topk(2)
    assert [(choice.scores.shape, choice.num_chosen) for choice in router.found] == [
        ((6, 4), 2),
        ((4, 6), 3),
        ((6, 4), 1),
    ]
