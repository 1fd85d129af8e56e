"""Token ids of texts, with bounded host memory: a tokenizer takes some 200 bytes for each character of a call.

Calls are small, and a text that is too long for one goes through in windows that overlap. Neighbours are joined where
both have the same tokens, so the result is that of the whole text. If they never do, as in a run of a thousand spaces,
they become one window. Only in a run that fills a whole call a token may end elsewhere, and Unigram may write the odd
token of a shorter one elsewhere, if roundings alone decide where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.rust_panics import panics_as_errors

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from data.tokens.special_text import SpecialTokens

CALL_CHARACTERS = 2**18  # of one call of the tokenizer
WINDOW_CHARACTERS = 2**15  # of a part of a long text; several are one call
OVERLAP_CHARACTERS = 2**10
AGREEING_TOKENS = 8  # on both sides of a join

Place = tuple[int, int]  # characters [first, last)


class EncodedText(NamedTuple):
    """The tokens of a text."""

    ids: np.ndarray  # int32 [tokens]
    place_of: Callable[[int], tuple[int, int]] | None  # the characters of a token; None if the tokenizer knows none
    token_at: Callable[[int], int | None] | None  # the first token of a character; both may be unknown


class _Window(NamedTuple):
    """The tokens of a part of a text; places count from the text's start."""

    ids: np.ndarray  # int32 [tokens]
    starts: np.ndarray  # int64 [tokens], never falling
    ends: np.ndarray

    @classmethod
    def empty(cls) -> _Window:
        return cls(*(np.empty(0, dtype) for dtype in (np.int32, np.int64, np.int64)))

    def place_of(self, token: int) -> tuple[int, int]:
        return int(self.starts[token]), int(self.ends[token])

    def start_near(self, place: int) -> int:
        """Where the first token from this place on starts, or else the last one; 0 without tokens."""
        starts = self.starts[self.starts >= place][:1] if len(self.ids) else np.zeros(1)
        return int(starts[0] if len(starts) else self.starts[-1])

    def part(self, first: int, last: int | None) -> _Window:
        return _Window(self.ids[first:last], self.starts[first:last], self.ends[first:last])

    def agrees(self, place: int, other: _Window, other_place: int) -> bool:
        """Whether the tokens around a place of this one are those around a place of the other."""
        if min(place, other_place) < AGREEING_TOKENS:
            return False
        mine, theirs = (
            window.part(at - AGREEING_TOKENS, at + AGREEING_TOKENS)
            for window, at in ((self, place), (other, other_place))
        )
        return len(mine.ids) == 2 * AGREEING_TOKENS and all(map(np.array_equal, mine, theirs))

    def is_in_run(self, place: int) -> bool:
        """Whether the tokens around a place are one over and over, or that and one for the rest of a run."""
        return len(np.unique(self.ids[place - AGREEING_TOKENS : place + AGREEING_TOKENS])) <= 2


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, special: SpecialTokens
) -> Iterator[EncodedText]:
    """The tokens of each text, without special tokens around it.

    Args:
        special: of the tokenizer; those that the data spells in a text stay text.
    """
    for group in _calls(texts, special):
        has_stand_ins = special.spells(group[0])
        if tokenizer.is_fast and len(group[0]) > CALL_CHARACTERS:
            encode = special.encode if has_stand_ins else lambda texts: _call(texts, tokenizer).encodings
            whole = _join(list(_windows(group[0], encode)))
            yield EncodedText(whole.ids, whole.place_of, None)
            continue
        if has_stand_ins:
            yield _encode_with_stand_ins(group[0], tokenizer, special)
            continue
        encoded = _call(group, tokenizer)
        for index, ids in enumerate(encoded["input_ids"]):
            encoding = encoded.encodings[index] if tokenizer.is_fast else None
            place_of, token_at = (encoding.token_to_chars, encoding.char_to_token) if encoding else (None, None)
            yield EncodedText(np.array(ids, dtype=np.int32), place_of, token_at)


