"""Every optimizer in every layout: the numbers of one process, and checkpoints that go on from one to another."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.tensor_files import TensorFiles
from run_folder.checkpoint_folder import tensor_files
from tests.helpers import optimizer_ranks
from tests.helpers.optimizer_ranks import DTYPES, MESHES, OPTIMIZERS
from tests.helpers.pairwise import keep_fast, slow_but
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import SHARDED, as_if_killed_after, assert_bit_equal, flags_of, results
from tools.make_tiny_model import make_tiny_model

DECAY = ["--weight_decay", "0.1"]
RUN = [*DECAY, "--run_validation", "False", "--batching_strategy", "padding", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def found(process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    process_group.train(partial(optimizer_ranks.run, folder), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_sharded_weights_are_those_on_whole_ones(name: str, mesh: str, dtype: str, found: list) -> None:
    """Bit for bit, but for Adafactor, whose sums are summed in another order, and torch's own kernels."""
    for rank in found:
        case = rank[f"{name} {mesh} {dtype}"]
        if mesh == "FULL_SHARD" and name in ("Adafactor", "Muon"):
            assert case["weights"] <= (1e-6 if dtype == "fp32" else 2**-7)  # one rounding of bf16 near 1
        else:
            assert case["weights"] == 0
        assert case["states"] <= (0 if name in ("anyprecision", "AdamW8bit") else 1e-6)
        assert case["moved"] > 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_holds_the_states_that_were_foreseen(name: str, mesh: str, dtype: str, found: list) -> None:
    for rank in found:
        case = rank[f"{name} {mesh} {dtype}"]
        assert case["held"] == case["foreseen"]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rows are whole blocks of 256, so that 8-bit optimizers quantize its states."""
    sizes = {"vocab_size": 600, "hidden_size": 256, "intermediate_size": 256, "num_layers": 1, "num_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", tie_word_embeddings=False, **sizes)


# AdamW's runs and checkpoints are those of other modules, too; on ranks, without a run, all four are fast tests.
@pytest.fixture(scope="module", params=keep_fast(OPTIMIZERS, ["AdamW8bit"], full=["AdamW"]))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(name: str, wide_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, sharded, that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    beside = ["--async_save", "True"]
    process_group.train([*flags_of(wide_model, folder, *RUN, *beside), *OPTIMIZERS[name], *SHARDED], 2)
    return folder


def assert_losses_agree(name: str, run: Path, other: Path) -> None:
    """To rounding; where gradients differ by that, some of 8-bit states and of Muon's bf16 fall to the next value."""
    rel = 1e-3 if name in ("AdamW8bit", "Muon") else 1e-5
    for ours, theirs in zip(results(run), results(other), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2:4] == pytest.approx(theirs[2:4], rel=rel)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_losses_are_the_same_in_every_layout(
    ranks: int, name: str, whole: Path, wide_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train([*flags_of(wide_model, tmp_path / "run", *RUN), *OPTIMIZERS[name]], ranks)
    assert_losses_agree(name, tmp_path / "run", whole)


REFUSED = {("AdamW8bit", "--optimizer_cpu_offload"), ("AdamW8bit", "--fsdp_cpu_offload")}
REFUSED |= {
    ("Adafactor", "--optimizer_cpu_offload"),
    ("Muon", "--optimizer_cpu_offload"),
    ("Muon", "--fsdp_cpu_offload"),
}


@pytest.mark.parametrize("offload", slow_but(1, ["", "--optimizer_cpu_offload", "--fsdp_cpu_offload"]))
def test_a_resumed_run_is_bit_equal(
    offload: str, name: str, whole: Path, wide_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    killed = as_if_killed_after(3, whole, tmp_path / "killed")
    flags = [*flags_of(wide_model, killed, *RUN, "--resume", "auto"), *OPTIMIZERS[name], *SHARDED, *offload.split()]
    if (name, offload) in REFUSED:
        outcome = process_group.run(flags, 2)[0]
        assert outcome.status == 2
        assert f"error: {offload}: " in outcome.stderr
        return
    process_group.train(flags, 2)
    assert_bit_equal(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", keep_fast(OPTIMIZERS, ["AdamW8bit", "Adafactor"], full=["AdamW", "anyprecision"]), indirect=True
)
def test_so_it_is_through_checkpoints_of_one_file_written_beside_training(
    name: str, whole: Path, wide_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    killed = as_if_killed_after(3, whole, tmp_path / "killed")
    flags = [*RUN, "--resume", "auto", "--checkpoint_type", "FULL_STATE_DICT", "--async_save", "True"]
    flags += [*OPTIMIZERS[name], *SHARDED]
    process_group.train(flags_of(wide_model, killed, *flags, "--max_train_step", "6"), 2)
    assert (killed / "checkpoints/step-00000006/state.safetensors").is_file()
    process_group.train(flags_of(wide_model, killed, *flags), 2)
    assert_bit_equal(killed, whole)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = TensorFiles(tensor_files(folder))
    return {name: files.read(name) for name in files.kinds}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, [], id="one process"),
        pytest.param(2, [], id="NO_SHARD", marks=pytest.mark.full),
        pytest.param(4, [*SHARDED, "--hsdp", "--sharding_group_size", "2"], id="HYBRID_SHARD", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_passes_through_another_layout_unchanged(
    ranks: int, layout: list[str], name: str, whole: Path, wide_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Loaded after its last step and written again: every weight and state, bit for bit."""
    moved, copies = tmp_path / "moved", ["--dist_checkpoint_root_folder", str(tmp_path), "--save_optimizer"]
    checkpoint = whole / "checkpoints/step-00000003"
    flags = [
        *flags_of(wide_model, moved, *RUN, "--max_train_step", "3", "--resume", str(checkpoint)),
        *OPTIMIZERS[name],
    ]
    process_group.train([*flags, *layout, *copies], ranks)
    found, wanted = stored(tmp_path / f"fine-tuned-{wide_model.name}"), stored(checkpoint)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    kinds = {value.dtype for key, value in wanted.items() if key.startswith("optimizer.")}  # small ones are fp32
    assert {"AdamW8bit": torch.uint8, "anyprecision": torch.bfloat16}.get(name, torch.float32) in kinds


def test_a_run_goes_on_elsewhere_with_the_same_losses(
    name: str, whole: Path, wide_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    moved = as_if_killed_after(3, whole, tmp_path / "moved")
    process_group.train([*flags_of(wide_model, moved, *RUN, "--resume", "auto"), *OPTIMIZERS[name]], 1)
    assert_losses_agree(name, moved, whole)
