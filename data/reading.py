"""How a task turns examples into sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from data.encoding import Encode
from data.sequences import Sequences


class Reading(NamedTuple):
    """From text to token ids, and from rows of token ids to sequences."""

    encode: Encode
    build_sequences: Callable[..., Sequences]  # with the signature of `data.causal_sequences.build_sequences`
