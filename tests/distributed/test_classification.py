"""Classification: losses and gradient norms of a plain loop of transformers in every layout, and what a run leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests.helpers import labeled_texts
from tests.helpers.documented import commands
from tests.helpers.labeled_texts import write_rows, write_split
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, train_events
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal
from tests.helpers.text_models import save_text_model
from tools.export import main as export

NUM_STEPS, NUM_TEXTS, SEED = 3, 23, 3  # no multiple of any batch below
LR, MOMENTUM = 0.1, 0.9  # of SGD: AdamW makes steps of gradients' rounding
KINDS = {"classes": labeled_texts.classes, "several": labeled_texts.several, "numbers": labeled_texts.numbers}
LORA = ("--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0")
SHARDED, REPLICATED = ("--enable_fsdp",), ("--enable_fsdp", "--sharding_strategy", "NO_SHARD")
PADDED, PACKED = ("--batching_strategy", "padding"), ("--batching_strategy", "packing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Data and models by name."""
    folder = tmp_path_factory.mktemp("classification")
    for name, rows_of in KINDS.items():
        write_rows(folder / name, rows_of, NUM_TEXTS, 7)
    for family in ("llama", "roberta", "deberta"):
        for number in (1, 3):
            save_text_model(folder / f"{family}-{number}", family, tiny_model, num_labels=number)
    return folder


def flags_of(folder: Path, family: str, kind: str, output: Path, *flags: str) -> list[str]:
    model = folder / f"{family}-{1 if kind == 'numbers' else 3}"
    defaults = {
        "--task": "text_classification",
        "--model_name": str(model),
        "--dataset": "classification_dataset",
        "--classification_dataset.data_path": str(folder / kind),
        "--output_dir": str(output),
        "--num_workers_dataloader": "0",
        "--context_length": "100",
        "--lr": str(LR),
        "--optimizer": "SGD",
        "--momentum": str(MOMENTUM),
        "--seed": str(SEED),
        "--global_batch_size": "24",
        "--batch_size_training": "3",
        "--num_epochs": str(NUM_STEPS),
        "--gamma": "1.0",
        "--mixed_precision": "False",
    }
    return [*(word for flag, value in defaults.items() if flag not in flags for word in (flag, value)), *flags]


def padded(folder: Path, kind: str, split: str, model: Path) -> tuple[Any, torch.Tensor]:
    """All texts of a split, as the tokenizer pads them, and their labels."""
    rows = [json.loads(line) for line in (folder / kind / f"{split}.jsonl").read_text().splitlines()]
    inputs = AutoTokenizer.from_pretrained(model)([row["text"] for row in rows], padding=True, return_tensors="pt")
    names = sorted(labeled_texts.MOODS)
    if kind == "numbers":
        return inputs, torch.tensor([row["label"] for row in rows])
    if kind == "several":
        return inputs, torch.tensor([[float(name in row["label"]) for name in names] for row in rows])
    return inputs, torch.tensor([names.index(row["label"]) for row in rows])


