"""The folder of the weights holds the earlier ones until the new ones are in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.model_folder import _replace


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("new")


def refuse(*_: object) -> None:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("fails", ["nothing", "writing", "the second rename"])
@pytest.mark.parametrize("left", ["model", "model.replaced"])  # the second by a kill between the two renames
def test_the_earlier_weights_stay_if_the_new_ones_cannot_be_put_there(
    left: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    (tmp_path / left).mkdir()
    (tmp_path / left / "weights").write_text("earlier")
    rename = Path.rename
    if fails == "the second rename":
        monkeypatch.setattr(Path, "rename", lambda a, b: refuse() if a.name == "model.incomplete" else rename(a, b))
    reason = _replace(folder, refuse if fails == "writing" else write)
    assert reason == ("" if fails == "nothing" else "[Errno 116] Stale file handle")
    assert (folder / "weights").read_text() == ("new" if fails == "nothing" else "earlier")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
