"""Who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.processes import ROOT


def imported(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_no_test_imports_from_another_test_module() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        others = [
            name for name in imported(file) if name.startswith("tests") and name.split(".")[-1].startswith("test_")
        ]
        assert not others, file
