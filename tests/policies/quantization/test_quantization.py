"""Quantized layers: the bytes and the arithmetic are bitsandbytes' own, and what cannot work is refused at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    JambaConfig,
    JetMoeConfig,
    Llama4TextConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from transformers.models.llama4.modeling_llama4 import Llama4Router

from benchmarks.families.published import read_published
from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.memory.row_lengths import rows_of_run
from planning.memory.run_memory import plan_memory
from planning.model.planned_model import PlannedModel, build_planned_model
from policies.mixed_precision import resolve_precision
from policies.quantization import choice as quantization_module
from policies.quantization.choice import gathering_changes_nothing, quantize_weights, resolve_quantization
from policies.quantization.packing import Quantization
from policies.quantization.quantized_linear import PACKED_ROWS, QuantizedLinear
from policies.sharding import choose_layout
from ranks.environment import Environment
from resolving.resolved import resolve
from tests.helpers.kept_by_compiled import compiled_layer
from tests.helpers.loaded import single_process
from tests.helpers.processes import ROOT, process_variables
from utils.compat import SHARDS_INTEGERS
from utils.device import facts_of
from utils.errors import ConfigError

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False)]
STORAGE = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]


def quantized(
    plain: nn.Linear, kind: tuple[str, bool], *, storage: torch.dtype = torch.uint8, compute: torch.dtype = FP32
) -> QuantizedLinear:
    quant_type, double = kind
    settings = Quantization(8 if quant_type == "int8" else 4, quant_type, double, compute, storage)
    linear = QuantizedLinear(plain, settings)
    linear.weight = nn.Parameter(linear.quantize(plain.weight.detach()), requires_grad=False)
    return linear


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40).map(lambda n: 8 * n),
    bias=st.booleans(),
    storage=st.sampled_from(STORAGE),
    seed=st.integers(0, 2**31),
)
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(
    kind: tuple[str, bool], rows: int, columns: int, bias: bool, storage: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = nn.Linear(columns, rows, bias=bias)
    linear = quantized(plain, kind, storage=storage)
    weight = linear.dequantize()
    assert weight.shape == plain.weight.shape
    if kind[0] == "int8":
        assert (weight - plain.weight).abs().max() < 0.01 * plain.weight.abs().max()
    else:  # half of the widest gap between two values of the type; double quantization rounds the scales, too
        step = 0.3 if kind[1] else 0.17
        errors, weights = (
            nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % 64)).view(-1, 64).abs().amax(1)
            for tensor in (weight - plain.weight, plain.weight)
        )
        assert bool((errors < step * weights).all()), "of each block of 64"
    inputs = torch.randn(3, 5, columns, requires_grad=True)
    wanted = nn.functional.linear(inputs, weight, plain.bias)
    found = linear(inputs)
    grad = torch.randn_like(wanted)
    (wanted_grad,) = torch.autograd.grad(wanted, inputs, grad)
    (found_grad,) = torch.autograd.grad(found, inputs, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_grad, wanted_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("quant_type", "double"), [kind for kind in KINDS if kind[0] != "int8"])
def test_the_bytes_are_those_of_bitsandbytes_own_layer(quant_type: str, double: bool, storage: torch.dtype) -> None:
    plain = nn.Linear(256, 96, bias=False)
    linear = quantized(plain, (quant_type, double), storage=storage, compute=BF16)
    own = bnb.nn.Linear4bit(256, 96, bias=False, compress_statistics=double, quant_type=quant_type)
    own.weight = bnb.nn.Params4bit(
        plain.weight.detach().to(BF16), requires_grad=False, compress_statistics=double, quant_type=quant_type
    )
    own = own.to("cpu")  # which quantizes
    assert torch.equal(linear.weight.view(torch.uint8).view(-1), own.weight.view(torch.uint8).view(-1))
    assert torch.equal(linear.absmax, own.weight.quant_state.absmax)
    assert linear.weight.dtype == storage
    assert linear.weight.untyped_storage().nbytes() == 96 * 256 // 2


def test_computing_in_another_dtype_than_the_inputs() -> None:
    linear = quantized(nn.Linear(64, 32), ("nf4", False), compute=BF16)
    outputs = linear(torch.randn(4, 64))
    assert outputs.dtype == FP32
    assert torch.equal(outputs, outputs.to(BF16).float())


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (("nf4", True), "aot_eager"),
        (("int8", False), "aot_eager"),
        pytest.param(("nf4", True), "inductor", marks=pytest.mark.full),
    ],
    ids=str,
)
@torch.compiler.config.patch(force_disable_caches=True)
def test_a_layer_compiles_without_graph_breaks(kind: tuple[str, bool], backend: str) -> None:
    linear = quantized(nn.Linear(64, 32), kind)
    inputs = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(inputs), linear(inputs))
    (found,) = torch.autograd.grad(compiled(inputs).sum(), inputs)
    (wanted,) = torch.autograd.grad(linear(inputs).sum(), inputs)
    torch.testing.assert_close(found, wanted)


class OperatorCalls(TorchDispatchMode):
    """The calls of our own operators and of bitsandbytes'."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("quantization", "bitsandbytes"):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [("nf4", True), ("int8", False)], ids=str)
