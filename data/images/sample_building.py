"""Samples of tokenized conversations: where the images of each are among its tokens, and which samples are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import datasets
import numpy as np

from data.files.table_rows import read_rows
from data.images.opening import ImageSource
from data.images.samples import HeldImages, ImageSamples, ImageStore
from data.sequences.causal import Truncation, cut_and_kept
from data.sequences.flattening import flatten
from data.sequences.tokenized import Sequences
from data.splits.examples import SplitExamples
from data.tokenizing import IMAGE_ROW, IMAGE_SOURCES, IMAGES_OF_SAMPLES, TOKENS_OF_IMAGES
from data.tokens.spans import BadExample
from utils.errors import ConfigError

_ROWS_AT_A_TIME = 20_000


@dataclass(frozen=True)
class StoredImages:
    """The images of a split by the place of their row in it."""

    examples: SplitExamples
    sources_in: Callable[[Mapping[str, Any]], list[ImageSource]]  # of a row

    def sources(self, key: int) -> Sequence[ImageSource]:
        (row,) = self.examples.rows_of(read_rows(self.examples.data, key, key + 1))
        if isinstance(row, BadExample):
            raise row
        return self.sources_in(row)

    def describe(self, key: int, error: BadExample) -> str:
        return f"{self.examples.flag}: {self.examples.where(key)}: {error}; mend it, or take the row out"


@dataclass(frozen=True)
class ChatRows:
    """Tokenized conversations, and their images."""

    tokens: Any  # datasets.Dataset
    store: StoredImages

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.tokens)


def build_image_samples(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    context_length: int,
    truncation: Truncation = "right",
    first_row: int = 0,
    is_part: bool = False,
    image_token: int,
) -> ImageSamples:
    """Check rows of conversations and cut them, as `data.sequences.causal.build_sequences` does; images are not cut.

    A sample that would lose an image is left out, and counted.

    Args:
        image_token: the id of the token that stands for images.

    Raises:
        ConfigError: as there; or if a text spells the token of an image.
    """
    rows = rows if isinstance(rows, ChatRows) else list(rows)
    flat = flatten(rows.tokens if isinstance(rows, ChatRows) else rows, name, first_row)
    if len(flat) == 0 and not is_part:
        raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
    if flat.of_tokens:
        raise ConfigError(
            f"dataset ({name}): weights of rows are for models of text alone, and this one reads images; take that "
            "column out"
        )
    num_images, tokens = _image_columns(rows)
    offsets = np.concatenate([[0], np.cumsum(num_images)]).astype(np.int64)
    places = _places(flat, num_images, tokens, image_token, name)
    lost = _loses_image(flat.lengths, places, offsets, context_length, truncation)
    cut, kept = cut_and_kept(_without(flat, lost), name=name, context_length=context_length, truncation=truncation)
    if len(cut) == 0 and not is_part:
        raise ConfigError(
            f"dataset ({name}): none of its {len(flat)} rows has a label token within context_length {context_length}, "
            f"{int(lost.sum())} since an image would be cut; check the data, or raise --context_length"
        )
    kept = np.flatnonzero(~lost)[kept]
    shifts = np.maximum(0, flat.lengths[kept] - context_length) if truncation == "left" else np.zeros(len(kept), int)
    chosen = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in kept] or [np.empty(0, int)]).astype(int)
    store, keys = _store_of(rows, flat.source_rows[kept], first_row)
    return ImageSamples(
        **{field.name: getattr(cut, field.name) for field in fields(Sequences)},
        places=places[chosen] - np.repeat(shifts, num_images[kept])[:, None],
        place_offsets=np.concatenate([[0], np.cumsum(num_images[kept])]).astype(np.int64),
        keys=keys,
        store=store,
        num_images_cut=int(lost.sum()),
    )


def _image_columns(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """The images of each sample, and the tokens of each of them, int64 [samples] and [images]."""
    numbers, tokens = [np.empty(0, int)], [np.empty(0, int)]
    if not isinstance(rows, ChatRows):
        for row in rows:
            numbers.append(np.array(row[IMAGES_OF_SAMPLES], int))
            tokens.append(np.array(row[TOKENS_OF_IMAGES], int))
        return np.concatenate(numbers), np.concatenate(tokens)
    columns: datasets.Dataset = rows.tokens.select_columns([IMAGES_OF_SAMPLES, TOKENS_OF_IMAGES])
    for table in columns.with_format("arrow").iter(_ROWS_AT_A_TIME):
        for found, column in ((numbers, IMAGES_OF_SAMPLES), (tokens, TOKENS_OF_IMAGES)):
            found.append(table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(int))
    return np.concatenate(numbers), np.concatenate(tokens)


def _places(flat: Sequences, num_images: np.ndarray, tokens: np.ndarray, image_token: int, name: str) -> np.ndarray:
    """The first of the tokens that stand for each image, and the one after the last, in its sample: [images, 2].

    Raises:
        ConfigError: if a sample has another number of them than its images.
    """
    positions = np.flatnonzero(flat.input_ids == image_token)
    before = np.searchsorted(positions, flat.offsets)
    sample_of_image = np.repeat(np.arange(len(flat)), num_images)
    expected = np.bincount(sample_of_image, weights=tokens, minlength=len(flat)).astype(int)
    if (wrong := np.flatnonzero(np.diff(before) != expected)).size:
        row = int(flat.source_rows[wrong[0]]) + 1
        raise ConfigError(
            f"dataset ({name}), row {row}: its text spells the token of an image, which the model would look for; take "
            "it out of the row, or let it be text (--split_special_tokens)"
        )
    ends = np.cumsum(tokens)
    found = (
        np.stack([positions[ends - tokens], positions[ends - 1] + 1], axis=1) if len(tokens) else np.empty((0, 2), int)
    )
    return found - flat.offsets[:-1][sample_of_image][:, None]


def _loses_image(
    lengths: np.ndarray, places: np.ndarray, offsets: np.ndarray, context_length: int, truncation: Truncation
) -> np.ndarray:
    """Which samples would lose an image, or a part of one, if they were cut: bool [samples]."""
    if truncation not in ("right", "left"):
        return np.zeros(len(lengths), dtype=bool)
    has_images = np.diff(offsets) > 0
    lost = np.zeros(len(lengths), dtype=bool)
    if truncation == "right":
        lost[has_images] = places[offsets[1:][has_images] - 1, 1] > context_length
    else:
        first = places[offsets[:-1][has_images], 0]
        lost[has_images] = first < (lengths - context_length)[has_images]
    return lost


def _without(flat: Sequences, left_out: np.ndarray) -> Sequences:
    """The sequences but for some."""
    if not left_out.any():
        return flat
    of_token = np.repeat(~left_out, flat.lengths)
    offsets = np.concatenate([[0], np.cumsum(flat.lengths[~left_out])]).astype(np.int64)
    return replace(
        flat,
        input_ids=flat.input_ids[of_token],
        labels=flat.labels[of_token],
        offsets=offsets,
        label_offsets=offsets,
        source_rows=flat.source_rows[~left_out],
    )


def _store_of(rows: Any, source_rows: np.ndarray, first_row: int) -> tuple[ImageStore, np.ndarray]:
    """The images of samples, and the key of each sample's."""
    if isinstance(rows, ChatRows):
        return rows.store, source_rows
    held = HeldImages(tuple(row[IMAGE_SOURCES] for row in rows), tuple(row[IMAGE_ROW] for row in rows))
    return held, source_rows - first_row
