"""Chat: exactly the assistant's turns are label tokens, each with the token that ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate, use_template
from configs.formats import DATASETS
from data.tokens.loss_mask import tokenize_spans
from data.tokens.spans import BadExample, ChatSamples, MaskWay, TextSpan
from tests.helpers.chat_templates import CHATML, FAMILIES, LLAMA_3, REWRITING
from tests.helpers.tokenizers_of_kinds import byte_level
from utils.errors import ConfigError

ChatDataset = DATASETS["chat_dataset"]
TURNS = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Peru? Paris."},
    {"role": "assistant", "content": "Lima.\nAnna says so."},
]
SYSTEM = {"role": "system", "content": "Be brief, Bob."}
# As LLAMA_3, but the template marks the assistant's part.
MARKED = """\
{%- for message in messages -%}
{{ (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] | trim + '<|eot_id|>' }}{%- endgeneration -%}
{%- else -%}{{ message['content'] | trim + '<|eot_id|>' }}{%- endif -%}
{%- endfor -%}"""


def spans_of(turns: Any, tools: Any, tokenizer: Any) -> list[TextSpan]:
    conversation = read_conversation({"messages": turns, "tools": tools}, ChatDataset())
    (spans,) = chat_samples(conversation, ChatTemplate.of(tokenizer)).spans
    return list(spans)


def samples_of(turns: Any, tokenizer: Any, **columns: Any) -> ChatSamples:
    return chat_samples(read_conversation({"messages": turns, **columns}, ChatDataset()), ChatTemplate.of(tokenizer))


def learned_of(turns: Any, tokenizer: Any, **columns: Any) -> list[list[str]]:
    """What is learned of each sample, turn by turn."""
    samples = samples_of(turns, tokenizer, **columns).spans
    return [[span.text for span in spans if span.has_loss] for spans in samples]


def label_text(turns: list[dict[str, Any]], tokenizer: Any, tools: Any = None) -> list[str]:
    """The label tokens of the whole conversation, decoded, by turn."""
    ((input_ids,), (labels,), _) = tokenize_spans([spans_of(turns, tools, tokenizer)], tokenizer)
    whole = tokenizer.apply_chat_template(turns, tools=tools, return_dict=False)
    assert input_ids.tolist() == whole, "the template's own tokens, start token included"
    parts: list[list[int]] = [[]]
    for token, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
        assert label in (token, -100)
        if label != -100:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part) for part in parts if part]


@pytest.mark.parametrize(
    ("name", "system"), [*((name, False) for name in FAMILIES), ("Llama-2", True), ("Llama-3", True), ("ChatML", True)]
)
def test_of_four_turns_the_assistants_are_label_tokens_with_their_end_tokens(name: str, system: bool) -> None:
    family = FAMILIES[name]
    answers = [family.answer.format(turn["content"]) for turn in TURNS if turn["role"] == "assistant"]
    with_label = label_text([SYSTEM, *TURNS] if system else TURNS, family.tokenizer())
    assert [part.strip() for part in with_label] == [answer.strip() for answer in answers]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_label_tokens_are_the_answers_and_no_other(name: str) -> None:
    """By ids: labels begin after the generation prompt and end with the answer's end token."""
    tokenizer = FAMILIES[name].tokenizer()
    ((input_ids,), (labels,), _) = tokenize_spans([spans_of(TURNS, None, tokenizer)], tokenizer)
    ids, with_label = input_ids.tolist(), (labels != -100).tolist()
    for number in (1, 3):
        prompt = tokenizer.apply_chat_template(TURNS[:number], add_generation_prompt=True, return_dict=False)
        assert ids[: len(prompt)] == prompt
        assert not with_label[len(prompt) - 1]
        assert with_label[len(prompt)]
        end = len(prompt) + with_label[len(prompt) :].index(False) if False in with_label[len(prompt) :] else len(ids)
        assert tokenizer.decode(ids[end - 1]).strip() == FAMILIES[name].answer.split("{}")[1].strip()


def test_the_templates_own_marks_give_the_same() -> None:
    family = FAMILIES["Llama-3"]
    found = spans_of(TURNS, None, family.tokenizer())
    marked = spans_of(TURNS, None, family.tokenizer(MARKED))
    assert [span for span in marked if span.text] == [span for span in found if span.text]


@pytest.mark.parametrize("template", [LLAMA_3, MARKED])
def test_thoughts_that_a_template_drops_from_history_are_learned_in_a_sample_of_their_own(template: str) -> None:
    """As in some reasoning templates, the assistant's thoughts are kept in its last turn alone."""
    forgets = "{%- set content = message['content'] if loop.last else message['content'].split('</think>')[-1] -%}"
    turns = [dict(turn) for turn in TURNS]
    turns[1]["content"] = "<think>France, so Paris</think>Paris."
    rewritten = template.replace("message['content'] | trim", "content | trim")
    rewritten = rewritten.replace("in messages -%}", "in messages -%}" + forgets, 1)
    learned = learned_of(turns, FAMILIES["Llama-3"].tokenizer(rewritten))
    assert learned == [["<think>France, so Paris</think>Paris.<|eot_id|>"], ["Lima.\nAnna says so.<|eot_id|>"]]


