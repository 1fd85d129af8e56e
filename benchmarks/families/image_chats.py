"""Generated conversations about generated pictures, and transformers' own loss of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.images.samples import ImageSamples
from data.pipeline import load_sequences
from data.processors.processor_loading import read_processor
from data.tokens.labels import IGNORE_INDEX
from tasks.image_text import ImageText
from utils.errors import RunError

CONTEXT_LENGTH = 512
NUM_CHATS, NUM_TO_EVALUATE = 24, 5
WORDS = ("what", "is", "in", "the", "picture", "one", "two", "red", "blue", "here", "and", "there")


def write_chats(folder: Path) -> None:
    """Conversations of one or two turns with none to three pictures, of 24 to 96 pixels a side, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, seed, number in (("train", 7, NUM_CHATS), ("validation", 8, NUM_TO_EVALUATE)):
        generator = np.random.default_rng(seed)
        rows = [_chat(folder, f"{split}-{row}", generator) for row in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chat(folder: Path, name: str, generator: np.random.Generator) -> dict[str, Any]:
    turns: list[dict[str, str]] = []
    images: list[str] = []
    for _ in range(generator.integers(1, 3)):
        parts = [_text(generator)]
        for _ in range(generator.integers(0, 3) if images else generator.integers(0, 2)):
            images.append(f"{name}-{len(images)}.png")
            height, width = generator.integers(24, 97, 2).tolist()
            pixels = generator.integers(0, 256, (height, width, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / images[-1])
            parts += ["<image>", _text(generator)]
        turns += [{"role": "user", "content": " ".join(parts)}, {"role": "assistant", "content": _text(generator)}]
    return {"messages": turns, "images": images}


def _text(generator: np.random.Generator) -> str:
    return " ".join(generator.choice(WORDS, generator.integers(2, 9)))


@torch.no_grad()
def own_loss(model_folder: Path, data: Path, adapter: Path | None = None) -> float:
    """transformers' own loss of the conversations to evaluate, one at a time: the mean over all their labels.

    The inputs are those of the family's processor, from the rendered text. Which tokens are learned, the run says.
    """
    torch.set_num_threads(1)
    processor = read_processor(str(model_folder), "--model_name")
    model: Any = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    rows = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    losses, counts = [], []
    for row, sample in zip(rows, read_validation(processor, data), strict=True):
        messages = [{**turn, "content": _parts(turn["content"])} for turn in row["messages"]]
        text = processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False)
        images = {"images": [[Image.open(data / file) for file in row["images"]]]} if row["images"] else {}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)
        if inputs["input_ids"][0].tolist() != sample.input_ids.tolist():
            raise RunError("the run reads other tokens than the processor writes")
        inputs.pop("labels", None)
        losses.append(float(model.eval()(**inputs, labels=torch.from_numpy(sample.labels.astype(np.int64))[None]).loss))
        counts.append(int(np.sum(sample.labels[1:] != IGNORE_INDEX)))
    return float(np.average(losses, weights=counts))


def read_validation(processor: Any, data: Path) -> ImageSamples:
    """The conversations to evaluate of a folder, as a run reads them."""
    config = DATASETS["chat_dataset"](data_path=str(data))
    model_config: Any = type("Config", (), {"get_text_config": lambda self: self})()
    train: Any = type("Train", (), {"max_text_length": 50})()
    reading = ImageText().make_reading(processor, model_config, train, (CONTEXT_LENGTH,))
    samples: Any = load_sequences(
        find_dataset_function("chat_dataset", config),
        config,
        processor,
        "validation",
        split_slice=None,
        build=lambda rows, name: reading.build_sequences(rows, name=name, context_length=CONTEXT_LENGTH),
        encode=reading.encode,
    )
    return samples


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, part in enumerate(text.split("<image>")):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": part}] if part else []
    return parts
