"""Checks the loss masks of chat templates on random conversations, against a rendering of its own.

    python -m benchmarks.chat_masks FOLDER [--tokenizers TOKENIZER,...] [--count 60]

Takes every *.jinja in FOLDER, with a tokenizer that is trained on the samples and has the template's special tokens,
and the own template of every TOKENIZER (a folder or a name on the hub). Conversations have one to six turns, with
system, tools, calls, results, thoughts, parts and characters of many scripts; every word of them is unique. For each
template it prints how many were taken in which way, the refusals with their reasons, and what is wrong: words of others
that are learned, words of the assistant that are not or twice, and samples that are not what jinja itself writes: each
text is compared whole, each token with those of the text, and each label with those behind the generation prompt, or
between the template's own marks, up to the end token. The last number must be 0.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import fire
import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from chat.conversation import Conversation, read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.tokens.labels import IGNORE_INDEX
from data.tokens.loss_mask import tokenize_spans
from data.tokens.spans import BadExample
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


MARK, END_OF_MARK, PROBE = "\ue001", "\ue002", "\ue003"  # private characters: no text has them
WORD = re.compile(r"[AO]\d+x")
Range = tuple[int, int]  # characters [first, last)
Turn = tuple[str, list[Range]]  # a text that begins a sample, and where a turn is learned in it


class OwnRendering:
    """The template, rendered here, in every form that a message may have; its own marks become characters."""

    def __init__(self, tokenizer: Any) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        environment.filters["marked"] = lambda text: f"{MARK}{text}{END_OF_MARK}"
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        given = tokenizer.chat_template
        self.templates, self.tokens = {}, tokenizer.special_tokens_map
        for name, source in given.items() if isinstance(given, dict) else [("default", given)]:
            source = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 filter marked \2", source)
            source = re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endfilter \2", source)
            self.templates[name] = environment.from_string(source)
        self.special = sorted(
            {token.content.strip() for token in tokenizer.added_tokens_decoder.values() if token.special} - {""},
            key=len,
            reverse=True,
        )

    def forms(self, conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
        """The messages in each form that a template may take."""
        for as_parts, as_text, as_null in product((False, True), repeat=3):
            messages = copy.deepcopy(conversation.messages)
            for message in messages:
                for call in message.get("tool_calls") or []:
                    if as_text:
                        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                if as_parts:
                    message["content"] = [{"type": "text", "text": message["content"]}]
                if as_null and message.get("tool_calls"):
                    message["content"] = None
            yield messages

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> tuple[str, list[Range]]:
        """The text, and the ranges that the template marks.

        Raises:
            jinja2.TemplateError: or others, if the template does not take the messages.
        """
        template = self.templates.get("tool_use" if tools else "default", self.templates["default"])
        written = template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self.tokens)
        marks, text = [], ""
        for number, part in enumerate(re.split(f"[{MARK}{END_OF_MARK}]", written)):
            if number % 2 and part:
                marks.append((len(text), len(text) + len(part)))
            text += part
        return text, marks


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def wrong(
    conversation: Conversation, samples: Any, tokenizer: Any, own: OwnRendering, *, is_marked: bool
) -> Iterator[str]:
    """Each thing that is wrong with the samples of a conversation."""
    learned: Counter[str] = Counter()
    tokens = tokenize_spans(samples.spans, tokenizer)
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    for spans, ids, labels in zip(samples.spans, tokens.input_ids, tokens.labels, strict=True):
        words = re.findall(r"([AO]\d+x)", " ".join(text for text, has_loss in spans if has_loss))
        learned.update(words)
        yield from (f"{word} of another is learned" for word in words if word[0] == "O")
        turns = [number for number in answers if _words(conversation.messages[number]) & set(words)]
        text = "".join(span.text for span in spans)
        difference = _difference(text, ids, labels, turns, conversation, tokenizer, own, is_marked=is_marked)
        if difference is not None:
            yield difference
    said = {word for number in answers for word in _words(conversation.messages[number])}
    yield from (f"{word} of the assistant is learned {learned[word]} times" for word in said if learned[word] != 1)


def _words(message: dict[str, Any]) -> set[str]:
    return set(re.findall(r"A\d+x", json.dumps(message)))


def _difference(
    text: str,
    ids: Any,
    labels: Any,
    turns: list[int],
    conversation: Conversation,
    tokenizer: Any,
    own: OwnRendering,
    *,
    is_marked: bool,
) -> str | None:
    """How a sample differs from all own renderings of it, token by token; None if it is like one.

    Args:
        turns: those that are learned in it.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] != ids.tolist():
        return "the tokens are not those of the text"
    found = "the text is not what the template writes"
    for messages in own.forms(conversation):
        try:
            numbers = [*(number + 1 for number in turns), len(messages)]
            whole = [own.render(messages[:number], conversation.tools) for number in numbers]
            if is_marked:
                found_turns = [[_marked_turn(messages[number], each, own) for each in whole] for number in turns]
                written = [[turn for turn in of_turn if turn] for of_turn in found_turns]
            else:
                written = [_prompted_turns(messages, number, conversation.tools, own) for number in turns]
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            continue
        places = [_places(text, options) for options in written]
        texts = [each for each, _ in [*whole, *(option for options in written for option in options)]]
        if text not in texts or None in places:
            continue
        ranges = [place for of_turn in places for place in of_turn or []]
        expected = [
            token if any(first < end and start < last for first, last in ranges) else IGNORE_INDEX
            for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]
        if expected == labels.tolist():
            return None
        number = sum(one != other for one, other in zip(expected, labels.tolist(), strict=True))
        found = f"{number} labels are not those of the rendering"
    return found


