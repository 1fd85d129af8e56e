"""run.yaml's command starts the same run: with the launcher's own options."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

OPTIONS = "--nnodes 2 --nproc_per_node 1 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint h:29500 --local_addr a-0"
FLAGS = ["--model_name", "a model", "--lr", "1e-4"]
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a-0"}
LAUNCHED |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "7"}
LAUNCHER = """
import subprocess, sys
script = sys.argv.index(next(word for word in sys.argv[1:] if word.endswith("finetuning.py")))
sys.exit(subprocess.call([sys.executable, "-u", *sys.argv[script:]]))
"""
SCRIPT = """
import sys
from ranks.environment import launch_command, read_environment
print(launch_command(read_environment(), sys.argv[1:]))
"""


def command_told(tmp_path: Path, launcher: list[str], **variables: str) -> list[str]:
    """What the script would write, started by this launcher."""
    (tmp_path / "finetuning.py").write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    given = kept | LAUNCHED | variables | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [*launcher, str(tmp_path / "finetuning.py"), *FLAGS]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=True, timeout=60)
    return shlex.split(done.stdout)


@pytest.mark.parametrize("as_module", [False, True])
def test_the_command_holds_the_launchers_options(as_module: bool, tmp_path: Path) -> None:
    name = "launcher.py" if as_module else "torchrun"
    (tmp_path / name).write_text(LAUNCHER)
    launcher = [sys.executable, *(["-m", "launcher"] if as_module else [str(tmp_path / "torchrun")])]
    words = command_told(tmp_path, [*launcher, *OPTIONS.split()])
    started_by = ["python", "-m", "launcher"] if as_module else ["torchrun"]
    assert words == [*started_by, *OPTIONS.split(), str(tmp_path / "finetuning.py"), *FLAGS]


def test_options_that_variables_gave_torchrun_are_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(LAUNCHER)
    words = command_told(tmp_path, [sys.executable, str(tmp_path / "torchrun")], PET_NNODES="2")
    assert words == ["env", "PET_NNODES=2", "torchrun", str(tmp_path / "finetuning.py"), *FLAGS]


def test_without_a_launcher_to_be_read_the_variables_tell(tmp_path: Path) -> None:
    words = command_told(tmp_path, [sys.executable])
    assert words == ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", str(tmp_path / "finetuning.py"), *FLAGS]
