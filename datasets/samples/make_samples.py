"""Write the sample dialogue-summary pairs: SAMSum's format, text made for this project.

    python datasets/samples/make_samples.py [--out DIR] [--seed 42]

The samples let the whole tool run where no data set can be downloaded.  They are built
from the templates in `material.py`: a situation, how it ends, who takes part, when and
where.  The summary states those facts, so it cannot be known without the dialogue; small
talk around the matter gives the dialogues the lengths that SAMSum's have.

The same seed gives the same bytes: only `random.Random(seed)` decides, and nothing is
taken from sets, from the clock or from the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
from collections.abc import Sequence
from pathlib import Path

from material import (
    CLOSING_BAD,
    CLOSING_GOOD,
    GOODBYES,
    GREETINGS,
    NAMES,
    NEWS,
    PADDING,
    PLACE,
    REASONS,
    RUN_ON,
    TIME,
    TOPICS,
    WARM_UP,
    WHEN,
    Topic,
)

SPLIT_SIZES = {"train": 2400, "validation": 240}
MIN_TURNS, MAX_TURNS = 3, 30
# Number of turns: log-normal, like SAMSum's (mean about 11, with a long right tail).
TURNS_MU, TURNS_SIGMA = 2.3, 0.58

Sample = dict[str, str]


def choose(rng: random.Random, text: str) -> str:
    """One of the phrasings that `|` separates."""
    return rng.choice(text.split("|")).strip()


def aligned(rng: random.Random, turns: Sequence[str]) -> list[str]:
    """`turns` with one phrasing left in each: the n-th question keeps the n-th answer."""
    pick = rng.randrange(60)
    fixed = []
    for turn in turns:
        role, phrasings = turn.split("> ", 1)
        options = phrasings.split("|")
        fixed.append(f"{role}> {options[pick % len(options)].strip()}")
    return fixed


def answering(block: Sequence[str], previous: Sequence[str]) -> list[str]:
    """`block` with A and B swapped if it would let the last speaker of `previous` go on."""
    if previous and previous[-1][0] == block[0][0]:
        swap = str.maketrans("AB", "BA")
        return [turn[0].translate(swap) + swap_names(turn[1:]) for turn in block]
    return list(block)


def swap_names(text: str) -> str:
    """`text` with the slots {A} and {B} exchanged."""
    return text.replace("{A}", "{_}").replace("{B}", "{A}").replace("{_}", "{B}")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def capitalised(text: str) -> str:
    """`text` with a capital at each sentence's start (slots may begin a sentence)."""
    out = text[0].upper() + text[1:]
    for end in ".!?":
        head, *rest = out.split(f"{end} ")
        out = f"{end} ".join([head, *(part[:1].upper() + part[1:] for part in rest)])
    return out


class Facts:
    """The values of one dialogue's slots, drawn when first asked for.

    A slot named like another with a digit behind it ("when2") draws from the same list
    but never the same value, so "Friday instead of Monday" is never "Monday instead of
    Monday".
    """

    def __init__(self, rng: random.Random, topic: Topic) -> None:
        self._rng = rng
        self._lists: dict[str, list[str]] = {}
        # Nothing is put off until tomorrow: tomorrow may be before the day it was planned for.
        weekdays = WHEN.removesuffix(",tomorrow")
        self.add_lists({"when": WHEN, "when2": weekdays, "when3": weekdays, "time": TIME, "place": PLACE})
        self.add_lists(topic.slots)
        self.values = dict(zip("ABCDE", rng.sample(NAMES.split(","), 5), strict=True))
        self.values |= dict(zip(("why1", "why3", "whyn"), rng.choice(REASONS), strict=True))

    def add_lists(self, slots: dict[str, str]) -> None:
        self._lists |= {name: values.split(",") for name, values in slots.items()}

    def _value(self, name: str) -> str:
        if name.startswith("a_"):
            return with_article(self._value(name[2:]))
        if name not in self.values:
            stem = name.rstrip("0123456789")
            taken = [v for k, v in self.values.items() if k.rstrip("0123456789") == stem]
            pool = self._lists[name] if name in self._lists else self._lists[stem]
            self.values[name] = self._rng.choice([v for v in pool if v not in taken])
        return self.values[name]

    def fill(self, text: str) -> str:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name]
        return capitalised(text.format(**{name: self._value(name) for name in names}))


