"""Samples with any number of images: the tokens of a text, those of its images included, and where the images are.

Images stay where they are stored until a batch is made of them; only their sizes were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from data.batches.mixing import global_row, row_of, source_of
from data.images.opening import ImageSource, open_image
from data.sequences.tokenized import Sequences, TokenArrays
from data.tokens.spans import BadExample
from utils.wording import plural


class ImageStore(Protocol):
    """Where the images of sequences are."""

    def sources(self, key: int) -> Sequence[ImageSource]:
        """The images under a key, in order.

        Raises:
            BadExample: if one is not there.
        """

    def describe(self, key: int, error: BadExample) -> str:
        """The message for an image that turns out broken when its batch is made."""


class ImageSample(NamedTuple):
    """One sample: tokens as the model reads them, and the images that some of them stand for, in order."""

    input_ids: np.ndarray  # int32 [tokens], with all tokens that the processor writes for images
    labels: np.ndarray  # int32 [tokens], not shifted; IGNORE_INDEX where nothing is learned, at every image token
    source_row: int
    places: np.ndarray  # int64 [images, 2]: the first of the tokens that stand for an image, and the one after the last
    key: int  # of its images in `store`; there may be more of them, of later samples of the same conversation
    store: ImageStore | None

    @property
    def of_tokens(self) -> TokenArrays:
        """No other columns: `ImageSamples` are made of none."""
        return {}

    def with_columns(self, of_tokens: TokenArrays) -> ImageSample:
        assert not of_tokens
        return self

    def open_images(self) -> list[Any]:
        """Its images, decoded, one for each of `places`.

        Raises:
            BadExample: if one cannot be.
        """
        return [open_image(source) for source in self.image_sources()]

    def image_sources(self) -> Sequence[ImageSource]:
        """Where its images are, one for each of `places`.

        Raises:
            BadExample: if one is not there.
        """
        if not len(self.places):
            return []
        assert self.store is not None
        return self.store.sources(self.key)[: len(self.places)]

    def describe(self, error: BadExample) -> str:
        """The message for an image that turns out broken when its batch is made."""
        return str(error) if self.store is None else self.store.describe(self.key, error)


@dataclass(frozen=True)
class ImageSamples(Sequences):
    """Samples end to end in flat arrays. Sample i has the images `places[place_offsets[i]:place_offsets[i + 1]]`."""

    places: Any = None  # int64 [images, 2], counted from the first token of their sample
    place_offsets: Any = None  # int64 [samples + 1]
    keys: Any = None  # int64 [samples]: of their images in `store`
    store: ImageStore | None = None
    num_images_cut: int = 0  # samples that were left out, since they would have lost an image

    def __getitem__(self, index: int) -> ImageSample:  # type: ignore[override]
        sequence = super().__getitem__(index)
        places = self.places[self.place_offsets[index] : self.place_offsets[index + 1]].copy()
        store, key = self.store, int(self.keys[index])
        if isinstance(store, HeldImages):  # the whole block's would stay in memory with it
            store, key = store.only(key), 0
        return ImageSample(*sequence, places, key, store)

    def more_of_joined(self, parts: Sequence[Sequences]) -> dict[str, Any]:
        assert all(isinstance(part, ImageSamples) for part in parts)
        samples = cast("Sequence[ImageSamples]", parts)
        starts = np.cumsum([0, *(part.place_offsets[-1] for part in samples)])
        offsets = [part.place_offsets[:-1] + start for part, start in zip(samples, starts, strict=False)]
        return {
            "places": np.concatenate([part.places for part in samples]),
            "place_offsets": np.concatenate([*offsets, starts[-1:]]),
            "keys": np.concatenate([part.keys + global_row(i, 0) for i, part in enumerate(samples)]),
            "store": _JoinedImages(tuple(part.store for part in samples)),
            "num_images_cut": sum(part.num_images_cut for part in samples),
        }

    def describe(self, split: str) -> list[str]:
        """The lines of all sequences, one on the tokens of images, and one on samples that would have lost one."""
        lines = super().describe(split)
        if self.num_images_cut:
            lines.append(
                f"{split}: {plural(self.num_images_cut, 'sample')} left out: longer than context_length, and an image "
                "would be cut (--max_pixels makes images smaller, --context_length samples longer)"
            )
        return [*lines, *self.figures(split)]

    def figures(self, split: str) -> list[str]:
        """A line on the images and their tokens, or on that there are none."""
        has_images = self.num_images > 0
        if not has_images.any():
            where = "--chat_dataset.image_column names the column of images"
            return [f"{split}: no images in {plural(len(self), 'sample')} ({where})"]
        tokens = self.num_image_tokens[has_images]
        low, middle, high = (round(float(np.percentile(tokens, share))) for share in (0, 50, 100))
        return [
            f"{split}: {plural(int(self.num_images.sum()), 'image')} in {int(has_images.sum()):,} of "
            f"{plural(len(self), 'sample')}; image tokens of such a sample: {low:,} at least, {middle:,} in the "
            f"median, {high:,} at most"
        ]

    @property
    def num_bytes_held(self) -> int:
        """Bytes of images that a stream read with their rows; all others stay where they are stored."""
        if isinstance(self.store, _JoinedImages):
            return sum(store.num_bytes for store in self.store.stores if isinstance(store, HeldImages))
        return self.store.num_bytes if isinstance(self.store, HeldImages) else 0

    @property
    def num_images(self) -> np.ndarray:
        """Images of each sample, int64 [samples]."""
        return np.diff(self.place_offsets)

    @property
    def num_image_tokens(self) -> np.ndarray:
        """Tokens of each sample that stand for its images, int64 [samples]."""
        before = np.concatenate([[0], np.cumsum(self.image_sizes)])
        return np.diff(before[self.place_offsets])

    @property
    def image_sizes(self) -> np.ndarray:
        sizes: np.ndarray = self.places[:, 1] - self.places[:, 0]
        return sizes


@dataclass(frozen=True)
class HeldImages:
    """Images of a stream, which cannot be read again by their row: bytes, or where the files are."""

    images: tuple[tuple[ImageSource, ...], ...]  # by key
    places: tuple[str, ...]  # by key: what messages call the rows

    def sources(self, key: int) -> Sequence[ImageSource]:
        return self.images[key]

    @property
    def num_bytes(self) -> int:
        return sum(len(image) for images in self.images for image in images if isinstance(image, bytes))

    def only(self, key: int) -> HeldImages:
        """Those under one key, as key 0."""
        return HeldImages((self.images[key],), (self.places[key],))

    def describe(self, key: int, error: BadExample) -> str:
        return f"{self.places[key]}: {error}; mend it, or take the row out"


@dataclass(frozen=True)
class _JoinedImages:
    """Images of several datasets; a key holds the place of its dataset, as a source row does."""

    stores: tuple[ImageStore | None, ...]

    def sources(self, key: int) -> Sequence[ImageSource]:
        return self._store(key).sources(row_of(key) - 1)

    def describe(self, key: int, error: BadExample) -> str:
        return self._store(key).describe(row_of(key) - 1, error)

    def _store(self, key: int) -> ImageStore:
        store = self.stores[source_of(key)]
        assert store is not None
        return store
