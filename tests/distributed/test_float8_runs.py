"""Runs in float8, emulated on CPUs: they learn as in bf16, resume bit for bit, and leave weights as any run does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing.folder import checkpoints
from checkpointing.tensor_index import read_index
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of, weights

FSDP = ["--enable_fsdp"]
TENSORWISE, ROWWISE = ["--float8", "tensorwise"], ["--float8", "rowwise"]
MIXED, TRUE = ["--mixed_precision", "True"], ["--pure_bf16"]
LORA = ["--use_peft", "--lora_config.lora_dropout", "0", *MIXED]
RUNS: dict[str, tuple[int, list[str]]] = {
    "bf16": (2, [*FSDP, *MIXED]),
    "tensorwise": (2, [*FSDP, *MIXED, *TENSORWISE]),
    "rowwise": (2, [*FSDP, *MIXED, *ROWWISE]),
    "one rank": (1, [*MIXED, *TENSORWISE]),
    "Kahan": (2, [*FSDP, *TRUE, *TENSORWISE, "--optimizer", "anyprecision", "--use_kahan_summation"]),
    "LoRA": (2, [*FSDP, *LORA, *TENSORWISE]),
    "LoRA, bf16": (2, [*FSDP, *LORA]),
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of each run, by its name in RUNS."""

    def run(name: str) -> Path:
        if "--use_peft" not in RUNS[name][1] and "--float8" in RUNS[name][1]:
            pytest.importorskip("torchao.float8")
        ranks, flags = RUNS[name]
        folder = tmp_path_factory.mktemp("float8") / "run"
        process_group.train(flags_of(tiny_model, folder, *flags), ranks)
        return folder

    return Made(run)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in train_events(folder)]


@pytest.mark.parametrize(("name", "plain"), [("tensorwise", "bf16"), ("LoRA", "LoRA, bf16")])
def test_losses_are_near_those_of_bf16(name: str, plain: str, runs: Made) -> None:
    found, wanted = losses(runs[name]), losses(runs[plain])
    assert found != wanted
    assert found == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_checkpoints_and_exports_hold_what_they_hold_without_float8(name: str, runs: Made) -> None:
    def kinds(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
        index = read_index(checkpoints(folder / "checkpoints")[-1]).state_dict_metadata
        return {name: (entry.size, entry.properties.dtype) for name, entry in index.items()}  # type: ignore[union-attr]

    assert kinds(runs[name]) == kinds(runs["bf16"])
    found, wanted = weights(runs[name]), weights(runs["bf16"])
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in wanted.items()}
    assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in wanted.items()}


@pytest.mark.parametrize(
    "name", ["tensorwise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one rank", "Kahan", "LoRA"))]
)
def test_a_resumed_run_goes_on_bit_for_bit(
    name: str, runs: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = RUNS[name]
    folder = as_if_killed_after(3, runs[name], tmp_path / "run")
    process_group.train([*flags_of(tiny_model, folder, *flags), "--resume", "auto"], ranks)
    assert_bit_equal(folder, runs[name])
