"""What a row says reaches the conversation: nothing of it is lost, and what cannot be read is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.conversation import Conversation, read_conversation
from configs.formats import DATASETS
from data.tokens.spans import BadExample

ChatDataset = DATASETS["chat_dataset"]
CALL = {"name": "weather", "arguments": {"city": "Lima", "unit": None}}
AS_READ = {"type": "function", "function": CALL}
TOOL = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}}
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def read(turns: Any, config: ChatDataset | None = None, **columns: Any) -> Conversation:
    return read_conversation({"messages": turns} | columns, config or ChatDataset())


def roles_and_texts(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize("key", ["text", "value", "content"])
@pytest.mark.parametrize("kind", [{"type": "text"}, {"type": "text", "image_url": None}, {}])
def test_parts_of_text_become_text(key: str, kind: dict[str, Any]) -> None:
    parts = [kind | {key: "Hel"}, kind | {key: "lo."}]
    found = read([{"role": "user", "content": [kind | {key: "Hi"}]}, {"role": "assistant", "content": parts}])
    assert roles_and_texts(found) == [("user", "Hi"), ("assistant", "Hello.")]
    assert found.has_loss == (False, True)


def test_parts_that_are_thoughts_and_calls_become_those() -> None:
    """As in LLaMA-Factory's newer files, and with Anthropic's names."""
    parts = [
        {"type": "reasoning", "value": "I look."},
        {"type": "text", "value": "Let me see."},
        {"type": "tool_call", "value": json.dumps(CALL)},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Cusco"}},
    ]
    message = read([QUESTION, {"role": "assistant", "content": parts}]).messages[1]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["thinking"] == "I look."
    second = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Cusco"}}}
    assert message["tool_calls"] == [AS_READ, second]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_parts_that_are_no_text_are_refused(kind: str) -> None:
    parts = [{"type": kind, kind: "a.png"}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(BadExample, match=rf"turn 1 \(user\): .*{kind}.*text alone"):
        read([{"role": "user", "content": parts}, ANSWER])


@pytest.mark.parametrize(
    ("columns", "text"),
    [({"images": ["a.png"]}, "Hi"), ({"audios": ["a.wav"]}, "<audio>Hi"), ({"image": "a.png"}, "<image>Hi")],
)
def test_columns_of_images_and_sound_are_refused(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(BadExample, match=f"column {next(iter(columns))} .*text alone"):
        read([{"role": "user", "content": text}, ANSWER], **columns)
    assert read([{"role": "user", "content": text}, ANSWER], **dict.fromkeys(columns)).messages


def test_the_same_names_of_roles_are_known_under_role_and_from() -> None:
    names = ["system", "human", "gpt", "user", "model", "observation", "bot", "prompter", "Assistant", "function"]
    expected = ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    under_role = read([{"role": name, "content": name} for name in names])
    under_from = read_conversation({"conversations": [{"from": n, "value": n} for n in names]}, ChatDataset())
    assert under_role == under_from == read([{"role": name, "value": name} for name in names])
    assert roles_and_texts(under_role) == list(zip(expected, names, strict=True))


def test_other_names_of_roles_are_given_by_a_flag_and_refused_without() -> None:
    turns = [{"role": "critic", "content": "Hi"}, {"role": "writer", "content": "Hello."}]
    with pytest.raises(BadExample, match=r"turn 1 \(critic\): .*--chat_dataset.roles critic=user"):
        read(turns)
    found = read(turns, ChatDataset(roles=("critic=critic", "writer=assistant")))
    assert roles_and_texts(found) == [("critic", "Hi"), ("assistant", "Hello.")]
    assert found.has_loss == (False, True)


def test_a_developers_turn_stays_one_where_the_template_knows_it() -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, QUESTION, ANSWER]}
    assert read_conversation(row, ChatDataset()).messages[0]["role"] == "system"
    template = "{% if role == 'developer' %}"
    assert read_conversation(row, ChatDataset(), chat_template=template).messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]},
        {"role": "assistant", "content": "", "function_call": CALL | {"arguments": json.dumps(CALL["arguments"])}},
    ],
)
def test_every_form_of_a_call_becomes_one_and_keeps_its_nulls(turn: dict[str, Any]) -> None:
    found = read([QUESTION, turn, {"role": "function", "name": "weather", "content": "dry"}, ANSWER])
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [AS_READ]}
    assert found.messages[2] == {"role": "tool", "content": "dry", "name": "weather"}
    assert found.has_loss == (False, True, False, True)


def test_nulls_that_arrow_puts_into_arguments_are_left_out_where_asked() -> None:
    row = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [AS_READ]}]}
    (call,) = read_conversation(row, ChatDataset(), nested_columns=frozenset({"messages"})).messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Lima"}


DEEP = {depth: "[" * depth + "]" * depth for depth in (61, 500, 20_000)}


def call_with(arguments: Any) -> list[dict[str, Any]]:
    return [QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": call_with({"a": float("inf")})}, "its turn 2's tool_calls: it holds the number inf"),
        ({"messages": call_with({"a": [float("nan")]})}, "its turn 2's tool_calls: it holds the number nan"),
        ({"messages": call_with('{"a": 1e999}')}, "holds the number inf, which JSON cannot write"),
        ({"messages": call_with('{"a": NaN}')}, "holds the number nan, which JSON cannot write"),
        ({"messages": [QUESTION, ANSWER], "tools": '[{"name": "f", "parameters": {"maximum": 1e999}}]'}, "number inf"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"a": float("-inf")}}, "kwargs: .* number -inf"),
        *(({"messages": call_with(f'{{"a": {deep}}}')}, "nested too deeply") for deep in DEEP.values()),
        *(({"messages": [QUESTION, ANSWER], "tools": deep}, "tools .*nested too deeply") for deep in DEEP.values()),
        *(({"messages": deep}, "messages .*nested too deeply") for deep in DEEP.values()),
    ],
)
def test_what_json_cannot_write_is_refused(row: dict[str, Any], reason: str) -> None:
    """1e999 was learned as Infinity, and 500 brackets ended in Python's limit of recursion, now here, now there."""
    with pytest.raises(BadExample, match=reason):
        read_conversation(row, ChatDataset())


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "weather(Lima)"}, r"no JSON.*--chat_dataset.roles function_call=assistant"),
        ({"from": "function_call", "value": '{"arguments": {}}'}, "a call without a name"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "not a JSON object"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{'a': 1}"}]}, "arguments .*no JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, "given twice"),
        ({"role": "assistant", "tool_calls": 5}, "not a list"),
        ({"role": "assistant", "content": "a", "value": "b"}, "content and value differ"),
        ({"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": "c"}, "differ"),
        ({"role": "assistant", "content": 5}, "neither text nor a list"),
        ({"role": "assistant", "content": [{"type": "poem", "text": "a"}]}, "'poem', which is unknown"),
        ({"role": "assistant", "content": [{"type": "text"}]}, "has no text"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight is 0.5; give 1 to learn it, or 0"),
        ({"role": "user", "content": "What is this?", "images": ["a.png"]}, "its images would be lost"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_turn(turn: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadExample, match=rf"turn 2 \(\w+\): .*{reason}"):
        read([QUESTION, turn, QUESTION, ANSWER])


def test_a_call_as_text_is_learned_as_text_where_asked() -> None:
    config = ChatDataset(roles=("function_call=assistant",))
    found = read([QUESTION, {"from": "function_call", "value": "weather(Lima)"}], config)
    assert found.messages[1] == {"role": "assistant", "content": "weather(Lima)"}


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("framed", [False, True])
def test_tools_are_read_from_every_form(column: str, as_text: bool, framed: bool) -> None:
    tools: Any = [{"type": "function", "function": TOOL} if framed else TOOL]
    found = read([QUESTION, ANSWER], **{column: json.dumps(tools) if as_text else tools})
    assert found.tools == [{"type": "function", "function": TOOL}]


def test_a_tools_schema_may_be_text_and_keeps_nulls_that_say_something() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "default": None, "title": None}}}
    tool = {"name": "f", "parameters": schema, "strict": None}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)], [tool | {"parameters": json.dumps(schema)}]):
        found = read([QUESTION, ANSWER], tools=tools)
        assert found.tools is not None
        assert found.tools[0]["function"].keys() == {"name", "parameters"}
        assert found.tools[0]["function"]["parameters"]["properties"] == {"city": {"type": "string", "default": None}}


