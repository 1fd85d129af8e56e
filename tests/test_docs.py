"""What the documents say to type can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from configs.flags import parse_flags
from tests.processes import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every line of a code block that starts finetuning.py."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```\w*\n(.*?)```", document.read_text(), flags=re.DOTALL):
            found += [line for line in block.splitlines() if re.match(r"(python|torchrun)\b.* finetuning\.py ", line)]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    parse_flags(words[words.index("finetuning.py") + 1 :])


def test_the_readme_holds_ten_situations_at_least() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_the_folder_of_recipes_never_hides_the_library() -> None:
    assert not (ROOT / "datasets/__init__.py").exists()
