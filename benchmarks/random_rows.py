"""Random data sets for `benchmarks.same_tokens`: rows of one format, with all that texts are known to trip over."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

_WORDS = (
    *("Anna", "says", "hello", "Wörter", "слово", "言葉", "كلمة", "🙂", "e\u0301", "na\u00efve", "\u200fab", "\u200db"),
    *('quo"ted', '"', "'", "a,b", "a;b", "a\tb", "back\\slash", "\\n", "\\", "a<b&c", "{x}", "{{ x }}", "{% y %}"),
    *("NA", "null", "None", "NaN", "true", "False", "007", "1.10", "1e5", "-0", "[1, 2]", '{"a": null}', "[", "#"),
    *("</s>", "<s>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "[INST]", "<bos>", "<|eot_id|>", "a://b?c=d"),
)
_INNER = (
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u2028",
    "\u0085",
    "\x0b",
    "\x0c",
    "\x1c",
    "\ufeff",
)
_ENDS = ("", "", "", "", " ", "\n", "  ", "\t", "\r\n", "\u00a0", "\n\n", "\u3000")


@dataclass
class RandomData:
    """Rows, and how they are read.

    `twins` are the same data in other words: the name of a dataset, its settings and its rows.
    """

    dataset: str
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    twins: list[tuple[str, dict[str, Any], list[Row]]] = field(default_factory=list)


def make_data(seed: int) -> RandomData:
    """A data set of one to twelve rows; its kind follows from the seed."""
    draw = random.Random(seed)
    make = (_chats, _instructions, _texts, _preferences, _questions, _calls)[seed % 6]
    return make(draw, draw.randint(1, 12))


def _text(draw: random.Random, *, is_plain: bool = False) -> str:
    """A text that says something; a plain one has none of the ends and line breaks that some kinds of files lack."""
    words = draw.choices(_WORDS, k=draw.randint(1, 6))
    if is_plain:
        return " ".join(word for word in words if word.strip())
    text = words[0] + "".join(draw.choice(_INNER) + word for word in words[1:])
    return draw.choice(_ENDS) + text + draw.choice(_ENDS)


def _part(text: str) -> list[Row]:
    return [{"type": "text", "text": text}]


def _chats(draw: random.Random, count: int) -> RandomData:
    rows, shared = [], []
    for _ in range(count):
        turns = [{"role": "system", "content": _text(draw)}] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 3)):
            turns += [{"role": "user", "content": _text(draw)}, {"role": "assistant", "content": _text(draw)}]
        rows.append({"messages": turns})
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        shared.append({"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]})
    parts = [
        {"messages": [t | {"content": [{"type": "text", "text": t["content"]}]} for t in r["messages"]]} for r in rows
    ]
    last = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    if draw.random() < 0.3:
        return RandomData("chat_dataset", rows, {"learn": "last"}, [("chat_dataset", {}, last)])
    system = [
        {"system": turns[0]["content"], "messages": turns[1:]} if turns[0]["role"] == "system" else {"messages": turns}
        for turns in (row["messages"] for row in rows)
    ]
    return RandomData("chat_dataset", rows, {}, [("chat_dataset", {}, twin) for twin in (shared, parts, system)])


def _calls(draw: random.Random, count: int) -> RandomData:
    """Conversations with calls and tools, whose keys differ from row to row."""
    rows: list[Row] = []
    as_text: list[Row] = []
    openai: list[Row] = []
    is_described = draw.random() < 0.5
    for number in range(count):
        keys = ("city", "unit", "days", "when")[: draw.randint(1, 3)]  # in one order, as the columns of a table are
        described = {key: {"description": _text(draw)} if is_described else {} for key in keys}
        properties = {key: {"type": "string"} | described[key] for key in keys}
        if draw.random() < 0.5:
            properties[keys[0]] |= {"default": "here"}
        parameters = {"type": "object", "properties": properties}
        function = {"name": f"f{number}", "description": "does", "parameters": parameters}
        call = {"name": f"f{number}", "arguments": {key: _text(draw, is_plain=True) for key in keys}}
        before = [{"role": "user", "content": _text(draw)}]
        after = [{"role": "tool", "content": _text(draw, is_plain=True)}, {"role": "assistant", "content": _text(draw)}]
        for into, calls, tools in (
            (rows, [{"type": "function", "function": call}], [{"type": "function", "function": function}]),
            (as_text, [call], [function]),
        ):
            turns = [*before, {"role": "assistant", "content": "", "tool_calls": calls}, *after]
            into.append({"messages": turns, "tools": tools})
        openai.append({"messages": rows[-1]["messages"], "functions": [function]})
    return RandomData("chat_dataset", rows, {}, [("chat_dataset", {}, as_text), ("chat_dataset", {}, openai)])


def _instructions(draw: random.Random, count: int) -> RandomData:
    has_system, has_history = draw.random() < 0.4, draw.random() < 0.4
    rows = []
    for _ in range(count):
        row: Row = {"instruction": _text(draw), "input": _text(draw) if draw.random() < 0.5 else ""}
        row["output"] = _text(draw)
        if has_system:
            row["system"] = _text(draw) if draw.random() < 0.7 else ""
        if has_history:
            row["history"] = [[_text(draw), _text(draw)] for _ in range(draw.randint(0, 2))]
        rows.append(row)
    if draw.random() < 0.5:
        return RandomData("instruction_dataset", rows, {}, [("alpaca_dataset", {"validation_fraction": 0.0}, rows)])
    chats = []
    for row in rows:
        question = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
        turns = [{"role": "system", "content": row["system"]}] if row.get("system", "").strip() else []
        for asked, answered in [*row.get("history", []), [question, row["output"]]]:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        chats.append({"messages": turns})
    return RandomData("instruction_dataset", rows, {"as_chat": True}, [("chat_dataset", {}, chats)])


def _questions(draw: random.Random, count: int) -> RandomData:
    rows = [{"prompt": _text(draw), "completion": _text(draw)} for _ in range(count)]
    if draw.random() < 0.5:
        asked = [{"question": row["prompt"], "answer": row["completion"]} for row in rows]
        twin = [{"prompt": f"Question: {row['prompt']}\nAnswer:\n", "completion": row["completion"]} for row in rows]
        return RandomData("instruction_dataset", asked, {}, [("instruction_dataset", {}, twin)])
    parts = [
        {"segments": [{"text": row["prompt"], "label": False}, {"text": row["completion"], "label": True}]}
        for row in rows
    ]
    return RandomData("segments_dataset", parts, {}, [])


def _texts(draw: random.Random, count: int) -> RandomData:
    is_plain = draw.random() < 0.5
    return RandomData(
        "text_dataset", [{"text": _text(draw, is_plain=is_plain)} for _ in range(count)], {"sample_by": "line"}
    )


def _preferences(draw: random.Random, count: int) -> RandomData:
    rows: list[Row] = []
    turns: list[Row] = []
    chats: list[Row] = []
    for number in range(count):
        asked, good, bad = _text(draw), _text(draw), f"{_text(draw)} {number}"
        if good.strip() == bad.strip():
            bad += " no"
        rows.append({"prompt": asked, "chosen": good, "rejected": bad})
        question = [{"role": "user", "content": asked}]
        chosen, rejected = ([*question, {"role": "assistant", "content": text}] for text in (good, bad))
        turns.append({"chosen": chosen, "rejected": rejected})
        chats.append({"messages": chosen})
    settings: dict[str, Any] = {"preference": "chosen"}
    apart = [
        {"prompt": row["chosen"][:1], "chosen": row["chosen"][1:], "rejected": row["rejected"][1:]} for row in turns
    ]
    twins = [("chat_dataset", settings, turns), ("chat_dataset", settings, apart), ("chat_dataset", {}, chats)]
    return RandomData("chat_dataset", rows, settings, twins)