def test_columns_of_structs_give_tools_no_nulls_that_they_never_had() -> None:
    tool = {"name": "f", "parameters": {"properties": {"city": {"type": "string", "default": None}}}}
    as_text = {"default": None}
    for tools, default in (([tool], {}), (json.dumps([tool]), as_text), ([json.dumps(tool)], as_text)):
        row = {"messages": [QUESTION, ANSWER], "tools": tools}
        found = read_conversation(row, ChatDataset(), nested_columns=frozenset({"tools"})).tools
        assert found is not None
        assert found[0]["function"]["parameters"]["properties"] == {"city": {"type": "string"} | default}


def test_a_system_column_is_the_first_turn_or_refused() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert read([QUESTION, ANSWER], system="Be brief.") == read([system, QUESTION, ANSWER])
    assert read([system, QUESTION, ANSWER], system="Be brief. ") == read([system, QUESTION, ANSWER])
    assert read([QUESTION, ANSWER], system="") == read([QUESTION, ANSWER])
    with pytest.raises(BadExample, match="column system and its first turn"):
        read([system, QUESTION, ANSWER], system="Be long.")


def test_template_settings_and_thoughts_are_kept() -> None:
    turns = [QUESTION, ANSWER | {"reasoning_content": "I greet."}]
    found = read(turns, chat_template_kwargs={"enable_thinking": False, "effort": None})
    assert found.template_kwargs == {"enable_thinking": False}
    assert read(turns, chat_template_kwargs='{"enable_thinking": false}') == found
    assert found.messages[1]["reasoning_content"] == found.messages[1]["thinking"] == "I greet."
    with pytest.raises(BadExample, match="chat_template_kwargs hold tools"):
        read(turns, chat_template_kwargs={"tools": []})


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss_weight"])
def test_an_answer_that_weighs_nothing_is_not_learned(key: str) -> None:
    turns = [QUESTION, ANSWER | {key: 0}, QUESTION | {key: 0}, ANSWER | {key: 1.0}, QUESTION, ANSWER]
    found = read(turns)
    assert found.has_loss == (False, False, False, True, False, True)
    assert not [message for message in found.messages if key in message]
    with pytest.raises(BadExample, match=r"turn 1 \(user\): .*only the assistant's turns are"):
        read([QUESTION | {key: 1}, ANSWER])


