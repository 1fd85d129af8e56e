"""Inputs that models of image and text generate from, and the texts that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.batches.padding import EXACT
from data.images.caption_rows import Picture
from data.images.opening import open_image
from data.images.samples import ImageSample
from data.processors.image_tokens import placeholders_of
from data.processors.processor_loading import image_inputs, num_end_tokens, prompt_text, refusal_of_size
from data.processors.written_images import ImageWriter
from tasks.generation import (
    AnswerSettings,
    GeneratedAnswer,
    GeneratingModel,
    GenerationSettings,
    answer_of,
    check_positions,
    decoder_positions,
    generate_tokens,
    last_answer,
    sampling,
)
from tasks.image_batches import prompts_of_images
from tasks.image_reading import end_id
from tasks.image_rows import RowsOfImages
from tasks.image_sample_batches import ImageSampleCollator
from utils.errors import ConfigError


def answer_about(model: GeneratingModel, processor: Any, prompt: str, settings: AnswerSettings) -> GeneratedAnswer:
    """The text that the model writes about the image of the settings: as `tasks.task.Task.generate`.

    Raises:
        BadExample: if the image cannot be read.
        ConfigError: if the processor refuses the image, or the model has no positions for image, prompt and answer.
    """
    assert settings.image is not None
    picture = picture_asked_about(processor, settings.image, prompt)
    inputs = caption_prompts(model, processor, [picture], processor.tokenizer.eos_token_id)
    is_encoder_decoder = getattr(model.config.get_text_config(), "is_encoder_decoder", False)
    num_taken = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
    check_positions(decoder_positions(model.config), num_taken, settings.max_new_tokens)
    end_ids = sorted({processor.tokenizer.eos_token_id, end_id(processor, model.config)})
    output = model.generate(
        **inputs,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=end_ids,
        pad_token_id=processor.tokenizer.eos_token_id,
        **sampling(settings.temperature),
    )
    answer = new_tokens(inputs["input_ids"], output)[0]
    return answer_of(processor.tokenizer, answer, settings.max_new_tokens, end_ids)


def answers_of(
    model: GeneratingModel, processor: Any, sequences: Sequence[Any], settings: GenerationSettings, *, in_step: bool
) -> list[str]:
    """The texts of captions or samples: as `tasks.task.Task.generate_batch`."""
    if isinstance(sequences[0], ImageSample):
        collate = ImageSampleCollator(ImageWriter.of(processor), RowsOfImages(settings.padding_id, EXACT))
        starts = [last_answer(sequence.labels).start for sequence in sequences]
        inputs, number = collate.prompts(sequences, starts)
        inputs = on_device(inputs, model)
        output = generate_tokens(model, inputs, settings, in_step=in_step)
        return new_texts(processor, inputs["input_ids"], output)[:number]
    pictures = [sequence.pictures.open(sequence.place) for sequence in sequences]
    inputs = caption_prompts(model, processor, pictures, settings.padding_id)
    output = generate_tokens(model, inputs, settings, in_step=in_step)
    return new_texts(processor, inputs["input_ids"], output)


def caption_prompts(
    model: GeneratingModel, processor: Any, pictures: Sequence[Picture], padding: int
) -> dict[str, torch.Tensor]:
    """The model's inputs up to where captions begin, on its device, padded on the left."""
    of_one_text = not getattr(model.config.get_text_config(), "is_encoder_decoder", False)
    cut = num_end_tokens(processor.tokenizer) if of_one_text else 0
    rows = [image_inputs(processor, picture.image, prompt_text(processor, picture.prompt)) for picture in pictures]
    return on_device(prompts_of_images(rows, cut, padding), model)


def picture_asked_about(processor: Any, file: Path, prompt: str) -> Picture:
    """An image, and a question about it.

    Raises:
        BadExample: if the image cannot be read.
        ConfigError: if the processor refuses its shape, or the prompt stands for one more image.
    """
    image = open_image(file)
    if reason := refusal_of_size(processor, image.size):
        raise ConfigError(f"--image: the processor refuses {file}, {image.width} x {image.height} pixels ({reason})")
    if reason := placeholders_of(processor).refusal_of_prompt(prompt):
        raise ConfigError(f"--prompt: {reason}; leave that out of it")
    return Picture(image, prompt)


def on_device(inputs: Mapping[str, torch.Tensor], model: GeneratingModel) -> dict[str, torch.Tensor]:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }


def new_texts(processor: Any, asked: torch.Tensor, output: torch.Tensor) -> list[str]:
    """The new texts."""
    tokens = new_tokens(asked, output)
    return [text.strip() for text in processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def new_tokens(asked: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The output without the prompt's ids, which decoders return first if they have read them."""
    width = asked.shape[1]
    repeats = output.shape[1] >= width and torch.equal(output[:, :width], asked)
    return output[:, width:] if repeats else output