def test_operators_return_what_is_traced(kind: tuple[str, bool]) -> None:
    """Shapes, strides and dtypes, which inductor's code relies on and asserts."""
    linear = quantized(nn.Linear(64, 32), kind)
    inputs = torch.randn(4, 64, requires_grad=True)
    with OperatorCalls() as seen:
        linear(inputs).sum().backward()
    own = {str(func) for func, *_ in seen.calls if func.namespace == "quantization"}
    assert own == {f"quantization.linear_{kind[0].replace('nf', '').replace('int', '')}bit.default"}
    for func, args, kwargs in seen.calls:
        torch.library.opcheck(func, args, kwargs, test_utils="test_faketensor")


@pytest.mark.parametrize("kind", [("nf4", True), ("int8", False)], ids=str)
def test_as_many_flops_are_counted_as_of_a_plain_layer(kind: tuple[str, bool]) -> None:
    plain = nn.Linear(64, 32, bias=False).requires_grad_(False)

    def count(linear: nn.Linear) -> int:
        with FlopCounterMode(display=False) as counter:
            linear(torch.randn(4, 3, 64, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    assert count(quantized(plain, kind)) == count(plain) == 2 * 2 * 4 * 3 * 64 * 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(2)])
        self.head = nn.Linear(64, 10)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_all_linear_layers_but_the_head_are_quantized() -> None:
    model = Model()
    note = quantize_weights(model, Quantization(4, "nf4", False, FP32, torch.uint8))
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds == {"layers.0.0": QuantizedLinear, "layers.1.0": QuantizedLinear, "head": nn.Linear}
    assert "nf4" in note
    norm = nn.LayerNorm(8)
    norm.get_output_embeddings = lambda: None
    with pytest.raises(ConfigError, match=r"--quantization: LayerNorm has no torch.nn.Linear"):
        quantize_weights(norm, Quantization(4, "nf4", False, FP32, torch.uint8))


def test_a_slower_unpacking_is_told_with_its_reason() -> None:
    reason = "Failed to find C compiler"
    note = quantize_weights(Model(), Quantization(4, "nf4", False, FP32, torch.uint8, slow_because=reason))
    assert note.endswith(f"the output head; our own kernel, which unpacks faster, fails: {reason}")


