"""Which examples have an answer whose first token ends its prompt, too: the prompt by itself has other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.tokens.long_texts import encode_texts
from data.tokens.special_text import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEAR_TOKENS, AGREEING_TOKENS = (
    64,
    16,
)  # before an answer: those tokenized again, and the last of them, which are compared


class Seam(NamedTuple):
    """Where an answer's first token may begin in the prompt."""

    example: int
    text: str
    end: int  # of the prompt, in characters
    before: np.ndarray  # int32 [tokens]: those before the answer's first one
    place_of: Callable[[int], tuple[int, int]] | None  # the characters of a token; None if the tokenizer knows none

    def nearby(self) -> str | None:
        """The end of the prompt; None if it is short, or the places of tokens are not known."""
        if self.place_of is None or len(self.before) <= 2 * NEAR_TOKENS:
            return None
        return self.text[self.place_of(len(self.before) - NEAR_TOKENS)[0] : self.end]


def joined_examples(seams: Sequence[Seam], tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> set[int]:
    """The examples of which a prompt by itself ends with other tokens than before its answer.

    A token may begin in the prompt because of what the tokenizer puts in; only other tokens of the prompt by itself
    show that the answer changes them. The end of a prompt tells that if it has the same tokens: whole prompts are
    tokenized only in doubt, or a conversation would take the square of its turns.
    """
    near = [seam.nearby() for seam in seams]
    ends = encode_texts([text for text in near if text is not None], tokenizer, special)
    in_doubt = [
        seam for seam, text in zip(seams, near, strict=True) if text is None or not _agrees(next(ends).ids, seam)
    ]
    joined: set[int] = set()
    while in_doubt:
        # One of each example: most often it is joined, and its others need not be looked at.
        tried = [*{seam.example: seam for seam in reversed(in_doubt)}.values()]
        prompts = encode_texts([seam.text[: seam.end] for seam in tried], tokenizer, special)
        joined |= {
            seam.example
            for seam, prompt in zip(tried, prompts, strict=True)
            if not np.array_equal(prompt.ids, seam.before)
        }
        done = {id(seam) for seam in tried}
        in_doubt = [seam for seam in in_doubt if id(seam) not in done and seam.example not in joined]
    return joined


def _agrees(ids: np.ndarray, seam: Seam) -> bool:
    return len(ids) >= AGREEING_TOKENS and np.array_equal(ids[-AGREEING_TOKENS:], seam.before[-AGREEING_TOKENS:])
