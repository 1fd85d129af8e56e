"""A whole run on conversations, with a template that drops earlier thoughts as Qwen 3's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetuning
from tests.helpers.chat_templates import REWRITING
from tests.helpers.processes import read_metrics

THOUGHTFUL = REWRITING["empty thought"]
SYSTEM = {"role": "system", "content": "Be brief."}


def conversation(number: int) -> list[dict[str, Any]]:
    """Two questions; the second answer has no thoughts."""
    return [
        SYSTEM,
        {"role": "user", "content": f"What follows {number}?"},
        {"role": "assistant", "reasoning_content": f"I add one to {number}.", "content": f"It is {number + 1}."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": f"Then {number + 2}."},
    ]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, numbers in (("train", range(12)), ("validation", range(20, 24))):
        rows = [json.dumps({"messages": conversation(number)}) + "\n" for number in numbers]
        (folder / f"{split}.jsonl").write_text("".join(rows))
    (folder / "thoughtful.jinja").write_text(THOUGHTFUL.template)
    return folder


def turns_as_the_model_meets_them(number: int, tokenizer: Any) -> list[tuple[str, str]]:
    """The prompt of each answer, and the answer up to its end token, by the template alone."""
    turns, found = conversation(number), []
    for place in (2, 4):
        prompt = tokenizer.apply_chat_template(turns[:place], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(turns[: place + 1], tokenize=False)
        assert whole.startswith(prompt)
        found.append((prompt, whole.removeprefix(prompt).removesuffix("\n")))
    return found


def mean_loss(model: Any, tokenizer: Any, numbers: range) -> float:
    """Over the answers' tokens, each turn by itself."""
    losses = []
    for prompt, answer in (turn for number in numbers for turn in turns_as_the_model_meets_them(number, tokenizer)):
        encoded = tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["offset_mapping"])
        is_answer = offsets[:, 1] > len(prompt)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        losses.append(each[is_answer[1:]])
    return torch.cat(losses).mean().item()


def test_each_answer_is_learned_as_the_model_meets_it_and_the_run_shows_it(
    chats: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--dataset", "chat_dataset"]
    words += ["--chat_dataset.data_path", str(chats), "--add_special_tokens", ",".join(THOUGHTFUL.tokens)]
    words += ["--chat_dataset.chat_template", str(chats / "thoughtful.jinja"), "--context_length", "256"]
    words += ["--num_workers_dataloader", "0", "--num_epochs", "2", "--lr", "1e-2", "--show_sample"]
    assert finetuning.main(words) == 0
    events = read_metrics(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")

    assert (events[0]["num_train_samples"], events[0]["num_eval_samples"]) == (24, 8), "one sample for each answer"
    out = capsys.readouterr().out
    assert "12 turn by turn, in several samples" in out
    shown = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["data"]["first_sample"]
    samples = [
        f"[sample {number} of 2 of the first conversation]\n{prompt}[learned]{answer}[/learned]\n"
        for number, (prompt, answer) in enumerate(turns_as_the_model_meets_them(0, tokenizer), 1)
    ]
    # Decoding puts a space behind a special token.
    assert "".join(shown.split()) == "".join("".join(samples).split())
    assert "<think>\nI add one to 0.\n</think>" in samples[0]
    assert "I add one" not in samples[1], "an earlier thought is not what the model will see"
    assert "[sample 2 of 2 of the first conversation]" in out

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32).eval()
    best = min(event["loss"] for event in events if event["event"] == "eval")
    assert mean_loss(model, tokenizer, range(20, 24)) == pytest.approx(best, rel=1e-5)
    trained = [event["loss"] for event in events if event["event"] == "train"]
    assert trained[-1] < trained[0] - 0.3