def test_spans_and_parts_that_leave_out_a_whole_turn_weigh_it() -> None:
    spans = [{"begin_offset": 0, "end_offset": 2, "train": False}, {"begin_offset": 3, "end_offset": 5, "train": False}]
    parts = [{"type": "text", "text": "Hello.", "train": False}]
    turns = [QUESTION, ANSWER | {"train_detail": spans}, QUESTION, {"role": "assistant", "content": parts}]
    assert read([*turns, QUESTION, ANSWER]).has_loss == (False,) * 5 + (True,)


def test_the_last_answer_alone_is_learned_where_asked() -> None:
    turns = [QUESTION, ANSWER, QUESTION, ANSWER, QUESTION]
    assert read(turns).has_loss == (False, True, False, True, False)
    only_last = (False, False, False, True, False)
    assert read(turns, ChatDataset(learn="last")).has_loss == only_last
    assert read(turns, mask_history=True).has_loss == only_last
    assert read(turns, mask_history=False) == read(turns)


def test_empty_answers_are_counted_and_learned_only_where_asked() -> None:
    turns = [QUESTION, ANSWER | {"content": " \n"}, QUESTION, ANSWER, QUESTION, ANSWER | {"content": ""}]
    found = read(turns)
    assert found.has_loss == (False, False, False, True, False, False)
    assert found.num_empty_answers == 2
    asked = read(turns, ChatDataset(learn_empty_answers=True))
    assert (asked.has_loss, asked.num_empty_answers) == ((False, True) * 3, 0)


def test_a_conversational_prompt_and_completion_is_a_conversation_that_learns_the_completion() -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
    found = read_conversation(row, ChatDataset())
    assert found.messages == [QUESTION, ANSWER, QUESTION, ANSWER]
    assert found.has_loss == (False, False, False, True)


def test_messages_may_be_json_text() -> None:
    assert read(json.dumps([QUESTION, ANSWER])) == read([QUESTION, ANSWER])
    with pytest.raises(BadExample, match="column messages needs a list of turns, or its JSON"):
        read("Hi. Hello.")


