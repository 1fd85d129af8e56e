"""Answers that are drawn, and measured as --eval_metric says, do not depend on the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.generated import GENERATE, flags, write_rows
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.refusals import write_lines

FUNCTION = """
def score(prompt, reference, answer):
    return {"length": len(answer), "asked": prompt.count("Bob"), "letters": len(set(answer))}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_rows(folder)
    (folder / "my_metrics.py").write_text(FUNCTION)
    return folder


def measured(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of all evaluations, and the texts of the first."""
    names = ("exact_match", "json_valid", "json_match", "length", "asked", "letters")
    events = [event for event in read_metrics(run) if event["event"] == "eval"]
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    texts = [line["generated"] for line in lines if line["step"] == events[0]["step"]]
    assert "rouge1" not in events[0]
    return [{name: event[name] for name in names} for event in events], texts


def test_drawn_answers_and_their_figures_are_those_of_any_layout(
    tiny_model: Path, files: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = [*GENERATE, "--eval_metric", f"exact_match,json,{files}/my_metrics.py:score", "--best_metric", "letters"]
    given += ["--temperature", "0.9", "--top_p", "0.95", "--max_train_step", "2", "--val_batch_size", "3"]
    given += ["--context_length", "128", "--eval_every_steps", "1", "--global_batch_size", "2"]
    given += ["--batch_size_training", "1"]
    process_group.train([*flags(tiny_model, files, tmp_path / "one", *given)], 1)
    process_group.train([*flags(tiny_model, files, tmp_path / "two", *given), "--enable_fsdp"], 2)
    one, two = measured(tmp_path / "one"), measured(tmp_path / "two")
    assert one[0][0] == two[0][0]
    assert one[1] == two[1]
    first = one[0][0]
    assert first["asked"] == 1  # the prompt is read
    assert first["length"] > 0
    process_group.train([*flags(tiny_model, files, tmp_path / "other", *given), "--seed", "1"], 1)
    assert measured(tmp_path / "other")[1] != one[1]


def test_a_function_that_fails_on_an_answer_ends_the_run_with_its_row_and_a_checkpoint(
    tiny_model: Path, files: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """It takes the reference, with which it is tried before the run. Once mended, the run goes on by evaluating."""
    function = tmp_path / "strict.py"
    function.write_text(
        "def strict(prompt, reference, answer):\n    return {reference: 1.0}[answer] and {'right': 1}\n"
    )
    run, given = tmp_path / "run", [*GENERATE[:-1], "--eval_metric", f"{function}:strict", "--max_train_step", "1"]
    given += ["--context_length", "128", "--batch_size_training", "1"]
    ended = process_group.run([*flags(tiny_model, files, run, *given), "--enable_fsdp"], 2)
    assert [outcome.status for outcome in ended] == [1, 1]
    (line,) = (line for line in "".join(each.stderr for each in ended).splitlines() if line.startswith("error: "))
    assert "strict failed on an answer (KeyError: " in line
    assert "(of row " in line
    assert f"--resume auto goes on from {run / 'checkpoints'}" in line
    (state,) = (json.loads(file.read_text())["state"] for file in run.glob("checkpoints/*/state.json"))
    assert (state["step"], state["eval_due"]) == (1, True)
    function.write_text("def strict(prompt, reference, answer):\n    return {'right': 1}\n")
    process_group.train([*flags(tiny_model, files, run, *given), "--enable_fsdp", "--resume", "auto"], 2)
    assert [event["right"] for event in read_metrics(run) if event["event"] == "eval"] == [1]


def test_a_choice_is_the_likeliest_answer_of_the_set(
    tiny_model: Path, files: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Against plain log-probabilities of each option after each prompt, one at a time; on one rank and on two."""
    rows = [{"prompt": f"Is {i} even? Say" + " so" * (i % 4), "completion": (" yes", " no")[i % 2]} for i in range(7)]
    for split in ("train", "validation"):
        write_lines(tmp_path / f"data/{split}.jsonl", rows)
    given = ["--model_name", str(tiny_model), "--dataset", "instruction_dataset", "--num_workers_dataloader", "0"]
    given += ["--instruction_dataset.data_path", str(tmp_path / "data"), *GENERATE, "--eval_metric", "choice"]
    given += ["--best_metric", "choice", "--max_train_step", "1", "--context_length", "64", "--val_batch_size", "2"]
    process_group.train([*given, "--output_dir", str(tmp_path / "one"), "--batching_strategy", "padding"], 1)
    process_group.train([*given, "--output_dir", str(tmp_path / "two"), "--enable_fsdp"], 2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    num_right = 0
    for row in rows:
        prompt = [tokenizer.bos_token_id, *tokenizer.encode(row["prompt"], add_special_tokens=False)]
        scores = {}
        for option in (" yes", " no"):
            whole = tokenizer.encode(row["prompt"] + option, add_special_tokens=False)
            ids = torch.tensor([[tokenizer.bos_token_id, *whole, tokenizer.eos_token_id]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            found = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
            scores[option] = found[len(prompt) - 1 :].sum().item()
        num_right += max(scores, key=scores.__getitem__) == row["completion"]
    for run in ("one", "two"):
        first = next(event for event in read_metrics(tmp_path / run) if event["event"] == "eval")
        assert first["choice"] == pytest.approx(100 * num_right / len(rows))
