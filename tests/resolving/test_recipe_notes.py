"""Whoever gives neither recipe nor learning rate is told of the recipe for such a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.flags import parse_flags
from configs.recipe_file import recipe_names
from ranks.environment import Environment
from resolving.resolved import resolve
from tests.helpers.seq2seq_models import save_seq2seq


def lines(model: Path, line: str) -> list[str]:
    resolved = resolve(parse_flags(["--model_name", str(model), *line.split()]), Environment(0, 0, 1, 1, launched=True))
    return [note for note in resolved.notes if "--config" in note]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--use_peft --dataset chat_dataset", "chat_lora"),
        ("--use_peft --quantization 4bit --dataset chat_dataset", "chat_qlora"),
        ("--use_peft", "instruct_lora"),
        ("", "full"),
        ("--use_peft --dataset text_dataset", "text"),
    ],
)
def test_the_recipe_for_a_run_is_named(line: str, name: str, tiny_model: Path) -> None:
    assert lines(tiny_model, line) == [f"lr: 0.0001, as in llama-recipes; --config {name} has measured settings"]
    assert name in recipe_names()


@pytest.mark.parametrize("line", ["--lr 1e-4", "--config litgpt/full_fp32_8x1", "--random_weights"])
def test_who_has_chosen_is_not_told(line: str, tiny_model: Path) -> None:
    assert not lines(tiny_model, line)


def test_models_that_the_recipes_are_not_for_have_no_line(tmp_path: Path) -> None:
    assert not lines(save_seq2seq("bart", tmp_path / "bart"), "")
