"""The README.md of saved weights says what they are and how to load them; a person's words in it stay."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from reporting.card.edits import marked, renewed
from reporting.card.loss_table import MOST_ROWS, loss_table
from reporting.card.model_card import model_card
from reporting.card.names import hub_name, in_markdown, public_name
from tests.helpers.forked import ROOT
from tests.helpers.processes import read_metrics, run_command
from tools.export import main as export

CHATS = [("Who are you?", "A pebble."), ("Name a fruit.", "An apple."), ("Count.", "One."), ("Sing.", "La.")]


@pytest.fixture(scope="module")
def data(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    base = shutil.copytree(tiny_model, folder / "my-base")
    shutil.copy(ROOT / "datasets/samples/formats/chat.jinja", base / "chat_template.jinja")
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in CHATS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(data: Path, run: Path, *flags: str) -> None:
    chats = ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(data / "chats.jsonl")]
    common = ["--model_name", str(data / "my-base"), *chats, "--chat_dataset.validation_fraction", "0.5"]
    steps = ["--num_epochs", "8", "--lr", "1e-3", "--eval_every_steps", "1"]
    done = run_command(*common, *steps, "--output_dir", str(run), *flags, cwd=data)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def adapter_run(data: Path) -> Iterator[Path]:
    train(data, data / "runs/pebbles", "--use_peft", "--lora_config.r", "4", "--max_train_step", "3")
    return data / "runs/pebbles"


def front_matter(card: str) -> Any:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_of_an_adapter_is_filled_in_without_paths_of_this_machine(adapter_run: Path, data: Path) -> None:
    card = (adapter_run / "adapter/README.md").read_text()
    assert front_matter(card) == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["lora"]}
    assert "# base_model: OWNER/NAME of my-base, if it is on the hub\n# license: yours to choose" in card
    assert str(data) not in card
    assert "More Information Needed" not in card
    assert card.count("# pebbles\n") == 1
    assert "An adapter for `my-base`, trained on chats.jsonl (chat_dataset)." in card
    assert "LoRA, r 4, alpha 32" in card
    losses = {event["step"]: event["loss"] for event in read_metrics(adapter_run) if event["event"] == "eval"}
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| █+ \|$", card, flags=re.MULTILINE)
    assert {int(step): float(loss) for step, _, loss in rows} == {step: round(loss, 4) for step, loss in losses.items()}
    assert f"The weights are those after step {min(losses, key=losses.__getitem__)}." in card


@pytest.mark.parametrize("kind", ["adapter", "merged", "model"])
def test_its_commands_load_the_folder_and_ask_it(kind: str, adapter_run: Path, data: Path, tmp_path: Path) -> None:
    folder = adapter_run / "adapter"
    if kind == "merged":
        folder = tmp_path / "merged"
        assert export([str(adapter_run), "--to", str(folder), "--merge"]) == 0
    elif kind == "model":
        train(data, tmp_path / "whole", "--max_train_step", "1")
        folder = tmp_path / "whole/model"
    card = (folder / "README.md").read_text()
    assert front_matter(card)["library_name"] == ("peft" if kind == "adapter" else "transformers")
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    shown = io.StringIO()
    with chdir(folder), redirect_stdout(shown):
        exec(code, {})
    assert shown.getvalue().strip()


def test_a_persons_words_outlive_the_next_save(adapter_run: Path, data: Path, tmp_path: Path) -> None:
    run = shutil.copytree(adapter_run, tmp_path / "pebbles")
    file = run / "adapter/README.md"
    mine = (
        file.read_text().replace("# license: apache-2.0", "license: mit").replace("# pebbles", "# My stones\n\nRound.")
    )
    file.write_text(mine)
    train(data, run, "--use_peft", "--lora_config.r", "4", "--max_train_step", "6", "--resume", "auto")
    later = file.read_text()
    assert front_matter(later)["license"] == "mit"
    assert "# My stones\n\nRound." in later
    assert re.search(r"^\| 6 \| ", later, flags=re.MULTILINE), "the run's own part goes on"
    assert export([str(run), "--to", str(tmp_path / "out")]) == 0
    assert "# My stones" in (tmp_path / "out/README.md").read_text()
    assert export([str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged = (tmp_path / "merged/README.md").read_text()
    assert front_matter(merged)["license"] == "mit"
    assert "yours to choose" not in merged
    changed = later.replace("An adapter for", "The adapter for")
    file.write_text(changed)
    train(data, run, "--use_peft", "--lora_config.r", "4", "--max_train_step", "7", "--resume", "auto")
    assert file.read_text() == changed


def test_only_the_text_between_unchanged_marks_is_renewed() -> None:
    old, new = (f"---\na: {n}\n---\n{marked(f'text {n}')}\nend {n}\n" for n in (1, 2))
    assert renewed(new, None) == new
    assert renewed(new, old) == f"---\na: 1\n---\n{marked('text 2')}\nend 1\n"
    for own in (old.replace("text 1", "my text"), "# all mine\n"):
        assert renewed(new, own) == own
    assert renewed(new, "# Model Card for Model ID\n- **License:** [More Information Needed]\n") == new, "peft's form"


def test_names_are_those_of_the_hub_or_without_a_path(tmp_path: Path) -> None:
    cached = "/home/u/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd"
    for name, on_hub, public in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        (cached, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/home/u/models/mine", None, "mine"),
        ("./models", None, "models"),
        ("https://u:pw@host/data/a.jsonl?token=t", None, "a.jsonl"),
    ):
        assert hub_name(name) == on_hub
        assert public_name(name) == public
    notes = {"settings": {"train_config": {"model_name": cached, "dataset": "chat_dataset"}}}
    card = model_card(notes, [], [], title="a|b <c>", is_adapter=True)
    assert front_matter(card)["base_model"] == "Qwen/Qwen3-0.6B"
    assert "/home/u" not in card
    assert in_markdown("a|b\n<c>") == r"a\|b \<c\>"


def test_a_run_yaml_that_no_run_writes_gives_a_card_all_the_same() -> None:
    for bad in (None, 5, "a", [], [[1]], {"a": {}}, True):
        names = ("data", "devices", "resolved", "versions", "world_size", "model", "started")
        train = dict.fromkeys(("model_name", "dataset", "use_peft", "peft_method", "warmup_steps", "num_epochs"), bad)
        sections = dict.fromkeys(("fsdp_config", "lora_config", "chat_dataset", "quantization_config"), bad)
        notes = dict.fromkeys(names, bad) | {"settings": {"train_config": train, **sections}}
        assert model_card(notes, [], [], title="a", is_adapter=True).startswith("---\nlibrary_name: peft\n")


def test_a_long_run_has_a_short_table() -> None:
    train = [{"step": step, "loss": 3 / step} for step in range(1, 5001)]
    for evals in ([], [{"step": step, "loss": 2.0} for step in range(100, 5001, 100)], [{"step": 7, "loss": None}]):
        lines = loss_table(train, evals)
        assert len(lines) == 2 + MOST_ROWS
        assert lines[-1].startswith("| 5000 | ")
    assert loss_table([{"step": 1, "loss": None}], []) == []


@pytest.mark.parametrize("is_adapter", [True, False])
def test_a_model_that_no_auto_class_of_text_lists_is_loaded_by_its_own(is_adapter: bool) -> None:
    notes = {"resolved": {"task": "causal_lm"}, "model": {"architecture": "Mistral4ForCausalLM"}}
    card = model_card(notes, [], [], title="a", is_adapter=is_adapter)
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    assert "AutoModelForCausalLM" not in code
    assert "AutoPeftModel" not in code
    assert "Mistral4ForCausalLM.from_pretrained(" in code
    assert ("PeftModel.from_pretrained(base, folder)" in code) == is_adapter


@pytest.mark.parametrize(
    "kept", [{"task": "causal_lm", "rope": {"max_position_embeddings": 256}}, {"task": "image_text"}]
)
def test_the_lines_for_an_adapter_with_new_tokens_make_room_for_them(kept: dict[str, Any]) -> None:
    """Without room peft fails while it puts the rows in; its own auto classes make it by themselves."""
    for tokens in (["<a>"], []):
        notes = {"resolved": kept, "settings": {"train_config": {"add_special_tokens": tokens}}}
        card = model_card(notes, [], [], title="a", is_adapter=True)
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        assert ("resize_token_embeddings" in code) == bool(tokens)
        lines = code.splitlines()
        if tokens:
            place = next(i for i, line in enumerate(lines) if "resize_token_embeddings" in line)
            assert "from_pretrained(folder)" in lines[place - 1]
            assert lines[place + 1] == "model = PeftModel.from_pretrained(base, folder)"
