"""Checks the loss masks of chat templates on random conversations, against a rendering of its own.

    python -m benchmarks.chat_masks FOLDER [--tokenizers TOKENIZER,...] [--count 60]

Takes every *.jinja in FOLDER, with a tokenizer that is trained on the samples and has the template's special tokens,
and the own template of every TOKENIZER (a folder or a name on the hub). Conversations have one to six turns, with
system, tools, calls, results, thoughts, parts and characters of many scripts; every word of them is unique. For each
template it prints how many were taken in which way, the refusals with their reasons, and what is wrong: words of others
that are learned, words of the assistant that are not or twice, turns that begin where no rendered generation prompt
ends or leads, turns without an end token, label tokens that are not those of the text. The last number must be 0.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import fire
import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from configs.datasets import ChatDataset
from data.chat import chat_samples
from data.chat_template import ChatTemplate
from data.conversation import Conversation, read_conversation
from data.labels import IGNORE_INDEX
from data.loss_mask import BadExample, tokenize_spans
from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts

SCRIPTS = ("word", "Wörter", "слово", "言葉", "كلمة", "🙂wink", 'quo"ted', "a<b&c", "back\\slash")
SPECIAL = re.compile(
    r"<\|[^<>{}\s]+\|>|<\uff5c[^<>]+\uff5c>|</?s>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|\[/?INST\]"
)
TOOL = {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}, "required": ["place"]}


def make_row(draw: random.Random) -> dict[str, Any]:
    """A row as people have it: questions, perhaps with a system, calls and results, thoughts and parts."""
    numbers = iter(range(1000))

    def words(kind: str) -> str:
        return " ".join(f"{kind}{next(numbers)}x{draw.choice(SCRIPTS)}" for _ in range(draw.randint(1, 3)))

    def content(kind: str) -> Any:
        text = words(kind)
        return [{"type": "text", "text": text}] if has_parts else text

    def answer(**more: Any) -> dict[str, Any]:
        thoughts = {"reasoning_content": words("A")} if thinks and draw.random() < 0.8 else {}
        return {"role": "assistant", "content": content("A"), **thoughts, **more}

    has_system, has_tools, thinks, has_parts = (draw.random() < share for share in (0.3, 0.3, 0.3, 0.2))
    messages: list[dict[str, Any]] = [{"role": "system", "content": content("O")}] if has_system else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": content("O")})
        if has_tools and draw.random() < 0.7:
            call = {"name": "look_up", "arguments": {"place": words("A"), "days": draw.randint(1, 9)}}
            call_id = f"call{draw.randint(10000, 99999)}"
            messages.append(
                answer(tool_calls=[{"type": "function", "id": call_id, "function": call}]) | {"content": ""}
            )
            messages.append({"role": "tool", "name": "look_up", "tool_call_id": call_id, "content": words("O")})
        messages.append(answer())
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": content("O")})
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Looks up", "parameters": TOOL}}]
    return {"messages": messages} | ({"tools": tools} if has_tools else {})


class OwnRendering:
    """The template, rendered here, in every form that a message may have."""

    def __init__(self, tokenizer: Any) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        source = re.sub(r"(\{%-?)\s*(?:end)?generation\s*(-?%\})", r"\1 if true \2\1 endif \2", tokenizer.chat_template)
        self.template, self.tokens = environment.from_string(source), tokenizer.special_tokens_map

    def texts(self, conversation: Conversation, number: int, *, prompt: bool) -> list[str]:
        found = []
        for as_parts, as_text, as_null in product((False, True), repeat=3):
            messages = copy.deepcopy(conversation.messages[:number])
            for message in messages:
                for call in message.get("tool_calls") or []:
                    if as_text:
                        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                if as_parts:
                    message["content"] = [{"type": "text", "text": message["content"]}]
                if as_null and message.get("tool_calls"):
                    message["content"] = None
            try:
                found.append(
                    self.template.render(
                        messages=messages, tools=conversation.tools, add_generation_prompt=prompt, **self.tokens
                    )
                )
            except (jinja2.TemplateError, TypeError, ValueError, KeyError):
                continue
        return found


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def wrong(
    conversation: Conversation, samples: Any, tokenizer: Any, own: OwnRendering, *, is_marked: bool
) -> Iterator[str]:
    """Each thing that is wrong with the samples of a conversation."""
    learned: Counter[str] = Counter()
    tokens = tokenize_spans(samples.spans, tokenizer)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    prompts = [text for number in answers for text in own.texts(conversation, number, prompt=True)]
    for spans, ids, labels in zip(samples.spans, *tokens, strict=True):
        before = ""
        for text, has_loss in spans:
            if has_loss:
                words = re.findall(r"([AO]\d+x)", text)
                learned.update(words)
                yield from (f"{word} of another is learned" for word in words if word[0] == "O")
                behind_prompt = before in prompts or any(prompt.startswith(before) for prompt in prompts)
                if not is_marked and not behind_prompt:
                    yield "a turn begins elsewhere than its prompt ends"
                if not any(text.endswith(token) for token in special):
                    yield "a turn has no end token"
            before += text
        in_labels = Counter(re.findall(r"[AO]\d+x", tokenizer.decode(ids[labels != IGNORE_INDEX].tolist())))
        in_spans = Counter(re.findall(r"[AO]\d+x", " ".join(text for text, has_loss in spans if has_loss)))
        if in_labels != in_spans:
            yield "label tokens are not those of the spans"
        if (labels[labels != IGNORE_INDEX] != ids[labels != IGNORE_INDEX]).any():
            yield "a label is not its token"
    said = {word for number in answers for word in re.findall(r"A\d+x", json.dumps(conversation.messages[number]))}
    yield from (f"{word} of the assistant is learned {learned[word]} times" for word in said if learned[word] != 1)


def check_template(tokenizer: Any, count: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Ways, refusals and wrong things of `count` random conversations."""
    ways, refusals, faults = Counter[str](), Counter[str](), Counter[str]()
    template, own = ChatTemplate.of(tokenizer), OwnRendering(tokenizer)
    for seed in range(count):
        row = make_row(random.Random(seed))
        conversation = read_conversation(row, ChatDataset(), chat_template=tokenizer.chat_template)
        try:
            samples = chat_samples(conversation, template)
        except BadExample as error:
            refusals[re.sub(r"^turn \d+|turn \d+|'[^']*'", "turn", str(error)).split(";")[0][:110]] += 1
            continue
        assert samples.way is not None  # as of every conversation
        ways[samples.way.removeprefix("num_by_")] += 1
        is_marked = template.has_marks(conversation)
        faults.update(wrong(conversation, samples, tokenizer, own, is_marked=is_marked))
    return ways, refusals, faults


