"""Precision: which flags mean what, and what weights, gradients and optimizer states then really are."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from checkpointing.model_folder import cast_weights
from configs.flags import parse_flags
from policies.adapters.apply import store_adapters
from policies.mixed_precision import Precision, resolve_precision
from tests.helpers import random_documents
from tests.helpers.adapter_kinds import adapt
from tests.helpers.pairwise import select, slow_but
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from utils.device import DeviceFacts, facts_of
from utils.errors import ConfigError

CPU = facts_of(torch.device("cpu"))
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FLAGS_OF_MODE = {
    "unset": [],
    "fp32": ["--mixed_precision", "False"],
    "bf16-mixed": ["--mixed_precision", "True"],
    "bf16-true": ["--pure_bf16"],
    "fp16-mixed": ["--use_fp16"],
}
MODES = [mode for mode in FLAGS_OF_MODE if mode != "unset"]
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
FLAGS_OF_METHOD = {"full": [], "lora": LORA, "bf16 lora": [*LORA, "--peft_dtype", "bf16"]}
LAYOUTS = {"one process": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
KINDS = [*itertools.product(MODES, LAYOUTS, ("full", "lora"))]
KINDS += itertools.product(("bf16-mixed", "bf16-true"), LAYOUTS, ("bf16 lora",))
ALL_CASES = select(KINDS, fast=lambda case: case[1] != "FULL_SHARD")
OFFLOADED = "--enable_fsdp --fsdp_cpu_offload"
LARGEST_DIFFERENCE = {"bf16-mixed": 5e-3, "bf16-true": 2e-2, "fp16-mixed": 2e-4}  # of a loss from fp32's, relative


def resolved(device: DeviceFacts, *flags: str) -> tuple[Precision, list[str]]:
    config = parse_flags(["--model_name", "m", *flags])
    return resolve_precision(config.train_config, config.fsdp_config, device)


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
        (["--use_fp16"], "fp16-mixed", FP32, FP16),
        (["--use_fp16", "--mixed_precision", "True"], "fp16-mixed", FP32, FP16),
        (["--fsdp_config.use_fp16", "True"], "fp16-mixed", FP32, FP16),
        (["--enable_fsdp", "--use_fp16"], "fp16-mixed", FP32, FP16),
        (["--use_peft", "--use_fp16"], "fp16-mixed", FP16, FP16),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_the_flags_mean_this_on_cpu(flags: list[str], name: str, storage: torch.dtype, compute: torch.dtype) -> None:
    precision, _ = resolved(CPU, *flags)
    assert (precision.name, precision.storage_dtype, precision.compute_dtype) == (name, storage, compute)
    assert precision.policy.reduce_dtype == FP32
    assert precision.policy.param_dtype == (compute if storage != compute else None)


def test_what_was_adapted_is_said() -> None:
    def notes(*flags: str) -> list[str]:
        return resolved(CPU, *flags)[1]

    assert len(notes()) == 1
    assert "fp32" in notes()[0]
    assert notes("--mixed_precision", "False") == notes("--mixed_precision", "True") == notes("--pure_bf16") == []


@pytest.mark.parametrize(
    ("flags", "on_a_card_without", "on_a_card_with"),
    [
        ([], "fp16-mixed", "bf16-mixed"),
        (["--mixed_precision", "True"], "fp16-mixed", "bf16-mixed"),
        (["--mixed_precision", "False"], "fp32", "fp32"),
        (["--use_fp16", "False"], "fp32", "bf16-mixed"),
        (["--use_fp16", "False", "--mixed_precision", "True"], "fp32", "bf16-mixed"),
        (["--use_fp16"], "fp16-mixed", "fp16-mixed"),
        (["--pure_bf16"], "bf16-true", "bf16-true"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_card_without_bf16_computes_in_fp16_unless_told_otherwise_and_says_so(
    flags: list[str], on_a_card_without: str, on_a_card_with: str
) -> None:
    for card_has_bf16, wanted in ((False, on_a_card_without), (True, on_a_card_with)):
        precision, notes = resolved(DeviceFacts("cuda", 2**34, card_has_bf16), *flags)
        assert precision.name == wanted
        was_asked_for = card_has_bf16 or (flags in (["--mixed_precision", "False"], ["--use_fp16"]))
        assert [note for note in notes if "this card has no bf16" in note] == notes
        assert len(notes) == (0 if was_asked_for else 1)


@pytest.mark.parametrize("flags", [[], ["--use_fp16"], ["--mixed_precision", "False"]])
def test_bf16_adapters_are_refused_beside_a_model_that_computes_in_something_else(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--peft_dtype: .*; give --mixed_precision True or --pure_bf16, or leave"):
        resolved(CPU, "--use_peft", "--peft_dtype", "bf16", *flags)


def flags_of(model: Path, folder: Path) -> list[str]:
    """Eight steps on the same few documents."""
    flags = ["--model_name", str(model), "--output_dir", str(folder), "--max_train_step", "8", "--lr", "5e-3"]
    flags += ["--dataset", f"{random_documents.__file__}:get_few_documents", "--context_length", "96"]
    return [*flags, "--batch_size_training", "1", "--global_batch_size", "4", "--num_workers_dataloader", "0"]


def cases(keep: Callable[[str, str, str], bool]) -> list[Any]:
    """The cases with such a mode, layout and method; some of them are marked `full`."""
    return [case for case in ALL_CASES if keep(*getattr(case, "values", case))]


Run = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def run(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Gives the folder of the run with a mode, layout and method, which trains at the first call."""

    @functools.cache
    def train(mode: str, layout: str, method: str) -> Path:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("precision") / "run"
        flags = [*flags_of(tiny_model, folder), *flags, *FLAGS_OF_MODE[mode], *FLAGS_OF_METHOD[method]]
        flags += ["--save_optimizer"]
        flags += ["--dist_checkpoint_root_folder", str(folder.parent), "--dist_checkpoint_folder", "sharded"]
        process_group.train(flags, ranks)
        return folder

    return train


