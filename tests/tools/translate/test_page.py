"""The commands of docs/other-tools.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from configs.flags import parse_flags
from tests.helpers.processes import ROOT
from tools.translate.__main__ import main

PAGE = (ROOT / "docs/other-tools.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^python -m tools\.translate (.*)$", PAGE, flags=re.MULTILINE))
def test_a_command_of_the_page_writes_a_recipe(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yaml").write_text("base_model: m\nlearning_rate: 1e-4\ndatasets: [{path: a/b, type: alpaca}]\n")
    assert main(shlex.split(command)) == 0
    (recipe,) = Path().glob("*recipe.yaml")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith(f"python finetuning.py --config {recipe}")
    parse_flags(["--config", str(recipe)])
