"""How a task turns examples into sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from data.sequences.tokenized import Sequences
from data.tokens.encoding import Encode


class Reading(NamedTuple):
    """From text to token ids, and from rows of token ids to sequences."""

    encode: Encode
    build_sequences: Callable[..., Sequences]  # with the signature of `data.sequences.causal.build_sequences`
