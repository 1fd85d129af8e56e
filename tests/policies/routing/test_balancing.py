"""The routers' loss has the gradients of transformers' own, for any cut of the batch, and counts each token once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from data.batches.counts import BatchCounts
from data.sequences.tokenized import TokenSequence
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.compilation.layers import compile_layers
from policies.loss.summed_loss import use_summed_loss
from policies.routing.coefficient import check_routers, resolve_coefficient
from policies.routing.expert_loads import SHARES, Routing
from policies.routing.routers import find_routers
from policies.wrapping import find_layers
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.causal_lm import CausalLM
from tests.helpers.small_configs import SMALL, VOCAB
from utils.errors import ConfigError

TASK = CausalLM()
NUM_EXPERTS, NUM_CHOSEN, COEFFICIENT = 8, 2, 0.7
EXPERTS: dict[str, Any] = {"num_experts_per_tok": NUM_CHOSEN, "router_aux_loss_coef": 0.02}
CONFIGS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, num_experts=NUM_EXPERTS, moe_intermediate_size=24, head_dim=8
    ),
    "mixtral": transformers.MixtralConfig(**SMALL, **EXPERTS, num_local_experts=NUM_EXPERTS),
}
FEW_LAYERS = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over ranks are those of one rank."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **kwargs: None)


def make_model(family: str = "qwen3_moe") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for router in find_routers(model):
            next(router.module.parameters()).mul_(30)  # so that choices are clear
    return model.train()


def rows(lengths: Sequence[int] = (5, 20, 11, 17)) -> list[list[TokenSequence]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=generator, dtype=torch.int32).numpy()
        labels = ids.copy()
        labels[: 2 + number] = -100
        made.append([TokenSequence(ids, labels, number)])
    return made


def padded(chosen: list[list[TokenSequence]]) -> CausalMicroBatch:
    return Collator(packing=False, padding_id=2)(chosen)


def watched(model: Any, coefficient: float = COEFFICIENT) -> tuple[Routing, Any]:
    """The routing of a model, and its loss."""
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    routing = Routing(find_routers(model), coefficient=coefficient)
    return routing, routing.watching(TASK.summed_loss)


def counts_of(batches: Sequence[CausalMicroBatch]) -> BatchCounts:
    num_labels = sum(b.num_label_tokens for b in batches)
    return BatchCounts(num_labels, sum(b.num_tokens for b in batches), 0, num_loss_terms=num_labels)


def gradients(model: Any, routing: Routing, loss: Any, batches: Sequence[CausalMicroBatch]) -> dict[str, torch.Tensor]:
    """The gradients of one step, as the training loop computes them."""
    model.zero_grad()
    counts = counts_of(batches)
    loss_grad = 1.0 / counts.num_label_tokens
    with routing.step(counts):
        for batch in batches:
            (loss(model, batch, loss_grad) * loss_grad).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of the whole gradient's norm."""
    assert found.keys() == wanted.keys()
    norm = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-6 * norm, name


def losses_of_layers(model: Any, batch: CausalMicroBatch) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """By transformers: the cross-entropy of a batch, the routers' loss of each layer, and f, [layers, experts]."""
    output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, output_router_logits=True)
    cross_entropy = nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100
    )
    of_layers = [
        load_balancing_loss_func((logits,), NUM_EXPERTS, NUM_CHOSEN, batch.attention_mask)
        for logits in output.router_logits
    ]
    mask = batch.attention_mask.flatten().bool()
    chosen = [logits[mask].topk(NUM_CHOSEN).indices.flatten() for logits in output.router_logits]
    counts = torch.stack([torch.bincount(of_layer, minlength=NUM_EXPERTS) for of_layer in chosen])
    return cross_entropy, of_layers, counts.double() / mask.sum()


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_transformers_loss_if_the_shares_are_the_batchs_own(family: str) -> None:
    model, batch = make_model(family), padded(rows())
    cross_entropy, of_layers, shares = losses_of_layers(model, batch)
    torch.stack([cross_entropy, COEFFICIENT * torch.stack(of_layers).mean()]).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    routing, loss = watched(model)
    routing.shares.copy_(shares)
    assert_close(gradients(model, routing, loss, [batch]), wanted)
    assert torch.equal(routing.shares, shares)
    plain = make_model(family)
    without = gradients(plain, *watched(plain, 0.0), [batch])
    router = "model.layers.0.mlp.gate.weight"
    assert (without[router] - wanted[router]).abs().max() > 1e-3, "the loss is too small to be seen"


def test_gradients_and_shares_are_the_same_for_one_micro_batch_and_for_four() -> None:
    model = make_model()
    routing, loss = watched(model)
    found = []
    for batches in ([padded(rows())], [padded([row]) for row in rows()]):
        routing.shares.copy_(torch.linspace(0, 1, routing.shares.numel()).view_as(routing.shares))
        found.append((gradients(model, routing, loss, batches), routing.shares.clone()))
    assert_close(found[1][0], found[0][0])
    assert torch.equal(found[0][1], found[1][1])