@pytest.mark.parametrize("template", [CHATML.replace("<|im_end|>", ""), MARKED.replace("<|eot_id|>", "")])
def test_a_template_without_an_end_token_is_refused(template: str) -> None:
    with pytest.raises(BadExample, match="never end"):
        spans_of(TURNS, None, FAMILIES["ChatML"].tokenizer(template))


def test_tools_and_tool_turns_are_passed_through_without_labels() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}
    turns = [
        {"role": "user", "content": "Is it raining in Lima?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": "dry"},
        {"role": "assistant", "content": "No."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": None, "parameters": {}}}]
    spans = spans_of(turns, tools, tokenizer)
    with_label = [span.text for span in spans if span.has_loss]
    assert with_label == [
        '<tool_call>{"name": "weather", "arguments": {"city": "Lima"}}</tool_call><|im_end|>',
        "No.<|im_end|>",
    ]
    text = "".join(span.text for span in spans)
    assert 'Tools: [{"type": "function"' in text
    assert "description" not in text, "a key that Arrow filled with null"
    assert "<|im_start|>tool\ndry<|im_end|>" in text
    assert spans_of(turns, '[{"type": "function"}]', tokenizer)[0].text.count("Tools:") == 1


def test_sharegpt_turns_are_the_same_conversation() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in [SYSTEM, *TURNS]]
    assert spans_of(turns, None, tokenizer) == spans_of([SYSTEM, *TURNS], None, tokenizer)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (TURNS[:1], "no assistant turn"),
        ([], "list of turns"),
        ("hello", "list of turns"),
        (["hello"], "turn 1: it is not a dict"),
        ([{"role": "user"}, TURNS[1]], r"turn 1 \(user\): it has no text"),
        ([{"content": "hello"}], "turn 1: it has no role"),
        ([{"from": "robot", "value": "hello"}], "turn 1 .*'robot' is unknown.*--chat_dataset.roles robot=user"),
        (TURNS[1:], "begins with the assistant"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(turns: Any, reason: str) -> None:
    with pytest.raises(BadExample, match=reason):
        spans_of(turns, None, FAMILIES["ChatML"].tokenizer())


def test_what_is_nested_too_deeply_is_refused_as_a_row() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    with pytest.raises(BadExample, match=r"its tools are no JSON .*nested too deeply"):
        spans_of(TURNS, "[" * 100_000, tokenizer)
    tokenizer.chat_template = "{% if true %}" * 2000 + "{% endif %}" * 2000
    with pytest.raises(BadExample, match=r"the chat template does not take turn 1 \(\w+Error"):
        spans_of(TURNS, None, tokenizer)


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(BadExample, match=r"must alternate"):
        spans_of([TURNS[0], TURNS[0], TURNS[1]], None, FAMILIES["Llama-2"].tokenizer())


def test_a_tokenizer_without_a_template_is_refused_or_given_one(tmp_path: Path) -> None:
    tokenizer = byte_level()
    with pytest.raises(ConfigError, match=r"--chat_dataset\.chat_template"):
        use_template(tokenizer, None)
    with pytest.raises(ConfigError, match="could not be read"):
        use_template(tokenizer, str(tmp_path / "absent.jinja"))
    (tmp_path / "chat.jinja").write_text(CHATML)
    given = FAMILIES["ChatML"].tokenizer(LLAMA_3)
    use_template(given, str(tmp_path / "chat.jinja"))
    assert given.chat_template == CHATML


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": 'Lima "A"', "days": [1, 2]}}}
WITH_CALL = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No."},
]


def test_each_of_two_turns_is_learned_once_where_a_template_rewrites_history() -> None:
    """Qwen 3 writes an empty thought before the last answer alone."""
    tokenizer = REWRITING["empty thought"].tokenizer()
    samples = samples_of(TURNS, tokenizer)
    assert samples.way == MaskWay.TURNS
    thought = "<think>\n\n</think>\n\n"
    assert learned_of(TURNS, tokenizer) == [
        [f"{thought}Paris.<|im_end|>"],
        [f"{thought}Lima.\nAnna says so.<|im_end|>"],
    ]
    first, second = ("".join(span.text for span in spans) for spans in samples.spans)
    assert first == tokenizer.apply_chat_template(TURNS[:2], tokenize=False)
    assert second == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_turns_that_are_beginnings_of_each_other_share_a_sample() -> None:
    """Between two questions Qwen 3 keeps its thoughts: the call and the answer after it are one sample."""
    turns = [dict(turn, reasoning_content=f"thought {n}") for n, turn in enumerate([*WITH_CALL, *TURNS[2:]])]
    learned = learned_of(turns, REWRITING["empty thought"].tokenizer())
    assert [len(turns) for turns in learned] == [2, 1]
    assert "thought 1" in learned[0][0]
    assert "thought 3" in learned[0][1]
    assert "thought 5" in learned[1][0]


def test_a_prompt_that_opens_a_thought_is_cut_where_the_turn_begins() -> None:
    """DeepSeek's and Nemotron's prompts open a thought that the finished turn does not have."""
    tokenizer = REWRITING["open thought"].tokenizer()
    assert learned_of(TURNS, tokenizer) == [["Paris.<|im_end|>", "Lima.\nAnna says so.<|im_end|>"]]


def test_a_turn_is_put_behind_the_prompt_that_the_model_will_see() -> None:
    """gpt-oss drops the thoughts of a call once the last answer is written, but not before."""
    turns = [dict(turn, reasoning_content=f"thought {n}") for n, turn in enumerate(WITH_CALL)]
    tokenizer = REWRITING["final answer"].tokenizer()
    (spans,) = samples_of(turns, tokenizer).spans
    learned = [span.text for span in spans if span.has_loss]
    assert [("thought 1" in learned[0]), ("thought 3" in learned[1]), len(learned)] == [True, True, 2]
    prompt = tokenizer.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True)
    assert "".join(span.text for span in spans).startswith(prompt)


