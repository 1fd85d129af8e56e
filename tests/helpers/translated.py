"""Translations of other tools' files, as `python -m tools.translate` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from configs.flags import parse_flags
from configs.run import RunConfig
from tools.translate.__main__ import main


class Translated(NamedTuple):
    """The settings of a run with the recipe, what was printed, and the recipe's text."""

    config: RunConfig
    printed: str
    recipe: str


def translate_text(text: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Translated:
    """Translate a file with this text; its recipe must be one that a run takes."""
    file, recipe = folder / "theirs.yaml", folder / "recipe.yaml"
    file.write_text(text)
    status = main([str(file), "--out", str(recipe), "--overwrite", *options])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return Translated(parse_flags(["--config", str(recipe)]), printed.out, recipe.read_text())


def refusal_of(text: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which a file is refused, without its path; no recipe is written."""
    file, recipe = folder / "theirs.yaml", folder / "refused.yaml"
    file.write_text(text)
    assert main([str(file), "--out", str(recipe), *options]) == 2
    assert not recipe.exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix(f"error: {file}: ")
