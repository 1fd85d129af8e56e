"""The loss mask: spans of text become token ids, with labels where a span counts in the loss.

The spans are joined and tokenized once; each token's offsets in the text say which span it belongs to. Tokenizing
prompt and answer apart would give other tokens at the seam than the model meets when it reads the text.

A token has a label if any of its characters counts. A token across the seam ends the prompt and begins the answer, and
must be predicted for the answer to come out right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.tokens import long_texts
from data.tokens.joined_answers import Seam, joined_examples
from data.tokens.labels import IGNORE_INDEX
from data.tokens.long_texts import EncodedText, encode_texts
from data.tokens.spans import TextSpan
from data.tokens.special_text import SpecialTokens
from utils.rust_panics import panics_as_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def without_empty_answers(spans: Sequence[TextSpan]) -> tuple[Sequence[TextSpan], int]:
    """The spans, and how many blank ones had a loss; now they have none."""
    is_empty = [span.has_loss and (not span.text or span.text.isspace()) for span in spans]
    if not any(is_empty):
        return spans, 0
    return [
        span._replace(has_loss=span.has_loss and not empty) for span, empty in zip(spans, is_empty, strict=True)
    ], sum(is_empty)


class TokenColumns(NamedTuple):
    """Tokenized examples as the columns of a Hugging Face dataset."""

    input_ids: list[np.ndarray]  # int32 [tokens] each
    labels: list[np.ndarray]  # int32 [tokens] each, not shifted, IGNORE_INDEX where the loss mask is off
    num_answers_joined: list[int]  # 1 where a token across the seam joins an answer to its prompt, else 0


def tokenize_spans(
    examples: Sequence[Sequence[TextSpan]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    start: Sequence[int] = (),
    end: Sequence[int] = (),
    special: SpecialTokens | None = None,
) -> TokenColumns:
    """Each example as `start`, the tokens of its joined spans, `end`.

    Args:
        start: token ids without a label, such as the start token.
        end: token ids that have labels if the last span has a loss, such as the end token.
        special: the tokenizer's special tokens; what it has built for text that spells them is used again.

    `start` and `end` are left out where the text brings them itself, as the text of a chat template does.
    """
    texts = ["".join(span.text for span in spans) for spans in examples]
    special = special or SpecialTokens.of(tokenizer)
    start_ids, end_ids, none = (np.array(ids, dtype=np.int32) for ids in (start, end, ()))
    tokenized = TokenColumns([], [], [0] * len(examples))
    across: list[Seam] = []
    for example, (spans, text, encoded) in enumerate(
        zip(examples, texts, encode_texts(texts, tokenizer, special), strict=True)
    ):
        content = encoded.ids
        before = none if len(start) and content[: len(start)].tolist() == list(start) else start_ids
        after = none if len(end) and _ends_with(content, end, text, tokenizer) else end_ids
        ids = np.concatenate([before, content, after])
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
        place_of, seams = encoded.place_of, _seams(spans)
        for place in _places_with_loss(spans):
            if place_of is not None:
                first, last = _tokens_by_offset(encoded, place, len(text))
            else:
                first, last = _tokens_by_prefix(content, text, place, tokenizer, special)
            labels[len(before) + first : len(before) + last] = content[first:last]
            if first < last and place[0] in seams and (place_of is None or place_of(first)[0] < place[0]):
                across.append(Seam(example, text, place[0], content[:first], place_of))
        if spans and spans[-1].has_loss and len(after):
            labels[-len(after) :] = after
        tokenized.input_ids.append(ids)
        tokenized.labels.append(labels)
    for example in joined_examples(across, tokenizer, special):
        tokenized.num_answers_joined[example] = 1
    return tokenized


def encode_plainly(
    tokenizer: PreTrainedTokenizerBase, special: SpecialTokens | None = None, **texts: list[str]
) -> list[np.ndarray]:
    """The token ids of each text, int32, with the tokenizer's own special tokens; texts are given by its argument."""
    ((name, values),) = texts.items()
    if not values:
        return []
    special = special or SpecialTokens.of(tokenizer)
    around: dict[str, Any] = {"add_special_tokens": True, "return_attention_mask": False, "verbose": False}
    # Those that spell special tokens, and those that one call would take much memory for.
    apart = [
        place
        for place, text in enumerate(values)
        if special.spells(text) or (tokenizer.is_fast and len(text) > long_texts.CALL_CHARACTERS)
    ]
    together = sorted({*range(len(values))} - {*apart})
    found = [no_tokens() for _ in values]
    if together:
        with panics_as_errors():
            rows = tokenizer(**{name: [values[place] for place in together]}, **around)["input_ids"]
        for place, ids in zip(together, rows, strict=True):
            found[place] = np.array(ids, dtype=np.int32)
    if apart:
        contents = encode_texts([values[place] for place in apart], tokenizer, special)
        before, after = affixes(tokenizer, name)
        for place, content in zip(apart, contents, strict=True):
            found[place] = np.array([*before, *content.ids, *after], dtype=np.int32)
    return found