def test_the_second_step_takes_the_shares_of_the_first() -> None:
    model, batch = make_model(), padded(rows())
    routing, loss = watched(model)
    assert torch.equal(routing.shares, torch.full((2, NUM_EXPERTS), NUM_CHOSEN / NUM_EXPERTS, dtype=torch.float64))
    first = gradients(model, routing, loss, [batch])
    shares = routing.shares.clone()
    assert torch.equal(shares, losses_of_layers(model, batch)[2])
    second = gradients(model, routing, loss, [batch])
    assert (second["model.layers.0.mlp.gate.weight"] - first["model.layers.0.mlp.gate.weight"]).abs().max() > 1e-4
    assert routing.tensors()[SHARES] is routing.shares


def test_layers_that_are_tried_before_the_first_step_count_as_in_training_and_leave_no_count() -> None:
    batch = padded(rows())
    routing, loss = watched(model := make_model())
    with routing.trying(batch):
        model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits.sum().backward()
        counted = [watched.trained.grad for watched in routing._watched]
    assert all(counts.sum() == NUM_CHOSEN * batch.num_tokens for counts in counted)
    fresh, fresh_loss = watched(fresh_model := make_model())
    found, wanted = gradients(model, routing, loss, [batch]), gradients(fresh_model, fresh, fresh_loss, [batch])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(routing.shares, fresh.shares)


def test_padding_is_left_out_in_padded_and_in_packed_rows() -> None:
    model = make_model()
    routing, loss = watched(model)
    (first,), (second,) = rows((9, 6))
    packed = Collator(packing=True, padding_id=2)
    found = []
    for batches in (
        [padded([[first]]), padded([[second]])],
        [Collator(packing=False, padding_id=2, num_rows=4)([[first], [second]])],
        [packed([[first, second]])],
        [Collator(packing=True, padding_id=5, num_rows=3)([[first], [second]])],
    ):
        routing.shares.copy_(torch.arange(NUM_EXPERTS) / NUM_EXPERTS)
        found.append((gradients(model, routing, loss, batches), routing.shares.clone()))
    for grads, shares in found[1:]:
        assert_close(grads, found[0][0])
        assert torch.equal(shares, found[0][1])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_layers_count_once(mode: str) -> None:
    model, batch = make_model(), padded(rows())
    routing, loss = watched(model)
    wanted, shares = gradients(model, routing, loss, [batch]), routing.shares.clone()
    checkpoint_layers(find_layers(model), Checkpointing(mode))
    routing.shares.fill_(NUM_CHOSEN / NUM_EXPERTS)
    assert_close(gradients(model, routing, loss, [batch]), wanted)
    assert torch.equal(routing.shares, shares)


