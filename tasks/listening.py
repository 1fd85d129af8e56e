"""Hearing an answer while the model writes it, and ending it early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Listener(Protocol):
    """Gets the text of an answer piece by piece."""

    def hear(self, text: str) -> None:
        """Called with each new piece, of whole words where there are such."""

    def stops(self) -> bool:
        """Whether the answer is to end here; asked after each token."""


def listening(processor: PreTrainedTokenizerBase, listener: Listener | None, *, num_beams: int = 1) -> dict[str, Any]:
    """The arguments of `model.generate` with which a listener hears what it writes.

    Of several beams nothing is heard, since the text is known at the end only.
    """
    if listener is None:
        return {}
    ended = {"stopping_criteria": StoppingCriteriaList([_Stops(listener)])}
    return ended | ({"streamer": _Streamer(processor, listener)} if num_beams == 1 else {})


class _Streamer(TextStreamer):
    def __init__(self, processor: PreTrainedTokenizerBase, listener: Listener) -> None:
        super().__init__(processor, skip_prompt=True, skip_special_tokens=True)
        self._listener = listener

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._listener.hear(text)


class _Stops(StoppingCriteria):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._listener.stops(), device=input_ids.device)
