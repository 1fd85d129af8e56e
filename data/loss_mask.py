"""Text of which parts are learned, as token ids: joined, tokenised once, and labelled by the tokens' own offsets.

Tokenising prompt and answer apart and joining the ids gives other tokens at the seam than the model will meet when
it reads the text, so no part is ever tokenised by itself.

A token is learned if any of its characters is: one that reaches across the seam ends the prompt and begins the answer,
and must be predicted for the answer to be what it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data.labels import IGNORE_INDEX


class BadRow(ValueError):
    """A row that cannot be used, and why; whoever reads the rows adds its place in the data."""


class Piece(NamedTuple):
    """A part of a sample's text, and whether the model is to learn to write it."""

    text: str
    learned: bool


class TokenizedText(NamedTuple):
    input_ids: np.ndarray  # int32 [length]
    labels: np.ndarray  # int32 [length], not shifted, IGNORE_INDEX where nothing is learned


def tokenize_marked(
    samples: Sequence[Sequence[Piece]], tokenizer: Any, *, start: Sequence[int] = (), end: Sequence[int] = ()
) -> list[TokenizedText]:
    """Each sample as `start`, the tokens of its joined pieces, `end`.

    Args:
        start: token ids that are not learned, such as the start token.
        end: token ids that are learned if the sample's last piece is, such as the end token.
    """
    texts = ["".join(piece.text for piece in pieces) for pieces in samples]
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    tokenized = []
    for index, (pieces, text) in enumerate(zip(samples, texts, strict=True)):
        content = np.array(encoded["input_ids"][index], dtype=np.int32)
        ids = np.concatenate([np.array(start, dtype=np.int32), content, np.array(end, dtype=np.int32)])
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
        for span in _learned_spans(pieces):
            if tokenizer.is_fast:
                first, last = _tokens_by_offset(encoded.encodings[index], span, len(text))
            else:
                first, last = _tokens_by_prefix(content, text, span, tokenizer)
            labels[len(start) + first : len(start) + last] = content[first:last]
        if pieces and pieces[-1].learned and len(end):
            labels[-len(end) :] = end
        tokenized.append(TokenizedText(ids, labels))
    return tokenized


def _learned_spans(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """The learned pieces as characters [first, last) of the joined text."""
    spans, position = [], 0
    for piece in pieces:
        if piece.learned and piece.text:
            spans.append((position, position + len(piece.text)))
        position += len(piece.text)
    return spans


def _tokens_by_offset(encoding: Any, span: tuple[int, int], length: int) -> tuple[int, int]:
    """The tokens [first, last) that overlap the characters `span` of a text of `length`.

    Offsets never fall from one token to the next, so a few of them are enough; all would cost more than tokenising.
    """
    tokens = range(len(encoding))
    first = bisect_right(tokens, span[0], key=lambda token: encoding.token_to_chars(token)[1])
    if span[1] == length:  # offsets of some tokenizers leave out white space: what ends the text is learned to its end
        return first, len(tokens)
    return first, bisect_left(tokens, span[1], key=lambda token: encoding.token_to_chars(token)[0])


def _tokens_by_prefix(content: np.ndarray, text: str, span: tuple[int, int], tokenizer: Any) -> tuple[int, int]:
    """The same for a tokenizer written in Python, which knows no offsets.

    The tokens that a text's beginning has in common with the whole lie before its end. The next one begins there, or,
    where the beginning by itself has a token more, reaches across.
    """
    common, sizes = [], []
    for position in span:
        ids = np.array(tokenizer(text[:position], add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        shared = min(len(ids), len(content))
        differs = ids[:shared] != content[:shared]
        common.append(int(np.argmax(differs)) if differs.any() else shared)
        sizes.append(len(ids))
    return common[0], common[1] + (sizes[1] > common[1])