class DialogueWriter:
    """Writes one dialogue and its summary."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.topic = rng.choice(TOPICS)
        self.outcome = rng.choice(self.topic.outcomes)
        self.facts = Facts(rng, self.topic)
        self.summary = [self.facts.fill(rng.choice(self.outcome.summaries))]

    def _target_turns(self) -> int:
        turns = round(self.rng.lognormvariate(TURNS_MU, TURNS_SIGMA))
        return min(max(turns, MIN_TURNS), MAX_TURNS)

    def _news(self, room: int) -> list[str]:
        """Turns of up to two side matters, if there is `room`; each adds to the summary."""
        turns: list[str] = []
        for news in self.rng.sample(NEWS, 2):
            if room - len(turns) >= 6 and self.rng.random() < 0.8:
                self.facts.add_lists(news.slots)
                turns += aligned(self.rng, news.turns)
                self.summary.append(self.facts.fill(self.rng.choice(news.summaries)))
        return turns

    def _turns(self) -> list[str]:
        """The turn templates, in order: the matter first, then whatever fits around it."""
        rng, room = self.rng, self._target_turns()
        matter = [*self.topic.opening, *self.outcome.turns]
        room -= len(matter)
        start: list[str] = []
        if room >= 2:
            start += aligned(rng, GREETINGS[0] if rng.random() < 0.85 else GREETINGS[1])
            room -= 2
        closing: tuple[str, ...] = ()
        if room >= 1 and not any(turn.startswith("C>") for turn in matter):
            after_b, after_a = CLOSING_GOOD if self.outcome.good else CLOSING_BAD
            closing = after_b if matter[-1].startswith("B>") else after_a
            room -= len(closing)
        asides: list[str] = []
        for aside in rng.sample(self.topic.asides, len(self.topic.asides)):
            if room >= 2 and rng.random() < 0.7:
                asides += aligned(rng, aside)
                room -= 2
        ending: Sequence[str] = GOODBYES if room >= 2 else ()
        room -= len(ending)
        news = self._news(room)
        room -= len(news)
        # Up to two blocks of small talk go before the matter, the rest after it.
        early = rng.sample(WARM_UP, 2)
        blocks = [*early, *rng.sample(RUN_ON, len(RUN_ON))]
        fitting: list[tuple[str, ...]] = []
        for block in blocks:
            if len(block) <= room:
                fitting.append(block)
                room -= len(block)
        for block in (block for block in fitting if block in early):
            start += answering(aligned(rng, block), start)
        turns = [*start, *self.topic.opening, *asides, *self.outcome.turns, *closing]
        for block in (block for block in fitting if block not in early):
            turns += answering(aligned(rng, block), turns)
        turns += news
        return turns + (answering(ending, turns) if ending else [])

    def write(self) -> tuple[str, str]:
        """The dialogue and the summary."""
        rng = self.rng
        # Most people are brief; a few pad many of their turns (never a question: it wants its answer).
        chattiness = rng.choice((0.0, 0.1, 0.2, 0.3, 0.4, 0.7))
        padding = rng.sample(PADDING, len(PADDING))
        lines: list[str] = []
        for turn in self._turns():
            role, phrasings = turn.split("> ", 1)
            text = self.facts.fill(choose(rng, phrasings))
            if padding and text[-1] != "?" and rng.random() < chattiness:
                text += " " + padding.pop()
            lines.append(f"{self.facts.values[role]}: {text}")
        return "\n".join(lines), " ".join(self.summary)


def make_split(rng: random.Random, split: str, size: int, seen: set[str]) -> list[Sample]:
    """`size` samples whose dialogues are not in `seen`, which grows by them."""
    samples: list[Sample] = []
    while len(samples) < size:
        dialogue, summary = DialogueWriter(rng).write()
        if dialogue not in seen:
            seen.add(dialogue)
            sample_id = f"{split}-{len(samples):05d}"
            samples.append({"id": sample_id, "dialogue": dialogue, "summary": summary})
    return samples


def make_samples(out: Path, seed: int = 42) -> dict[str, list[Sample]]:
    """Write `train.jsonl` and `validation.jsonl` under `out` and return the samples."""
    rng = random.Random(seed)
    seen: set[str] = set()
    out.mkdir(parents=True, exist_ok=True)
    splits = {name: make_split(rng, name, size, seen) for name, size in SPLIT_SIZES.items()}
    for name, samples in splits.items():
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        # Bytes, so that the line ends are the same on every system.
        (out / f"{name}.jsonl").write_bytes("".join(lines).encode("utf-8"))
    return splits


def describe(samples: list[Sample]) -> str:
    """Turns and words per sample, to compare with SAMSum's."""
    counts = {
        "turns": [sample["dialogue"].count("\n") + 1 for sample in samples],
        "dialogue words": [len(sample["dialogue"].split()) for sample in samples],
        "summary words": [len(sample["summary"].split()) for sample in samples],
    }
    return "\n".join(
        f"  {name:<15} mean {statistics.mean(values):6.1f}  median "
        f"{statistics.median(values):6.1f}  min {min(values):3d}  max {max(values):3d}"
        for name, values in counts.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here / "dialogue_summary")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    for name, samples in make_samples(args.out, args.seed).items():
        size = (args.out / f"{name}.jsonl").stat().st_size
        print(f"{name}: {len(samples)} samples, {size / 1e6:.2f} MB\n{describe(samples)}")


if __name__ == "__main__":
    main()
