"""A folder that cannot be deleted stays, and ends nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.deleting import delete_folder


@pytest.mark.parametrize("call", ["fstat", "close", "rmdir"])
def test_no_error_of_the_disk_escapes(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    real = getattr(os, call)

    def refuse(*given: object, **named: object) -> None:
        if call == "close":
            real(*given)
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        delete_folder(folder)
    delete_folder(folder)
    assert not folder.exists()
    delete_folder(folder)
