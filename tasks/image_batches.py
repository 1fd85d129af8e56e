"""Micro-batches of images and captions. The collator runs in the loader's workers: that is where images are opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from data.batches.counts import EncoderDecoderPairs, causal_pairs
from data.batches.padding import batch_width
from data.batches.step_loader import Unreadable
from data.images.sequences import CaptionedImage
from data.processors.processor_loading import blank_image, image_inputs, num_end_tokens, prompt_text
from data.processors.written_images import TEXT_INPUTS
from data.tokens.labels import IGNORE_INDEX, labels_to_predict, shift_right
from data.tokens.spans import BadExample
from tasks.image_masks import ImageMasks
from tasks.image_rows import GRIDS, RowsOfImages, SampleText
from tasks.micro_batch import TensorBatch, offsets_of
from utils.errors import in_one_line

_IMAGES_SEEN = TEXT_INPUTS[4:]  # by each token: Llama 3.2 Vision, Idefics


@dataclass(frozen=True)
class ImageTextMicroBatch(TensorBatch):
    """One rank's share of one forward pass (`tasks.micro_batch.MicroBatch`)."""

    inputs: dict[str, torch.Tensor]  # of the model: input_ids int64 [batch, seq], pixel_values and whatever it takes
    target_positions: torch.Tensor  # int64 [n], positions of the flattened [batch x seq] that predict a label token
    targets: torch.Tensor  # int64 [n], those label tokens
    num_tokens: int  # that the language model reads, those of images included, without padding
    num_label_tokens: int
    num_attended_pairs: int  # (query, key) pairs of the language model; of an encoder-decoder, in its encoder
    source_rows: tuple[int, ...]  # of its examples, their rows in the data file
    num_decoder_tokens: int = 0
    num_decoder_pairs: int = 0
    num_cross_pairs: int = 0
    num_image_features: int = 0  # these four as in `tasks.image_counts.ImageCounts`
    num_patches: int = 0
    num_patch_pairs: int = 0
    num_window_pairs: int = 0
    row_lengths: torch.Tensor | None = None  # int64 [batch], tokens of each row, without padding; None: all of it
    cu_seqlens: torch.Tensor | None = None  # int32 [samples + 1] in the flattened [batch x seq], of packed rows
    max_seqlen: int = 0  # tokens of the longest sample; 0 without offsets
    masks: ImageMasks | None = None  # draws those of packed rows; None: transformers does

    def model_inputs(self) -> dict[str, Any]:
        """The arguments of the model's forward pass."""
        inputs: dict[str, Any] = self.inputs | offsets_of(self)
        if self.masks is not None:
            inputs["attention_mask"] = self.masks.draw(inputs["position_ids"], inputs["token_type_ids"])
        return inputs

    @property
    def text_ids(self) -> torch.Tensor:
        return self.inputs[self._text_name]

    def with_text_ids(self, ids: torch.Tensor) -> Self:
        return replace(self, inputs=self.inputs | {self._text_name: ids})

    @property
    def _text_name(self) -> str:
        return "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        inputs = {name: function(value) for name, value in self.inputs.items()}
        return replace(super()._map(function), inputs=inputs)


@dataclass(frozen=True)
class DecoderIds:
    """The tokens with which a decoder of its own begins and is padded."""

    start: int
    padding: int