def _marked_turn(message: dict[str, Any], rendered: tuple[str, list[Range]], own: OwnRendering) -> Turn | None:
    """A turn in a rendering with marks: those with its words, and those without any words beside them."""
    text, marks = rendered
    with_words = [n for n, mark in enumerate(marks) if any(word in text[slice(*mark)] for word in _words(message))]
    if not with_words:
        return None
    first, last = with_words[0], with_words[-1]
    while first and not WORD.search(text[marks[first - 1][0] : marks[first][0]]):
        first -= 1
    while last + 1 < len(marks) and not WORD.search(text[marks[last][1] : marks[last + 1][1]]):
        last += 1
    end = _own_ends(text[: marks[last][1]], own.special)[0]
    return text, [*marks[first:last], (marks[last][0], end)]


def _prompted_turns(messages: list[dict[str, Any]], number: int, tools: Any, own: OwnRendering) -> list[Turn]:
    """A turn behind its prompt; its end may be behind one special token or behind several."""
    text, prompt = (own.render(messages[: number + n], tools, prompt=not n)[0] for n in (1, 0))
    first_word = min(text.index(word) for word in _words(messages[number]))
    first = min(_length_shared(prompt, text), first_word)
    header = prompt[len(own.render(messages[:number], tools)[0]) :]
    if not header:  # the turn then begins behind the token that ends the prompt
        header = next((token for token in own.special if prompt.endswith(token)), "")
    earlier = json.dumps(messages[:number])
    before = max((word.end() for word in WORD.finditer(text, 0, first_word) if word[0] in earlier), default=0)
    if not text.startswith(prompt) and header in text[before:first_word]:
        text = prompt + text[text.rindex(header, before, first_word) + len(header) :]
        first = len(prompt)
    ends = _own_ends(text, own.special)
    if not ends:
        following = messages[number + 1] if len(messages) > number + 1 else {"role": "user", "content": PROBE}
        written = own.render([*messages[: number + 1], following], tools)[0]
        last_words = text.rstrip()[max(text.rindex(word) for word in _words(messages[number])) :]
        found = next(last_words[n:] for n in range(len(last_words)) if last_words[n:] in written)
        behind = written.rpartition(found)[2]
        token = next((token for token in own.special if behind.lstrip().startswith(token)), None)
        if token is None:
            return []
        text = text.rstrip() + behind[: behind.index(token) + len(token)]
        ends = [len(text)]
    return [(text, [(first, end)]) for end in ends]


def _length_shared(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _own_ends(text: str, special: list[str]) -> list[int]:
    """Behind each of the special tokens that end a text, the last first."""
    ends, rest = [], text.rstrip()
    while token := next((token for token in special if rest.endswith(token)), None):
        ends.append(len(rest))
        rest = rest.removesuffix(token).rstrip()
    return ends


def _places(text: str, options: list[Turn]) -> list[Range] | None:
    """Where a turn is in a sample that begins with its text; None if none does."""
    return next((places for written, places in options if text.startswith(written[: places[-1][1]])), None)


def check_template(tokenizer: Any, count: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Ways, refusals and wrong things of `count` random conversations."""
    ways, refusals, faults = Counter[str](), Counter[str](), Counter[str]()
    template, own = ChatTemplate.of(tokenizer), OwnRendering(tokenizer)
    settings: Any = DATASETS["chat_dataset"]()
    for seed in range(count):
        row = make_row(random.Random(seed))
        conversation = read_conversation(row, settings, chat_template=tokenizer.chat_template)
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
