"""Texts with a label for the whole of each: a class, several classes, or a number.

A sample's `labels` are no tokens. Until all data are read, classes have no numbers yet, so the label is kept as it was
written: `labels` holds how many of the tokens are of the first text of a pair (all, without a second), and then the
bytes of the label's JSON. `tasks.labels` makes numbers of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.tokens.long_texts import encode_texts
from data.tokens.loss_mask import TokenColumns, encode_plainly, no_tokens
from data.tokens.spans import TextSpan
from data.tokens.special_text import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PairAffixes(NamedTuple):
    """The special tokens that a tokenizer puts before, between and after two texts. A cut leaves them in place."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> PairAffixes:
        first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "b"))
        whole = tokenizer("a", "b")["input_ids"]
        start = _place(whole, first, 0)
        end = start + len(first)
        next_start = _place(whole, second, end)
        next_end = next_start + len(second)
        return cls(tuple(whole[:start]), tuple(whole[end:next_start]), tuple(whole[next_end:]))


def _place(whole: Sequence[int], part: Sequence[int], start: int) -> int:
    return next((i for i in range(start, len(whole)) if list(whole[i : i + len(part)]) == list(part)), start)


def written_label(value: Any) -> np.ndarray:
    """The bytes of a label's JSON, int32."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8).astype(np.int32)


def fault_of_label(value: Any) -> str | None:
    """Why a value is no label; None if it is a class, a list of different classes, or a number."""
    if value is None or value == "" or value != value:  # pandas' empty cell is no number
        return "is empty"
    if not isinstance(value, list):
        is_label = isinstance(value, str | int | float)
        return None if is_label else f"is no label but {type(value).__name__}; give a name, a number or a list"
    if fault := next(filter(None, map(_fault_of_class, value)), None):
        return fault
    if repeated := [one for place, one in enumerate(value) if one in value[:place]]:
        return f"names {repeated[0]!r} twice; a list has the classes of its text, and not 0 or 1 for each class"
    return None


def _fault_of_class(value: Any) -> str | None:
    if isinstance(value, list):
        return "is a list of lists; give a list of classes"
    fault = fault_of_label(value)
    return fault and f"has a class that {fault}"


def encode_labeled(
    examples: Sequence[Sequence[TextSpan]], tokenizer: PreTrainedTokenizerBase, special: SpecialTokens | None
) -> TokenColumns:
    """One or two texts per example, then its label, a span with a loss. See `data.tokens.encoding.Encode`.

    Tokens are those that the tokenizer makes of a text, or a pair, for inference.
    """
    columns = TokenColumns([no_tokens() for _ in examples], [no_tokens() for _ in examples], [0] * len(examples))
    texts = [[span.text for span in spans if not span.has_loss] for spans in examples]
    single = [place for place, found in enumerate(texts) if len(found) == 1]
    pairs = [place for place, found in enumerate(texts) if len(found) == 2]
    encoded = encode_plainly(tokenizer, special, text=[texts[place][0] for place in single])
    for place, ids in zip(single, encoded, strict=True):
        columns.input_ids[place] = ids
        columns.labels[place] = _label(len(ids), examples[place])
    if not pairs:
        return columns
    around, special = PairAffixes.of(tokenizer), special or SpecialTokens.of(tokenizer)
    firsts, seconds = (encode_texts([texts[place][i] for place in pairs], tokenizer, special) for i in (0, 1))
    for place, first, second in zip(pairs, firsts, seconds, strict=True):
        start = np.concatenate([np.array(around.before), first.ids, np.array(around.between)])
        ids = np.concatenate([start, second.ids, np.array(around.after)]).astype(np.int32)
        columns.input_ids[place], columns.labels[place] = ids, _label(len(start), examples[place])
    return columns


def _label(num_first: int, spans: Sequence[TextSpan]) -> np.ndarray:
    return np.concatenate([[num_first], np.frombuffer(spans[-1].text.encode(), dtype=np.uint8)]).astype(np.int32)
