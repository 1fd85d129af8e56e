"""Long conversations are found from one rendering, as if each turn were rendered by itself."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.chat_masks import make_row
from chat import long_conversations, rendered_turns, template
from chat import samples as samples_module
from chat.conversation import Conversation, read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from chat.turn_starts import render_with_starts, words_read
from configs.formats import DATASETS
from data.tokens.spans import BadExample, ChatSamples
from tests.helpers.chat_templates import CHATML, FAMILIES, REWRITING

ALL = FAMILIES | REWRITING
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up", "parameters": {}}}


def calls(number: int, *, thinks: bool = False, questions: int = 1) -> dict[str, Any]:
    """A row in which the assistant calls a tool `number` times after each question, then answers."""
    messages = []
    for question in range(questions):
        messages.append({"role": "user", "content": f"Question {question}?"})
        for call in range(number):
            thoughts = {"reasoning_content": f"I look {call}."} if thinks else {}
            function = {"name": "look_up", "arguments": {"place": f"Lima {question} {call}"}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]} | thoughts)
            messages.append({"role": "tool", "content": f"Dry, {question} {call}."})
        messages.append({"role": "assistant", "content": f"So {question}."})
    return {"messages": messages} | ({} if thinks else {"tools": [TOOL]})  # a template of thoughts writes no tools


def long_row(seed: int) -> dict[str, Any]:
    """Random rows, one after another."""
    draw = random.Random(seed)
    rows = [make_row(random.Random(100 * seed + number)) for number in range(draw.randint(2, 5))]
    messages: list[dict[str, Any]] = []
    for row in rows:
        said = row["messages"][1:] if messages and row["messages"][0]["role"] == "system" else row["messages"]
        messages = [*messages[: -1 if messages and messages[-1]["role"] == "user" else None], *said]
    tools = next((row["tools"] for row in rows if "tools" in row), None)
    return {"messages": messages} | ({"tools": tools} if tools else {})


def read(row: dict[str, Any]) -> Conversation:
    return read_conversation(row, DATASETS["chat_dataset"]())


def found(conversation: Conversation, of: ChatTemplate) -> ChatSamples | str:
    try:
        return chat_samples(conversation, of)
    except BadExample as error:
        return str(error)


@pytest.mark.parametrize("name", ALL)
def test_random_long_conversations_are_those_of_turns_rendered_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ALL[name].tokenizer()
    by_kinds, one_by_one = ChatTemplate.of(tokenizer), ChatTemplate.of(tokenizer)
    monkeypatch.setattr(long_conversations, "_WHOLE_AT_FIRST", 0)  # its own comparison would hide a difference
    for seed in range(12):
        conversation = read(long_row(seed))
        monkeypatch.setattr(samples_module, "MANY_TURNS", 0)
        long = found(conversation, by_kinds)
        monkeypatch.setattr(samples_module, "MANY_TURNS", 10_000)
        assert long == found(conversation, one_by_one)
    assert by_kinds.kinds.is_trusted


@pytest.mark.parametrize(
    ("name", "row", "most"),
    [
        ("ChatML", {}, 2),
        ("Llama-3", None, 2),
        ("empty thought", {"thinks": True}, 2),
        ("empty thought", {"thinks": True, "questions": 4}, 6),
    ],
)
def test_the_number_of_renderings_does_not_grow_with_the_turns(
    name: str, row: dict[str, Any] | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once some conversations have been seen."""
    number = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            number[0] += 1
            return function(*args, **options)

        return call

    of = ChatTemplate.of(ALL[name].tokenizer())
    turns = [{"role": role, "content": f"{role} {turn}."} for turn in range(40) for role in ("user", "assistant")]
    conversation = read({"messages": turns} if row is None else calls(10, **row))
    for _ in range(6):
        chat_samples(conversation, of)
    monkeypatch.setattr(template, "render_chat", counted(template.render_chat))
    monkeypatch.setattr(template, "render_with_starts", counted(template.render_with_starts))
    chat_samples(conversation, of)
    assert number[0] <= most


