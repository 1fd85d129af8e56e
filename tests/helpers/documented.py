"""The documents, and the commands that they say to type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.processes import ROOT

DATASETS = ROOT / "docs/datasets.md"
TRACKING = ROOT / "docs/tracking.md"
PRECISION = ROOT / "docs/precision.md"
QUANTIZATION = ROOT / "docs/quantization.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    """Every line of a code block that starts finetuning.py."""
    found = []
    for document in documents:
        for block in re.findall(r"```\w*\n(.*?)```", document.read_text(), flags=re.DOTALL):
            found += [line for line in block.splitlines() if re.match(r"(python|torchrun)\b.* finetuning\.py ", line)]
    return found