def stored_dtypes(run: Path) -> dict[str, torch.dtype]:
    """Trained weights and their optimizer states, as the sharded copy holds them."""
    metadata = HuggingFaceStorageReader(str(run.parent / "sharded-tiny")).read_metadata().state_dict_metadata
    return {key: value.properties.dtype for key, value in metadata.items() if hasattr(value, "properties")}


@pytest.mark.parametrize(("mode", "layout", "method"), cases(lambda mode, layout, method: method == "full"))
def test_weights_and_optimizer_states_are_bf16_under_pure_bf16_alone(
    mode: str, layout: str, method: str, run: Run, tiny_model: Path
) -> None:
    wanted = BF16 if mode == "bf16-true" else FP32
    folder = run(mode, layout, method)
    assert {tensor.dtype for tensor in load_file(folder / "model/model.safetensors").values()} == {wanted}
    states = {key: dtype for key, dtype in stored_dtypes(folder).items() if "exp_avg" in key}
    num_weights = len(list(AutoModelForCausalLM.from_pretrained(tiny_model).parameters()))
    assert len(states) == 2 * num_weights  # two averages each
    assert set(states.values()) == {wanted}
    assert {dtype for key, dtype in stored_dtypes(folder).items() if key.startswith("model.")} == {wanted}


@pytest.mark.parametrize(("mode", "layout", "method"), cases(lambda mode, layout, method: "lora" in method))
def test_adapters_and_their_optimizer_states_are_fp32_unless_peft_dtype_says_bf16(
    mode: str, layout: str, method: str, run: Run
) -> None:
    wanted, folder = BF16 if method == "bf16 lora" else FP32, run(mode, layout, method)
    tensors = load_file(folder / "adapter/adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    dtypes = stored_dtypes(folder)
    stored = {key: dtype for key, dtype in dtypes.items() if "exp_avg" in key or key.startswith("model.")}
    assert len(stored) == 3 * len(tensors)
    assert set(stored.values()) == {wanted}


@pytest.mark.parametrize(("mode", "layout", "method"), cases(lambda mode, layout, method: mode != "fp32"))
def test_losses_fall_and_stay_close_to_those_of_fp32(mode: str, layout: str, method: str, run: Run) -> None:
    """fp32's are the same in every layout (tests/distributed/test_exactness.py)."""
    folders = run(mode, layout, method), run("fp32", "one process", method.removeprefix("bf16 "))
    found, wanted = ([event["loss"] for event in train_events(folder)] for folder in folders)
    assert found == pytest.approx(wanted, rel=LARGEST_DIFFERENCE[mode])
    assert found != wanted  # it did compute in half precision
    assert found[-1] < min(found[:2]) - 0.1
    evals = [[e["loss"] for e in read_metrics(folder) if e["event"] == "eval"] for folder in folders]
    assert evals[0] == pytest.approx(evals[1], rel=LARGEST_DIFFERENCE[mode])


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        pytest.param("bf16-mixed", "full", marks=pytest.mark.slow),
        pytest.param("fp16-mixed", "lora", marks=pytest.mark.full),
        pytest.param("bf16-mixed", "lora", marks=pytest.mark.full),
        pytest.param("fp16-mixed", "full", marks=pytest.mark.full),
    ],
)
def test_mixed_precision_is_the_same_in_every_layout(mode: str, method: str, run: Run) -> None:
    """The policy that casts is one; only where gradients are summed differs, in fp32."""
    losses = [[e["loss"] for e in train_events(run(mode, layout, method))] for layout in LAYOUTS]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize(
    ("ranks", "method", "flags"),
    slow_but(
        1,
        [
            (1, "lora", "--optimizer_cpu_offload --activation_checkpointing selective"),
            (2, "lora", "--enable_fsdp --fsdp_cpu_offload --wrap root"),
            (2, "full", "--optimizer_cpu_offload --activation_checkpointing full --loss_chunk_size 20"),
            (
                2,
                "full",
                f"{OFFLOADED} --sharding_strategy SHARD_GRAD_OP --accumulate_unsharded False",
            ),
            (4, "full", "--enable_fsdp --hsdp --sharding_group_size 2 --accumulate_unsharded False"),
        ],
    ),
)
def test_fp16_stays_close_to_fp32_under_every_policy(
    ranks: int, method: str, flags: str, run: Run, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = [*flags_of(tiny_model, tmp_path / "run"), *FLAGS_OF_METHOD[method], *flags.split(), "--use_fp16"]
    process_group.train([*argv, "--run_validation", "False", "--save_model", "False"], ranks)
    found, wanted = train_events(tmp_path / "run"), train_events(run("fp32", "one process", method))
    for name, largest in (("loss", LARGEST_DIFFERENCE["fp16-mixed"]), ("grad_norm", 1e-2)):
        assert [event[name] for event in found] == pytest.approx([event[name] for event in wanted], rel=largest)


def test_a_seed_draws_the_same_adapters_in_bf16_rounded_and_a_saved_one_is_rounded_alike(
    run: Run, tiny_model: Path
) -> None:
    def adapters(*flags: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        adapted = adapt(model, parse_flags(["--model_name", str(tiny_model), "--use_peft", *flags]))
        store_adapters(adapted, dtype)
        assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {FP32}
        return {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}

    saved = run("fp32", "one process", "lora") / "adapter"
    for flags in (["--seed", "5"], ["--from_peft_checkpoint", str(saved)]):
        fp32, bf16 = adapters(*flags, dtype=FP32), adapters(*flags, dtype=BF16)
        assert fp32.keys() == bf16.keys()
        for name, tensor in fp32.items():
            assert tensor.dtype == FP32
            assert torch.equal(bf16[name], tensor.to(BF16))


@pytest.mark.parametrize(("mode", "layout", "method"), cases(lambda mode, layout, method: method != "bf16 lora"))
def test_the_loss_scale_is_a_figure_of_fp16_alone(mode: str, layout: str, method: str, run: Run) -> None:
    for event in train_events(run(mode, layout, method)):
        assert event.get("loss_scale") == (65536 if mode == "fp16-mixed" else None)
        assert event["grad_norm"] > 0


@pytest.mark.parametrize("asked", ["base", "fp32"])
def test_a_bf16_model_is_saved_in_bf16_unless_all_bits_are_asked_for(
    asked: str, tiny_model: Path, samples: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, base)
    flags = ["--model_name", str(base), "--samsum_dataset.data_path", str(samples)]
    flags += ["--output_dir", str(tmp_path / "run")]
    flags += ["--max_train_step", "2", "--lr", "1e-3", "--run_validation", "False", "--num_workers_dataloader", "0"]
    flags += ["--context_length", "64", "--save_every_steps", "2"]
    flags += [] if asked == "base" else ["--save_dtype", asked]
    (outcome,) = process_group.train(flags, 1)
    assert ("save_dtype: the trained weights are saved in bf16, as " in outcome.stdout) == (asked == "base")
    saved = load_file(tmp_path / "run/model/model.safetensors")
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["dtype"] == {"base": "bfloat16", "fp32": "float32"}[asked]
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*")
    trained = {}
    for file in checkpoint.glob("*.safetensors"):
        trained |= load_file(file)
    for name, tensor in saved.items():
        (master,) = [whole for key, whole in trained.items() if key.endswith(name) and key.startswith("model.")]
        assert torch.equal(tensor, master.to(tensor.dtype))
        assert tensor.dtype == getattr(torch, config["dtype"])


def test_a_tied_weight_that_is_saved_in_bf16_is_still_one_tensor(tied_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    saved = cast_weights(model, model.state_dict(), torch.bfloat16)
    assert saved["lm_head.weight"].data_ptr() == saved["model.embed_tokens.weight"].data_ptr()
    assert saved["lm_head.weight"].dtype == torch.bfloat16
