"""Sequences for a model of image and text: captions as tokens, each with the place of its image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data.images.caption_rows import CaptionRows, Pictures
from data.images.placeholders import NO_PLACEHOLDERS, Placeholders
from data.images.shapes import RefusalOf, Size
from data.sequences.flattening import flatten
from data.sequences.tokenized import Sequences, special_as_text
from data.tokens.labels import IGNORE_INDEX
from utils.errors import ConfigError
from utils.wording import plural

CountBefore = Callable[[Sequence[Size], Sequence[str]], np.ndarray]
"""The tokens before a caption, int64 [rows], by the sizes of images and their prompts."""


class CaptionedImage(NamedTuple):
    """One example: its caption's tokens, and where its image is."""

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [tokens], the same tokens
    source_row: int
    pictures: Pictures
    place: int  # of the image in `pictures`


@dataclass(frozen=True)
class ImageSequences(Sequences):
    """Captions end to end in flat arrays; `input_ids` holds no image tokens, which the collator writes."""

    pictures: Any = None  # Pictures
    max_text_length: int = 0
    num_before: Any = None  # int64 [captions], tokens of image and prompt; None if they are in a row of their own

    def __getitem__(self, index: int) -> CaptionedImage:  # type: ignore[override]
        sequence = super().__getitem__(index)
        return CaptionedImage(*sequence, self.pictures, sequence.source_row)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [captions]: those of image, prompt and caption, or of the caption alone."""
        return super().lengths if self.num_before is None else self.num_before + super().lengths

    @property
    def num_image_tokens(self) -> np.ndarray | None:
        """Tokens of each row before its caption, int64 [captions]."""
        return self.num_before

    @property
    def image_sizes(self) -> np.ndarray:
        # A caption has one image, and its prompt is short.
        return super().image_sizes if self.num_before is None else self.num_before

    def describe(self, split: str) -> list[str]:
        """Lines on what was cut and what was left out; none if all is well."""
        lines = []
        if self.num_truncated:
            lines.append(
                f"{split}: {plural(self.num_truncated, 'caption')} cut: longer than max_text_length "
                f"{self.max_text_length}, by {plural(self.num_tokens_cut, 'token')} in all"
            )
        if self.num_without_label:
            lines.append(
                f"{split}: {plural(self.num_without_label, 'sample')} left out: their captions are empty "
                "(--learn_empty_answers learns them)"
            )
        if self.num_empty:
            lines.append(f"{split}: {plural(self.num_empty, 'sample')} left out by --skip_bad_rows")
        if self.num_special_as_text:
            lines.append(special_as_text(split, self.num_special_as_text))
        return lines


def build_image_sequences(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    max_text_length: int,
    refusal_of: RefusalOf,
    count_before: CountBefore | None = None,
    placeholders: Placeholders = NO_PLACEHOLDERS,
    first_row: int = 0,
    is_part: bool = False,
) -> ImageSequences:
    """Cut the captions of a caption dataset, check its images, and leave out rows that lack either.

    Args:
        max_text_length: the most tokens of a caption, its end token counted; what is cut off lacks that.
        refusal_of: the processor's, of images by their size.
        count_before: the tokens of each row before its caption; None: the caption is in a row of its own.
        placeholders: the processor's, which neither a caption nor a prompt may spell.

    Raises:
        ConfigError: for other rows, an image that is missing, broken or refused, or if no row is left.
    """
    if not isinstance(rows, CaptionRows):
        raise ConfigError(
            f"dataset ({name}): a model of image and text is trained on images and captions; give --dataset "
            "caption_dataset"
        )
    flat = flatten(rows.tokens, name, first_row)
    is_text = flat.labels != IGNORE_INDEX  # without a start token, which the prompt has
    offsets = np.concatenate([[0], np.cumsum(is_text)])[flat.offsets]
    starts, lengths = offsets[:-1], np.diff(offsets)
    spelled = _spelled_images(flat, is_text, placeholders)
    checked = rows.pictures.check(refusal_of, placeholders.refusal_of_prompt, spelled)
    kept = (lengths > 0) & ~checked.is_unusable
    if not kept.any() and not is_part:
        raise ConfigError(f"dataset ({name}): none of its {len(flat)} rows has an image and a caption")
    kept_lengths = np.minimum(lengths, max_text_length)[kept]
    tokens, kept_starts = flat.input_ids[is_text], starts[kept]
    ends = np.cumsum(kept_lengths)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(kept_starts - (ends - kept_lengths), kept_lengths)
    kept_offsets = np.concatenate([[0], ends]).astype(np.int64)
    return ImageSequences(
        input_ids=tokens[places],
        labels=tokens[places],
        offsets=kept_offsets,
        label_offsets=kept_offsets,
        source_rows=flat.source_rows[kept],
        num_truncated=int((lengths[kept] > max_text_length).sum()),
        num_tokens_cut=int((lengths[kept] - kept_lengths).sum()),
        num_without_label=flat.num_empty_answers,
        num_empty=int((~kept).sum()) - flat.num_empty_answers,
        num_special_as_text=flat.num_special_as_text,
        pictures=rows.pictures,
        max_text_length=max_text_length,
        num_before=None if count_before is None else _num_before(rows.pictures, checked.sizes, kept, count_before),
    )


def _num_before(pictures: Pictures, sizes: list[Size], kept: np.ndarray, count_before: CountBefore) -> np.ndarray:
    """The tokens of each kept row before its caption, int64 [kept]."""
    places = np.flatnonzero(kept).tolist()
    if not places:
        return np.zeros(0, dtype=np.int64)
    # Rows with a column of prompts are read one by one.
    prompts = (
        [pictures.prompt_of(place) for place in places] if pictures.prompt_column else [pictures.prompt] * len(places)
    )
    return count_before([sizes[place] for place in places], prompts)


def _spelled_images(flat: Sequences, is_text: np.ndarray, placeholders: Placeholders) -> dict[int, str]:
    """Why captions cannot be used that hold an image's token, by the place of their rows."""
    places = np.flatnonzero(is_text & np.isin(flat.input_ids, placeholders.ids))
    rows = np.unique(np.searchsorted(flat.offsets, places, side="right") - 1)
    return {int(row): "its caption spells the token of an image, which the model would look for" for row in rows}