@pytest.mark.parametrize("bias", [False, True])
def test_a_familys_own_linear_layers_count_if_they_compute_a_product_alone(bias: bool) -> None:
    """Falcon's layers do; Llama 4's router chooses experts with its product."""
    with torch.device("meta"):
        falcon = FalconForCausalLM(
            FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, bias=bias)
        )
        router = Llama4Router(Llama4TextConfig(hidden_size=64, num_local_experts=4))
    note = quantize_weights(falcon, Quantization(4, "nf4", False, FP32, torch.uint8))
    quantized = [name for name, module in falcon.named_modules() if isinstance(module, QuantizedLinear)]
    names = ["self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    assert quantized == [f"transformer.h.{layer}.{name}" for layer in range(2) for name in names]
    assert note.endswith("all linear layers but the output head")
    router.get_output_embeddings = lambda: None
    with pytest.raises(ConfigError, match=r"--quantization: Llama4Router has no torch.nn.Linear"):
        quantize_weights(router, Quantization(4, "nf4", False, FP32, torch.uint8))


def test_a_model_with_mamba_layers_is_planned_without_those_whose_weights_they_read(tmp_path: Path) -> None:
    """The layer multiplies with dt_proj's weight itself, and packed weights have another shape and dtype."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    JambaConfig(
        **sizes, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, vocab_size=64
    ).save_pretrained(tmp_path)
    flags = "--random_weights --use_peft --quantization 4bit --context_length 16 --batching_strategy padding"
    config, card = parse_flags(["--model_name", str(tmp_path), *flags.split()]), parse_hardware("H200")
    env = planned_environment(card, config.train_config)
    planned = build_planned_model(resolve(config, env), env)
    (note,) = planned.adapted.notes
    assert note.endswith("all linear layers but the output head and dt_proj and out_proj and x_proj")
    assert plan_memory(planned, card.card, rows_of_run(planned.resolved)).phases["backward"].activations


def planned_qlora(model_config: PreTrainedConfig, tmp_path: Path, target_modules: str, *given: str) -> PlannedModel:
    """The planned model of a run on one H200."""
    model_config.save_pretrained(tmp_path)
    flags = "--random_weights --use_peft --quantization 4bit --context_length 64 --target_modules"
    config = parse_flags(["--model_name", str(tmp_path), *flags.split(), target_modules, *given])
    env = planned_environment(parse_hardware("H200"), config.train_config)
    return build_planned_model(resolve(config, env), env)


@pytest.mark.parametrize("given", [("--compile", "False"), ("--compile", "--activation_checkpointing", "off")])
def test_packed_experts_are_said_and_planned_with_the_weights_that_a_product_unpacks(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=8, vocab_size=512)
    planned = planned_qlora(config, tmp_path, "q_proj,v_proj", *given)
    (note,) = planned.adapted.notes
    assert note.endswith("all linear layers and experts but the output head")
    phases = plan_memory(planned, parse_hardware("H200").card, rows_of_run(planned.resolved)).phases
    num_experts, others = 2 * 8 * 3 * 256 * 512, 2 * 512 * 256 * 2 + 2 * 3 * 256 * 256
    assert num_experts * 4.5 / 8 < phases["load"].params * 2**30 < num_experts * 4.5 / 8 + others * 2
    largest = 8 * 2 * 512 * 256 * 2  # bytes of the first weight of a layer in bf16
    for phase in ("load", "forward", "backward"):
        assert largest <= phases[phase].temporaries * 2**30 < 2 * largest, phase


def test_experts_that_stay_in_16_bits_are_said(tmp_path: Path) -> None:
    """JetMoE's, whose products transformers does not let others compute."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_key_value_heads": 4}
    config = JetMoeConfig(**sizes, kv_channels=64, num_local_experts=8, vocab_size=512)
    planned = planned_qlora(config, tmp_path, "all-linear")
    (note,) = planned.adapted.notes
    num_experts = 2 * 8 * (3 * 256 * 512 + 2 * 256 * 256)  # its attention has some, too
    assert note.endswith(
        f"all linear layers but the output head and experts that are one tensor ({num_experts / 1e6:.1f} million "
        "weights in bf16)"
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8] * SHARDS_INTEGERS + [FP32])
def test_a_bit_that_changes_on_the_way_to_the_gathered_weight_is_found(
    storage: torch.dtype, damage: bool, nested: bool
) -> None:
    with single_process():
        model = Model()
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        whole = {name: module.weight.detach() for name, module in linears.items()}
        quantize_weights(model, Quantization(4, "nf4", False, FP32, storage))
        mesh = init_device_mesh("cpu", (1,))  # else it takes a GPU, if there is one
        for layer in model.layers:
            if nested:
                fully_shard(layer[0], mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model._apply(lambda tensor: torch.empty_like(tensor, device=CPU) if tensor.is_meta else tensor)

        def fill() -> None:
            with gathering_changes_nothing(model), torch.no_grad():
                for name, linear in model.named_modules():
                    if isinstance(linear, QuantizedLinear):
                        assert isinstance(linear.weight, DTensor)
                        local = linear.weight.to_local()
                        local.copy_(linear.quantize(whole[name]))
                        if damage and name == "layers.1.0":
                            local.view(torch.uint8).flatten()[100] ^= 4

        if damage:
            with pytest.raises(ConfigError, match="--quantization: gathering changed 1 of 2048 bytes"):
                fill()
        else:
            fill()


def resolved(*flags: str, kind: str = "4bit", world_size: int = 1) -> Quantization | None:
    config = parse_flags(["--model_name", "m", "--use_peft", "--quantization", kind, *flags])
    env = Environment(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, launched=world_size > 1)
    precision, _ = resolve_precision(config.train_config, config.fsdp_config, facts_of(CPU))
    return resolve_quantization(
        config.quantization_config,
        precision,
        choose_layout(config.train_config, config.fsdp_config, precision, env),
        CPU,
    )


def test_the_flags_mean_this() -> None:
    assert resolved() == Quantization(4, "nf4", False, FP32, torch.uint8)
    assert resolved("--quant_type", "fp4", "--use_double_quant") == Quantization(4, "fp4", True, FP32, torch.uint8)
    assert resolved("--pure_bf16") == Quantization(4, "nf4", False, BF16, torch.uint8)
    assert resolved("--compute_dtype", "bf16") == Quantization(4, "nf4", False, BF16, torch.uint8)
    assert resolved("--quant_storage", "bf16") == Quantization(4, "nf4", False, FP32, BF16)
    assert resolved(kind="8bit") == Quantization(8, "int8", False, FP32, torch.uint8)


def test_where_torch_shards_no_integers_bytes_are_stored_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_module, "SHARDS_INTEGERS", False)
    sharded = ("--enable_fsdp",)
    assert resolved(*sharded, world_size=2) == Quantization(4, "nf4", False, FP32, FP32)
    assert resolved(*sharded, "--quant_storage", "bf16", world_size=2) == Quantization(4, "nf4", False, FP32, BF16)
    assert resolved(world_size=2) == Quantization(4, "nf4", False, FP32, torch.uint8)  # replicated
    with pytest.raises(ConfigError, match=r"--quant_storage: torch .* does not shard uint8, 2.12 and later do"):
        resolved(*sharded, "--quant_storage", "uint8", world_size=2)


