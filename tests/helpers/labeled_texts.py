"""Generated texts with labels: words at random, among them some that say what the text is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILLERS = [
    "the",
    "a",
    "we",
    "they",
    "walked",
    "home",
    "late",
    "and",
    "saw",
    "many",
    "trees",
    "near",
    "old",
    "house",
    "by",
    "river",
    "when",
    "rain",
    "began",
]
MOODS = {"glad": "happy", "sad": "angry", "flat": "nothing"}


def words(rng: random.Random, *marks: str) -> str:
    """Words in a random order, with these among them."""
    chosen = [*rng.choices(FILLERS, k=rng.randint(3, 16)), *marks]
    rng.shuffle(chosen)
    return " ".join(chosen)


def classes(num_rows: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    names = rng.choices(sorted(MOODS), k=num_rows)
    return [{"text": words(rng, MOODS[name], MOODS[name]), "label": name} for name in names]


def several(num_rows: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    chosen = [[name for name in sorted(MOODS) if rng.random() < 0.4] for _ in range(num_rows)]
    return [{"text": words(rng, *(MOODS[name] for name in names)), "label": names} for names in chosen]


def numbers(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """The number is the share of happy words among the marked ones."""
    rng, rows = random.Random(seed), []
    for _ in range(num_rows):
        happy = rng.randint(0, 4)
        rows.append({"text": words(rng, *["happy"] * happy, *["angry"] * (4 - happy)), "label": happy / 4 + 0.01})
    return rows


def write_rows(folder: Path, rows_of: Any, num_train: int = 512, num_validation: int = 64) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, number) in enumerate({"train": num_train, "validation": num_validation}.items()):
        write_split(folder / f"{split}.jsonl", rows_of(number, seed))
    return folder


def write_split(file: Path, rows: Sequence[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
