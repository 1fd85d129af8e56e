"""What a run shows of its data before it trains: one sample, what is learned of it marked, and the figures."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

import finetuning
from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from data.batches.rows import make_rows
from data.batches.step_loader import StepLoader
from data.sequences.causal import build_sequences
from data.sequences.pairs import build_pairs
from data.sequences.tokenized import Sequences
from data.tokens.loss_mask import tokenize_spans
from data.tokens.spans import TextSpan
from reporting.data_preview import (
    SHOWN_TOKENS,
    coloured,
    figures_table,
    marked,
    row_figures,
    sample_spans,
    split_figures,
)
from tasks.causal_batches import Collator
from tests.helpers.chat_templates import REWRITING

ChatDataset = DATASETS["chat_dataset"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def examples_of(ids: list[int], labels: list[int] | None = None, **more: Any) -> Sequences:
    rows = [{"input_ids": ids, "labels": ids if labels is None else labels}]
    return build_sequences(rows, name="test", context_length=100_000, **more)


def test_the_answer_is_marked_with_its_end_token(tokenizer: Any) -> None:
    prompt, answer = tokenizer.encode("What is it?\n"), [*tokenizer.encode("A cat."), tokenizer.eos_token_id]
    spans = sample_spans(examples_of([*prompt, *answer], [-100] * len(prompt) + answer), tokenizer)
    assert marked(spans) == "What is it?\n[learned]A cat.</s>[/learned]"


def test_every_turn_of_the_assistant_is_marked(tokenizer: Any) -> None:
    ids, labels = [], []
    for text, is_learned in (("one", False), ("two", True), ("three", False), ("four", True)):
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        labels += part if is_learned else [-100] * len(part)
    text = marked(sample_spans(examples_of(ids, labels), tokenizer))
    assert text == "one[learned] two[/learned] three[learned] four[/learned]"


@given(text=st.text(min_size=1, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_spans_are_the_whole_text_wherever_they_are_cut(tokenizer: Any, text: str, data: st.DataObject) -> None:
    """Characters of several tokens, too: no character is lost, doubled or broken."""
    ids = [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    learned = data.draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
    labels = [-100, *(i if is_learned else -100 for i, is_learned in zip(ids[1:], [*learned[:-1], True], strict=True))]
    spans = sample_spans(examples_of(ids, labels), tokenizer)
    whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    shown = "".join(span.text for span in spans)
    codes = [c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in whole]
    assert shown == "".join(codes)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_both_texts_of_a_pair_are_shown_whole(tokenizer: Any, shares_prompts: bool) -> None:
    prompt, *answers = (tokenizer.encode(text, add_special_tokens=False) for text in ("Is it?", " Yes.", " No."))
    row = {
        "input_ids": [token for answer in answers for token in (*prompt, *answer)],
        "labels": [token for answer in answers for token in (*[-100] * len(prompt), *answer)],
        "sample_lengths": [len(prompt) + len(answer) for answer in answers],
    }
    pairs = build_pairs([row], name="x", context_length=64, shares_prompts=shares_prompts)
    assert marked(sample_spans(pairs, tokenizer)) == (
        "[chosen]\nIs it?[learned] Yes.[/learned]\n[rejected]\nIs it?[learned] No.[/learned]"
    )


def test_what_would_steer_the_terminal_is_not_printed(tokenizer: Any) -> None:
    ids = tokenizer.encode("a\x1b[2Jb\rc\n\td", add_special_tokens=False)
    text = "".join(span.text for span in sample_spans(examples_of(ids), tokenizer))
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.endswith("a\\x1b[2Jb\\rc\n\td"), "shown by their codes"


def test_all_samples_of_the_first_conversation_are_shown() -> None:
    """With a call, its result and an answer: what is learned of each turn is seen at once."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Lima"}}}]},
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "No."},
    ]
    tokenizer = REWRITING["empty thought"].tokenizer()
    samples = chat_samples(read_conversation({"messages": turns}, ChatDataset()), ChatTemplate.of(tokenizer))
    ids, labels, _ = tokenize_spans(samples.spans, tokenizer)
    row: dict[str, Any] = {"input_ids": np.concatenate(ids), "labels": np.concatenate(labels)}
    row |= {"sample_lengths": [len(part) for part in ids], "num_by_turns": 1}
    text = marked(sample_spans(build_sequences([row], name="test", context_length=999), tokenizer))
    first, second = text.split("\n[sample 2 of 2 of the first conversation]\n")
    thought = "<think>\n\n</think>\n\n"
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Lima"}}</tool_call>'
    assert first.startswith("[sample 1 of 2 of the first conversation]\n<|im_start|>user\nRain?<|im_end|>")
    assert f"<|im_start|>assistant\n[learned]{thought}{call}<|im_end|>[/learned]" in first
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\ndry<|im_end|>" in second
    assert f"<|im_start|>assistant\n[learned]{thought}No.<|im_end|>[/learned]" in second


def test_of_a_long_sample_the_beginning_and_the_end_are_shown(tokenizer: Any) -> None:
    (x,) = tokenizer.encode("x", add_special_tokens=False)[-1:]
    spans = sample_spans(examples_of([x] * 5000, [-100] * 4000 + [x] * 1000), tokenizer)
    assert [span.has_loss for span in spans] == [False, False, True]
    assert f"[... {5000 - SHOWN_TOKENS:,} tokens ...]" in spans[1].text
    assert len(spans[0].text.replace(" ", "")) == len(spans[2].text.replace(" ", "")) == SHOWN_TOKENS // 2


