"""Compiled code is kept where the user's caches are, unless a variable names another place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import process_variables, run_command
from utils.compiled_code import _PLACES, keep_compiled_code


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _PLACES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_torchs_compiler_writes_into_the_users_cache_folder(tmp_path: Path) -> None:
    assert keep_compiled_code() is None
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    assert cache_dir() == str(tmp_path / "caches/finetuning/torchinductor")
    assert triton_cache_dir(0) == str(tmp_path / "caches/finetuning/triton")


BEGIN = """
import os, sys
from supervision.process_start import begin_process
begin_process(["--model_name", "m"])
assert "torch" not in sys.modules
import torch._dynamo.package
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_a_process_settles_it_before_torch_does(tmp_path: Path) -> None:
    """torch 2.13 names its own place in the variable when transformers import its compiler."""
    variables = {name: value for name, value in process_variables({}).items() if name not in _PLACES}
    begun = subprocess.run([sys.executable, "-c", BEGIN], env=variables, capture_output=True, text=True, check=True)
    assert begun.stdout == f"{tmp_path}/caches/finetuning/torchinductor\n"


def test_a_named_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run_command("--model_name", "m", real=True, TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/file/cache")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: TORCHINDUCTOR_CACHE_DIR: {tmp_path}/file/cache cannot be made (Not a directory), and torch needs it; "
        "name a folder that can, or leave the variable out\n"
    )


def test_a_place_that_a_variable_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/mine")
    assert keep_compiled_code() is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "caches/finetuning/triton")


def test_a_folder_that_cannot_be_made_is_named_and_variables_stay(tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("")
    line = keep_compiled_code()
    assert line == (
        "compiled code may be lost before the next start: it cannot be kept in "
        f"{tmp_path}/caches/finetuning (Not a directory); set XDG_CACHE_HOME"
    )
    assert not any(name in os.environ for name in _PLACES)


def test_without_locks_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("utils.compiled_code.fcntl.flock", refuse)
    assert "(files cannot be locked: No locks available)" in str(keep_compiled_code())
    assert not any(name in os.environ for name in _PLACES)
