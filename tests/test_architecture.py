"""Who may import whom, as docs/architecture.md says it, and other rules on where things stand."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from tests.helpers.processes import ROOT

ROOMS = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
FILES = [file for file in ROOT.rglob("*.py") if not file.relative_to(ROOT).parts[0].startswith(".")]
OUTSIDE_TESTS = [file for file in FILES if "tests" not in file.relative_to(ROOT).parts]


def imported(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def table_of_imports() -> dict[str, set[str]]:
    """What each room may import, from the page."""
    named = {
        "nothing of ours": set(),
        "all rooms": ROOMS,
        "all rooms but tools, benchmarks": ROOMS - {"tools", "benchmarks"},
        "all rooms but preparation": ROOMS - {"preparation"},
    }
    page = (ROOT / "docs/architecture.md").read_text()
    (table,) = re.findall(r"\| room \| may import \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [re.sub("[`/]", "", line).strip("| ").split(" | ") for line in table.splitlines()]
    may_import = {
        room: named.get(others, set(others.split(", "))) for names, others in rows for room in names.split(", ")
    }
    assert may_import.keys() == ROOMS | {"finetuning.py"}
    return {room.removesuffix(".py"): others for room, others in may_import.items()}


def test_a_file_imports_from_the_rooms_that_the_table_allows() -> None:
    table, found = table_of_imports(), []
    for file in OUTSIDE_TESTS:
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        allowed = table[room] | {room}
        # In the code, `datasets` is always the Hugging Face package.
        others = {name.split(".")[0] for name in imported(file)} & (table.keys() | {"tests"}) - {"datasets"}
        found += [f"{file.relative_to(ROOT)} imports {other}" for other in others - allowed]
    assert not found


def test_no_files_import_each_other_in_a_circle_and_no_folders_do() -> None:
    names = {str(file.relative_to(ROOT).with_suffix("")).replace("/", "."): file for file in OUTSIDE_TESTS}
    graph = {name: imported(file) & names.keys() for name, file in names.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    folders: dict[str, set[str]] = {}  # those inside of a room; a file in the room itself stands for itself
    for name, others in graph.items():
        room, place = name.split(".")[0], ".".join(name.split(".")[:2])
        within = {".".join(other.split(".")[:2]) for other in others if other.split(".")[0] == room}
        folders.setdefault(place, set()).update(within - {place})
    TopologicalSorter(folders).prepare()


def test_no_test_imports_from_another_test_module() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        others = [name for name in imported(file) if re.match(r"tests\..*\btest_\w+$", name)]
        assert not others, file


def test_no_test_gives_a_wide_scope_to_values_that_bypass_their_fixture() -> None:
    """`indirect=True` instead.

    With `scope="module"` pytest makes a second definition of the fixture. Fixtures that depend on the name then keep
    the value that they have from the other definition, unless the order of tests happens to end it in between.
    """
    calls = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in ROOT.glob("tests/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize")
        if any(keyword.arg == "scope" for keyword in node.keywords)
    ]
    assert not calls


def test_no_init_file_holds_code_and_datasets_has_none() -> None:
    assert not [file for file in FILES if file.name == "__init__.py" and file.read_text()]
    assert not (ROOT / "datasets/__init__.py").exists()


def test_no_class_name_occurs_twice() -> None:
    nodes = [node for file in OUTSIDE_TESTS for node in ast.walk(ast.parse(file.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]
