"""The table of memory in README.md: its cells are plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.planned_run import plan_of
from tools.memory_table import FLAGS, main


def test_each_cell_is_the_plan_of_its_flags(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_model), "--num_cards", "2", "--", "--context_length", "64"]) == 0
    heading, _, row = capsys.readouterr().out.splitlines()
    methods = [f"{method}, {cards}" for method in ("LoRA", "QLoRA", "full") for cards in ("1 GPU", "2 GPUs")]
    assert heading == f"| GiB on each GPU | {' | '.join(methods)} |"
    name, *cells = row.strip("| ").split(" | ")
    assert name == tiny_model.name
    flags = ["--model_name", str(tiny_model), *FLAGS[:2], *FLAGS[4:], "--context_length", "64", "--use_peft"]
    memory = plan_of(parse_flags([*flags, "--enable_fsdp"]), parse_hardware("2xH100-80GB")).memory
    assert len(cells) == len(methods)
    assert cells[1] == f"{memory.peak_gib + memory.overhead_gib:.1f}"


def test_a_card_that_nobody_knows_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_model), "--card", "H1000"]) == 2
    assert capsys.readouterr().err.startswith("error: --dry_run_hardware: ")