def test_on_a_terminal_the_learned_part_has_a_colour_and_no_marks() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(coloured([TextSpan("[why] ", False), TextSpan("because", True)]))
    assert console.file.getvalue() == "[why] \x1b[1;32mbecause\x1b[0m\n"  # type: ignore[attr-defined]


def test_figures_are_those_of_a_plain_count() -> None:
    rows = [{"input_ids": [5] * n, "labels": [-100] + [5] * (n - 1)} for n in range(2, 102)]
    figures = split_figures(build_sequences([*rows, {"input_ids": [5], "labels": [5]}], name="test", context_length=99))
    assert figures["lengths"] == {"min": 2, "p50": 51, "p90": 91, "p99": 99, "max": 99}
    assert figures["num_samples"] == 100
    assert figures["num_tokens"] == figures["num_label_tokens"] + 100 == sum(range(2, 100)) + 2 * 99
    assert (figures["num_truncated"], figures["num_tokens_cut"], figures["num_without_label"]) == (2, 3, 1)
    text = _printed(figures_table({"train": figures, "validation": None}))
    assert "train 5,047 of 5,147 tokens (98 %)" in text
    assert "train 2 to 99 tokens, half up to 51, 90 % up to 91, 99 % up to 99" in text


def test_a_stream_without_validation_has_no_figures_and_no_empty_lines() -> None:
    assert figures_table({"train": {"streamed": True}, "validation": None}).row_count == 0


def _printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["packing", "padding"])
def test_the_share_of_padding_is_that_of_the_batches_that_are_trained_on(strategy: str) -> None:
    rows = [{"input_ids": [5] * n, "labels": [5] * n} for n in range(2, 60)]
    examples = build_sequences(rows, name="test", context_length=64)
    layout, width = BatchLayout(3, 2, 2), PaddedWidth(8, 64)
    of_strategy = make_rows(examples, batching_strategy=strategy, context_length=64)
    figures = row_figures(of_strategy, layout, width, seed=4)
    if strategy == "packing":
        assert figures == {"fill": round(len(examples.input_ids) / (len(of_strategy) * 64), 4)}
        return
    places = 0
    for rank in range(2):
        collate = Collator(packing=False, padding_id=0, width=width)
        steps = StepLoader(of_strategy, layout, rank=rank, seed=4, collate=collate).epoch(0)
        places += sum(batch.input_ids.numel() for step in steps for batch in step if batch.num_tokens)
    assert figures["padding_share"] == pytest.approx(1 - len(examples.input_ids) / places, abs=1e-4)


RECIPE = """
def get_rows(dataset_config, tokenizer, split):
    ids = tokenizer.encode("Why? Because.", add_special_tokens=False)
    row = {"input_ids": ids, "labels": [-100] * (len(ids) - 2) + ids[-2:]}
    long = {"input_ids": ids * 9, "labels": ids * 9}
    return [row, row, long, {"input_ids": ids, "labels": [-100] * len(ids)}]
"""


def start(model: Path, folder: Path, *given: str) -> int:
    (folder / "rows.py").write_text(RECIPE)
    argv = ["--model_name", str(model), "--output_dir", str(folder / "run"), "--dataset", f"{folder}/rows.py:get_rows"]
    argv += [
        "--num_workers_dataloader",
        "0",
        "--max_train_step",
        "1",
        "--save_model",
        "False",
        "--run_validation",
        "False",
    ]
    return finetuning.main([*argv, "--context_length", "16", *given])


def test_a_run_prints_the_first_sample_and_keeps_it(
    tiny_model: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tiny_model, tmp_path) == 0
    printed = capsys.readouterr().out
    data = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["data"]
    assert re.fullmatch(r"Why\? .*\[learned\].*\.\[/learned\]", data["first_sample"])
    assert data["first_sample"] in printed
    assert data["train"]["num_samples"] == 3
    assert data["train"]["num_truncated"] == data["train"]["num_without_label"] == 1
    assert data["validation"] is None
    assert re.search(rf"^packing +training rows are {100 * data['train']['fill']:.1f} % full", printed, re.MULTILINE)
    assert re.search(r"^lengths +train \d+ to 16 tokens, half up to", printed, re.MULTILINE)
    assert printed.index("first training sample") < printed.index("\nmodel ")


def test_the_sample_can_be_left_out_and_the_figures_stay(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tiny_model, tmp_path, "--show_sample", "False", "--truncation", "drop") == 0
    printed = capsys.readouterr().out
    assert "Why?" not in printed
    assert "train: 1 sample left out: longer than context_length (--truncation drop)" in printed
    run_yaml = (tmp_path / "run/run.yaml").read_text()
    assert "Why?" not in run_yaml
    data = yaml.safe_load(run_yaml)["data"]
    assert (data["train"]["num_samples"], data["train"]["num_too_long"]) == (2, 1)


def test_a_sample_that_is_too_long_is_refused_where_that_is_asked_for(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tiny_model, tmp_path, "--truncation", "error") == 2
    assert re.search(r"error: .*row 3: \d+ tokens are more than --context_length 16; raise it", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
