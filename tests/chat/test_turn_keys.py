"""Keys of turns: each is read, named once as lost, or refused if it would change what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.tokens.spans import BadExample, ChatSamples
from tests.helpers.chat_templates import CHATML, FAMILIES, REWRITING
from tests.helpers.refusals import write_lines

ChatDataset = DATASETS["chat_dataset"]
QUESTION, ANSWER = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}
TEMPLATE = ChatTemplate.of(FAMILIES["ChatML"].tokenizer())
NAMED = CHATML.replace("message['role'] +", "message['role'] + (message.name or '') +")


def samples(*turns: dict[str, Any], template: ChatTemplate = TEMPLATE) -> ChatSamples:
    return chat_samples(read_conversation({"messages": list(turns)}, ChatDataset()), template)


def learned(found: ChatSamples) -> list[str]:
    return [span.text for spans in found.spans for span in spans if span.has_loss]


@pytest.mark.parametrize(
    "key", ["loss", "loss_mask", "trainable", "loss_scale", "learn", "Weight", "lossMask", "LOSS", "loss-weight"]
)
@pytest.mark.parametrize("value", [False, 0, 0.0, "false"])
def test_an_answer_that_another_tool_would_not_learn_is_not_learned(key: str, value: Any) -> None:
    found = samples(QUESTION, ANSWER | {"content": "Yes.", key: value}, QUESTION, ANSWER | {key: 1})
    assert learned(found) == ["No.<|im_end|>"]
    assert found.unread_keys == ()
    part = {"type": "text", "text": "Yes. ", key: value}
    found = samples(QUESTION, ANSWER | {"content": [part, {"type": "text", "text": "No."}]})
    assert learned(found) == ["No.<|im_end|>"]


@pytest.mark.parametrize(
    "extra",
    [
        {"mask": True},
        {"masked": 1},
        {"is_masked": "true"},
        {"ignore": True},
        {"compute_loss": False},
        {"trainOnTurn": 0},
        {"weights": [0, 1]},
        {"loss_mask": [1, 0]},
        {"loss_scale": 0.3},
        {"rejected": True},
        {"label": False},
        {"channel": "analysis"},
        {"channel": "commentary"},
        {"recipient": "functions.weather"},
        {"prefix": True},
        {"end_turn": False},
        {"content": [{"type": "text", "text": "No.", "mask": 1}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {}, "masked": True}}]},
    ],
    ids=str,
)
def test_a_key_that_would_change_what_is_learned_is_refused_with_its_turn(extra: dict[str, Any]) -> None:
    with pytest.raises(BadExample, match=r"turn 4 \(assistant\): .*give"):
        samples(QUESTION, ANSWER, QUESTION, ANSWER | extra)


@pytest.mark.parametrize("extra", [{"channel": "final"}, {"prefix": False}, {"end_turn": True}, {"recipient": "all"}])
def test_the_usual_value_of_such_a_key_changes_nothing(extra: dict[str, Any]) -> None:
    assert samples(QUESTION, ANSWER | extra) == samples(QUESTION, ANSWER)


@pytest.mark.parametrize(
    "extra",
    [
        {"thought": "Dry."},
        {"thinking_content": "Dry."},
        {"reasoningContent": "Dry."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Dry."}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Dry."}], "reasoning": "Dry."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Dry.", "signature": "x"}]},
        {"content": [{"type": "text", "text": "Dry.", "thought": True}, {"type": "text", "text": "No."}]},
    ],
    ids=str,
)
def test_thoughts_are_read_under_each_of_their_names(extra: dict[str, Any]) -> None:
    thinks = ChatTemplate.of(REWRITING["empty thought"].tokenizer())
    assert learned(samples(QUESTION, ANSWER | extra, template=thinks)) == learned(
        samples(QUESTION, ANSWER | {"reasoning_content": "Dry."}, template=thinks)
    )
    with pytest.raises(BadExample, match=r"turn 2 .*does not write its thoughts"):
        samples(QUESTION, ANSWER | extra)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (ANSWER | {"thought": "Dry.", "reasoning": "Wet."}, "reasoning and thought differ"),
        (ANSWER | {"Weight": 0, "weight": 1}, "given twice, in two spellings"),
        (ANSWER | {"image": "sky.png"}, "its image would be lost"),
        (ANSWER | {"tool_calls": [{"name": "f"}], "function_call": {"name": "g"}}, "both tool_calls and function_call"),
        (ANSWER | {"tool_calls": [{"name": "f", "arguments": {"a": 1}, "input": {"a": 2}}]}, "arguments and input of"),
    ],
)
def test_what_says_two_things_is_refused(turn: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadExample, match=reason):
        samples(QUESTION, turn)


def test_a_key_that_the_template_writes_is_read_and_any_other_is_lost() -> None:
    turns = (QUESTION | {"name": "Anna", "id": 7, "note": ""}, ANSWER | {"score": 0.5})
    assert samples(*turns).unread_keys == ("id (user)", "name (user)", "score (assistant)")
    found = samples(*turns, template=ChatTemplate.of(FAMILIES["ChatML"].tokenizer(NAMED)))
    assert "userAnna" in found.spans[0][0].text
    assert found.unread_keys == ("id (user)", "score (assistant)")


def test_a_template_may_write_some_values_of_a_key_alone() -> None:
    content = "(message['content'] or '')"
    written = CHATML.replace(content, f"{content} + ('...' if message.prefix else '')")
    template = ChatTemplate.of(FAMILIES["ChatML"].tokenizer(written))
    assert learned(samples(QUESTION, ANSWER | {"prefix": False}, template=template)) == ["No.<|im_end|>"]
    assert learned(samples(QUESTION, ANSWER | {"prefix": True}, template=template)) == ["No....<|im_end|>"]


def test_keys_of_calls_and_parts_are_named_too() -> None:
    call = {"id": "c1", "index": 0, "type": "function", "function": {"name": "f", "arguments": {}, "strict": True}}
    part = {"type": "text", "text": "No.", "cache_control": {"type": "ephemeral"}, "annotations": []}
    hidden = [{"type": "reasoning.encrypted", "data": "x"}]
    found = samples(
        QUESTION, {"role": "assistant", "content": [part], "tool_calls": [call], "reasoning_details": hidden}
    )
    assert found.unread_keys == (
        "cache_control (part)",
        "reasoning.encrypted (part)",
        *("tool_calls.id (assistant)", "tool_calls.index (assistant)", "tool_calls.strict (assistant)"),
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "streamed"])
def test_a_line_names_lost_keys_once_and_again_when_the_tokens_are_found(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [QUESTION | {"name": "Anna"}, ANSWER | {"name": None}]}] * 300
    file = tmp_path / f"chats.{'parquet' if kind == 'parquet' else 'jsonl'}"
    write_lines(file, rows) if kind != "parquet" else datasets.Dataset.from_list(rows).to_parquet(file)
    config = ChatDataset(str(file), streaming=kind == "streamed")
    for _ in range(2):
        found = find_dataset_function("chat_dataset", config)(config, FAMILIES["ChatML"].tokenizer(), "train")
        assert "unread_keys" not in next(iter(found))
        assert len(list(found)) == 300
        line = f"{file}: keys of turns that are not read, so what they say is lost: name (user)"
        assert capsys.readouterr().out.count(line) == 1
