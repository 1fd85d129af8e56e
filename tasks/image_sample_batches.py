"""Micro-batches of samples whose tokens and places of images are known: conversations with any number of images.

The collator runs in the loader's workers: that is where images are opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from data.batches.counts import causal_pairs
from data.batches.step_loader import Unreadable
from data.images.opening import ImageSource
from data.images.samples import ImageSample
from data.images.vision_features import NUM_TOKENS, FeatureStore, blank_source
from data.processors.processor_loading import blank_image
from data.processors.written_images import ImageWriter
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import BadExample
from tasks.image_batches import ImageCollator, ImageTextMicroBatch, filled, stacked
from tasks.image_counts import count_images
from tasks.image_rows import GRIDS, RowsOfImages, SampleText
from utils.errors import TrainingError, in_one_line

Pixels = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ImageSampleCollator:
    """Makes an ImageTextMicroBatch of rows of samples.

    A batch without any image gets one more row, of a blank image and nothing else. So every rank calls the vision
    encoder in every batch, as sharded layers and gradient buckets need, and its weights get gradients of zero.
    """

    writer: ImageWriter
    rows: RowsOfImages
    features: FeatureStore | None = None  # what a frozen vision encoder makes of images; None: it gets their pixels

    def __call__(self, rows: Sequence[Sequence[ImageSample]]) -> ImageTextMicroBatch | Unreadable:
        samples, found = [sample for row in rows for sample in row], list[Pixels]()
        for sample in samples:
            try:
                found.append(self._pixels_of(sample) if len(sample.places) else {})
            except BadExample as error:
                return Unreadable(sample.describe(error))
        texts = iter(list(map(self._text, samples, found)))
        of_rows, pixels = [list(islice(texts, len(row))) for row in rows], list(filter(None, found))
        if not pixels:
            blank, of_blank = self._blank()
            of_rows, pixels = [*of_rows, [blank]], [of_blank]
        laid_out = self.rows.of(of_rows)
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        row_lengths = torch.zeros_like(laid_out.row_lengths)
        row_lengths[: len(rows)] = laid_out.row_lengths[: len(rows)]
        return ImageTextMicroBatch(
            inputs=laid_out.inputs | {name: stacked([of[name] for of in pixels]) for name in pixels[0]},
            target_positions=laid_out.target_positions,
            targets=laid_out.targets,
            num_tokens=int(lengths.sum()),
            num_label_tokens=int((laid_out.targets != IGNORE_INDEX).sum()),
            num_attended_pairs=int(causal_pairs(lengths).sum()),
            source_rows=tuple(sample.source_row for sample in samples),
            row_lengths=row_lengths,
            cu_seqlens=laid_out.cu_seqlens,
            max_seqlen=laid_out.max_seqlen,
            masks=self.rows.masks if self.rows.packing else None,
        )

    def prompts(self, samples: Sequence[ImageSample], lengths: Sequence[int]) -> tuple[Pixels, int]:
        """The model's inputs up to so many tokens of each sample, padded on the left as generation needs them; and how
        many of the rows are samples: without any image there is one more, of a blank one.

        Raises:
            TrainingError: if an image cannot be read.
        """
        cut = [_first_tokens(sample, length) for sample, length in zip(samples, lengths, strict=True)]
        found = []
        for sample in cut:
            try:
                found.append(self._pixels_of(sample) if len(sample.places) else {})
            except BadExample as error:
                raise TrainingError(sample.describe(error)) from error
        texts, pixels = list(map(self._text, cut, found)), list(filter(None, found))
        if not pixels:
            blank, of_blank = self._blank()
            texts, pixels = [*texts, blank], [of_blank]
        width = max(map(len, texts))
        inputs = {name: stacked([of[name] for of in pixels]) for name in pixels[0]}
        for name in texts[0].inputs:
            filling = self.rows.padding_id if name == "input_ids" else 0
            rows = [filled(text.inputs[name], width - len(text), filling, left=True) for text in texts]
            inputs[name] = torch.stack(rows)
        return inputs, len(samples)

    def _pixels_of(self, sample: ImageSample) -> Pixels:
        if self.features is not None:
            inputs, num_features = _stored(self.features, sample.image_sources())
        else:
            inputs, num_features = self._processed(sample.open_images())
        if num_features != int((sample.input_ids == self.writer.token_id).sum()):
            raise BadExample(
                f"its images are {num_features:,} tokens, and were others when the row was tokenized: a file changed "
                "since then; tokenize again by removing the cache folder finetuning-tokenized"
            )
        return inputs

    def _processed(self, images: Sequence[Any]) -> tuple[Pixels, int]:
        try:
            return self.writer.pixel_inputs(images)
        except Exception as error:  # some processors refuse some shapes
            raise BadExample(f"the processor cannot take its images ({in_one_line(error)})") from error

    def _blank(self) -> tuple[SampleText, Pixels]:
        """The tokens of a blank image, and its inputs."""
        if self.features is not None:
            inputs, num_features = _stored(self.features, [blank_source(blank_image())])
        else:
            inputs, num_features = self.writer.pixel_inputs([blank_image()])
        text = self.writer.texts([blank_image().size])[0]
        ids = self.writer.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids.count(self.writer.token_id) == num_features
        unlearned = np.full(len(ids), IGNORE_INDEX)
        return self._text(ImageSample(np.array(ids), unlearned, 0, np.zeros((0, 2)), 0, None), inputs), inputs

    def _text(self, sample: ImageSample, pixels: Pixels) -> SampleText:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))
        is_image = ids == self.writer.token_id
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= {name: is_image.to(torch.int64) * value for name, value in self.writer.types}
        return SampleText(inputs, torch.from_numpy(sample.labels.astype(np.int64)), pixels.get(GRIDS))


def _stored(features: FeatureStore, sources: Sequence[ImageSource]) -> tuple[Pixels, int]:
    """The inputs of images whose features are kept, and how many tokens stand for them."""
    found = [features.read(source) for source in sources]
    num_tokens = sum(int(inputs.pop(NUM_TOKENS)) for inputs in found)
    return {name: stacked([inputs[name] for inputs in found]) for name in found[0]}, num_tokens


def _first_tokens(sample: ImageSample, length: int) -> ImageSample:
    return sample._replace(
        input_ids=sample.input_ids[:length],
        labels=sample.labels[:length],
        places=sample.places[sample.places[:, 1] <= length],
    )


@dataclass
class CaptionsOrSamples:
    """Makes micro-batches of captions, or of samples of conversations, whichever the rows are."""

    captions: ImageCollator
    processor: Any
    rows: RowsOfImages
    model_config: PreTrainedConfig
    features: FeatureStore | None = None  # as of `ImageSampleCollator`

    def __call__(self, rows: Sequence[Sequence[Any]]) -> ImageTextMicroBatch | Unreadable:
        # A rank without rows is to leave the vision encoder out, too, if the others do.
        is_samples = self.features is not None or any(isinstance(sample, ImageSample) for row in rows for sample in row)
        batch = self._samples(rows) if is_samples else self.captions(rows)
        if isinstance(batch, Unreadable):
            return batch
        return replace(batch, **count_images(batch.inputs, self.model_config)._asdict())

    @cached_property
    def _samples(self) -> ImageSampleCollator:
        return ImageSampleCollator(ImageWriter.of(self.processor), self.rows, self.features)
