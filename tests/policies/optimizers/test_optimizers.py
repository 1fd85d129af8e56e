"""The optimizers besides torch's own: the numbers they must give, the states they keep, and going on from these."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import Optimizer

from configs.flags import parse_flags
from configs.fsdp import FsdpConfig
from configs.optimizers import OPTIMIZERS as LISTED
from configs.training import TrainConfig
from policies.optimizers import anyprecision
from policies.optimizers.adafactor import Adafactor
from policies.optimizers.adamw8bit import AdamW8bit
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.build import build_optimizer, optimizer_notes, state_bytes
from policies.optimizers.schedule import build_scheduler
from ranks.environment import read_environment
from reporting.memory_ledger import local_bytes, optimizer_tensors
from resolving.preflight import check_environment
from tests.helpers.processes import ROOT
from utils.errors import ConfigError
from utils.optional_packages import import_bitsandbytes

PAGE = ROOT / "docs/optimizers.md"
FP32, BF16, UINT8 = torch.float32, torch.bfloat16, torch.uint8
OPTIMIZERS = {
    "AdamW": [],
    "SGD": ["--optimizer", "SGD"],
    "anyprecision": ["--optimizer", "anyprecision"],
    "anyprecision, Kahan": ["--optimizer", "anyprecision", "--use_kahan_summation"],
    "anyprecision, fp32": ["--optimizer", "anyprecision", "--momentum_dtype", "fp32", "--variance_dtype", "fp32"],
    "AdamW8bit": ["--optimizer", "AdamW8bit"],
    "Adafactor": ["--optimizer", "Adafactor"],
    "Muon": ["--optimizer", "Muon"],
}
SHAPES = [(6, 7), (1, 9), (5,), (3, 4, 6), (16, 256), (1, 4096), (4, 2, 512)]


def parameters(dtype: torch.dtype = FP32, shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes)


def sections(*flags: str, lr: float = 0.02) -> tuple[TrainConfig, FsdpConfig]:
    config = parse_flags(["--model_name", "m", "--lr", str(lr), *flags])
    return config.train_config, config.fsdp_config


def notes(model: nn.Module, *flags: str, lr: float = 0.02) -> list[str]:
    return optimizer_notes(model, lr, sections(*flags)[1])


def train(model: nn.Module, optimizer: Optimizer, num_steps: int, seed: int = 1) -> None:
    """Random gradients at a falling rate; now and then a parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * 0.9**step
        for index, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient if (index + step) % 9 else None
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


RANDOMLY = {
    "seed": st.integers(0, 10**6),
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "shapes": st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
}


@given(**RANDOMLY, piece=st.sampled_from([1, 7, 2**23]), kahan=st.booleans())
@settings(max_examples=40, deadline=None)
def test_anyprecision_in_fp32_is_adamw(
    seed: int, weight_decay: float, shapes: list[tuple[int, ...]], piece: int, kahan: bool
) -> None:
    ours, theirs = parameters(shapes=shapes, seed=seed), parameters(shapes=shapes, seed=seed)
    dtypes = {"momentum_dtype": FP32, "variance_dtype": FP32, "use_kahan_summation": kahan}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(anyprecision.SLICE_SIZES, "cpu", piece)
        train(ours, AnyPrecisionAdamW(ours, lr=0.1, weight_decay=weight_decay, **dtypes), 12, seed)
    train(theirs, torch.optim.AdamW(theirs, lr=0.1, weight_decay=weight_decay), 12, seed)
    assert largest_difference(ours, theirs) < 1e-5


@given(**RANDOMLY)
@settings(max_examples=40, deadline=None)
def test_adafactor_is_torchs(seed: int, weight_decay: float, shapes: list[tuple[int, ...]]) -> None:
    ours, theirs = parameters(shapes=shapes, seed=seed), parameters(shapes=shapes, seed=seed)
    train(ours, Adafactor(ours, lr=0.1, weight_decay=weight_decay), 12, seed)
    train(theirs, torch.optim.Adafactor(theirs, lr=0.1, weight_decay=weight_decay), 12, seed)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_8bit_is_bitsandbytes_own(weight_decay: float, dtype: torch.dtype) -> None:
    bitsandbytes = import_bitsandbytes("--optimizer")
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = AdamW8bit(ours, lr=0.1, weight_decay=weight_decay)
    other = bitsandbytes.optim.AdamW8bit(theirs, lr=0.1, weight_decay=weight_decay)
    train(ours, optimizer, 12)
    train(theirs, other, 12)
    assert largest_difference(ours, theirs) == 0
    for parameter, theirs_parameter in zip(ours, theirs, strict=True):
        found, wanted = optimizer.state[parameter], other.state[theirs_parameter]
        for key in ("state1", "state2"):
            assert torch.equal(found[key], wanted[key])
        if "absmax1" in wanted:
            assert torch.equal(found["absmax1"].flatten(), wanted["absmax1"])


