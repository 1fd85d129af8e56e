"""The optimizers on GPUs: bitsandbytes' kernels and paged memory, steps on the CPU, and going on from a checkpoint."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from configs.flags import parse_flags
from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.adafactor import Adafactor
from policies.optimizers.adamw8bit import AdamW8bit, PagedAdamW8bit
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.build import build_optimizer, state_bytes
from run_folder.checkpoint_folder import checkpoints
from tests.helpers import random_documents
from tests.helpers.processes import read_metrics, run_command, train_events
from tools.make_tiny_model import make_tiny_model
from utils.optional_packages import import_bitsandbytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = torch.device("cuda", 0)
SHAPES = [(512, 256), (400, 512), (7, 5), (100_000,), (9,)]  # the first two in 8 bits, of which and the fourth paged
OPTIMIZERS = {
    "anyprecision": ["--optimizer", "anyprecision", "--use_kahan_summation"],
    "AdamW8bit": ["--optimizer", "AdamW8bit"],
    "PagedAdamW8bit": ["--optimizer", "PagedAdamW8bit"],
    "Adafactor": ["--optimizer", "Adafactor"],
}
LAYOUTS = {
    "plain": (None, ["--mixed_precision", "False"]),
    "bf16 weights": (None, ["--pure_bf16"]),
    "one-rank mesh": (1, ["--enable_fsdp"]),
    "FULL_SHARD": (2, ["--enable_fsdp"]),
    "NO_SHARD": (2, ["--mixed_precision", "False"]),
}


def sections(*flags: str) -> tuple[TrainConfig, FsdpConfig]:
    config = parse_flags(["--model_name", "m", *flags])
    return config.train_config, config.fsdp_config


def parameters(dtype: torch.dtype, device: torch.device = CUDA) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    return nn.ParameterList(nn.Parameter(value) for value in values)


def train(model: nn.Module, optimizer: Optimizer, num_steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("paged", [False, True])
def test_8bit_is_bitsandbytes_own(paged: bool, dtype: torch.dtype) -> None:
    """Where it quantizes the same parameters: those of two dimensions, here."""
    bitsandbytes = import_bitsandbytes("--optimizer")
    ours, theirs = parameters(dtype)[:3], parameters(dtype)[:3]
    optimizer = (PagedAdamW8bit if paged else AdamW8bit)(ours, lr=1e-3, weight_decay=0.1)
    own = bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit
    other = own(theirs, lr=1e-3, weight_decay=0.1)
    train(ours, optimizer, 10)
    train(theirs, other, 10)
    for parameter, theirs_parameter in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, theirs_parameter)
        found, wanted = optimizer.state[parameter], other.state[theirs_parameter]
        for key in ("state1", "state2"):
            assert found[key].dtype == wanted[key].dtype
            assert found[key].device == wanted[key].device
            assert torch.equal(found[key], wanted[key])


def test_paged_states_are_not_in_the_memory_of_the_gpu() -> None:
    model = parameters(FP32)
    optimizer = PagedAdamW8bit(model, lr=1e-3)
    train(model, optimizer, 1)
    kinds = []
    for parameter in model:
        state: dict[str, Any] = optimizer.state[parameter]
        kinds.append((state["state1"].dtype, getattr(state["state1"], "is_paged", False), state["state1"].device.type))
    paged, small = (torch.uint8, True, "cpu"), (FP32, False, "cuda")
    assert kinds == [paged, paged, small, (FP32, True, "cpu"), small]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_state_dict_as_if_never_interrupted(name: str, dtype: torch.dtype) -> None:
    settings = sections("--weight_decay", "0.1", *OPTIMIZERS[name])
    model, resumed = parameters(dtype), parameters(dtype)
    optimizer, other = build_optimizer(model, *settings), build_optimizer(resumed, *settings)
    train(model, optimizer, 5)
    train(resumed, other, 2, seed=7)
    saved = optimizer.state_dict()
    saved["state"] = {index: {k: copy.deepcopy(v) for k, v in state.items()} for index, state in saved["state"].items()}
    other.load_state_dict(saved)
    resumed.load_state_dict(model.state_dict())
    train(model, optimizer, 5, seed=2)
    train(resumed, other, 5, seed=2)
    for parameter, theirs in zip(model, resumed, strict=True):
        assert torch.equal(parameter, theirs)
        for key, value in optimizer.state[parameter].items():
            found = other.state[theirs][key]
            if isinstance(value, torch.Tensor):
                assert (found.dtype, found.device) == (value.dtype, value.device)
                assert getattr(found, "is_paged", False) == getattr(value, "is_paged", False)
                assert torch.equal(found, value)


@pytest.mark.parametrize("name", ["anyprecision", "AdamW8bit", "Adafactor"])
def test_a_step_on_the_gpu_is_that_on_the_cpu(name: str) -> None:
    settings = sections("--lr", "1e-3", "--weight_decay", "0.1", *OPTIMIZERS[name])
    model, other = parameters(FP32), parameters(FP32, torch.device("cpu"))
    train(model, build_optimizer(model, *settings), 5)
    train(other, build_optimizer(other, *settings), 5)
    for parameter, theirs in zip(model, other, strict=True):
        # What differs by rounding may be stored as the next of 256 values, or of bf16's.
        apart = (parameter.cpu() - theirs).abs()
        assert apart.mean() < 1e-5
        assert apart.max() < 1e-3


@pytest.mark.parametrize("kind", [AnyPrecisionAdamW, Adafactor, AdamW8bit])
def test_a_step_does_not_wait_for_the_gpu(kind: type[Optimizer]) -> None:
    model = parameters(BF16)
    optimizer = kind(model, lr=1e-3)  # type: ignore[call-arg]
    train(model, optimizer, 2)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rows are whole blocks of 256, its embeddings large enough to be paged."""
    sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 256, "num_layers": 1, "num_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", tie_word_embeddings=False, **sizes)


