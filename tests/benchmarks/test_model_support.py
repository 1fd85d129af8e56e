"""benchmarks.model_support with one family of each kind, and what it must see."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.published import read_published
from benchmarks.families.random_weights import make_random_model
from benchmarks.families.support_cells import COLUMNS, SupportCell
from benchmarks.model_support import main, measure_missing, print_table, read_cells
from tests.helpers.processes import ROOT, ProcessGroup

KINDS = {
    "olmo3": "dense",  # windows, and full attention with YaRN
    "qwen3_moe": "mixture",
    "glm4_moe": "mixture with shared experts and biases in the router",
    "gpt_oss": "sinks",
    "qwen3_next": "delta net",
    "nemotron_h": "Mamba hybrid",
    "zamba2": "layers that share weights",
}
MEASURED = ("padded", "packed", "LoRA", "merged", "saved")


# nemotron_h has shared experts and biases in its router, too.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.full) if name == "glm4_moe" else name for name in KINDS]
)
def test_a_family_of_each_kind_trains_as_transformers_computes_it(
    family: str, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The cells are wrong, too, if a model's own parts are lost on the way through files or adapters."""
    results = tmp_path / "support.jsonl"
    flags = ["--results", str(results), "--families", family, "--columns", *MEASURED]
    (outcome,) = process_group.run(partial(main, flags), 1)
    assert outcome.status == 0, outcome.stdout + outcome.stderr
    cells = read_cells(results)
    assert all(cells[family, column].apart is not None for column in MEASURED)


def test_a_tiny_model_is_always_the_same() -> None:
    """Delta nets draw vectors, too; with others in each process, a choice of experts is at times one of a tie."""
    config = read_published()["qwen3_next"].tiny_config(97)
    torch.manual_seed(1)
    one = make_random_model(AutoModelForCausalLM, config).state_dict()
    torch.manual_seed(2)
    other = make_random_model(AutoModelForCausalLM, config).state_dict()
    torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_published_structures_are_kept() -> None:
    """What is shrunk are sizes and lists of layers; a switch, a multiplier or a method of the published file stays."""
    for family in read_published().values():
        for name, value in family.shrunk.items():
            published = family.published.get(name)
            assert not isinstance(value, bool), (family.name, name)
            if not isinstance(value, list | dict | str) and published is not None:
                assert isinstance(published, int), (family.name, name)
                assert value <= published, (family.name, name)


def test_the_table_of_the_page_has_every_family_and_nothing_is_wrong() -> None:
    page = (ROOT / "docs/support.md").read_text().partition("## Models of today")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| [a-z].*\|$", page, re.M)]
    found = {cells[0]: cells for cells in rows if len(cells) == 2 + len(COLUMNS)}
    assert found.keys() == read_published().keys() | {"family"}
    assert found["family"][2:] == list(COLUMNS)
    for family in read_published().values():
        assert found[family.name][1] == family.model
        assert not any("**" in cell for cell in found[family.name])


def test_a_call_measures_only_what_the_file_lacks_and_a_wrong_cell_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = read_published()["phi3"]
    refused = SupportCell(refused="--batching_strategy: no")
    cells = {(family.name, column): refused for column in COLUMNS}
    cells[family.name, "padded"] = SupportCell(apart=2e-5)
    cells[family.name, "LoRA"] = SupportCell(apart=1e-7, said="experts too")
    results = tmp_path / "support.jsonl"
    rows = [{"family": name, "column": column} | asdict(cell) for (name, column), cell in cells.items()]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measure_missing(results, [family], list(COLUMNS))
    assert read_cells(results) == cells
    print_table(cells, {family.name: family.model}, COLUMNS)
    printed = capsys.readouterr().out
    assert "| **2.0e-05** | refused (1) | refused (1) | 1.0e-07, experts too | refused (1) |" in printed
    assert printed.endswith("1. `--batching_strategy: no`\n")
