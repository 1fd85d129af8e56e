"""The commands of docs/tasks.md and docs/images.md run as they are written, on tiny models."""

from __future__ import annotations

import json
import shlex
import tarfile
from pathlib import Path

import pytest

from tests.helpers.documented import commands
from tests.helpers.image_chat_reference import write_conversations
from tests.helpers.image_chats import save_chat_model
from tests.helpers.image_models import save_image_model, save_pictures
from tests.helpers.made import Made
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics
from tests.helpers.refusals import dialogues, write_lines
from tests.helpers.seq2seq_models import save_seq2seq
from tools.generate import main as generate

COMMANDS = commands([ROOT / "docs/tasks.md", ROOT / "docs/images.md"])
MOST_RANKS = 2  # of the four that a command is for
MODELS = {
    "facebook/bart": "bart",
    "google/flan-t5": "flan-t5",
    "Salesforce/blip2": "blip2_opt",
    "Qwen/Qwen2.5-VL": "qwen2_5_vl",
}
SAVE = {"blip2_opt": save_image_model, "qwen2_5_vl": save_chat_model}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return Made(lambda name: SAVE.get(name, save_seq2seq)(name, folder / name))


# One of each kind of model; the two others are the same by other flags.
FAST = [command for command in COMMANDS if "bart" in command or ("blip2-opt" in command and "python" in command[:6])]


def write_chats(folder: Path) -> Path:
    """The data of all commands with conversations, in the working directory; a picture of them."""
    pictures = folder / "coco/train2017"
    rows = [json.loads(line) for line in write_conversations(pictures, 8).read_text().splitlines()]
    chats = [row | {"images": [str(pictures / name) for name in row["images"]]} for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    shown, names = next(row for row in rows if row["images"]), {"user": "human", "assistant": "gpt"}
    says = [{"from": names[turn["role"]], "value": turn["content"]} for turn in shown["messages"]]
    (folder / "llava.json").write_text(json.dumps([{"image": shown["images"], "conversations": says}] * 4))
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards/0.tar", "w") as archive:
        for number, row in enumerate(rows):
            (folder / "row.json").write_text(json.dumps({"messages": row["messages"]}))
            archive.add(folder / "row.json", f"{number}.json")
            for place, name in enumerate(row["images"]):
                archive.add(pictures / name, f"{number}.{place}.png")
    return next(pictures.glob("*.png"))


def without_steps(flags: list[str]) -> list[str]:
    """The flags without the number of steps."""
    if "--max_train_step" not in flags:
        return flags
    place = flags.index("--max_train_step")
    return flags[:place] + flags[place + 2 :]


@pytest.mark.parametrize("command", keep_fast(COMMANDS, FAST))
def test_a_command_trains_and_its_model_answers(
    command: str,
    models: Made,
    process_group: ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command)
    ranks = int(words[words.index("--nproc_per_node") + 1]) if "--nproc_per_node" in words else 1
    flags = words[words.index("finetuning.py") + 1 :]
    place = flags.index("--model_name") + 1
    (name,) = [tiny for documented, tiny in MODELS.items() if flags[place].startswith(documented)]
    flags[place] = str(models[name])
    if name == "qwen2_5_vl":
        asked = ["--image", str(write_chats(tmp_path)), "--prompt", "red ?"]
    elif name == "blip2_opt":
        table = save_pictures(tmp_path / "pictures", 8)
        asked = ["--image", str(table.parent / "train-0.png")]
    else:
        write_lines(tmp_path / "data/train.jsonl", dialogues(8))
        flags += ["--samsum_dataset.data_path", "data"]
        asked = ["--prompt", "summarize: Ann: Is it 3?"]
    flags = without_steps(flags)
    flags += ["--output_dir", "run", "--max_train_step", "1", "--run_validation", "False"]
    monkeypatch.chdir(tmp_path)
    process_group.train(flags, min(ranks, MOST_RANKS))
    events = read_metrics(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "train"] == [1]
    assert events[-1]["status"] == "finished"
    capsys.readouterr()
    assert generate(["run", *asked, "--max_new_tokens", "3"]) == 0, capsys.readouterr().err


def test_both_pages_have_commands_of_both_layouts() -> None:
    assert sorted("torchrun" in command for command in COMMANDS) == [False] * 6 + [True] * 2
