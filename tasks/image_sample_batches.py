"""Micro-batches of samples whose tokens and places of images are known: conversations with any number of images.

The collator runs in the loader's workers: that is where images are opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from data.batches.counts import causal_pairs
from data.batches.padding import PaddedWidth, batch_width
from data.batches.step_loader import Unreadable
from data.images.samples import ImageSample
from data.processors.processor_loading import blank_image
from data.processors.written_images import ImageWriter
from data.tokens.labels import IGNORE_INDEX, labels_to_predict, shift_left
from data.tokens.spans import BadExample
from tasks.image_batches import ImageCollator, ImageTextMicroBatch, padded, stacked
from utils.errors import in_one_line

Pixels = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ImageSampleCollator:
    """Makes an ImageTextMicroBatch of rows of one sample each, padded on the right.

    A batch without any image gets one more row, of a blank image and nothing else. So every rank calls the vision
    encoder in every batch, as sharded layers and gradient buckets need, and its weights get gradients of zero.
    """

    writer: ImageWriter
    padding_id: int
    width: PaddedWidth

    def __call__(self, rows: Sequence[Sequence[ImageSample]]) -> ImageTextMicroBatch | Unreadable:
        samples = [sample for row in rows for sample in row]
        pixels: list[Pixels] = []
        for sample in samples:
            if not len(sample.places):
                continue
            try:
                pixels.append(self._pixels_of(sample))
            except BadExample as error:
                return Unreadable(sample.describe(error))
        ids = [torch.from_numpy(sample.input_ids.astype(np.int64)) for sample in samples]
        labels = [torch.from_numpy(sample.labels.astype(np.int64)) for sample in samples]
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        if not pixels:
            blank, of_blank = self._blank()
            ids, labels, pixels = [*ids, blank], [*labels, torch.full_like(blank, IGNORE_INDEX)], [of_blank]
        all_lengths = np.array([len(row) for row in ids], dtype=np.int64)
        width = batch_width(all_lengths, self.width)
        target_positions, targets = labels_to_predict(shift_left(padded(labels, width, IGNORE_INDEX)))
        row_lengths = torch.zeros(len(ids), dtype=torch.int64)
        row_lengths[: len(lengths)] = torch.from_numpy(lengths)
        return ImageTextMicroBatch(
            inputs=self._text_inputs(ids, width) | {name: stacked([of[name] for of in pixels]) for name in pixels[0]},
            target_positions=target_positions,
            targets=targets,
            num_tokens=int(lengths.sum()),
            num_label_tokens=len(targets),
            num_attended_pairs=int(causal_pairs(lengths).sum()),
            source_rows=tuple(sample.source_row for sample in samples),
            row_lengths=row_lengths,
        )

    def _pixels_of(self, sample: ImageSample) -> Pixels:
        images = sample.open_images()
        try:
            inputs, num_features = self.writer.pixel_inputs(images)
        except Exception as error:  # some processors refuse some shapes
            raise BadExample(f"the processor cannot take its images ({in_one_line(error)})") from error
        if num_features != int((sample.input_ids == self.writer.token_id).sum()):
            raise BadExample(
                f"its images are {num_features:,} tokens, and were others when the row was tokenized: a file changed "
                "since then; tokenize again by removing the cache folder finetuning-tokenized"
            )
        return inputs

    def _blank(self) -> tuple[torch.Tensor, Pixels]:
        """A row of the tokens of a blank image, int64 [tokens], and its inputs."""
        inputs, num_features = self.writer.pixel_inputs([blank_image()])
        text = self.writer.texts([blank_image().size])[0]
        ids = self.writer.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids.count(self.writer.token_id) == num_features
        return torch.tensor(ids, dtype=torch.int64), inputs

    def _text_inputs(self, ids: list[torch.Tensor], width: int) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": padded(ids, width, self.padding_id)}
        inputs["attention_mask"] = padded([torch.ones_like(row) for row in ids], width, 0)
        is_image = (inputs["input_ids"] == self.writer.token_id) & inputs["attention_mask"].bool()
        return inputs | {name: is_image.to(torch.int64) * value for name, value in self.writer.types}


@dataclass
class CaptionsOrSamples:
    """Makes micro-batches of captions, or of samples of conversations, whichever the rows are."""

    captions: ImageCollator
    processor: Any
    padding_id: int
    width: PaddedWidth

    def __call__(self, rows: Sequence[Sequence[Any]]) -> ImageTextMicroBatch | Unreadable:
        is_samples = any(isinstance(example, ImageSample) for row in rows for example in row)
        return self._samples(rows) if is_samples else self.captions(rows)

    @cached_property
    def _samples(self) -> ImageSampleCollator:
        return ImageSampleCollator(ImageWriter.of(self.processor), self.padding_id, self.width)