@pytest.mark.parametrize("seed", range(3))
def test_with_kahan_summation_bf16_weights_follow_fp32_ones(seed: int) -> None:
    """At a rate whose updates are below bf16's resolution, as in fine-tuning."""

    def after_training(dtype: torch.dtype, flags: list[str]) -> torch.Tensor:
        model = nn.ParameterList([nn.Parameter(start.to(dtype, copy=True))])
        optimizer = build_optimizer(model, *sections(*flags, lr=1e-4))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            drift = torch.randn(start.shape, generator=generator) + 0.5  # most moves are the same way
            model[0].grad = drift.to(dtype)
            optimizer.step()
        return model[0].detach().float()

    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    wanted = after_training(FP32, []) - start
    plain = (after_training(BF16, []) - start - wanted).norm() / wanted.norm()
    kahan = (after_training(BF16, OPTIMIZERS["anyprecision, Kahan"]) - start - wanted).norm() / wanted.norm()
    assert plain > 0.5, "plain bf16 should lose most of such updates"
    assert kahan < plain / 4


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_take_the_bytes_that_were_foreseen(name: str, dtype: torch.dtype) -> None:
    model = parameters(dtype)
    optimizer = build_optimizer(model, *sections(*OPTIMIZERS[name]))
    train(model, optimizer, 2)
    steps = 4 * len(SHAPES) if name == "AdamW" else 0  # torch's own keeps them as tensors
    held = local_bytes(optimizer_tensors(optimizer))["cpu"] - steps
    assert held == sum(state_bytes(parameter, *sections(*OPTIMIZERS[name])) for parameter in model)


def documented_bytes() -> list[tuple[str, float, float]]:
    """Flags, bytes with fp32 weights and with bf16 weights."""
    rows = re.findall(r"^\| `(--optimizer .*)` \|.*\| ([0-9.]+) \| ([0-9.]+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return [(flags, float(fp32), float(bf16)) for flags, fp32, bf16 in rows]


@pytest.mark.parametrize(("flags", "fp32", "bf16"), documented_bytes())
def test_the_documented_bytes_are_those_of_the_states(flags: str, fp32: float, bf16: float) -> None:
    for dtype, wanted in ((FP32, fp32), (BF16, bf16)):
        weight = torch.empty(512, 4096, dtype=dtype, device="meta")
        assert state_bytes(weight, *sections(*flags.split())) / weight.numel() == pytest.approx(wanted, abs=0.005)


def test_every_optimizer_is_documented() -> None:
    assert {flags.split()[1] for flags, *_ in documented_bytes()} == {*LISTED}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_states_have_the_promised_dtypes(dtype: torch.dtype) -> None:
    def dtypes(*flags: str, shape: int = 4) -> dict[str, Any]:
        model = parameters(dtype)
        optimizer = build_optimizer(model, *sections(*flags))
        train(model, optimizer, 2)
        return {key: getattr(value, "dtype", type(value)) for key, value in optimizer.state[model[shape]].items()}

    averages = {"step": int, "exp_avg": BF16, "exp_avg_sq": BF16}
    assert dtypes(*OPTIMIZERS["anyprecision"]) == averages
    assert dtypes(*OPTIMIZERS["anyprecision, Kahan"]) == averages | {"compensation": BF16}
    assert dtypes(*OPTIMIZERS["anyprecision, fp32"]) == averages | {"exp_avg": FP32, "exp_avg_sq": FP32}
    assert dtypes("--optimizer", "anyprecision", "--variance_dtype", "fp32") == averages | {"exp_avg_sq": FP32}
    scales = {"absmax1": FP32, "absmax2": FP32}
    assert dtypes(*OPTIMIZERS["AdamW8bit"]) == {"step": int, "state1": UINT8, "state2": UINT8, **scales}
    assert dtypes(*OPTIMIZERS["AdamW8bit"], shape=0) == {"step": int, "state1": FP32, "state2": FP32}
    assert dtypes(*OPTIMIZERS["Adafactor"]) == {"step": int, "row_var": FP32, "col_var": FP32}
    assert dtypes(*OPTIMIZERS["Adafactor"], shape=2) == {"step": int, "variance": FP32}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_state_dict_as_if_never_interrupted(name: str, dtype: torch.dtype) -> None:
    flags = [*OPTIMIZERS[name], "--weight_decay", "0.1", "--decay_norms_and_biases", "False"]
    model, resumed = parameters(dtype), parameters(dtype, seed=3)
    optimizer, other = build_optimizer(model, *sections(*flags)), build_optimizer(resumed, *sections(*flags))
    train(model, optimizer, 5)
    train(resumed, other, 2, seed=7)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(model.state_dict())
    train(model, optimizer, 5, seed=2)
    train(resumed, other, 5, seed=2)
    assert largest_difference(model, resumed) == 0
    for parameter, theirs in zip(model, resumed, strict=True):
        for key, value in optimizer.state[parameter].items():
            found = other.state[theirs][key]
            assert type(found) is type(value)
            assert not isinstance(value, torch.Tensor) or (found.dtype == value.dtype and torch.equal(found, value))


def test_anyprecision_takes_up_states_of_other_dtypes() -> None:
    model = parameters()
    optimizer = build_optimizer(model, *sections(*OPTIMIZERS["anyprecision"]))
    train(model, optimizer, 5)
    for name in ("anyprecision, Kahan", "anyprecision, fp32"):
        other = build_optimizer(model, *sections(*OPTIMIZERS[name]))
        other.load_state_dict(optimizer.state_dict())
        train(model, other, 2)
        fresh = build_optimizer(model, *sections(*OPTIMIZERS[name]))
        train(model, fresh, 2)
        for parameter in model:
            kinds = {key: getattr(value, "dtype", None) for key, value in fresh.state[parameter].items()}
            assert {key: getattr(value, "dtype", None) for key, value in other.state[parameter].items()} == kinds


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)), torch.randn(64, 16)
    optimizer, wanted = build_optimizer(model, *sections(*OPTIMIZERS[name])), inputs.flip(1)
    losses = []
    for _ in range(60):
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


