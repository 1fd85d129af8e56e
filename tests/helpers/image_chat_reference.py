"""A plain loop over conversations with images, by transformers' own processor and model, and the conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from data.processors.processor_loading import read_processor
from tests.helpers.image_models import captioned
from tests.helpers.image_reference import LR, MOMENTUM
from tests.helpers.reference import reference_order

SIZES = ((32, 32), (64, 40), (40, 90), (48, 48))


def write_conversations(folder: Path, number: int, seed: int = 0, *, with_images: bool = True) -> Path:
    """Conversations of one or two turns with up to three pictures each, of several sizes; some have none."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    rows = []
    for row in range(number):
        turns, images = [], []
        for turn in range(int(generator.integers(1, 3))):
            count = int(generator.integers(0, 3)) if with_images else 0
            shown = captioned(max(1, count), seed=seed + 1000 * row + turn)
            for place, (picture, _) in enumerate(shown[:count]):
                file = f"{seed}-{row}-{turn}-{place}.png"
                picture.resize(SIZES[int(generator.integers(len(SIZES)))]).save(folder / file)
                images.append(file)
            turns.append({"role": "user", "content": "<image>" * count + shown[-1][1]})
            turns.append({"role": "assistant", "content": shown[0][1]})
        rows.append({"messages": turns, "images": images})
    table = folder / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


def conversation_inputs(processor: Any, row: dict[str, Any], folder: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """What the model reads of a row, by the processor itself, and its labels, [1, tokens] each.

    The assistant's turns are found as the tokens that follow each rendered prompt, up to the end token.
    """
    end = processor.tokenizer.eos_token_id
    messages = [{**turn, "content": parts(turn["content"])} for turn in row["messages"]]

    def inputs_of(number: int, prompt: bool) -> dict[str, Any]:
        values = {**processor.tokenizer.special_tokens_map, "add_generation_prompt": prompt}
        text = processor.tokenizer.apply_chat_template(
            messages[:number], chat_template=processor.chat_template, tokenize=False, **values
        )
        images = [Image.open(folder / image) for image in row["images"]][: _num_images(row["messages"][:number])]
        options = {"images": [images]} if images else {}
        return dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **options))

    whole = inputs_of(len(messages), prompt=False)
    ids = whole["input_ids"][0]
    labels = torch.full_like(whole["input_ids"], -100)
    for number, turn in enumerate(row["messages"]):
        if turn["role"] == "assistant":
            first = inputs_of(number, prompt=True)["input_ids"].shape[1]
            last = first + ids[first:].tolist().index(end) + 1
            labels[0, first:last] = ids[first:last]
    whole.pop("labels", None)
    return whole, labels


def chat_reference(model_folder: Path, table: Path, *, num_steps: int, global_batch: int) -> list[tuple[float, float]]:
    """One conversation at a time in fp64. For each step, the mean loss over the label tokens of the global batch, and
    the gradient norm before clipping."""
    processor = read_processor(str(model_folder), "--model_name")
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    examples = [conversation_inputs(processor, row, table.parent) for row in rows]
    lengths = [labels.shape[1] for _, labels in examples]
    steps_per_epoch = -(-len(rows) // global_batch)
    results = []
    for step in range(num_steps):
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.85**epoch
        chosen = reference_order(len(rows), epoch, lengths, global_batch)[step_of_epoch * global_batch :][:global_batch]
        num_label_tokens = sum(int((examples[row][1] != -100).sum()) for row in chosen)
        loss_sum = 0.0
        for row in chosen:
            inputs, labels = examples[row]
            inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
            logits = model(**inputs).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
            (loss / num_label_tokens).backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        results.append((loss_sum / num_label_tokens, norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # momentum goes on where a step has no image
    return results


def parts(text: str) -> list[dict[str, str]]:
    """A text with `<image>` as parts of a content."""
    found: list[dict[str, str]] = []
    for number, part in enumerate(text.split("<image>")):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": part}] if part else []
    return found


def _num_images(turns: list[dict[str, Any]]) -> int:
    return sum(turn["content"].count("<image>") for turn in turns)