@pytest.mark.parametrize("mode", ["off", "full"])
def test_one_graph_serves_all_compiled_layers_and_counts_in_training_and_evaluation(mode: str) -> None:
    torch._dynamo.reset()
    batches = [padded(rows()), padded(rows((9, 24, 3)))]
    found = []
    for compiles in (False, True):
        model = make_model()
        model.set_experts_implementation("batched_mm")  # grouped products of transformers 5.17 do not compile on a CPU
        routing, loss = watched(model)
        checkpoint_layers(find_layers(model), Checkpointing(mode))
        counter = CompileCounterWithBackend("aot_eager")
        if compiles:
            compile_layers(find_layers(model), widths_vary=True)
            for layer in find_layers(model):
                layer.compile(backend=counter, dynamic=True, fullgraph=True)
        grads = gradients(model, routing, loss, batches)
        with torch.no_grad():
            for batch in batches:
                loss(model, batch)
        found.append((grads, routing.shares.clone(), routing.take_loads()))
    assert_close(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert found[1][2] == found[0][2]
    assert counter.frame_count <= 4, "of training, of a first layer without a gradient below it, and of evaluation"


def test_a_frozen_router_pulls_on_what_it_reads() -> None:
    grads = []
    for coefficient in (0.0, COEFFICIENT):
        model, batch = make_model(), padded(rows())
        routing, loss = watched(model, coefficient)
        for router in find_routers(model):
            router.module.requires_grad_(False)
        routing.shares.copy_(torch.arange(NUM_EXPERTS) / NUM_EXPERTS)
        grads.append(gradients(model, routing, loss, [batch]))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert "model.layers.0.mlp.gate.weight" not in grads[1]
    assert (grads[1][name] - grads[0][name]).abs().max() > 1e-4


def test_layers_that_nothing_trains_are_left_alone() -> None:
    model, batch = make_model(), padded(rows())
    routing, loss = watched(model)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert gradients(model, routing, loss, [batch]).keys() == {"lm_head.weight"}
    assert not routing.shares.any()


def test_an_evaluation_counts_its_own_tokens_and_training_none_of_them() -> None:
    model, batch = make_model(), padded(rows())
    routing, loss = watched(model, 0.0)
    shares = losses_of_layers(model, batch)[2]
    gradients(model, routing, loss, [batch])
    with torch.no_grad():
        for part in ([0], [1, 2, 3]):
            loss(model, padded([rows()[index] for index in part]))
        model(batch.input_ids)  # as generating does
    found = routing.take_loads()
    place = int(shares.argmax())
    assert found["busiest_expert_share"] == pytest.approx(shares.max().item(), abs=1e-6)
    assert (found["busiest_expert_layer"], found["busiest_expert"]) == divmod(place, NUM_EXPERTS)
    assert found["idlest_expert_share"] == pytest.approx(shares.min().item(), abs=1e-6)
    assert found["equal_expert_share"] == NUM_CHOSEN / NUM_EXPERTS
    with torch.no_grad():
        loss(model, batch)
    assert routing.take_loads() == found
    assert Routing().take_loads() == {}


def test_the_config_decides_unless_a_number_is_given() -> None:
    def found(config: Any, asked: float | None = None) -> tuple[float, int]:
        coefficient, notes = resolve_coefficient(asked, config, TASK.AUTO_MODEL, "m")
        return coefficient, len(notes)

    asks = transformers.Qwen3MoeConfig(output_router_logits=True, router_aux_loss_coef=0.02)
    assert found(asks) == (0.02, 1)
    assert found(asks, 0.0) == (0.0, 0)
    assert found(transformers.Qwen3MoeConfig()) == (0.0, 0)
    assert found(transformers.Qwen3MoeConfig(), 0.5) == (0.5, 0)
    assert found(transformers.JetMoeConfig(output_router_logits=True, aux_loss_coef=0.03)) == (0.03, 1)
    assert found(transformers.DeepseekV3Config(output_router_logits=True)) == (0.0, 0), "transformers adds none"
    assert found(transformers.DogeConfig(output_router_logits=True)) == (0.0, 1), "another formula"
    assert found(transformers.LlamaConfig()) == (0.0, 0)
    assert found(transformers.LlamaConfig(), 0.0) == (0.0, 0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.DeepseekV3Config(),
        transformers.Glm4MoeConfig(),
        transformers.DogeConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_without_such_a_router_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"^--router_aux_loss_coef: m is a \w+ model, which has no router .*leave it"):
        resolve_coefficient(0.1, config, TASK.AUTO_MODEL, "m")


FAMILIES: dict[str, tuple[Any, list[int]]] = {
    "llama": (transformers.LlamaConfig(**SMALL), []),
    "jetmoe, with two in a layer": (transformers.JetMoeConfig(**FEW_LAYERS, num_key_value_heads=2), [0, 0, 1, 1]),
    "minimax": (transformers.MiniMaxConfig(**SMALL, **EXPERTS, num_local_experts=4, head_dim=8), [0, 1]),
    "gpt_oss": (transformers.GptOssConfig(**SMALL, **EXPERTS, num_local_experts=4, head_dim=8), [0, 1]),
    "qwen2_moe, dense first": (
        transformers.Qwen2MoeConfig(
            **SMALL,
            **EXPERTS,
            num_experts=4,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
        ),
        [1],
    ),
    "llama4, which returns no choice": (
        transformers.Llama4TextConfig(**SMALL, num_local_experts=4, head_dim=8, interleave_moe_layer_step=1),
        [0, 1],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_found_in_the_layers_that_have_one_and_count_every_choice(family: str) -> None:
    config, layers = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    routers = find_routers(model)
    assert [router.layer for router in routers] == layers
    routing = Routing(routers)
    ids = torch.randint(3, VOCAB, (2, 10))
    batch = SimpleNamespace(text_ids=ids, row_lengths=torch.tensor([10, 7]), num_tokens=17)

    def logits_of(model: Any, batch: Any, loss_grad: float | None = None) -> torch.Tensor:
        return model(batch.text_ids, use_cache=False).logits.sum()

    loss = routing.watching(logits_of)
    with torch.no_grad():
        loss(model, batch)
    counts = [one.evaluated.sum().item() for one in routing._watched]
    assert counts == [17 * router.num_chosen for router in routers]


def test_a_mixture_without_a_layer_of_experts_has_no_loss_to_train() -> None:
    config = transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, num_experts=4, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[0, 1]
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigError, match=r"^--router_aux_loss_coef: transformers \S+ names no router in this Qwen3Moe"
    ):
        check_routers(model, 0.1, asked=0.1)
    (note,) = check_routers(model, 0.1, asked=None)
    assert note.endswith("cross-entropy alone is trained")
    assert not check_routers(model, 0.0, asked=0.0)
    assert not check_routers(make_model(), 0.1, asked=0.1)
