"""What cannot be generated or scored is refused before weights are read, in one line."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from configs.training import TrainConfig
from evaluation.measures import MEASURES, check_measures
from tests.helpers.processes import ROOT
from tests.helpers.refusals import Bench
from utils.errors import ConfigError
from utils.optional_packages import requirement


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num_beams", "2"], "--num_beams: nothing is generated without --eval_generate"),
        (["--max_generate_samples", "2"], "--max_generate_samples: nothing is generated without --eval_generate"),
        (["--best_metric", "rougeL"], "--best_metric: rougeL needs --eval_generate"),
        (
            ["--eval_generate", "--best_metric", "rougeX"],
            "'rougeX' is not one of eval_loss, token_accuracy, token_entropy, rouge1, rouge2, rougeL; give one",
        ),
        (["--eval_generate", "--run_validation", "False"], "--eval_generate: nothing is evaluated with"),
        (
            ["--eval_generate", "--max_new_tokens", "2030"],
            "validation row 1 are more than the 2,048 positions",
        ),
    ],
)
def test_flags(given: list[str], said: str, bench: Bench) -> None:
    assert said in bench.refused(*given)


def test_texts_without_a_prompt(bench: Bench) -> None:
    for split in ("train", "validation"):
        (bench.folder / f"texts/{split}.txt").parent.mkdir(exist_ok=True)
        (bench.folder / f"texts/{split}.txt").write_text("A text, and no question.\n" * 9)
    line = bench.refused(
        *("--dataset", "text_dataset", "--text_dataset.data_path", str(bench.folder / "texts"), "--eval_generate")
    )
    assert "--eval_generate: no validation sample has a prompt" in line


def test_no_validation_data(bench: Bench) -> None:
    file = bench.folder / "train.jsonl"
    file.write_text(json.dumps({"dialogue": "Ann: Hi", "summary": "Ann says hi."}) + "\n")
    line = bench.refused("--samsum_dataset.data_path", str(file), "--eval_generate")
    assert "--eval_generate: there is no validation data" in line


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda **given: ())
    check_measures(TrainConfig(model_name="M"))
    with pytest.raises(ConfigError, match="--eval_generate: needs the package rouge-score; pip install 'rouge-score>="):
        check_measures(TrainConfig(model_name="M", eval_generate=True))


def test_the_requirement_is_the_one_that_the_refusal_names() -> None:
    lines = Path(ROOT / "requirements-evaluation.txt").read_text().splitlines()
    assert {requirement(measure.PACKAGE) for measure in MEASURES if measure.PACKAGE} <= set(lines)
