"""Layers in tiles have the losses and gradients of whole ones, whatever recomputes, adapts, compiles or counts them."""

from __future__ import annotations

import gc
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.families.published import read_published
from data.batches.counts import BatchCounts
from planning.memory.live_bytes import LiveBytes
from policies.activations.checkpointing import MODES, Checkpointing, checkpoint_layers
from policies.adapters.lora_layers import use_lean_forward
from policies.compilation.layers import compile_layers
from policies.loss.summed_loss import use_summed_loss
from policies.quantization.choice import quantize_weights
from policies.quantization.packing import Quantization
from policies.routing.expert_loads import Routing
from policies.routing.routers import find_routers
from policies.tiling.finding import find_token_parts, why_not_tiled
from policies.tiling.tiles import Tiles, tile_parts, tiled_parts
from policies.wrapping import find_layers
from tasks.causal_lm import CausalLM
from tests.helpers.aot_eager import compile_by
from tests.helpers.causal_models import make_batch
from tests.helpers.families import FAMILIES
from tests.helpers.mixtures import mixture
from tests.helpers.seq2seq_models import make_model as make_seq2seq
from utils.errors import RunError

TASK = CausalLM()
TILE = 16  # of batches of 6 rows, up to 23 tokens wide: several tiles, and a shorter last one


def tiled(model: Any, tokens: int, mode: str = "full") -> Any:
    """The model, in tiles of so many tokens; 0: as it is."""
    layers = find_layers(model)
    checkpoint_layers(layers, Checkpointing(mode, tile_tokens=tokens))
    assert all(bool(tiled_parts(layer)) == bool(tokens) for layer in layers)
    return model


def make(family: str, tokens: int, mode: str = "full") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family].config, attn_implementation="eager")
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    return tiled(model.train(), tokens, mode)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of each gradient's largest number, in fp32."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "gpt_oss"])
def test_the_loss_is_that_of_whole_layers_to_the_bit_and_gradients_are_to_1e_6(family: str, mode: str) -> None:
    losses, found = [], []
    for tokens in (0, TILE):
        model = make(family, tokens, mode)
        loss = TASK.summed_loss(model, make_batch())
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(model))
    assert losses[1] == losses[0]
    assert_close(found[1], found[0])


def test_tokens_with_several_streams_of_hidden_states_too() -> None:
    """DeepSeek-V4's layers hold [batch, seq, streams, hidden]. Its hyper-connections amplify roundings."""
    losses, found = [], []
    for tokens in (0, TILE):
        torch.manual_seed(0)
        config = read_published()["deepseek_v4"].tiny_config(97)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
        loss = TASK.summed_loss(tiled(model.train(), tokens), make_batch())
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(model))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert found[1].keys() == found[0].keys()
    largest = max(float(gradient.abs().max()) for gradient in found[0].values())
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-8 * largest, name


@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_decoder_too(mode: str) -> None:
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    losses, found = [], []
    for tokens in (0, TILE):
        model = tiled(make_seq2seq("flan-t5").train(), tokens, mode)
        loss = model(input_ids=ids, labels=ids[:, :25].contiguous(), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(model))
    assert losses[1] == losses[0]
    assert_close(found[1], found[0])


