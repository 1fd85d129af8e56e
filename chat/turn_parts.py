"""Turns that are learned in part: which of their characters the data leaves out, and where a template writes these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from data.tokens.spans import BadExample

Place = tuple[int, int]  # characters [first, last)
Parts = list[tuple[str, bool | None]]  # of a text, and whether the data says to learn each; None if it says nothing


class TurnPlaces(NamedTuple):
    """Characters of a turn's text, and of its thoughts."""

    text: tuple[Place, ...] = ()
    thoughts: tuple[Place, ...] = ()


NOTHING = TurnPlaces()


def is_learned(key: str, value: Any) -> bool:
    """Whether a weight says that a turn is learned.

    Raises:
        BadExample: if it is neither 0 nor 1.
    """
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1):
        return bool(value)
    raise BadExample(f"its {key} is {value!r}; give 1 to learn it, or 0")


def parts_of(text: str, key: str, spans: Any) -> Parts:
    """Axolotl's spans of characters, the last of each included, as parts; what no span names is not learned.

    Raises:
        BadExample: if a span names no characters of the text, or two disagree.
    """
    says: list[bool | None] = [None] * len(text)
    for span in spans if isinstance(spans, list) else [spans]:
        first, last = (span.get(name) if isinstance(span, Mapping) else None for name in ("begin_offset", "end_offset"))
        if not isinstance(first, int) or not isinstance(last, int):
            raise BadExample(f"its {key} is no list of begin_offset, end_offset and train")
        if not 0 <= first <= last < len(text):
            raise BadExample(
                f"its {key} names the characters {first} to {last}, the last included, of a text that has "
                f"{len(text)}; they count from 0"
            )
        learns = is_learned(key, span.get("train", span.get("training")))
        if (not learns) in says[first : last + 1]:
            raise BadExample(f"its {key} both learns and leaves out characters from {first} to {last}; mend it")
        says[first : last + 1] = [learns] * (last + 1 - first)
    groups = groupby(zip(text, says, strict=True), key=lambda character: character[1] is True)
    return [("".join(character for character, _ in group), learns) for learns, group in groups]


def places_not_learned(parts: Parts) -> tuple[Place, ...]:
    """The parts that the data leaves out, in the text that they make together."""
    places, position = [], 0
    for text, learns in parts:
        if text and learns is False:
            places.append((position, position + len(text)))
        position += len(text)
    return tuple(places)


def learned_places(
    rendered: str, places: Sequence[Place], *, text: str, thoughts: str, not_learned: TurnPlaces
) -> list[Place]:
    """The places of a rendered turn without the parts of it that are not learned.

    Args:
        places: of the turn in the rendered text.
        text: the turn's own, as it is in the data.

    Raises:
        BadExample: if the template does not write it once, as it is.
    """
    first, last = places[0][0], places[-1][1]
    holes: list[Place] = []
    if not_learned.thoughts:
        holes += _places_in(rendered, (first, last), thoughts, not_learned.thoughts, "thoughts")
    if not_learned.text:
        behind_thoughts = rendered.find(thoughts.strip(), first, last) if thoughts.strip() else -1
        begin = behind_thoughts + len(thoughts.strip()) if behind_thoughts >= 0 else first
        holes += _places_in(rendered, (begin, last), text, not_learned.text, "text")
    return [part for place in places for part in _without(place, sorted(holes))]


def _places_in(rendered: str, turn: Place, text: str, places: Sequence[Place], what: str) -> list[Place]:
    """The places of a text in the rendered turn; white space around the text may be gone."""
    written = text if rendered.count(text, *turn) == 1 else text.strip()
    if (number := rendered.count(written, *turn)) != 1:
        raise BadExample(
            f"parts of its {what} are not learned, and the chat template writes its {what} {number} times in the turn, "
            "so their place is unknown; weigh the turn as a whole"
        )
    begin = rendered.find(written, *turn)
    shift = begin - text.index(written)
    return [(max(begin, first + shift), min(begin + len(written), last + shift)) for first, last in places]


def _without(place: Place, holes: Sequence[Place]) -> Iterator[Place]:
    first, last = place
    for begin, end in holes:
        if begin >= last or end <= first:
            continue
        if begin > first:
            yield first, begin
        first = end
    if first < last:
        yield first, last