def test_a_turn_is_put_behind_a_prompt_without_a_header() -> None:
    """Mistral Nemo writes the system's text in the last question, and not at all once that is answered."""
    tokenizer = REWRITING["system in question"].tokenizer()
    turns = [SYSTEM, *TURNS]
    texts = ["".join(span.text for span in spans) for spans in samples_of(turns, tokenizer).spans]
    answers = [f" {turn['content']}</s>" for turn in TURNS[1::2]]
    assert learned_of(turns, tokenizer) == [[answer] for answer in answers]
    prompts = [tokenizer.apply_chat_template(turns[:number], tokenize=False) for number in (2, 4)]
    assert texts == [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


def test_a_turn_without_an_end_token_ends_with_the_token_of_the_next_speaker() -> None:
    """GLM-4: the model stops when it writes <|user|> or <|tool|>."""
    learned = learned_of(WITH_CALL, REWRITING["role tokens"].tokenizer())
    assert [[turn[-8:] for turn in turns] for turns in learned] == [["<|tool|>", "<|user|>"]]


@pytest.mark.parametrize("name", ["parts", "argument text"])
def test_a_template_gets_the_form_that_it_takes(name: str) -> None:
    """LLaVA's takes contents as parts, DeepSeek's the arguments as text."""
    turns = WITH_CALL if name == "argument text" else TURNS
    ((first, second),) = learned_of(turns, REWRITING[name].tokenizer())
    assert first.count("Lima") == (name == "argument text")
    assert (first + second).count("'") == 0, "Python's own form"
    if name == "argument text":
        assert '{"city": "Lima \\"A\\"", "days": [1, 2]}' in first


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "'weather' of the tools"),
        (
            {"reasoning_content": "so it is Paris"},
            r"turn 2 \(assistant\): the chat template does not write its thoughts",
        ),
        ({"tool_calls": [CALL]}, r"turn 2 \(assistant\): the chat template does not write its call of weather"),
    ],
)
def test_what_the_template_does_not_write_is_refused_by_turn(changed: dict[str, Any], lost: str) -> None:
    tools = {"tools": changed.pop("tools")} if "tools" in changed else {}
    with pytest.raises(BadExample, match=lost) as refusal:
        samples_of([TURNS[0], TURNS[1] | changed], FAMILIES["Llama-3"].tokenizer(), **tools)
    assert "--chat_dataset.chat_template FILE" in str(refusal.value)


@pytest.mark.parametrize(("role", "dropped"), [("system", 1), ("tool", 2), ("user", 2)])
def test_a_turn_that_a_template_skips_is_refused(role: str, dropped: int) -> None:
    turns = [SYSTEM, *TURNS] if role == "system" else [TURNS[0], {"role": role, "content": "Hm."}, TURNS[1]]
    skips = "{%- for message in messages if message['content'] not in ('Hm.', 'Be brief, Bob.') -%}"
    template = CHATML.replace("{%- for message in messages -%}", skips)
    with pytest.raises(BadExample, match=rf"turn {dropped} \({role}\): the chat template does not write its text"):
        samples_of(turns, FAMILIES["ChatML"].tokenizer(template))