def templates_of(folder: str | None, tokenizers: list[str]) -> Iterator[tuple[str, Any]]:
    """Names, and tokenizers that have the template."""
    for name in tokenizers:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.chat_template:
            yield name, tokenizer
        else:
            print(f"{name}: has no chat template")
    base: Any = make_tokenizer(read_texts(DEFAULT_DATA), 400) if folder else None
    for file in sorted(Path(folder).glob("*.jinja")) if folder else []:
        source = file.read_text(encoding="utf-8")
        with_template = copy.deepcopy(base)
        tokens = sorted({*SPECIAL.findall(source), "<|endoftext|>"})
        with_template.add_special_tokens({"additional_special_tokens": tokens})
        with_template.eos_token, with_template.chat_template = "<|endoftext|>", source
        yield file.name, with_template


def main(folder: str | None = None, tokenizers: str | tuple[str, ...] = (), count: int = 60) -> None:
    names = tokenizers.split(",") if isinstance(tokenizers, str) else [*tokenizers]
    num_wrong = 0
    for name, tokenizer in templates_of(folder, names):
        ways, refusals, faults = check_template(tokenizer, count)
        num_wrong += faults.total()
        print(
            f"{name}: taken {ways.total()} of {count} {dict(ways)}, refused {refusals.total()}, wrong {faults.total()}"
        )
        for reason, number in [*refusals.most_common(6), *faults.most_common(6)]:
            print(f"    {number:3} {reason}")
    print(f"wrong in all: {num_wrong}")


if __name__ == "__main__":
    fire.Fire(main)