def affixes(tokenizer: PreTrainedTokenizerBase, argument: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer puts before and after a text, which is given by this argument."""
    # The special tokens are those around the plain ids, wherever the tokenizer puts them.
    plain, whole = (tokenizer(**{argument: "a"}, add_special_tokens=added)["input_ids"] for added in (False, True))
    place = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    if not plain or place is None:
        return (), ()
    return tuple(whole[:place]), tuple(whole[place + len(plain) :])


def no_tokens() -> np.ndarray:
    return np.empty(0, dtype=np.int32)


def _ends_with(content: np.ndarray, end: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokens of a text end with `end`; white space may follow, as after the turns of many templates."""
    if content[-len(end) :].tolist() == list(end):
        return True
    written = text.rstrip()
    if len(written) == len(text) or end[-1] not in content[-8:]:
        return False
    return written.endswith(str(tokenizer.convert_ids_to_tokens(end[-1])))


def _places_with_loss(spans: Sequence[TextSpan]) -> list[tuple[int, int]]:
    """The spans with a loss as characters [first, last) of the joined text."""
    places, position = [], 0
    for span in spans:
        if span.has_loss and span.text:
            places.append((position, position + len(span.text)))
        position += len(span.text)
    return places


def _seams(spans: Sequence[TextSpan]) -> set[int]:
    """The characters of the joined text at which a span with a loss follows one without."""
    seams, position, follows_prompt = set[int](), 0, False
    for span in spans:
        if span.text:
            if span.has_loss and follows_prompt:
                seams.add(position)
            follows_prompt = not span.has_loss
        position += len(span.text)
    return seams


def _tokens_by_offset(encoded: EncodedText, place: tuple[int, int], length: int) -> tuple[int, int]:
    """The tokens [first, last) that overlap the characters `place` of a text of `length`.

    Offsets never fall from one token to the next, so bisection is enough; reading all would cost more than tokenizing.
    """
    place_of, tokens = encoded.place_of, range(len(encoded.ids))
    assert place_of is not None
    first = encoded.token_at(place[0]) if encoded.token_at is not None else None
    if first is None:  # a character without a token, such as a space that the tokenizer leaves out
        first = bisect_right(tokens, place[0], key=lambda token: place_of(token)[1])
    if place[1] == length:  # offsets of some tokenizers leave out white space; the last span reaches to the end
        return first, len(tokens)
    return first, bisect_left(tokens, place[1], key=lambda token: place_of(token)[0])


def _tokens_by_prefix(
    content: np.ndarray,
    text: str,
    place: tuple[int, int],
    tokenizer: PreTrainedTokenizerBase,
    special: SpecialTokens,
) -> tuple[int, int]:
    """The same for a tokenizer written in Python, which knows no offsets.

    The tokens that a text's beginning shares with the whole text lie before the beginning's end. The next token starts
    there, or reaches across if the beginning by itself has one more token.
    """
    common, sizes = [], []
    for position in place:
        ((ids, *_),) = encode_texts([text[:position]], tokenizer, special)
        shared = min(len(ids), len(content))
        differs = ids[:shared] != content[:shared]
        common.append(int(np.argmax(differs)) if differs.any() else shared)
        sizes.append(len(ids))
    return common[0], common[1] + (sizes[1] > common[1])
