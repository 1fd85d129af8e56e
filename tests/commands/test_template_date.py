"""Chat templates that write today's date: a run keeps that of its first start, also if it goes on after midnight."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers.utils import chat_template_utils

import finetuning
from chat.conversation import Conversation
from chat.template import ChatTemplate
from configs.flags import parse_flags
from data.dataset_functions.function_key import tokenizer_key
from data.dataset_functions.user_tokenizer import give_template_lists
from data.processors.processor_loading import prompt_text
from resolving import resume_state
from tests.helpers.chat_templates import CHATML, FAMILIES
from tests.helpers.checkpoints import forget_marks
from tests.helpers.processes import train_events
from tests.helpers.refusals import write_lines
from tests.helpers.tokenizers_of_kinds import written_in_python
from tools.answering.chat_form import ChatForm, as_user_turn
from tools.answering.loading import load
from utils import template_date
from utils.errors import ConfigError

DATED = "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '.<|im_end|>\\n' }}" + CHATML
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(8)
]


def set_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """The clock of whatever asks for the date."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromisoformat(f"{day}T12:00:00")

    class Calendar(date):
        @classmethod
        def today(cls) -> Any:
            return date.fromisoformat(day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(template_date, "datetime", Clock)
    monkeypatch.setattr(resume_state, "date", Calendar)
    chat_template_utils._compile_jinja_template.cache_clear()


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    write_lines(tmp_path / "rows.jsonl", CHATS)
    (tmp_path / "dated.jinja").write_text(DATED)
    found = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--dataset", "chat_dataset"]
    found += ["--chat_dataset.data_path", str(tmp_path / "rows.jsonl"), "--run_validation", "False", "--resume", "auto"]
    found += ["--chat_dataset.chat_template", str(tmp_path / "dated.jinja"), "--num_workers_dataloader", "0"]
    return [*found, "--add_special_tokens", "<|im_start|>,<|im_end|>", "--save_every_steps", "1", "--show_sample"]


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_run_goes_on_after_midnight_with_the_date_of_its_first_start(
    earlier_version: bool,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    for day, steps in (("2026-11-25", "1"), ("2026-11-26", "2")):
        set_day(monkeypatch, day)
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / day))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / day)
        assert finetuning.main([*words, "--max_train_step", steps]) == 0
        assert "Today is 25 Nov 2026." in capsys.readouterr().out
        if earlier_version:  # which noted when the run started, and no date
            forget_date(run, started="2026-11-25T12:00:00+00:00")
    assert [event["step"] for event in train_events(run)] == [1, 2]

    _, tokenizer, *_ = load(run, None)
    assert "Today is 25 Nov 2026." in ChatForm.of(tokenizer).prompt(as_user_turn("Say 1."))
    (run / "model").rename(tmp_path / "elsewhere")
    _, tokenizer, *_ = load(tmp_path / "elsewhere", None)
    assert "Today is 26 Nov 2026." in ChatForm.of(tokenizer).prompt(as_user_turn("Say 1.")), "as any server says"


def forget_date(run: Path, *, started: str) -> None:
    """What an earlier version would have left."""
    values = yaml.safe_load((run / "run.yaml").read_text())
    values["settings"]["train_config"].pop("template_date", None)
    (run / "run.yaml").write_text(yaml.safe_dump(values | {"started": started}))
    for folder in run.glob("checkpoints/step-*"):
        state = json.loads((folder / "state.json").read_text())
        state["settings"]["train_config"].pop("template_date", None)
        (folder / "state.json").write_text(json.dumps(state))
        forget_marks(folder)


def test_the_date_of_a_new_run_is_that_of_the_day_or_the_one_given(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens that were kept on another day are not found."""
    for day in ("2026-11-25", "2026-11-26"):
        set_day(monkeypatch, day)
        given = [*words[:2], "--output_dir", str(tmp_path / day), *words[4:]]
        assert finetuning.main([*given, "--max_train_step", "1"]) == 0
        assert f"Today is {day[-2:]} Nov 2026." in capsys.readouterr().out
    given[given.index("--output_dir") + 1] = str(tmp_path / "given")
    assert finetuning.main([*given, "--max_train_step", "1", "--template_date", "2024-02-29"]) == 0
    assert "Today is 29 Feb 2024." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--template_date: 2026-02-30 is no date"):
        parse_flags(["--model_name", "M", "--template_date", "2026-02-30"])


def test_users_functions_and_processors_get_the_runs_date_too() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    tokenizer = FAMILIES["ChatML"].tokenizer("{{ strftime_now('%d %b %Y') }}")
    for day in ("2026-11-25", "2024-02-29", None):
        tokenizer.template_date = day
        wanted = (date.today() if day is None else date.fromisoformat(day)).strftime("%d %b %Y")
        of_user = pickle.loads(pickle.dumps(tokenizer))  # as a stream's worker has it
        give_template_lists(of_user)
        assert of_user.apply_chat_template(turns, tokenize=False) == wanted
        assert prompt_text(SimpleNamespace(tokenizer=tokenizer, **apply_of(tokenizer)), "Hi") == wanted
        conversation = Conversation([*turns, {"role": "assistant", "content": ""}], (False, True))
        assert ChatTemplate.of(tokenizer).render(conversation, 2) == wanted


def test_the_date_makes_no_other_key_of_a_tokenizer_that_may_not_write_it() -> None:
    tokenizer, keys = copy.copy(written_in_python()), set()
    for tokenizer.template_date in ("2026-11-25", "2026-11-26", None):
        keys.add(tokenizer_key(tokenizer))
    assert len(keys) == 1


def apply_of(tokenizer: Any) -> dict[str, Any]:
    return {"chat_template": tokenizer.chat_template, "apply_chat_template": tokenizer.apply_chat_template}