def with_lora(model: Any, dropout: float) -> Any:
    targets = ["q_proj", "gate_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=targets))
    use_lean_forward(adapted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def test_dropout_of_adapters_draws_the_same_masks_again() -> None:
    """Beside a loop over tiles whose graphs autograd keeps."""
    mlp = with_lora(make("llama", 0, "off"), 0.3).base_model.model.model.layers[0].mlp
    hidden = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))
    trained = [p for p in mlp.parameters() if p.requires_grad]

    def run(compute: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(7)
        leaf = hidden.clone().requires_grad_()
        output = compute(leaf)
        after = torch.rand(())  # what follows draws the same, too
        torch.rand(100)
        return output, after, *torch.autograd.grad(output.square().sum(), [leaf, *trained])

    def by_tiles(leaf: torch.Tensor) -> torch.Tensor:
        tiles = leaf.view(1, 48, 32).split(TILE, dim=1)
        return torch.cat([mlp(tile) for tile in tiles], dim=1).view(leaf.shape)

    wanted = run(by_tiles)
    tile_parts([mlp], Tiles(TILE))
    found = run(mlp)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    for one, other in zip(found[2:], wanted[2:], strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_a_quantized_base_with_adapters_has_the_same_loss_and_gradients() -> None:
    losses, found = [], []
    for tokens in (0, TILE):
        model = make("llama", 0, "off")
        quantization = Quantization(4, "nf4", False, torch.float32, torch.uint8)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        quantize_weights(model, quantization)
        for name, module in model.named_modules():
            if hasattr(module, "quantize"):
                module.weight = torch.nn.Parameter(module.quantize(weights[f"{name}.weight"]), requires_grad=False)
        torch.manual_seed(1)
        adapted = with_lora(model, 0.0)
        tiled(model, tokens)
        loss = TASK.summed_loss(adapted, make_batch())
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(adapted))
    assert losses[1] == losses[0]
    assert_close(found[1], found[0])


def test_what_the_layers_of_a_frozen_start_need_no_gradient_for_is_computed_all_the_same() -> None:
    losses = []
    for tokens in (0, TILE):
        model = make("llama", tokens)
        for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].self_attn.parameters()]:
            parameter.requires_grad_(False)
        TASK.summed_loss(model, make_batch()).backward()
        losses.append(gradients(model))
    assert_close(losses[1], losses[0])


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **kwargs: None)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_routers_count_each_token_once_and_their_loss_has_the_same_gradients(name: str, compiled: bool) -> None:
    found, shares, loads = [], [], []
    for tokens in (0, TILE):
        model = mixture(name, vocab_size=97)
        use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
        routers = find_routers(model)
        tiled(model.train(), tokens)
        if compiled and tokens:
            compile_with(model, "aot_eager")
        routing, batch = Routing(routers, coefficient=0.5), make_batch()
        loss = routing.watching(TASK.summed_loss)
        num_labels = batch.num_label_tokens
        with routing.step(BatchCounts(num_labels, batch.num_tokens, 0, num_loss_terms=num_labels)):
            loss(model, batch, 1.0).backward()
        with torch.no_grad():
            loss(model, batch)
        found.append(gradients(model))
        shares.append(routing.shares)
        loads.append(routing.take_loads())
    assert_close(found[1], found[0])
    assert torch.equal(shares[1], shares[0])
    assert loads[1] == loads[0]