@dataclass(frozen=True)
class ImageCollator:
    """Makes an ImageTextMicroBatch of rows of examples.

    The processor writes the tokens of an image and the text before the caption. The caption follows; in an
    encoder-decoder it is the decoder's target, and rows hold one example each.
    """

    processor: Any
    rows: RowsOfImages
    decoder: DecoderIds | None = None

    def __call__(self, rows: Sequence[Sequence[CaptionedImage]]) -> ImageTextMicroBatch | Unreadable:
        examples = [example for row in rows for example in row]
        inputs = []
        for example in examples:
            try:
                inputs.append(self._inputs_of(example))
            except BadExample as error:
                return Unreadable(example.pictures.describe(example.place, error))
        labels = [torch.from_numpy(example.labels.astype(np.int64)) for example in examples]
        source_rows = tuple(example.source_row for example in examples)
        # An empty micro-batch (fewer rows than ranks) becomes a blank image with nothing to learn.
        inputs = inputs or [image_inputs(self.processor, blank_image(), prompt_text(self.processor, ""))]
        labels = labels or [torch.empty(0, dtype=torch.int64)]
        if self.decoder is not None:
            return self._of_encoder_decoder(inputs, labels, self.decoder, source_rows)
        captions = [torch.from_numpy(example.input_ids.astype(np.int64)) for example in examples] or labels
        texts = list(map(self._text, inputs, captions, labels))
        return self._of_one_text(texts, [len(row) for row in rows] or [1], inputs, source_rows)

    def _inputs_of(self, example: CaptionedImage) -> dict[str, torch.Tensor]:
        picture = example.pictures.open(example.place)
        try:
            inputs = image_inputs(self.processor, picture.image, prompt_text(self.processor, picture.prompt))
        except Exception as error:  # some processors refuse some shapes
            raise BadExample(f"the processor cannot take this image ({in_one_line(error)})") from error
        num_tokens = inputs["input_ids"].shape[1] + (0 if self.decoder else len(example.labels))
        if num_tokens > self.rows.width.limit:
            raise BadExample(
                f"the tokens of the image, its prompt and caption are {num_tokens:,}, and the model takes "
                f"{self.rows.width.limit:,} (context_length); give a smaller image or a shorter prompt"
            )
        return inputs

    def _text(self, inputs: Mapping[str, torch.Tensor], caption: torch.Tensor, labels: torch.Tensor) -> SampleText:
        # The processor ends its text; the caption comes before that end and has its own.
        num_prompt = inputs["input_ids"].shape[1] - num_end_tokens(self.processor.tokenizer)
        text = {name: inputs[name][0, :num_prompt] for name in TEXT_INPUTS if name in inputs}
        return SampleText(
            inputs=lengthened(text, caption, self.rows.learned_type),
            labels=torch.cat([torch.full((num_prompt,), IGNORE_INDEX), labels]),
            grids=inputs.get(GRIDS),
        )

    def _of_one_text(
        self,
        texts: list[SampleText],
        num_of_rows: Sequence[int],
        inputs: list[dict[str, torch.Tensor]],
        source_rows: tuple[int, ...],
    ) -> ImageTextMicroBatch:
        """
        Args:
            num_of_rows: how many of the texts each row holds.
        """
        following, lengths = iter(texts), np.array([len(text) for text in texts])
        rows = self.rows.of([list(islice(following, number)) for number in num_of_rows])
        is_empty = not source_rows
        return ImageTextMicroBatch(
            inputs=rows.inputs | _pixels(inputs),
            target_positions=rows.target_positions,
            targets=rows.targets,
            num_tokens=0 if is_empty else int(lengths.sum()),
            num_label_tokens=sum(int((text.labels != IGNORE_INDEX).sum()) for text in texts),
            num_attended_pairs=0 if is_empty else int(causal_pairs(lengths).sum()),
            source_rows=source_rows,
            row_lengths=rows.row_lengths * (not is_empty),
            cu_seqlens=rows.cu_seqlens,
            max_seqlen=rows.max_seqlen,
            masks=self.rows.masks if self.rows.packing else None,
        )

    def _of_encoder_decoder(
        self,
        inputs: list[dict[str, torch.Tensor]],
        captions: list[torch.Tensor],
        decoder: DecoderIds,
        source_rows: tuple[int, ...],
    ) -> ImageTextMicroBatch:
        prompts = [{name: row[name][0] for name in TEXT_INPUTS if name in row} for row in inputs]
        lengths = np.array([len(prompt["input_ids"]) for prompt in prompts])
        target_lengths = np.array([len(caption) for caption in captions])
        labels = padded(captions, batch_width(target_lengths, self.rows.width), IGNORE_INDEX)
        unlearned = [SampleText(prompt, torch.full_like(prompt["input_ids"], IGNORE_INDEX)) for prompt in prompts]
        pairs = EncoderDecoderPairs.of(lengths, target_lengths)
        target_positions, targets = labels_to_predict(labels)
        return ImageTextMicroBatch(
            inputs=self.rows.of([[prompt] for prompt in unlearned]).inputs
            | _pixels(inputs)
            | {"decoder_input_ids": shift_right(labels, decoder.start, decoder.padding)},
            target_positions=target_positions,
            targets=targets,
            num_tokens=int(lengths.sum() + target_lengths.sum()) if source_rows else 0,
            num_label_tokens=int(target_lengths.sum()),
            num_attended_pairs=pairs.encoder if source_rows else 0,
            source_rows=source_rows,
            num_decoder_tokens=int(target_lengths.sum()),
            num_decoder_pairs=pairs.decoder,
            num_cross_pairs=pairs.cross,
        )


