"""What the assistant said stands in the rendered text as it was put, or the row is refused."""

from __future__ import annotations

from typing import Any

import pytest

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.tokens.spans import BadExample
from tests.helpers.chat_templates import CHATML, FAMILIES

# As Qwen 3's: what stands before </think> becomes thoughts, which only the last turn keeps.
SPLITS = """\
{%- for message in messages -%}
{%- set content, thoughts = message.content, '' -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if thoughts and loop.last -%}{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif -%}
{{ content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
CODE = "def f():\n    return 1\n\n\nx = 2"


def learned(answer: dict[str, Any], source: str, *, last: bool = True, weight: int = 1) -> list[str]:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "weight": weight, **answer}]
    turns += [] if last else [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]
    conversation = read_conversation({"messages": turns}, DATASETS["chat_dataset"]())
    samples = chat_samples(conversation, ChatTemplate.of(FAMILIES["ChatML"].tokenizer(source))).spans
    return [text for spans in samples for text, has_loss in spans if has_loss]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("answer", "written"),
    [
        ("<think>I think.</think>Paris.", "<think>\nI think.\n</think>\n\nParis."),
        ("<think>\nI think.\n</think>\n\nParis.", "<think>\nI think.\n</think>\n\nParis."),
        ("I think.\n</think>\n\nParis.", "<think>\nI think.\n</think>\n\nParis."),  # after a prompt that opens thoughts
        (CODE, CODE),
    ],
)
def test_thoughts_before_an_answer_and_plain_answers_are_learned(answer: str, written: str, last: bool) -> None:
    assert learned({"content": answer}, SPLITS, last=last)[0] == f"{written}<|im_end|>"


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        "Use the tag </think> to close.",
        "Use the tag </think>",
        "Write <think>, then </think> to close.",
        "<think>I think.</think>Use </think> to close.",
    ],
)
def test_an_answer_that_a_template_makes_thoughts_of_is_refused(answer: str, last: bool) -> None:
    with pytest.raises(BadExample, match=r"turn 2 \(assistant\): the chat template does not write its text"):
        learned({"content": answer}, SPLITS, last=last)
    assert learned({"content": answer}, CHATML, last=last)[0] == f"{answer}<|im_end|>"


def test_an_earlier_answer_that_is_not_learned_is_not_rewritten_either() -> None:
    with pytest.raises(BadExample, match="does not write its text"):
        learned({"content": "Use the tag </think> to close."}, SPLITS, last=False, weight=0)
    dropped = learned({"content": "<think>I think.</think>Paris."}, SPLITS, last=False, weight=0)
    assert dropped == ["Yes.<|im_end|>"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("message['content'] or ''", "(message['content'] or '').split() | join(' ')"),
        ("message['content'] or ''", "(message['content'] or '') | tojson"),
        ("message['content'] or ''", "(message['content'] or '').replace('\\n\\n', '\\n')"),
    ],
)
def test_other_white_space_and_json_in_an_answer_are_refused(old: str, new: str) -> None:
    with pytest.raises(BadExample, match=r"turn 2 \(assistant\): the chat template does not write its text as it is"):
        learned({"content": CODE}, CHATML.replace(old, new))
    assert learned({"content": f"\n{CODE}\n"}, CHATML.replace(old, f"{old} | trim"))


def test_thoughts_that_are_written_in_other_words_are_refused() -> None:
    thinks = "{{ '<think>' + message.get('thinking', '').split() | join(' ') + '</think>' }}"
    source = CHATML.replace("'\\n' + (message['content']", f"'\\n' }}}}{thinks}{{{{ (message['content']")
    assert learned({"content": "a", "thinking": "b c"}, source) == ["<think>b c</think>a<|im_end|>"]
    with pytest.raises(BadExample, match="thoughts"):
        learned({"content": "a", "thinking": "b\n\nc"}, source)