def test_the_first_conversations_are_rendered_few_times_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one with many turns the beginning alone is found in both ways, or it would take the square of them."""
    of = ChatTemplate.of(FAMILIES["ChatML"].tokenizer())
    turns = [{"role": role, "content": f"{role} {turn}."} for turn in range(150) for role in ("user", "assistant")]
    sizes: list[int] = []
    render = of.render

    def counted(conversation: Conversation, size: int, **options: Any) -> str:
        sizes.append(size)
        return render(conversation, size, **options)

    monkeypatch.setattr(ChatTemplate, "render", lambda _, *args, **options: counted(*args, **options))
    long = chat_samples(read({"messages": turns}), of)
    assert sum(sizes) < len(turns) ** 2 / 6, "messages rendered: one by one it would be half of the square"
    monkeypatch.undo()
    monkeypatch.setattr(samples_module, "MANY_TURNS", 10_000)
    assert chat_samples(read({"messages": turns}), ChatTemplate.of(FAMILIES["ChatML"].tokenizer())) == long


def test_a_turn_that_is_written_by_its_place_is_doubted_and_rendered_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that writes a thought in history for every third turn alone: no kind says that."""
    odd = "{{ '<think></think>' if message.role == 'assistant' and loop.index % 3 == 0 and not loop.last else '' }}"
    source = CHATML.replace("'\\n' + (message['content']", f"'\\n' }}}}{odd}{{{{ (message['content']")
    tokenizer = FAMILIES["ChatML"].tokenizer(source)
    turns = [{"role": role, "content": f"{role} {turn}."} for turn in range(20) for role in ("user", "assistant")]
    of = ChatTemplate.of(tokenizer)
    first = chat_samples(read({"messages": turns}), of)
    for _ in range(4):
        assert chat_samples(read({"messages": turns}), of) == first
    monkeypatch.setattr(samples_module, "MANY_TURNS", 10_000)
    assert chat_samples(read({"messages": turns}), of) == first


def test_a_difference_in_a_conversation_that_is_found_both_ways_ends_the_trust(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Should two turns of a kind ever be written differently without one of those that are checked showing it."""
    of = ChatTemplate.of(FAMILIES["ChatML"].tokenizer())
    for _ in range(8):
        right = chat_samples(read(calls(9)), of)
    monkeypatch.setattr(long_conversations, "_WHOLE_EVERY", 1)
    for kind in of.kinds.kinds.values():
        assert kind.header
        kind.header = kind.header[:-1]
    assert chat_samples(read(calls(9)), of) == right
    assert not of.kinds.is_trusted
    assert "writes two turns of the same kind differently" in capsys.readouterr().out
    assert chat_samples(read(calls(9)), of) == right


def test_starts_of_turns_are_lengths_of_renderings_up_to_them() -> None:
    of = ChatTemplate.of(FAMILIES["ChatML"].tokenizer())
    conversation = read(calls(3))
    rendered = of.render_with_starts(conversation, len(conversation.messages))
    assert rendered is not None
    assert rendered.text == of.render(conversation, len(conversation.messages))
    expected = [len(of.render(conversation, number)) for number in range(1, len(conversation.messages))]
    assert rendered.starts[1:] == expected
    assert all(one <= other for one, other in pairwise(rendered.starts))


def test_a_template_without_a_loop_over_turns_tells_no_starts() -> None:
    by_number = "{%- for n in range(messages | length) -%}{{ messages[n].content }}{%- endfor -%}"
    assert render_with_starts(by_number, [{"role": "user", "content": "Hi"}]) is None


def test_the_words_that_a_template_looks_for_are_known() -> None:
    source = "{% if '</think>' in m %}{{ m.split('</a>')[0] }}{% elif m.startswith('[B') %}{{ m | replace('<c>', '') }}"
    assert words_read(source + "{% endif %}{{ ' <d>' + m['role'] }}") == ("</a>", "</think>", "<c>", "[B")


def test_values_that_json_has_not_are_rendered_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes them before it renders."""
    row = calls(10)
    row["messages"][0]["day"] = {1, 2}
    one_by_one = []
    prompted = rendered_turns.prompted_turn
    monkeypatch.setattr(samples_module, "prompted_turn", lambda *args: one_by_one.append(1) or prompted(*args))
    of = ChatTemplate.of(FAMILIES["ChatML"].tokenizer())
    for _ in range(3):
        chat_samples(read(row), of)
    assert len(one_by_one) == 3 * 11


def test_the_date_is_that_of_the_run() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer("{{ strftime_now('%Y') }}" + CHATML)
    tokenizer.template_date = "2001-02-03"
    of, conversation = ChatTemplate.of(tokenizer), read(calls(3))
    rendered = of.render_with_starts(conversation, 4)
    assert rendered is not None
    assert rendered.text == of.render(conversation, 4)
    assert rendered.text.startswith("2001<|im_start|>")