def _pixels(inputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The inputs of images of all examples."""
    names = [name for name in inputs[0] if name not in TEXT_INPUTS]
    return {name: stacked([of_image[name] for of_image in inputs]) for name in names}


def lengthened(text: Mapping[str, torch.Tensor], caption: torch.Tensor, learned_type: int) -> dict[str, torch.Tensor]:
    """The inputs of a text, [tokens, ...] each, with a caption after it.

    Args:
        caption: int64 [tokens].
        learned_type: the token type of captions (`learned_token_type`).
    """
    filling = {
        "input_ids": caption,
        "attention_mask": torch.ones_like(caption),
        "token_type_ids": torch.full_like(caption, learned_type),
    }
    # The caption sees the images that the end of its prompt sees.
    filling |= {
        name: text[name][-1:].expand(len(caption), *text[name].shape[1:]) for name in text.keys() & _IMAGES_SEEN
    }
    # Other inputs mark the image's tokens, of which a caption has none.
    return {name: torch.cat([value, filling.get(name, torch.zeros_like(caption))]) for name, value in text.items()}


def prompts_of_images(
    inputs: list[dict[str, torch.Tensor]], num_end_tokens: int, padding_id: int
) -> dict[str, torch.Tensor]:
    """Inputs of single images as one batch whose texts are padded on the left, as generation needs them.

    Args:
        num_end_tokens: that are left out at the end of each text.
    """
    width = max(row["input_ids"].shape[1] for row in inputs) - num_end_tokens
    joined = {}
    for name in inputs[0]:
        if name not in TEXT_INPUTS:
            joined[name] = stacked([row[name] for row in inputs])
            continue
        texts = [row[name][0, : row[name].shape[1] - num_end_tokens] for row in inputs]
        filling = padding_id if name == "input_ids" else 0
        joined[name] = torch.stack([filled(text, width - len(text), filling, left=True) for text in texts])
    return joined


def padded(rows: list[torch.Tensor], width: int, filling: int) -> torch.Tensor:
    """The rows, padded on the right: [batch, width, ...]."""
    return torch.stack([filled(row, width - len(row), filling) for row in rows])


def filled(row: torch.Tensor, amount: int, filling: int, *, left: bool = False) -> torch.Tensor:
    """A row [tokens, ...] with so many tokens more at its end, or at its beginning."""
    sides = (amount, 0) if left else (0, amount)
    return F.pad(row, (0, 0) * (row.dim() - 1) + sides, value=filling)


def stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of single images one after another, along their first dimension; others are filled up with zeros.

    Models leave out images of zeros, which fill up those that were cut into fewer tiles than others.
    """
    sizes = [max(size) for size in zip(*(value.shape[1:] for value in values), strict=True)]
    filled = []
    for value in values:
        missing = [size - there for size, there in zip(sizes, value.shape[1:], strict=True)]
        padding = [side for amount in reversed(missing) for side in (0, amount)]
        filled.append(F.pad(value, padding) if any(missing) else value)
    return torch.cat(filled)