def test_without_bitsandbytes_or_a_device_for_it_quantization_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel for this\ndevice")

    with monkeypatch.context() as patch:
        patch.setattr(bnb.functional, "quantize_4bit", fail)
        with pytest.raises(ConfigError, match=r"--quantization: .* \(no kernel for this device\); leave it out"):
            resolved()
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"--quantization: needs bitsandbytes .*pip install 'bitsandbytes"):
        resolved()


def test_weights_that_do_not_fill_whole_elements_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--quantization: 3 x 5 weights .* torch\.uint8; give --quantization 8bit"):
        QuantizedLinear(nn.Linear(5, 3), Quantization(4, "nf4", False, FP32, torch.uint8))


@pytest.mark.slow
def test_bitsandbytes_is_imported_without_inductor_and_torch_compile_still_compiles() -> None:
    code = (
        "import os, sys, torch\n"
        "from utils.compat import import_bitsandbytes_without_inductor\n"
        "import_bitsandbytes_without_inductor()\n"
        "import peft\n"
        "loaded = {'bitsandbytes', 'torch._inductor.compile_fx'} & set(sys.modules)\n"
        "torch.compile(torch.sin, backend='eager')(torch.ones(2))\n"
        "print(loaded, 'TORCHDYNAMO_DISABLE' in os.environ, torch._dynamo.utils.counters['frames']['ok'])\n"
    )
    given = {"cwd": ROOT, "env": process_variables({}), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], check=True, **given)
    assert done.stdout == "{'bitsandbytes'} False 1\n"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("compute", [FP32, BF16])
def test_own_unpacking_gives_the_bits_of_bitsandbytes(double: bool, compute: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    linear = quantized(nn.Linear(320, 200, bias=False, device=device), ("nf4", double), compute=compute)
    expected = linear.dequantize()
    linear.quantization = replace(linear.quantization, own_unpacking=True)
    assert torch.equal(linear.dequantize(), expected)


def test_compiled_and_unpacked_by_our_own_kernel_the_weight_is_not_kept_unpacked() -> None:
    torch.manual_seed(0)
    linear = quantized(nn.Linear(64, 96, bias=False), ("nf4", False))
    inputs = torch.randn(PACKED_ROWS + 1, 64, requires_grad=True)  # so many rows that forward unpacks, too
    probe = torch.randn(PACKED_ROWS + 1, 96)
    (expected,) = torch.autograd.grad(linear(inputs), inputs, probe)
    linear.quantization = replace(linear.quantization, own_unpacking=True)
    compiled, returned = compiled_layer(linear)
    outputs = compiled(inputs)
    torch.testing.assert_close(torch.autograd.grad(outputs, inputs, probe)[0], expected)
    assert all(tensor.numel() < 64 * 96 for tensor in returned[1:])


def test_layers_that_share_a_weight_are_refused_and_routers_that_multiply_theirs_are_left_out() -> None:
    models, settings = read_published(), Quantization(4, "nf4", False, FP32, torch.uint8)
    with torch.device("meta"):
        zamba, longcat = (
            AutoModelForCausalLM.from_config(models[name].tiny_config(64)) for name in ("zamba2", "longcat_flash")
        )
    with pytest.raises(ConfigError, match=r"--quantization: in Zamba2ForCausalLM several layers share a weight \("):
        quantize_weights(zamba, settings)
    assert "all linear layers but the output head and classifier" in quantize_weights(longcat, settings)
    assert type(longcat.model.layers[0].mlp.router.classifier) is torch.nn.Linear
    assert isinstance(longcat.model.layers[0].mlps[0].up_proj, QuantizedLinear)
