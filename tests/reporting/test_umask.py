"""Every file and folder of a run, its checkpoints and its exports is as readable as the umask says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.exports import export
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import flags_of
from utils.umask import follow_umask


def modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_a_file_of_safetensors_gets_the_mode_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for mask in (0o022, 0o027, 0o077, 0o002):
            os.umask(mask)
            (tmp_path / f"{mask}/inner").mkdir(parents=True)
            save_file({"a": torch.zeros(1)}, tmp_path / f"{mask}/inner/a.safetensors")
            follow_umask(tmp_path / f"{mask}")
            assert modes(tmp_path / f"{mask}") == {
                str(tmp_path / f"{mask}/inner"): 0o777 & ~mask,
                str(tmp_path / f"{mask}/inner/a.safetensors"): 0o666 & ~mask,
            }
    finally:
        os.umask(before)


@pytest.mark.parametrize("flags", [[], ["--use_peft"]], ids=["model", "adapter"])
def test_what_a_run_and_an_export_write_follows_the_umask(
    flags: list[str], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    (tmp_path / "shown").touch()
    (tmp_path / "shown-folder").mkdir()
    file, folder = modes(tmp_path).values()
    run = tmp_path / "run"
    process_group.train(flags_of(tiny_model, run, "--max_train_step", "1", "--run_validation", "False", *flags), 1)
    export(run, tmp_path / "exported")
    export(next(run / name for name in ("model", "adapter") if (run / name).exists()), tmp_path / "again")
    assert any(name.endswith(".safetensors") for name in modes(run))
    assert {name: mode for name, mode in modes(tmp_path).items() if mode not in (file, folder)} == {}
