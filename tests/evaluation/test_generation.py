"""Generation at evaluation: texts and ROUGE are those of plain transformers, on however many ranks they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.dataset_functions import BUILT_IN_FOLDER, load_dataset_file
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.refusals import dialogues, write_lines
from tests.helpers.short_of_memory import without_memory

NUM_ROWS, MAX_NEW_TOKENS = 11, 12
ROUGES = ("rouge1", "rouge2", "rougeL")
GENERATE = ["--eval_generate", "--max_new_tokens", str(MAX_NEW_TOKENS), "--eval_before_training"]


def rows_of_many_lengths(count: int) -> list[dict[str, str]]:
    """Prompts of several lengths, so that batches have padding."""
    return [row | {"dialogue": "Ann: Hm.\n" * (7 * i % 5) + row["dialogue"]} for i, row in enumerate(dialogues(count))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths")
    write_lines(folder / "train.jsonl", rows_of_many_lengths(30))
    write_lines(folder / "validation.jsonl", rows_of_many_lengths(NUM_ROWS))
    return folder


def flags(model: Path, data: Path, output: Path, *given: str) -> list[str]:
    argv = ["--model_name", str(model), "--samsum_dataset.data_path", str(data), "--output_dir", str(output)]
    return [*argv, "--num_workers_dataloader", "0", "--context_length", "128", *given]


@pytest.fixture(scope="module")
def taught(tiny_model: Path, data: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after some steps: it says what Bob says, and not always the right number."""
    run = tmp_path_factory.mktemp("taught") / "run"
    given = ["--max_train_step", "60", "--num_epochs", "60", "--lr", "5e-3", "--run_validation", "False"]
    process_group.train(flags(tiny_model, data, run, *given, "--batch_size_training", "1"), 1)
    return run / "model"


def evaluation(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The `eval` event before training, and the lines of samples.jsonl that belong to it."""
    (event,) = (e for e in read_metrics(run) if e["event"] == "eval" and e["step"] == 0)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return event, [line for line in lines if line["step"] == 0]


@pytest.fixture(scope="module")
def alone(taught: Path, data: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    given = [*GENERATE, "--max_train_step", "1", "--save_model", "False", "--val_batch_size", "3"]
    process_group.train(flags(taught, data, run, *given), 1)
    return run


def test_texts_are_those_of_plain_transformers_and_rouge_that_of_rouge_score(
    alone: Path, taught: Path, data: Path
) -> None:
    """One prompt at a time, without padding."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(taught), AutoTokenizer.from_pretrained(taught)
    template = load_dataset_file(BUILT_IN_FOLDER / "samsum.py").PROMPT
    scorer, scores, texts = RougeScorer(list(ROUGES), use_stemmer=True), [], []
    rows = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    for row in rows:
        prompt = template.format(dialogue=row["dialogue"])
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]])
        output = model.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
        scores.append(scorer.score(row["summary"], texts[-1]))
    event, samples = evaluation(alone)
    for name in ROUGES:
        assert event[name] == pytest.approx(100 * sum(score[name].fmeasure for score in scores) / NUM_ROWS, rel=1e-12)
    assert 10 < event["rougeL"] < 100
    assert len(samples) == 8
    for sample in samples:
        assert sample["dataset"] == "samsum_dataset"
        place = sample["row"] - 1
        assert sample["generated"] == texts[place]
        assert sample["reference"] == rows[place]["summary"]
        assert sample["prompt"].endswith(template.format(dialogue=rows[place]["dialogue"]))
        assert sample["rougeL"] == 100 * scores[place]["rougeL"].fmeasure


LAYOUTS = {
    "ddp": (3, []),
    "full": (2, ["--enable_fsdp"]),
    "full, short of memory": (2, ["--enable_fsdp"]),
    "padded, offloaded": (2, ["--enable_fsdp", "--fsdp_cpu_offload", "--batching_strategy", "padding"]),
    "compiled": (2, ["--enable_fsdp", "--sharding_strategy", "SHARD_GRAD_OP", "--compile"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_work_and_change_no_text_and_no_figure(
    layout: str, alone: Path, taught: Path, data: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Eleven samples in batches of three: the last rank gets less, and in one case nothing in the last round."""
    ranks, given = LAYOUTS[layout]
    given = [*given, *GENERATE, "--max_train_step", "1", "--save_model", "False", "--val_batch_size", "3"]
    argv = flags(taught, data, tmp_path / "run", *given)
    process_group.train(without_memory(argv) if "short" in layout else argv, ranks)
    event, samples = evaluation(tmp_path / "run")
    expected, expected_samples = evaluation(alone)
    assert {name: event[name] for name in ROUGES} == {name: expected[name] for name in ROUGES}
    assert samples == expected_samples


def test_generating_changes_no_bit_of_the_training(
    tiny_model: Path, data: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Not dropout's random numbers, not which weights are sharded, not the mode of the model."""
    losses = []
    for name, given in (("with", [*GENERATE, "--num_beams", "2"]), ("without", ["--eval_before_training"])):
        argv = flags(tiny_model, data, tmp_path / name, *given, "--enable_fsdp", "--eval_every_steps", "2")
        argv += ["--use_peft", "--lora_config.lora_dropout", "0.3", "--max_train_step", "5", "--lr", "1e-2"]
        process_group.train([*argv, "--batch_size_training", "1"], 2)
        losses.append([event["loss"] for event in train_events(tmp_path / name)])
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]