def run(model: Path, folder: Path, nproc: int | None, *flags: str) -> None:
    given = ["--model_name", str(model), "--output_dir", str(folder), "--context_length", "96", "--deterministic"]
    given += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    given += ["--batch_size_training", "1", "--global_batch_size", "4", "--max_train_step", "8", "--lr", "1e-3"]
    given += ["--save_every_steps", "3", "--keep_last", "9", "--weight_decay", "0.1", "--batching_strategy", "padding"]
    done = run_command(*given, *flags, nproc=nproc, real=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layout", [pytest.param(k, marks=needs_two if v[0] == 2 else ()) for k, v in LAYOUTS.items()])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_bit_equal(name: str, layout: str, wide_model: Path, tmp_path: Path) -> None:
    nproc, flags = LAYOUTS[layout]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(wide_model, whole, nproc, *flags, *OPTIMIZERS[name])
    shutil.copytree(whole, killed)
    for checkpoint in checkpoints(killed / "checkpoints")[:2]:
        shutil.rmtree(checkpoint)
    run(wide_model, killed, nproc, *flags, *OPTIMIZERS[name], "--resume", "auto")
    for found, wanted in zip(train_events(killed), train_events(whole), strict=True):
        for key in ("step", "loss", "grad_norm", "lr"):
            assert found[key] == wanted[key], (wanted["step"], key)
    found, wanted = (load_file(next(folder.glob("*/*model.safetensors"))) for folder in (killed, whole))
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_run_goes_on_with_its_states_paged(wide_model: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(wide_model, whole, 1, "--enable_fsdp", *OPTIMIZERS["AdamW8bit"])
    shutil.copytree(whole, killed)
    for checkpoint in checkpoints(killed / "checkpoints")[:2]:
        shutil.rmtree(checkpoint)
    resumed = ["--enable_fsdp", *OPTIMIZERS["PagedAdamW8bit"], "--resume", "auto", "--resume_anyway"]
    run(wide_model, killed, 1, *resumed)
    found, wanted = ([e["loss"] for e in train_events(folder)] for folder in (killed, whole))
    assert found == wanted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_ledger_counts_the_states(name: str, wide_model: Path, tmp_path: Path) -> None:
    """On the GPU; paged ones, which torch's allocator does not know, as if they were all in host memory."""
    run(wide_model, tmp_path / "run", None, "--mixed_precision", "False", *OPTIMIZERS[name])
    event = [e for e in read_metrics(tmp_path / "run") if e["event"] == "memory"][-1]
    tensors = load_file(tmp_path / "run/model/model.safetensors")
    settings = sections(*OPTIMIZERS[name])
    paged = [t for t in tensors.values() if name == "PagedAdamW8bit" and t.numel() >= 100_000]
    in_host = sum(2 * tensor.numel() for tensor in paged)
    foreseen = sum(state_bytes(tensor, *settings) for tensor in tensors.values())
    assert event["optimizer_cpu_gib"] * 2**30 == pytest.approx(in_host)
    assert event["optimizer_gib"] * 2**30 == pytest.approx(foreseen - in_host)


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("anyprecision", "--fsdp_cpu_offload"),
        ("anyprecision", "--optimizer_cpu_offload"),
        ("Adafactor", "--fsdp_cpu_offload"),
    ],
)
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=needs_two)])
def test_losses_with_steps_in_host_memory_are_the_same(
    nproc: int, name: str, offload: str, wide_model: Path, tmp_path: Path
) -> None:
    flags = ["--enable_fsdp", "--mixed_precision", "False", *OPTIMIZERS[name]]
    run(wide_model, tmp_path / "a", nproc, *flags)
    run(wide_model, tmp_path / "b", nproc, *flags, offload)
    found, wanted = ([e["loss"] for e in train_events(tmp_path / run_name)] for run_name in "ba")
    assert found == pytest.approx(wanted, rel=1e-4)


@needs_two
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_over_two_gpus_are_those_of_one(name: str, wide_model: Path, tmp_path: Path) -> None:
    fp32 = ["--mixed_precision", "False", *OPTIMIZERS[name]]
    run(wide_model, tmp_path / "one", None, *fp32)
    for layout, flags in {"sharded": ["--enable_fsdp"], "copies": []}.items():
        run(wide_model, tmp_path / layout, 2, *flags, *fp32)
        found, wanted = ([e["loss"] for e in train_events(tmp_path / folder)] for folder in (layout, "one"))
        assert found == pytest.approx(wanted, rel=1e-3 if "8bit" in name else 1e-4)
