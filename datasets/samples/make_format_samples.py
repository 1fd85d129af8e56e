"""Write a few rows of every format that docs/datasets.md names: text made for this project.

    python datasets/samples/make_format_samples.py [--out DIR]

They show how a file has to look and let every recipe run where no data set can be downloaded; too few to learn from.
The same script gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path

# (thing, what it is, where it is, a mistaken sentence about it, the same corrected)
THINGS = (
    ("Lake Titicaca", "a lake", "Peru and Bolivia", "Titicaca are a lake.", "Titicaca is a lake."),
    ("Mount Kenya", "a mountain", "Kenya", "He have climbed Mount Kenya.", "He has climbed Mount Kenya."),
    ("the Danube", "a river", "ten countries of Europe", "The Danube flow east.", "The Danube flows east."),
    (
        "the Gobi",
        "a desert",
        "Mongolia and China",
        "The Gobi is cold in the winter often.",
        "The Gobi is often cold in winter.",
    ),
    ("Hokkaido", "an island", "Japan", "Hokkaido lie in the north.", "Hokkaido lies in the north."),
    (
        "the Wadden Sea",
        "a shallow sea",
        "the Netherlands, Germany and Denmark",
        "It fall dry twice the day.",
        "It falls dry twice a day.",
    ),
    ("Etna", "a volcano", "Italy", "Etna smoke most days.", "Etna smokes most days."),
    ("the Ruwenzori", "a mountain range", "Uganda and Congo", "Its peaks has snow.", "Its peaks have snow."),
)
SYSTEM = "You answer in one sentence."
TOOL = {
    "type": "function",
    "function": {
        "name": "find_place",
        "description": "Where a lake, mountain, river or other thing is",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def chats() -> list[dict[str, object]]:
    """Two rounds each; every other one begins with a system turn, the last one calls a tool."""
    rows: list[dict[str, object]] = []
    for number, (name, kind, place, _, _) in enumerate(THINGS):
        turns: list[dict[str, object]] = [{"role": "system", "content": SYSTEM}] if number % 2 else []
        turns += [
            {"role": "user", "content": f"What is {name}?"},
            {"role": "assistant", "content": f"{sentence(name)} is {kind}."},
            {"role": "user", "content": "And where is it?"},
        ]
        if number == len(THINGS) - 1:
            call = {"type": "function", "function": {"name": "find_place", "arguments": {"name": name}}}
            turns += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "find_place", "content": place},
            ]
        turns.append({"role": "assistant", "content": f"It is in {place}."})
        rows.append({"messages": turns, "tools": json.dumps([TOOL]) if number == len(THINGS) - 1 else ""})
    return rows


def as_lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_csv(rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def make_files() -> dict[str, str]:
    """The text of each file by its name."""
    alpaca = [
        {"instruction": "Say where it is.", "input": sentence(name), "output": f"It is in {place}."}
        if number % 2
        else {"instruction": f"Say what {name} is.", "input": "", "output": f"{sentence(name)} is {kind}."}
        for number, (name, kind, place, _, _) in enumerate(THINGS)
    ]
    questions: list[dict[str, object]] = [
        {"question": f"What is {name}?", "answer": f"{sentence(name)} is {kind}."} for name, kind, *_ in THINGS
    ]
    return {
        "alpaca_data.json": json.dumps(alpaca, indent=1) + "\n",
        "grammar.csv": as_csv([{"input": wrong, "target": right} for *_, wrong, right in THINGS]),
        "chats.jsonl": as_lines(chats()),
        "questions.jsonl": as_lines(questions),
        "places.txt": "\n\n".join(f"{sentence(name)} is {kind}.\nIt is in {place}." for name, kind, place, *_ in THINGS)
        + "\n",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "formats")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in make_files().items():
        (out / name).write_bytes(text.encode("utf-8"))  # bytes, so that the line ends are the same on every system


if __name__ == "__main__":
    main()