def _encode_with_stand_ins(text: str, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> EncodedText:
    if not tokenizer.is_fast:
        return EncodedText(np.array(special.encode_slowly(text), dtype=np.int32), None, None)
    encoding: Any = special.encode([text])[0]  # its annotations say that a token may have no characters
    return EncodedText(np.array(encoding.ids, dtype=np.int32), encoding.token_to_chars, encoding.char_to_token)


def _calls(texts: Sequence[str], special: SpecialTokens) -> Iterator[list[str]]:
    """Neighbours that one call may take together; a longer text is alone, and one with stand-ins, too."""
    group: list[str] = []
    num_characters = 0
    for text in texts:
        is_alone = special.spells(text)
        if group and (is_alone or num_characters + len(text) > CALL_CHARACTERS):
            yield group
            group, num_characters = [], 0
        group.append(text)
        num_characters = CALL_CHARACTERS if is_alone else num_characters + len(text)
    if group:
        yield group


def _call(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Any:
    with panics_as_errors():
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)


def _windows(text: str, encode: Callable[[list[str]], list[Encoding]]) -> Iterator[_Window]:
    """Parts of the text's tokens that follow each other."""
    before, before_place = _Window.empty(), (0, 0)
    remaining = _places(text)
    while places := list(islice(remaining, max(1, CALL_CHARACTERS // WINDOW_CHARACTERS))):
        for place, window in zip(places, _encode_windows(text, places, encode), strict=True):
            if len(before.ids):
                meeting = _meeting(before, window)
                if meeting is None and place[1] - before_place[0] <= CALL_CHARACTERS:
                    before_place = before_place[0], place[1]
                    (window,) = _encode_windows(text, [before_place], encode)
                    before = window.part(int(np.searchsorted(window.starts, before.starts[0])), None)
                    continue
                meeting = meeting or _meeting(before, window, in_run=True)
                if meeting is None:
                    place, meeting = _cut(before, before_place, place)
                    (window,) = _encode_windows(text, [place], encode)
                yield before.part(0, meeting[0])
                window = window.part(meeting[1], None)
            before, before_place = window, place
    yield before


def _places(text: str) -> Iterator[Place]:
    """The characters of each window. They begin before a word, if there is one: there a token begins, too."""
    start = 0
    while start + WINDOW_CHARACTERS < len(text):
        end = start + WINDOW_CHARACTERS
        yield start, end
        following = end - OVERLAP_CHARACTERS
        start = max(following, text.find(" ", following, following + OVERLAP_CHARACTERS // 4))
    yield start, len(text)


def _cut(before: _Window, before_place: Place, place: Place) -> tuple[Place, tuple[int, int]]:
    """Where to cut the text itself if a window does not agree with the one before: its new place, and the meeting.

    It is cut before a token: the tokens of a long run of one character depend on where it starts.
    """
    start = before.start_near(place[0] + OVERLAP_CHARACTERS // 2)
    if start <= before_place[0]:  # one token all through
        return (before_place[1], place[1]), (len(before.ids), 0)
    return (start, place[1]), (int(np.searchsorted(before.starts, start)), 0)


def _encode_windows(
    text: str, places: Sequence[Place], encode: Callable[[list[str]], list[Encoding]]
) -> Iterator[_Window]:
    """The tokens of some windows, by one call: the tokenizer takes them on several cores."""
    encodings = encode([text[start:end] for start, end in places])
    for (start, _), encoded in zip(places, encodings, strict=True):
        flat = np.fromiter(chain.from_iterable(encoded.offsets), dtype=np.int64, count=2 * len(encoded))
        starts, ends = start + flat[::2], start + flat[1::2]
        yield _Window(np.array(encoded.ids, dtype=np.int32), starts, ends)


def _meeting(before: _Window, after: _Window, *, in_run: bool = False) -> tuple[int, int] | None:
    """A place in each window at which the same token starts, in the middle of tokens that agree; None without one.

    Tokens of a run of one character may agree though it has an odd one before in one window and behind in the other:
    Unigram's place of that is as likely anywhere, and each window sees another length of the run.

    Args:
        in_run: take such a place, too.
    """
    if not len(after.ids):
        return None
    first = int(np.searchsorted(before.starts, after.starts[0]))
    middle = (first + len(before.starts)) // 2
    for place in sorted(range(first, len(before.starts)), key=lambda place: abs(place - middle)):
        other = int(np.searchsorted(after.starts, before.starts[place]))
        place = int(np.searchsorted(before.starts, before.starts[place]))  # the first token that starts there
        if before.agrees(place, after, other) and (in_run or not before.is_in_run(place)):
            return place, other
    return None


def _join(windows: Sequence[_Window]) -> _Window:
    return _Window(*(np.concatenate([window[field] for window in (_Window.empty(), *windows)]) for field in range(3)))
