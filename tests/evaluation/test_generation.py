"""Generation at evaluation: texts and ROUGE are those of plain transformers, on however many ranks they are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.datasets import BUILT_IN_FOLDER
from data.dataset_functions.importing import load_dataset_file
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.generated import GENERATE, MAX_NEW_TOKENS, NUM_ROWS, ROUGES, evaluation, flags, write_rows
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.short_of_memory import without_memory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("lengths"))


def causal_flags(model: Path, data: Path, output: Path, *given: str) -> list[str]:
    return flags(model, data, output, "--context_length", "128", *given)


@pytest.fixture(scope="module")
def taught(tiny_model: Path, data: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after some steps: it says what Bob says, and not always the right number."""
    run = tmp_path_factory.mktemp("taught") / "run"
    given = ["--max_train_step", "60", "--num_epochs", "60", "--lr", "5e-3", "--run_validation", "False"]
    process_group.train(causal_flags(tiny_model, data, run, *given, "--batch_size_training", "1"), 1)
    return run / "model"


@pytest.fixture(scope="module")
def alone(taught: Path, data: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    given = [*GENERATE, "--max_train_step", "1", "--save_model", "False", "--val_batch_size", "3"]
    process_group.train(causal_flags(taught, data, run, *given), 1)
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
    rouge, samples = evaluation(alone)
    for name in ROUGES:
        assert rouge[name] == pytest.approx(100 * sum(score[name].fmeasure for score in scores) / NUM_ROWS, rel=1e-12)
    assert 10 < rouge["rougeL"] < 100
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


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in LAYOUTS]
)
def test_ranks_share_the_work_and_change_no_text_and_no_figure(
    layout: str, alone: Path, taught: Path, data: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Eleven samples in batches of three: the last rank gets less, and in one case nothing in the last round."""
    ranks, given = LAYOUTS[layout]
    given = [*given, *GENERATE, "--max_train_step", "1", "--save_model", "False", "--val_batch_size", "3"]
    argv = causal_flags(taught, data, tmp_path / "run", *given)
    how = {"full, short of memory": without_memory, "compiled": with_aot_eager}
    process_group.train(how[layout](argv) if layout in how else argv, ranks)
    assert evaluation(tmp_path / "run") == evaluation(alone)


def test_generating_changes_no_bit_of_the_training(
    tiny_model: Path, data: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Not dropout's random numbers, not which weights are sharded, not the mode of the model."""
    losses = []
    for name, given in (("with", [*GENERATE, "--num_beams", "2"]), ("without", ["--eval_before_training"])):
        argv = causal_flags(tiny_model, data, tmp_path / name, *given, "--enable_fsdp", "--eval_every_steps", "2")
        argv += ["--use_peft", "--lora_config.lora_dropout", "0.3", "--max_train_step", "5", "--lr", "1e-2"]
        process_group.train([*argv, "--batch_size_training", "1"], 2)
        losses.append([event["loss"] for event in train_events(tmp_path / name)])
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]