def test_norms_and_biases_decay_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    (whole,) = build_optimizer(model, *sections("--weight_decay", "0.1")).param_groups
    assert len(whole["params"]) == 5
    assert whole["weight_decay"] == 0.1
    train_config, fsdp_config = sections(
        "--weight_decay", "0.1", "--decay_norms_and_biases", "False", "--scheduler", "linear"
    )
    optimizer = build_optimizer(model, train_config, fsdp_config)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1, 0, 0, 0, 0.1]
    scheduler = build_scheduler(optimizer, train_config, steps_per_epoch=4, num_steps=4)
    for step in range(4):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 * (1 - step / 4)] * 2)
        optimizer.step()
        scheduler.step()


def test_without_gradients_only_what_decays_changes() -> None:
    for name, flags in OPTIMIZERS.items():
        model, before = parameters(), parameters()
        more = ["--weight_decay", "0.5", "--decay_norms_and_biases", "False"]
        optimizer = build_optimizer(model, *sections(*flags, *more))
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter, start in zip(model, before, strict=True):
            wanted = start * (1 - 0.02 * 0.5) if parameter.dim() > 1 else start
            assert torch.allclose(parameter, wanted, rtol=1e-6, atol=1e-7), (name, parameter.shape)


def test_one_kind_of_parameter_makes_one_group() -> None:
    flags = ["--weight_decay", "0.1", "--decay_norms_and_biases", "False"]
    (group,) = build_optimizer(nn.Linear(3, 2, bias=False), *sections(*flags)).param_groups
    assert group["weight_decay"] == 0.1


def test_a_line_tells_where_much_stays_in_32_bits() -> None:
    eight_bits, mixed = nn.Linear(256, 64, bias=False), nn.Linear(100, 64)
    assert notes(eight_bits, "--optimizer", "AdamW8bit") == []
    (line,) = notes(mixed, "--optimizer", "AdamW8bit")
    assert "6,464 of 6,464 trained weights (100 %), in 2 of 2 tensors" in line
    assert notes(mixed) == []


def weights_of_a_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 256, bias=False)]).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def test_all_of_a_large_tensor_is_looked_at_and_counts_by_its_size() -> None:
    model = nn.ModuleList([nn.Linear(512, 1024, bias=False), nn.Linear(64, 64, bias=False)]).to(torch.bfloat16)
    for large in (slice(0, 512), slice(512, 1024), slice(0, 1024, 2)):
        nn.init.constant_(model[1].weight, 1.0)
        nn.init.zeros_(model[0].weight)
        model[0].weight.data[large] = 1.0
        (line,) = notes(model, lr=2e-5)
        assert " 50 % of" in line


@pytest.mark.parametrize("name", ["AdamW", "anyprecision", "AdamW8bit", "PagedAdamW8bit"])
def test_a_line_tells_what_part_of_bf16_weights_no_update_changes(name: str) -> None:
    def lines(dtype: torch.dtype, lr: float, *flags: str) -> list[str]:
        found = notes(weights_of_a_model(dtype), "--optimizer", name, *flags, lr=lr)
        return [line for line in found if "rounding loses" in line]

    model, lr = weights_of_a_model(torch.bfloat16), 2e-5
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    stuck = weights.abs() > 512 * lr
    assert bool(((weights + lr == weights) & (weights - lr == weights))[stuck].all())
    (line,) = lines(torch.bfloat16, lr)
    assert f"{100 * stuck.double().mean():.0f} % of" in line
    assert lines(torch.bfloat16, 1e-4) == []
    assert lines(torch.float32, lr) == []
    if name == "anyprecision":
        assert lines(torch.bfloat16, lr, "--use_kahan_summation") == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_adamw_is_fused_on_the_cpu_under_cpu_offload(one_rank: None) -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = build_optimizer(model, *sections("--enable_fsdp", "--fsdp_cpu_offload"))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # on a thread of its own, which a profiler would not see
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(True, None)]


def test_paged_states_need_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"^--optimizer: PagedAdamW8bit .* there is no GPU here; give AdamW8bit"):
        check_environment(parse_flags(["--model_name", "m", "--optimizer", "PagedAdamW8bit"]), read_environment())


def test_without_bitsandbytes_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"^--optimizer AdamW8bit: needs bitsandbytes \(.*\); pip install"):
        build_optimizer(nn.Linear(2, 2), *sections("--optimizer", "AdamW8bit"))