def plain_loop(folder: Path, family: str, kind: str, *, lora: bool = False) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, by transformers' own loss over all texts at once; then the loss of the
    validation set, and its accuracy or squared error."""
    torch.manual_seed(SEED)
    path = folder / f"{family}-{1 if kind == 'numbers' else 3}"
    types = {"classes": "single_label_classification", "several": "multi_label_classification", "numbers": "regression"}
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, problem_type=types[kind], dtype=torch.float32)
    if lora:
        targets = ["q_proj", "v_proj"] if family == "llama" else ["query", "value"]
        settings = peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=targets, task_type="SEQ_CLS")
        model = peft.get_peft_model(model, settings)
        torch.manual_seed(SEED)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.reset_lora_parameters("default", init_lora_weights=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    inputs, labels = padded(folder, kind, "train", path)
    model.train()
    results = []
    for _ in range(NUM_STEPS):
        loss = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    inputs, labels = padded(folder, kind, "validation", path)
    model.eval()
    with torch.no_grad():
        output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
    right = {
        "classes": lambda: (output.logits.argmax(-1) == labels).float().mean().item(),
        "several": lambda: ((output.logits > 0) == labels.bool()).all(-1).float().mean().item(),
        "numbers": lambda: ((output.logits[:, 0] - labels) ** 2).mean().item(),
    }[kind]()
    return [*results, (output.loss.item(), right)]


CASES = [
    ("llama", "classes", 1, (*PADDED, "--global_batch_size", "24")),
    ("llama", "classes", 2, (*PACKED, *SHARDED, "--batch_size_training", "1")),
    ("llama", "several", 2, (*PADDED, *REPLICATED, "--batch_size_training", "2")),
    ("llama", "numbers", 2, (*PACKED, *REPLICATED, "--batch_size_training", "4")),
    ("roberta", "several", 1, ("--batch_size_training", "24")),
    ("roberta", "classes", 2, (*SHARDED, "--batch_size_training", "4")),
    ("roberta", "numbers", 2, (*REPLICATED, "--batch_size_training", "12")),
    ("llama", "classes", 2, (*PACKED, *SHARDED, *LORA)),
    ("roberta", "several", 2, (*SHARDED, *LORA)),
    ("deberta", "classes", 2, (*REPLICATED, "--batch_size_training", "6")),
]


@pytest.mark.parametrize(("family", "kind", "ranks", "flags"), CASES)
def test_steps_are_those_of_a_plain_loop(
    family: str,
    kind: str,
    ranks: int,
    flags: tuple[str, ...],
    folder: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    process_group.train(flags_of(folder, family, kind, tmp_path / "run", *flags), ranks)
    *steps, (loss, figure) = plain_loop(folder, family, kind, lora="--use_peft" in flags)
    events = train_events(tmp_path / "run")
    assert len(events) == NUM_STEPS
    for event, (wanted, norm) in zip(events, steps, strict=True):
        assert event["loss"] == pytest.approx(wanted, rel=1e-5)
        assert event["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert (event["num_samples"], event["num_label_tokens"]) == (NUM_TEXTS, 0)
        assert "perplexity" not in event
    evaluation = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"][-1]
    assert evaluation["num_samples"] == 7
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    assert evaluation["mse" if kind == "numbers" else "accuracy"] == pytest.approx(figure, rel=1e-5)


def test_a_killed_run_goes_on_bit_for_bit(folder: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    def flags(output: Path, *more: str) -> list[str]:
        more = (*PACKED, *LORA, *SHARDED, "--batch_size_training", "1", "--global_batch_size", "2", *more)
        saving = ("--num_epochs", "3", "--save_every_steps", "3", "--keep_last", "9", "--run_validation", "False")
        return flags_of(folder, "llama", "classes", output, *more, *saving)

    process_group.train(flags(tmp_path / "whole"), 2)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    process_group.train(flags(killed, "--resume", "auto"), 2)
    assert_bit_equal(killed, tmp_path / "whole")


def test_texts_that_fill_a_row_are_tried_in_shorter_pieces(
    folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    more = ("--context_length", "8", "--max_train_step", "1", "--batch_size_training", "1", "--global_batch_size", "1")
    process_group.train(flags_of(folder, "llama", "classes", tmp_path / "run", *PACKED, *more), 1)
    assert train_events(tmp_path / "run")[0]["num_samples"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_learns_generated_texts(
    kind: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    write_rows(tmp_path / kind, KINDS[kind])
    argv = ["--task", "text_classification", "--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run")]
    argv += ["--dataset", "classification_dataset", "--classification_dataset.data_path", str(tmp_path / kind)]
    argv += ["--context_length", "64", "--lr", "3e-3", "--num_workers_dataloader", "0", "--batch_size_training", "1"]
    argv += ["--num_epochs", "2", "--best_metric", "correlation" if kind == "numbers" else "macro_f1"]
    process_group.train(argv, 1)
    evaluation = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"][-1]
    if kind == "numbers":
        assert evaluation["correlation"] > 0.9
        return
    assert evaluation["accuracy"] >= 0.95
    classify = pipeline("text-classification", model=str(tmp_path / "run/model"))
    found = classify(["they walked happy home happy", "the angry rain angry", "late"], batch_size=3, top_k=None)
    assert [max(scores, key=lambda one: one["score"])["label"] for scores in found[:2]] == ["glad", "sad"]
    assert {one["label"] for one in found[0]} == {"flat", "glad", "sad"}


def test_an_adapter_keeps_its_head_and_merges_into_a_classifier(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    write_rows(tmp_path / "data", labeled_texts.classes)
    argv = ["--task", "text_classification", "--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run")]
    argv += ["--dataset", "classification_dataset", "--classification_dataset.data_path", str(tmp_path / "data")]
    argv += ["--context_length", "64", "--lr", "1e-2", "--num_workers_dataloader", "0", "--batch_size_training", "1"]
    process_group.train([*argv, *LORA, "--num_epochs", "3"], 1)
    settings = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["classifier", "score"])
    overrides = json.loads((tmp_path / "run/adapter/label_overrides.json").read_text())
    assert overrides["id2label"] == {"0": "flat", "1": "glad", "2": "sad"}
    loaded = _by_its_card(tmp_path / "run/adapter")
    inputs = loaded["tokenizer"]("they walked happy home happy", return_tensors="pt")
    assert loaded["model"].config.id2label[int(loaded["model"](**inputs).logits.argmax())] == "glad"
    assert export([str(tmp_path / "run/adapter"), "--merge", "--to", str(tmp_path / "merged"), "--verify"]) == 0
    classify = pipeline("text-classification", model=str(tmp_path / "merged"))
    found = classify(["they walked happy home happy", "the angry rain angry"], batch_size=2)
    assert [one["label"] for one in found] == ["glad", "sad"]
    more = [*argv, "--use_peft", "--from_peft_checkpoint", str(tmp_path / "run/adapter"), "--max_train_step", "1"]
    more[more.index(str(tmp_path / "run"))] = str(tmp_path / "more")
    (resumed,) = process_group.train([*more, "--eval_before_training"], 1)
    assert "of a new head drawn at random" not in resumed.stdout  # it is the adapter's
    before = next(event for event in read_metrics(tmp_path / "more") if event["event"] == "eval")
    best = min(event["loss"] for event in read_metrics(tmp_path / "run") if event["event"] == "eval")
    assert before["loss"] == pytest.approx(best, rel=1e-5), "trained on from where it was"
    write_split(tmp_path / "other.jsonl", [{"text": "a", "label": name} for name in ("glad", "sad", "calm")])
    more[more.index(str(tmp_path / "data"))] = str(tmp_path / "other.jsonl")
    more[more.index(str(tmp_path / "more"))] = str(tmp_path / "other")
    (refused,) = process_group.run(more, 1)
    assert refused.status == 2
    assert "the head of this adapter has the classes flat, glad, sad, and the labels of" in refused.stderr


def _by_its_card(folder: Path) -> dict[str, Any]:
    """What the lines of Python in the adapter's README.md define."""
    (lines,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(lines.replace('folder = "."', f"folder = {str(folder)!r}"), found)
    return found


def test_what_has_no_meaning_is_refused(folder: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    write_split(tmp_path / "rows.jsonl", [{"text": "a", "mark": 1}, {"text": "b", "mark": 2}])
    said = {
        ("--eval_generate",): "--eval_generate: nothing is generated with --task text_classification",
        ("--truncation", "split"): "--truncation: split makes several samples of one text",
        ("--best_metric", "rougeL"): "--best_metric: rougeL needs --eval_generate",
        ("--best_metric", "recall"): "--best_metric: 'recall' is not one of eval_loss, accuracy, macro_f1, mse",
        ("--dataset", "samsum_dataset,classification_dataset"): "samsum_dataset has no labels of whole texts",
        ("--task", "causal_lm"): "has labels of whole texts, and --task causal_lm learns tokens",
        ("--classification_dataset.data_path", str(tmp_path / "rows.jsonl")): "has no column label; it has text, mark",
        ("--class_weights", "unheard=2"): "--class_weights: unheard is no class",
        ("--batching_strategy", "packing"): "--batching_strategy: packing is for causal language models",
    }
    for flags, wanted in said.items():
        family = "roberta" if flags[-1] == "packing" else "llama"
        (outcome,) = process_group.run(flags_of(folder, family, "classes", tmp_path / "run", *flags), 1)
        assert outcome.status == 2, outcome.stderr
        assert wanted in outcome.stderr, outcome.stderr


def test_the_documented_command_is_planned_and_trains(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    line = next(line for line in commands([ROOT / "docs/classification.md"]) if "moods.csv" in line)
    argv = [word.replace("datasets/samples", str(ROOT / "datasets/samples")) for word in line.split()[2:]]
    argv[argv.index("M")] = str(tiny_model)
    argv += ["--num_workers_dataloader", "0"]
    (planned,) = process_group.train([*argv, "--dry_run", "--dry_run_json", str(tmp_path / "plan.json")], 1)
    assert "LlamaForSequenceClassification" in planned.stdout
    process_group.train([*argv, "--output_dir", str(tmp_path / "run")], 1)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    assert config["problem_type"] == "single_label_classification"


def test_a_run_without_a_figure_to_be_the_best_by_says_so_when_it_ends_early(
    folder: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    write_rows(tmp_path / "rows", labeled_texts.numbers, 8, 1)  # one text has no correlation
    flags = flags_of(folder, "llama", "numbers", tmp_path / "run", "--best_metric", "correlation")
    flags[flags.index("--classification_dataset.data_path") + 1] = str(tmp_path / "rows")
    (outcome,) = process_group.train([*flags, "--early_stopping_patience", "2"], 1)
    assert "ended after step 2 of 3: 2 evaluations in a row had no correlation that could be the best" in outcome.stdout


def test_a_run_is_not_resumed_with_other_names_of_classes(
    folder: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    write_rows(tmp_path / "rows", labeled_texts.classes, NUM_TEXTS, 7)
    flags = flags_of(folder, "llama", "classes", tmp_path / "run", "--classification_dataset.data_path")
    flags = [*flags, str(tmp_path / "rows"), "--resume", "auto", "--max_train_step"]
    process_group.train([*flags, "1"], 1)
    for file in (tmp_path / "rows").iterdir():
        file.write_text(file.read_text().replace('"glad"', '"good"'))
    (outcome,) = process_group.run([*flags, "2"], 1)
    assert outcome.status == 2
    assert "would change the result: the training data: other classes; give what was given there" in outcome.stderr
