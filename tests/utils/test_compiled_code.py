"""Compiled code is kept where the user's caches are, unless a variable names another place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.compiled_code import _PLACES, keep_compiled_code


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _PLACES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_torchs_compiler_writes_into_the_users_cache_folder(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    assert keep_compiled_code() is None
    assert cache_dir() == str(tmp_path / "caches/finetuning/torchinductor")
    assert triton_cache_dir(0) == str(tmp_path / "caches/finetuning/triton")


def test_a_place_that_a_variable_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/mine")
    assert keep_compiled_code() is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "caches/finetuning/triton")


def test_a_folder_that_cannot_be_made_is_named_and_variables_stay(tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("")
    line = keep_compiled_code()
    assert line == (
        "compiled code may be lost before the next start: it cannot be kept in "
        f"{tmp_path}/caches/finetuning (Not a directory); set XDG_CACHE_HOME"
    )
    assert not any(os.environ[name] for name in _PLACES)


def test_without_locks_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("utils.compiled_code.fcntl.flock", refuse)
    assert "(files cannot be locked: No locks available)" in str(keep_compiled_code())
    assert not any(os.environ[name] for name in _PLACES)