def compile_with(model: Any, backend: Any) -> None:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_by(backend))
        compile_layers(find_layers(model), widths_vary=True)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_one_graph_serves_the_tiles_of_all_layers_and_of_later_batches(mode: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    plain, model = make("llama", 0, "off"), make("llama", TILE, mode)
    compile_with(model, counter)
    counts = []
    for seed in range(3):  # of several widths
        loss, wanted = (TASK.summed_loss(one, make_batch(seed)) for one in (model, plain))
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        loss.backward()
        wanted.backward()
        counts.append(counter.frame_count)
    assert_close(gradients(model), gradients(plain))
    assert counts[1:] == counts[:1] * 2
    assert counts[0] <= 4  # the first layer's start, another's, a tile, and what follows tiles


def test_a_recomputed_layer_computes_its_tiles_twice_and_not_three_times() -> None:
    flops = {}
    for tokens in (0, TILE):
        model, counter = make("llama", tokens), FlopCounterMode(display=False)
        with counter:
            TASK.summed_loss(model, make_batch()).backward()
        flops[tokens] = counter.get_total_flops()
    batch = make_batch()
    # Untiled recomputation stops before the last product.
    last = 2 * 2 * batch.input_ids.numel() * 32 * FAMILIES["llama"].config.intermediate_size
    assert flops[TILE] - flops[0] == last


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_were_tried_in_tiles_compute_no_more_than_before(mode: str) -> None:
    """As a plan does that finds no use for tiles: selective checkpointing was of the attention alone in them."""
    flops = []
    for tried in (False, True):
        model, counter = (
            make("llama", TILE, "selective") if tried else make("llama", 0, mode),
            FlopCounterMode(display=False),
        )
        tiled(model, 0, mode)
        with counter:
            TASK.summed_loss(model, make_batch()).backward()
        flops.append(counter.get_total_flops())
    assert flops[1] == flops[0]


def test_what_a_tile_held_is_given_back_with_it_and_not_when_python_collects_garbage() -> None:
    peaks, gc_was_enabled = [], gc.isenabled()
    gc.disable()
    try:
        for tokens in (0, TILE):
            layer = make("llama", tokens, "off").model.layers[0]
            states = [torch.randn(1, 20 * TILE, 32, requires_grad=True)]
            live = LiveBytes([*states, *layer.parameters()])
            with live:
                for part in (layer.input_layernorm, layer.mlp):
                    states.append(part(states[-1]))
                kept = live.live
                states[-1].sum().backward()
            peaks.append((kept, live.window.peak))
    finally:
        if gc_was_enabled:
            gc.enable()
    of_states = states[0].nbytes
    assert peaks[1][0] == 2 * of_states, "the outputs of both, which are the input of the second"
    assert peaks[1][1] < peaks[0][0], "all of it"
    # Beside outputs and their gradients there are one tile's inner values, and the weights' gradients.
    of_tile = peaks[0][0] // 20
    assert peaks[1][1] < 5 * of_states + 2 * of_tile + 2 * sum(p.nbytes for p in layer.mlp.parameters())


@pytest.mark.parametrize(("family", "has_heads_first"), [("qwen3", False), ("gemma3", True)])
def test_norms_of_queries_keep_no_copies_in_fp32(family: str, has_heads_first: bool) -> None:
    attention, tokens = make(family, TILE, "off").bfloat16().model.layers[0].self_attn, 20 * TILE
    queries = torch.randn(2, tokens, 4, attention.head_dim, dtype=torch.bfloat16)
    if has_heads_first:
        queries = queries.transpose(1, 2)
    results, kept = [], []
    for num_tokens in (0, TILE):
        attention.q_norm.tiles.tokens = num_tokens
        inputs = queries.detach().requires_grad_()
        live = LiveBytes([inputs, *attention.parameters()])
        with live:
            outputs = attention.q_norm(inputs)
            kept.append(live.live - outputs.nbytes)
        outputs.square().sum().backward()
        results.append((outputs, inputs.grad))
    assert kept[1] == 0 < queries.nbytes <= kept[0]
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("num_tokens", "most", "sizes"),
    [
        (8000, 1000, [896] * 8 + [832]),  # multiples of 16 as even as can be, of at most 1000
        (1000, 1000, [1000]),  # one tile runs as it is
        (33, 17, [16, 16, 1]),
        (5, 2, [2, 2, 1]),
    ],
)
def test_tiles_have_a_multiple_of_16_tokens_as_products_in_float8_need(
    num_tokens: int, most: int, sizes: list[int]
) -> None:
    found: list[int] = []
    module = torch.nn.Linear(4, 4)
    module.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].shape[1]))
    outer = torch.nn.Sequential(module)
    tile_parts([outer], Tiles(most))
    with torch.no_grad():
        outer(torch.zeros(1, num_tokens, 4))
    assert found == sizes


class Summing(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        outputs = super().forward(hidden)
        return outputs, outputs.sum()


@pytest.mark.parametrize("trains", [True, False])
def test_outputs_that_are_not_of_single_tokens_end_the_run_with_one_line(trains: bool) -> None:
    module = Summing(4, 4)
    tile_parts([module], Tiles(16))
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(RunError, match=r"^--tile_tokens: for 16 .* shape \[\]"),
    ):
        module(torch.zeros(2, 16, 4))


def test_layers_that_multiply_by_the_weights_of_their_mlp_themselves_are_not_tiled() -> None:
    layers = find_layers(AutoModelForCausalLM.from_config(FAMILIES["opt"].config))
    assert str(why_not_tiled(layers, [])).startswith("its layers have no MLP in a module of its own")


def test_units_inside_an_mlp_are_refused_and_whole_ones_are_not() -> None:
    layers = find_layers(make("llama", 0))
    parts = find_token_parts(layers)
    assert why_not_tiled(layers, [*layers, *parts]) is None
    assert str(why_not_tiled(layers, [parts[0].down_proj])).startswith("--wrap Linear would gather weights anew")
