"""Rows of text with images: one sample each, padded, or several, packed.

The samples of a packed row are told apart by positions that begin anew, and by offsets if attention goes by them. No
mask is given, unless images are seen both ways (`tasks.image_masks`): transformers makes one of the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from data.batches.packing import Offsets
from data.batches.padding import PaddedWidth, batch_width
from data.tokens.labels import IGNORE_INDEX, next_tokens_to_predict
from tasks.image_masks import ImageMasks
from tasks.image_positions import GridPositions

GRIDS = "image_grid_thw"  # transformers' name of the patches of each image in time, height and width


class SampleText(NamedTuple):
    """One sample's text, the tokens of its images included."""

    inputs: Mapping[str, torch.Tensor]  # [tokens, ...] each: input_ids, and others that have a value for each token
    labels: torch.Tensor  # int64 [tokens], not shifted
    grids: torch.Tensor | None = None  # int64 [images, 3]; None for families without, and for a text without images

    def __len__(self) -> int:
        return len(self.labels)


class TextRows(NamedTuple):
    """The rows of a batch."""

    inputs: dict[str, torch.Tensor]  # of the model
    target_positions: torch.Tensor  # as of `tasks.image_batches.ImageTextMicroBatch`
    targets: torch.Tensor
    row_lengths: torch.Tensor  # int64 [batch]
    cu_seqlens: torch.Tensor | None
    max_seqlen: int


@dataclass(frozen=True)
class RowsOfImages:
    """Lays out rows of text with images.

    Attributes:
        padding_id: the token in unused positions.
        learned_type: the token type of these, and of text that is learned.
        packing: rows hold several samples.
        offsets: which packed rows need `cu_seqlens`.
        num_rows: packed batches are filled up to so many rows; 0: they are not.
        positions: of packed samples, if they have three axes.
        masks: of packed rows, if images are seen both ways.
    """

    padding_id: int
    width: PaddedWidth
    learned_type: int = 0
    packing: bool = False
    offsets: Offsets = "none"
    num_rows: int = 0
    positions: GridPositions | None = None
    masks: ImageMasks | None = None

    def of(self, rows: Sequence[Sequence[SampleText]]) -> TextRows:
        """The rows, padded on the right. There is one at least, with a sample at least.

        Raises:
            ValueError: if one is longer than the width's limit.
        """
        rows = [*rows, *[[]] * (self.packing * (self.num_rows - len(rows)))]
        lengths = np.array([sum(map(len, row)) for row in rows], dtype=np.int64)
        width = batch_width(lengths, self.width)
        if lengths.max() > width:
            raise ValueError(f"a row of {lengths.max():,} tokens is longer than {width:,}")
        target_positions, targets = next_tokens_to_predict(_joined(rows, _learned, width, IGNORE_INDEX))
        offsets = self._offsets(rows, width)
        return TextRows(
            inputs=self._text(rows, width) | (self._positions(rows, width) if self.packing else {}),
            target_positions=target_positions,
            targets=targets,
            row_lengths=torch.from_numpy(lengths),
            cu_seqlens=None if offsets is None else torch.from_numpy(offsets),
            max_seqlen=0 if offsets is None else int(np.diff(offsets).max()),
        )

    def _text(self, rows: Sequence[Sequence[SampleText]], width: int) -> dict[str, torch.Tensor]:
        # Of the captions' type, which no earlier token sees: as a part of the prompt PaliGemma would see padding.
        fillings = {"input_ids": self.padding_id, "token_type_ids": self.learned_type}
        names = [name for name in _first(rows).inputs if not (self.packing and name == "attention_mask")]
        return {name: _joined(rows, partial(_input, name), width, fillings.get(name, 0)) for name in names}

    def _positions(self, rows: Sequence[Sequence[SampleText]], width: int) -> dict[str, torch.Tensor]:
        """The place of each token in its sample: int64 [batch, seq], or [4, batch, seq] with three axes besides, as
        transformers takes them. Padding at the end of a row is one more sample."""
        places = _joined(rows, lambda sample: torch.arange(len(sample)), width, None)
        if self.positions is None:
            return {"position_ids": places}
        axes = _joined(rows, self._axes, width, None)
        return {"position_ids": torch.cat([places[None], axes.movedim(-1, 0)])}

    def _axes(self, sample: SampleText) -> torch.Tensor:
        """int64 [tokens, 3]."""
        assert self.positions is not None
        grids = torch.empty(0, 3, dtype=torch.int64) if sample.grids is None else sample.grids
        return self.positions.count(sample.inputs["input_ids"], grids).T

    def _offsets(self, rows: Sequence[Sequence[SampleText]], width: int) -> np.ndarray | None:
        """Where samples begin in the flattened [batch x seq], and where the last ends: int32; None: no row needs it."""
        is_shared = any(len(row) > 1 for row in rows)
        if not self.packing or self.offsets == "none" or (self.offsets == "shared" and not is_shared):
            return None
        starts = []
        for number, row in enumerate(rows):
            ends = np.cumsum([0, *map(len, row)])
            starts += [number * width + int(end) for end in ends if end < width]
        return np.array([*starts, len(rows) * width], dtype=np.int32)


def _first(rows: Sequence[Sequence[SampleText]]) -> SampleText:
    return next(chain.from_iterable(rows))


def _input(name: str, sample: SampleText) -> torch.Tensor:
    return sample.inputs[name]


def _learned(sample: SampleText) -> torch.Tensor:
    """Its labels; the first token follows nothing, or another sample."""
    labels = sample.labels.clone()
    labels[:1] = IGNORE_INDEX
    return labels


def _joined(
    rows: Sequence[Sequence[SampleText]],
    value_of: Callable[[SampleText], torch.Tensor],
    width: int,
    filling: int | None,
) -> torch.Tensor:
    """The values [tokens, ...] of the samples of each row, one after another: [batch, width, ...].

    Args:
        filling: in unused positions; None: these are counted from 0.
    """
    none = value_of(_first(rows))[:0]
    joined = []
    for row in rows:
        values = torch.cat([none, *map(value_of, row)])
        unused = none.new_full((width - len(values), *none.shape[1:]), filling or 0)
        if filling is None:
            unused += torch.arange(len(unused)).reshape(-1, *[1] * (none.dim() - 1))
        joined.append(torch.cat([values, unused]))
    return torch.stack(joined)
