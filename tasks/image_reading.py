"""How rows with images become sequences: captions, and conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedConfig

from data.images.caption_rows import CaptionRows
from data.images.sample_building import build_image_samples
from data.images.sequences import build_image_sequences
from data.processors.image_lengths import tokens_before_captions
from data.processors.image_tokens import placeholders_of
from data.processors.processor_loading import refusal_of_size
from data.processors.written_images import ImageWriter
from data.sequences.causal import Truncation
from data.sequences.tokenized import Sequences


@dataclass
class BuildImageSequences:
    """Makes sequences of captions, or samples of conversations, whichever the rows are.

    Of captions the collator checks the context length, because it opens the image that says how many tokens it is.
    """

    processor: Any
    max_text_length: int
    is_apart: bool  # captions are in a row of their own

    def __call__(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        name: str,
        context_length: int,
        truncation: Truncation = "right",
        first_row: int = 0,
        is_part: bool = False,
    ) -> Sequences:
        numbered: dict[str, Any] = {"name": name, "first_row": first_row, "is_part": is_part}
        if isinstance(rows, CaptionRows):
            return build_image_sequences(
                rows,
                max_text_length=self.max_text_length,
                refusal_of=partial(refusal_of_size, self.processor),
                count_before=None if self.is_apart else partial(tokens_before_captions, self.processor),
                placeholders=placeholders_of(self.processor),
                **numbered,
            )
        return build_image_samples(
            rows,
            context_length=context_length,
            truncation=truncation,
            image_token=self._image_token,
            **numbered,
        )

    @cached_property
    def _image_token(self) -> int:
        return ImageWriter.of(self.processor).token_id


def end_id(processor: Any, model_config: PreTrainedConfig) -> int:
    """The token that ends a caption: the tokenizer's, or the one at which the model stops.

    BLIP-2 and InstructBLIP generate by their language model's own config, which names another one (a new line).
    """
    own = getattr(model_config.get_text_config(), "eos_token_id", None)
    generates_by_it = hasattr(model_config, "use_decoder_only_language_model")
    return own if generates_by_it and isinstance(own, int) else processor.tokenizer.eos_token_id