def in_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A list of dicts as a dict of lists; where a dict has no such key, there is a null."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def test_a_dict_of_lists_is_a_list_of_dicts() -> None:
    call = {"id": "c1", "type": "function", "function": CALL}
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "dry."}]
    turns = [QUESTION, {"role": "assistant", "tool_calls": [call]}, QUESTION, {"role": "assistant", "content": parts}]
    tools = [{"type": "function", "function": TOOL}]
    stored = [
        QUESTION,
        turns[1] | {"tool_calls": in_columns([call])},
        QUESTION,
        turns[3] | {"content": in_columns(parts)},
    ]
    assert read(in_columns(stored), tools=in_columns(tools)) == read(turns, tools=tools)
    assert read(in_columns([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}])) == read(
        [QUESTION, ANSWER]
    )
    with pytest.raises(BadExample, match=r"different lengths \(2 of role, 1 of content\)"):
        read({"role": ["user", "assistant"], "content": ["Hi"]})


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda of: st.lists(of, max_size=3), max_leaves=4
)
CALLS = st.fixed_dictionaries({"name": TEXTS, "arguments": st.dictionaries(TEXTS, VALUES, max_size=3)})


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, str, list[Any]]]]:
    """Turns in random forms, and what each says: its role, its text and its calls."""
    turns, said = [], []
    for _ in range(draw(st.integers(1, 5))):
        name, role = draw(st.sampled_from([("human", "user"), ("gpt", "assistant"), ("observation", "tool")]))
        text = draw(TEXTS)
        form = draw(st.sampled_from(["text", "parts", "sharegpt"]))
        cut = draw(st.integers(0, len(text)))
        parts = [{"type": "text", draw(st.sampled_from(["text", "value"])): part} for part in (text[:cut], text[cut:])]
        turn: dict[str, Any] = {"from": name, "value": text} if form == "sharegpt" else {"role": role, "content": text}
        turn |= {"content": parts} if form == "parts" else {}
        calls = draw(st.lists(CALLS, max_size=2)) if role == "assistant" else []
        as_text = draw(st.booleans())
        if calls:
            written = [c | {"arguments": json.dumps(c["arguments"])} for c in calls] if as_text else calls
            turn["tool_calls"] = [{"id": "c", "type": "function", "function": call} for call in written]
        turns.append(turn)
        said.append((role, text, calls))
    return turns, said


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_every_text_and_call_of_a_conversation_is_read(
    drawn: tuple[list[dict[str, Any]], list[tuple[str, str, list[Any]]]],
) -> None:
    turns, said = drawn
    found = read([*turns, QUESTION, ANSWER])
    read_back = [
        (message["role"], message["content"], [call["function"] for call in message.get("tool_calls", [])])
        for message in found.messages
    ]
    assert read_back[:-2] == said
    assert list(found.has_loss[:-2]) == [
        role == "assistant" and bool(text.strip() or calls) for role, text, calls in said
    ]


def test_calls_that_follow_each_other_as_turns_are_calls_of_one_turn() -> None:
    """As ShareGPT's data writes parallel calls. A model makes both before it gets a result."""
    first, second = ({"from": "function_call", "value": json.dumps({"name": n, "arguments": {}})} for n in "fg")
    results = [{"from": "observation", "value": text} for text in ("1", "2")]
    question, answer = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Both."}
    found = read([question, first, second, *results, answer])
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["function"]["name"] for call in found.messages[1]["tool_calls"]] == ["f", "g"]
    assert found.has_loss == (False, True, False, False, True)
    one_turn = {"from": "function_call", "value": f"[{first['value']}, {second['value']}]"}
    assert found == read([question, one_turn, *results, answer])
    one_by_one = read([question, first, results[0], second, results[1], answer])
    assert [len(message.get("tool_calls", [])) for message in one_by_one.messages] == [0, 1, 0, 1, 0, 0]
    not_learned = read([question, first | {"weight": 0}, second, answer])  # a weight is that of one call
    assert not_learned.has_loss == (False, False, True, True)
    split = read_conversation({"prompt": [question, first], "completion": [second, answer]}, ChatDataset())
    assert split.has_loss == (False, False, True, True)
