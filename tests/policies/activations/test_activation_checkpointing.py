"""Checkpointing changes what is kept between forward and backward, and nothing else."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.activations.checkpointing import (
    Checkpointing,
    checkpoint_layers,
    checkpointing_mode,
    draws_random_numbers,
    is_attention,
    with_default_mode,
)
from policies.adapters.lora_layers import use_lean_forward
from policies.loss.summed_loss import use_summed_loss
from policies.wrapping import find_layers
from tasks.causal_lm import CausalLM
from tests.helpers.small_configs import SMALL, VOCAB
from utils.errors import ConfigError

TASK = CausalLM()
MODES = ("off", "selective", "full")
MIXED = ("full in 1, else off", "full in 1, else selective")
CHOICES = {
    **{mode: Checkpointing(mode) for mode in MODES},
    **{text: Checkpointing(text.split()[-1], "full", 1) for text in MIXED},
}
MODELS = {
    "Llama": transformers.LlamaConfig(**SMALL),
    "with biases and dropout": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made while this lasts and are held still."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.storages[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return outputs

    def total(self) -> int:
        return sum(self.storages.values())


def make_model(mode: str, *, name: str = "Llama", lora: bool = False, backend: Any = "") -> torch.nn.Module:
    torch.manual_seed(0)
    model = causal_lm = AutoModelForCausalLM.from_config(MODELS[name])
    use_summed_loss(causal_lm, TASK.backbone(causal_lm), 1024, TASK.compute_logits)
    if lora:
        targets = ["q_proj", "v_proj"] if name == "Llama" else ["c_attn"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets))
        use_lean_forward(model)
    checkpoint_layers(find_layers(causal_lm), CHOICES[mode])
    if backend:
        for layer in causal_lm.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    return model.train()


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)  # of the dropout
    positions = torch.arange(ids.numel()).view(ids.shape)[:, :-1].flatten()
    return model(input_ids=ids, targets=ids[:, 1:].flatten(), target_positions=positions, use_cache=False)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_to_the_bit(name: str, lora: bool) -> None:
    wanted_loss, wanted = (
        loss_of(make_model("off", name=name, lora=lora)),
        gradients(make_model("off", name=name, lora=lora)),
    )
    for mode in [*MODES[1:], *MIXED]:
        model = make_model(mode, name=name, lora=lora)
        assert torch.equal(loss_of(model), wanted_loss)
        assert all(map(torch.equal, gradients(model), wanted)), mode


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_selective_keeps_less_than_off_and_more_than_full(lora: bool) -> None:
    held = {}
    for mode in CHOICES:
        model = make_model(mode, lora=lora)
        with HeldBytes() as counter:
            loss = loss_of(model)
            held[mode] = counter.total()
        loss.backward()
    assert held["full"] < 0.8 * held["selective"]
    # With LoRA there is less to drop: its layers keep no copy of their input (policies/adapters/lora_layers.py).
    assert held["selective"] < (0.65 if lora else 0.6) * held["off"]
    for mode in MIXED:  # one of two layers
        assert held[mode] == pytest.approx((held["full"] + held[mode.split()[-1]]) / 2, rel=0.05)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_selective_computes_less_again_than_full(lora: bool) -> None:
    flops = {}
    for mode in MODES:
        model = make_model(mode, lora=lora)
        with FlopCounterMode(display=False) as counter:
            loss_of(model).backward()
        flops[mode] = counter.get_total_flops()
    again = {mode: flops[mode] - flops["off"] for mode in MODES[1:]}
    assert 0.4 * again["full"] < again["selective"] < 0.6 * again["full"]


def test_the_first_layers_are_the_ones_that_are_other_than_the_rest_and_a_plan_may_try_others() -> None:
    model: Any = AutoModelForCausalLM.from_config(MODELS["Llama"])
    first, second = model.model.layers
    checkpoint_layers(find_layers(model), CHOICES["selective"])
    checkpoint_layers(find_layers(model), CHOICES["full in 1, else off"])
    assert "forward" in vars(first)
    assert "forward" not in vars(second)
    assert str(CHOICES["full in 1, else off"]) == "full in the first layer, off in the others"
    assert CHOICES["full in 1, else off"].modes == ("off", "full")


@pytest.mark.slow
def test_layers_of_two_modes_compile_into_two_graphs_with_the_same_gradients() -> None:
    wanted = gradients(make_model("off"))
    for mode, num_graphs in (("full", 1), ("full in 1, else off", 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = make_model(mode, backend=counter)
        for _ in range(2):
            model.zero_grad()
            found = gradients(model)
        assert counter.frame_count == num_graphs
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_selective_compiles_into_one_graph_with_the_same_gradients() -> None:
    torch._dynamo.reset()
    wanted = gradients(make_model("off"))
    found = gradients(make_model("selective", backend="aot_eager"))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_attention_that_drops_out_is_computed_again_with_the_random_numbers_around_it() -> None:
    query = torch.zeros(1, 1, 1, 8)
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"):
        op = getattr(torch.ops.aten, name).default
        assert is_attention(op)
        assert not draws_random_numbers(op, (query, query, query), {})
        assert draws_random_numbers(op, (query, query, query), {"dropout_p": 0.1})
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert draws_random_numbers(flash, (query, query, query, 0.1), {})
    assert not draws_random_numbers(flash, (query, query, query, 0.0), {})


def resolved_mode(model: Any, *flags: str, device: str = "cpu") -> tuple[Checkpointing, list[str]]:
    config = with_default_mode(parse_flags(["--model_name", "m", *flags]), device)
    quantized = config.quantization_config.quantization is not None
    return checkpointing_mode(model, config.train_config, config.fsdp_config, quantized=quantized)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("", "off"),
        ("--enable_fsdp", "off"),
        ("--enable_fsdp --fsdp_activation_checkpointing", "full"),
        ("--enable_fsdp --fsdp_activation_checkpointing False", "off"),
        ("--use_peft --quantization 4bit", "off"),
        ("--activation_offloading", "full"),
        ("--use_peft --quantization 4bit --fsdp_activation_checkpointing False", "off"),
        ("--use_peft --quantization 4bit --enable_fsdp --fsdp_activation_checkpointing False", "off"),
        ("--use_peft --quantization 4bit --activation_checkpointing selective", "selective"),
        ("--activation_checkpointing auto", "off"),
        ("--enable_fsdp --activation_checkpointing auto", "full"),
    ],
)
def test_unset_nothing_is_recomputed_on_a_cpu_and_what_is_given_holds(flags: str, mode: str) -> None:
    model = AutoModelForCausalLM.from_config(MODELS["Llama"])
    assert resolved_mode(model, *flags.split()) == (Checkpointing(mode), [])


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("", "auto"),
        ("--enable_fsdp", "auto"),
        ("--use_peft --quantization 4bit", "auto"),
        ("--activation_offloading", "full"),
        ("--activation_checkpointing selective", "selective"),
        ("--enable_fsdp --fsdp_activation_checkpointing False", None),
    ],
)
def test_unset_as_little_is_recomputed_on_a_gpu_as_its_memory_needs(flags: str, mode: str | None) -> None:
    config = with_default_mode(parse_flags(["--model_name", "m", *flags.split()]), "cuda")
    assert config.train_config.activation_checkpointing == mode


def test_a_model_that_names_no_layers_adapts_the_default_and_refuses_the_flag() -> None:
    model = AutoModelForCausalLM.from_config(
        transformers.CTRLConfig(vocab_size=VOCAB, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=128)
    )
    for flags in (["--enable_fsdp"], ["--activation_checkpointing", "auto"]):
        mode, notes = resolved_mode(model, *flags, device="cuda")
        assert mode == Checkpointing("off")
        assert notes == ["activation_checkpointing: off, CTRLLMHeadModel does not support it"]
    for flags in (["--activation_checkpointing", "selective"], ["--fsdp_activation_checkpointing"]):
        with pytest.raises(
            ConfigError, match=r"^--activation_checkpointing: CTRL.*; give --activation_checkpointing off"
        ):
            resolved_mode(model, "--enable_fsdp", *flags)
