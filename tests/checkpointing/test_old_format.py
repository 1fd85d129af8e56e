"""Checkpoints that versions before safetensors wrote: runs go on from them bit for bit, and forged ones run nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from run_folder.checkpoint_folder import checkpoints, checksum, listed_files, old_tensor_files, tensor_files
from tests.helpers.made import Made
from tests.helpers.old_checkpoints import write_as_before
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import PLAIN, SHARDED, as_if_killed_after, assert_bit_equal, flags_of

LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0.3"]
KINDS: dict[str, tuple[int, list[str]]] = {
    "8-bit states, FULL_SHARD": (2, [*SHARDED, "--optimizer", "AdamW8bit"]),
    "LoRA in one file": (1, [*LORA, "--checkpoint_type", "FULL_STATE_DICT"]),
    "LoRA, FULL_SHARD": (2, [*SHARDED, *LORA]),
    "one process": (1, ["--scheduler", "cosine", "--warmup_steps", "2"]),
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A whole run, by its kind."""

    def run(kind: str) -> Path:
        folder, (ranks, flags) = tmp_path_factory.mktemp("old") / "whole", KINDS[kind]
        process_group.train(flags_of(tiny_model, folder, *PLAIN, *flags), ranks)
        return folder

    return Made(run)


@pytest.mark.parametrize("kind", keep_fast(KINDS, ["LoRA in one file"], full=["LoRA, FULL_SHARD"]))
def test_a_run_goes_on_from_it_bit_for_bit_and_writes_safetensors(
    kind: str, runs: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = KINDS[kind]
    killed = as_if_killed_after(3, runs[kind], tmp_path / "killed")
    (old,) = checkpoints(killed / "checkpoints")
    process_group.train(partial(write_as_before, str(old)), ranks)
    assert old_tensor_files(old)
    assert not tensor_files(old)
    outcome = process_group.train(flags_of(tiny_model, killed, *PLAIN, *flags, "--resume", "auto"), ranks)[0]
    assert f"resume: from {old}, after step 3" in outcome.stdout
    assert_bit_equal(killed, runs[kind])
    newest = checkpoints(killed / "checkpoints")[0]
    assert tensor_files(newest)
    assert not old_tensor_files(newest)


def test_one_whose_index_is_forged_runs_nothing(
    runs: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """COMPLETE agrees with the forged index, as an attacker would make it."""

    class Forged:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    ranks, flags = KINDS["8-bit states, FULL_SHARD"]
    run = as_if_killed_after(3, runs["8-bit states, FULL_SHARD"], tmp_path / "run")
    (old,) = checkpoints(run / "checkpoints")
    process_group.train(partial(write_as_before, str(old)), ranks)
    (old / ".metadata").write_bytes(pickle.dumps(Forged()))
    files = listed_files(old) | {".metadata": checksum(old / ".metadata")}
    (old / "COMPLETE").write_text(json.dumps({"files": files}))
    outcome = process_group.run(flags_of(tiny_model, run, *PLAIN, *flags, "--resume", "auto"), ranks)[0]
    assert outcome.status == 2
    assert "posix.system" in outcome.stderr
    assert not (tmp_path / "ran").exists()
