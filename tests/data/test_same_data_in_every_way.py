"""The same data gives the same tokens, however it is written and read: as JSON, Parquet, Arrow, CSV or text, whole or
streamed, as chats, instructions or preferences. `python -m benchmarks.same_tokens TOKENIZER` takes more of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest

from benchmarks.random_rows import RandomData, make_data
from benchmarks.same_tokens import WAYS, check, read, with_template
from tests.helpers.tokenizers_of_kinds import byte_level

FEW_WAYS = ("jsonl", "parquet", "csv")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return with_template(copy.deepcopy(byte_level()))


@pytest.mark.parametrize("seed", range(6))  # one of each kind
def test_every_way_gives_the_same_tokens_or_the_same_refusal(seed: int, tokenizer: Any, tmp_path: Path) -> None:
    assert check(make_data(seed), tokenizer, tmp_path) == []


def test_a_tool_has_no_default_that_only_another_tool_has(tokenizer: Any, tmp_path: Path) -> None:
    def row(number: int, **more: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"city": {"type": "string", **more}}}
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        return {"messages": turns, "tools": [{"name": f"f{number}", "description": "does", "parameters": parameters}]}

    rows = [row(1, default="Oslo"), row(2)]
    assert check(RandomData("chat_dataset", rows), tokenizer, tmp_path, FEW_WAYS) == []


def chats_of(rows: list[dict[str, Any]], answer: str) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    columns = {"user": "prompt", "assistant": answer}
    chats = [{"messages": [{"role": role, "content": row[name]} for role, name in columns.items()]} for row in rows]
    return [("chat_dataset", {}, chats)]


def test_an_answer_keeps_its_white_space_as_a_chat_and_as_an_instruction(tokenizer: Any, tmp_path: Path) -> None:
    answers = [" 4", "4\n", "    indented\n", "\t4 "]
    rows = [{"prompt": " 2 + 2 =\n", "completion": answer} for answer in answers]
    data = RandomData("instruction_dataset", rows, {"as_chat": True}, chats_of(rows, "completion"))
    assert check(data, tokenizer, tmp_path, FEW_WAYS) == []
    tokens = read("instruction_dataset", {"as_chat": True}, tmp_path / "0-jsonl/a.jsonl", tokenizer, streams=False)
    for (ids, _), answer in zip(tokens, answers, strict=True):
        assert f"{answer}</s>" in tokenizer.decode(ids)


def test_an_answer_that_is_json_is_a_text_and_no_turns(tokenizer: Any, tmp_path: Path) -> None:
    answers = ['{"name": "Eva"}', "{x} is {y}", '[{"name": "Eva"}]', '{"role": "admin"}']
    rows = [{"prompt": "Who?", "chosen": answer, "rejected": "no"} for answer in answers]
    data = RandomData("chat_dataset", rows, {"preference": "chosen"}, chats_of(rows, "chosen"))
    assert check(data, tokenizer, tmp_path, FEW_WAYS) == []
    for broken in ('[{"role": "assistant", "content": "x}]', "[{'role': 'assistant', 'content': 'x'}]"):
        data = RandomData(
            "chat_dataset", [{"prompt": "Who?", "chosen": broken, "rejected": "no"}], {"preference": "chosen"}
        )
        path = WAYS["jsonl"](data.rows, tmp_path)
        assert path is not None
        assert "needs a list of turns" in str(read(data.dataset, data.settings, path, tokenizer, streams=False))
