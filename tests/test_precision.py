"""Precision: which flags mean what, and what weights, gradients and optimizer states then really are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.mixed_precision import resolve_precision
from tests import random_documents
from tests.processes import ProcessGroup, read_metrics, train_events

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
FLAGS_OF_MODE = {
    "unset": [],
    "fp32": ["--mixed_precision", "False"],
    "bf16-mixed": ["--mixed_precision", "True"],
    "bf16-true": ["--pure_bf16"],
}
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
LAYOUTS = {"one process": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}


@pytest.mark.parametrize(
    ("flags", "name", "storage", "compute"),
    [
        ([], "fp32", FP32, FP32),
        (["--mixed_precision", "False"], "fp32", FP32, FP32),
        (["--use_fp16", "False"], "fp32", FP32, FP32),
        (["--mixed_precision", "False", "--use_fp16", "False"], "fp32", FP32, FP32),
        (["--mixed_precision", "True"], "bf16-mixed", FP32, BF16),
        (["--train_config.mixed_precision", "True"], "bf16-mixed", FP32, BF16),
        (["--fsdp_config.mixed_precision", "True"], "bf16-mixed", FP32, BF16),
        (["--mixed_precision", "True", "--use_fp16", "False"], "bf16-mixed", FP32, BF16),
        (["--pure_bf16"], "bf16-true", BF16, BF16),
        (["--pure_bf16", "--mixed_precision", "False"], "bf16-true", BF16, BF16),
        (["--use_peft"], "fp32", FP32, FP32),
        (["--use_peft", "--mixed_precision", "True"], "bf16-mixed", BF16, BF16),
        (["--use_peft", "--pure_bf16"], "bf16-true", BF16, BF16),
        (["--enable_fsdp"], "fp32", FP32, FP32),
        (["--enable_fsdp", "--mixed_precision", "True"], "bf16-mixed", FP32, BF16),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_the_flags_mean_this_on_cpu(flags: list[str], name: str, storage: torch.dtype, compute: torch.dtype) -> None:
    precision, _ = resolve_precision(parse_flags(["--model_name", "m", *flags]), CPU)
    assert (precision.name, precision.storage_dtype, precision.compute_dtype) == (name, storage, compute)
    assert precision.policy.reduce_dtype == FP32
    assert precision.policy.param_dtype == (compute if storage != compute else None)


def test_what_was_adapted_is_said() -> None:
    def notes(*flags: str) -> list[str]:
        return resolve_precision(parse_flags(["--model_name", "m", *flags]), CPU)[1]

    assert len(notes()) == 1
    assert "fp32" in notes()[0]
    assert notes("--mixed_precision", "False") == notes("--mixed_precision", "True") == notes("--pure_bf16") == []


@pytest.fixture(scope="module")
def runs(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The folder of each run, by mode, layout and method: eight steps on the same rows."""
    folders = {}
    modes, methods = ("fp32", "bf16-mixed", "bf16-true"), ("full", "lora")
    for mode, layout, method in itertools.product(modes, LAYOUTS, methods):
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("precision") / "run"
        flags = ["--model_name", str(tiny_model), "--output_dir", str(folder), *flags, *FLAGS_OF_MODE[mode]]
        flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--max_train_step", "8"]
        flags += ["--batch_size_training", "1", "--global_batch_size", "4", "--context_length", "96", "--lr", "5e-3"]
        flags += ["--num_workers_dataloader", "0", "--save_optimizer"]
        flags += ["--dist_checkpoint_root_folder", str(folder.parent), "--dist_checkpoint_folder", "sharded"]
        process_group.train(flags + (LORA if method == "lora" else []), ranks)
        folders[mode, layout, method] = folder
    return folders


def stored_dtypes(run: Path) -> dict[str, torch.dtype]:
    """Trained weights and their optimizer states, as the sharded copy holds them."""
    metadata = FileSystemReader(run.parent / "sharded").read_metadata().state_dict_metadata
    return {key: value.properties.dtype for key, value in metadata.items() if hasattr(value, "properties")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["fp32", "bf16-mixed", "bf16-true"])
def test_weights_and_optimizer_states_are_bf16_under_pure_bf16_alone(
    mode: str, layout: str, runs: dict, tiny_model: Path
) -> None:
    wanted = BF16 if mode == "bf16-true" else FP32
    run = runs[mode, layout, "full"]
    assert {tensor.dtype for tensor in load_file(run / "model/model.safetensors").values()} == {wanted}
    states = {key: dtype for key, dtype in stored_dtypes(run).items() if "exp_avg" in key}
    num_weights = len(list(AutoModelForCausalLM.from_pretrained(tiny_model).parameters()))
    assert len(states) == 2 * num_weights  # two averages each
    assert set(states.values()) == {wanted}
    assert {dtype for key, dtype in stored_dtypes(run).items() if key.startswith("model.")} == {wanted}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["fp32", "bf16-mixed", "bf16-true"])
def test_adapters_and_their_optimizer_states_are_always_fp32(mode: str, layout: str, runs: dict) -> None:
    run = runs[mode, layout, "lora"]
    tensors = load_file(run / "adapter/adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {FP32}
    assert {dtype for key, dtype in stored_dtypes(run).items() if "exp_avg" in key or key.startswith("model.")} == {
        FP32
    }


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_losses_stay_close_to_those_of_fp32(mode: str, layout: str, method: str, runs: dict) -> None:
    found, wanted = train_events(runs[mode, layout, method]), train_events(runs["fp32", layout, method])
    assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in wanted], rel=5e-2)
    assert [event["loss"] for event in found] != [event["loss"] for event in wanted]  # it did compute in bf16
    evals = [
        [e["loss"] for e in read_metrics(runs[key]) if e["event"] == "eval"]
        for key in runs
        if key[1:] == (layout, method)
    ]
    assert all(losses == pytest.approx(evals[0], rel=5e-2) for losses in evals)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_mixed_precision_is_the_same_in_every_layout(method: str, runs: dict) -> None:
    """The policy that casts is one; only where gradients are summed differs, in fp32."""
    losses = [[e["loss"] for e in train_events(runs["bf16-mixed", layout, method])] for layout in LAYOUTS]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
