"""Batches of conversations with images have the pixels, tokens and losses of transformers' processor and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from data.batches.padding import PaddedWidth
from data.batches.step_loader import Unreadable
from data.images.samples import ImageSample
from data.processors.written_images import ImageWriter
from reporting.data_preview import sample_spans
from tasks.generation import GenerationSettings
from tasks.image_batches import ImageTextMicroBatch
from tasks.image_generation import picture_asked_about
from tasks.image_masks import ImageMasks
from tasks.image_positions import GridPositions
from tasks.image_rows import RowsOfImages
from tasks.image_sample_batches import ImageSampleCollator
from tasks.image_text import ImageText
from tests.helpers.image_chats import chat_processor, flat_picture, read_chats, save_chat_model
from tests.helpers.image_models import captioned
from utils.errors import ConfigError, TrainingError

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "llava"]


def write_chats(folder: Path) -> Path:
    """Two pictures in two turns, a text alone, and three pictures of other sizes in one turn."""
    for number, (picture, _) in enumerate(captioned(2)):
        picture.save(folder / f"{number}.png")
    for number, size in enumerate([(64, 40), (32, 32), (40, 90)], 2):
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"{number}.png")
    says = [
        (["<image>one red circle", "blue", "<image>\nred ?", "two"], ["0.png", "1.png"]),
        (["one red", "two blue circles"], []),
        (["<image><image> and <image>", "three green"], ["2.png", "3.png", "4.png"]),
    ]
    rows = []
    for texts, images in says:
        turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=False)]
        rows.append({"messages": turns, "images": images})
    table = folder / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


def collator_of(processor: Any, multiple: int = 1, **options: Any) -> ImageSampleCollator:
    rows = RowsOfImages(0, PaddedWidth(multiple, 1024), **options)
    return ImageSampleCollator(ImageWriter.of(processor), rows)


def losses_of(model: Any, batch: Any) -> torch.Tensor:
    """The loss of each label token, in the order of its place."""
    logits = model(**batch.model_inputs(), use_cache=False).logits.flatten(0, 1)[batch.target_positions]
    return torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_samples_that_share_rows_have_the_losses_of_padded_ones(name: str, tmp_path: Path) -> None:
    """Two images, none, and three in one row; and three with none."""
    model = AutoModelForImageTextToText.from_pretrained(save_chat_model(name, tmp_path / "model")).eval()
    processor = chat_processor(name)
    samples = read_chats(processor, write_chats(tmp_path))
    several, one = [*samples], [samples[2], samples[0]]
    padded = collator_of(processor)([[sample] for sample in [*several, *one]])
    of_family = {"positions": GridPositions.of_config(model.config), "masks": ImageMasks.of_config(model.config)}
    packed = collator_of(processor, 16, packing=True, num_rows=3, **of_family)([several, one])
    assert isinstance(packed, ImageTextMicroBatch)
    assert packed.inputs["input_ids"].shape[0] == 3
    assert "attention_mask" not in packed.inputs
    assert torch.allclose(losses_of(model, packed), losses_of(model, padded), atol=1e-5)
    assert (packed.num_tokens, packed.num_attended_pairs) == (padded.num_tokens, padded.num_attended_pairs)
    texts = collator_of(processor, packing=True, **of_family)([[samples[1]] * 3])
    alone = losses_of(model, collator_of(processor)([[samples[1]]]))
    assert torch.allclose(losses_of(model, texts), alone.repeat(3), atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_batch_has_the_losses_of_each_of_its_samples_by_the_processor_alone(name: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(save_chat_model(name, tmp_path / "model")).eval()
    processor = chat_processor(name)
    samples = read_chats(processor, write_chats(tmp_path))
    batch = collator_of(processor, 16)([[sample] for sample in samples])
    assert isinstance(batch, ImageTextMicroBatch)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    expected = []
    for row, sample in zip(rows, samples, strict=True):
        messages = [{**turn, "content": _parts(turn["content"])} for turn in row["messages"]]
        text = processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False)
        images = [Image.open(tmp_path / image) for image in row["images"]]
        options = {"images": [images]} if images else {}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **options)
        inputs.pop("labels", None)
        assert inputs["input_ids"][0].tolist() == sample.input_ids.tolist()
        logits = model(**inputs).logits[0, :-1]
        labels = torch.from_numpy(sample.labels.astype("int64"))[1:]
        expected.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100])
    assert torch.allclose(losses_of(model, batch), torch.cat(expected), atol=1e-5)
    assert batch.num_tokens == sum(len(sample.input_ids) for sample in samples)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_batch_without_an_image_runs_the_vision_encoder_and_has_the_same_losses(name: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(save_chat_model(name, tmp_path / "model")).eval()
    processor = chat_processor(name)
    samples = read_chats(processor, write_chats(tmp_path))
    collate = collator_of(processor)
    alone, mixed = collate([[samples[1]]]), collate([[samples[1]], [samples[0]]])
    assert isinstance(alone, ImageTextMicroBatch)
    assert isinstance(mixed, ImageTextMicroBatch)
    assert "pixel_values" in alone.inputs
    assert len(alone.inputs["input_ids"]) == 2
    assert alone.num_tokens == len(samples[1].input_ids)
    own = alone.num_label_tokens
    assert torch.allclose(losses_of(model, alone), losses_of(model, mixed)[:own], atol=1e-5)
    assert alone.source_rows == (1,)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
@torch.no_grad()
def test_prompts_of_answers_of_any_length_are_answered_as_each_alone(name: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(save_chat_model(name, tmp_path / "model")).eval()
    processor = chat_processor(name)
    table = write_chats(tmp_path)
    table.write_text(table.read_text().replace("three green", "three green circles and two red circles"))
    samples = [*read_chats(processor, table)]
    settings = GenerationSettings(num_beams=1, max_new_tokens=6, padding_id=0, end_ids=(2,))

    def answers(asked: list[ImageSample]) -> list[str]:
        return ImageText().generate_batch(model, processor, asked, settings, in_step=False)

    assert answers(samples) == [text for sample in samples for text in answers([sample])]
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"row 1: image .*0\.png cannot be read"):
        answers(samples)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_an_image_of_any_size_is_the_processors(name: str) -> None:
    """Those that can count are asked for their count; others make the inputs of a blank image."""
    processor = chat_processor(name)
    writer = ImageWriter.of(processor)
    assert (writer.around is None) == (name == "idefics3")
    generator = np.random.default_rng(3)
    for width, height in generator.integers(20, 400, (12, 2)).tolist():
        text = "+".join([writer.placeholder] * 2)
        images = [Image.new("RGB", (width, height)), Image.new("RGB", (64, 64))]
        expected = processor(images=[images], text=[text], add_special_tokens=False)["input_ids"][0]
        written = "+".join(writer.texts([(width, height), (64, 64)]))
        assert processor.tokenizer(written, add_special_tokens=False)["input_ids"] == list(expected)


def test_a_picture_that_its_camera_turned_has_the_tokens_of_what_is_seen(tmp_path: Path) -> None:
    """Its header has width and height as the camera was held; half-transparent pixels are taken as they are."""
    processor = chat_processor("qwen2_vl")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (90, 30), (9, 200, 9)).save(tmp_path / "0.jpg", exif=exif)
    Image.new("RGBA", (30, 90), (9, 200, 9, 20)).save(tmp_path / "1.png")
    row = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "two"}]}
    lines = [json.dumps(row | {"images": [name]}) for name in ("0.jpg", "1.png")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    turned, clear = read_chats(processor, tmp_path / "train.jsonl")
    assert turned.input_ids.tolist() == clear.input_ids.tolist()
    (image,), (other,) = turned.open_images(), clear.open_images()
    assert image.size == other.size == (30, 90)
    assert other.getpixel((3, 3)) == (9, 200, 9)
    batch = collator_of(processor)([[turned], [clear]])
    assert isinstance(batch, ImageTextMicroBatch)
    grids = batch.inputs["image_grid_thw"].tolist()
    assert grids[0] == grids[1]
    assert grids[0][1] > grids[0][2]


def test_the_preview_shows_an_image_as_the_template_writes_it(tmp_path: Path) -> None:
    processor = chat_processor("qwen2_vl")
    samples = read_chats(processor, write_chats(tmp_path))
    shown = "".join(span.text for span in sample_spans(samples, processor.tokenizer))
    assert shown.count("<|vision_start|><|image_pad|><|vision_end|>") == len(samples[0].places) == 2


def test_an_image_that_changed_since_its_row_was_read_ends_the_run_with_the_row(tmp_path: Path) -> None:
    processor = chat_processor("qwen2_vl")
    samples = read_chats(processor, write_chats(tmp_path))
    flat_picture(tmp_path / "3.png", (0, 0, 0), (32, 200))
    found = collator_of(processor)([[samples[2]]])
    assert isinstance(found, Unreadable)
    assert "row 3: its images are" in found.message
    (tmp_path / "3.png").unlink()
    found = collator_of(processor)([[samples[2]]])
    assert isinstance(found, Unreadable)
    assert "row 3: image 2: there is no file" in found.message


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, part in enumerate(text.split("<image>")):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": part}] if part else []
    return parts


@pytest.mark.parametrize(
    ("size", "prompt", "message"),
    [
        ((4000, 10), "red ?", "--image: the processor refuses"),
        ((40, 24), "<|image_pad|> ?", "--prompt: its prompt spells"),
    ],
)
def test_what_a_processor_does_not_take_is_refused_when_a_person_asks(
    size: tuple[int, int], prompt: str, message: str, tmp_path: Path
) -> None:
    file = flat_picture(tmp_path / "a.png", (255, 0, 0), size)
    with pytest.raises(ConfigError, match=message):
        picture_asked_about(chat_processor("qwen2_vl"), file, prompt)
