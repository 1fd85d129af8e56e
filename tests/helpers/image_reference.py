"""A plain loop over images and captions with transformers' own loss, and the flags for the same work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from PIL import Image
from transformers import AutoModelForImageTextToText

from data.batches.packing import pack_best_fit
from data.processors.processor_loading import read_processor
from tests.helpers.reference import SEED, reference_order

PROMPT = "what is it ?"
LR, MOMENTUM = 0.1, 0.9


def image_flags(model: Path, data: Path, output: Path, *, num_steps: int) -> list[str]:
    """The reference's work; the caller says how its global batch is cut, and laid out.

    With SGD, weights differ as gradients do. AdamW divides each element by its own size: where a gradient is almost
    zero, rounding decides its sign, and moves a weight by the whole learning rate.
    """
    flags = ["--model_name", str(model), "--output_dir", str(output), "--seed", str(SEED), "--lr", str(LR)]
    flags += ["--dataset", "caption_dataset", "--caption_dataset.data_path", str(data)]
    flags += ["--caption_dataset.prompt", PROMPT, "--run_validation", "False"]
    flags += ["--max_train_step", str(num_steps), "--num_epochs", "4", "--num_workers_dataloader", "0"]
    flags += ["--optimizer", "SGD", "--momentum", str(MOMENTUM)]
    flags += ["--mixed_precision", "False"]  # fp32 on GPUs too
    return [*flags, "--gradient_clipping", "--gradient_clipping_threshold", "0.5"]


def image_reference(
    model_folder: Path,
    table: Path,
    *,
    num_steps: int,
    global_batch: int,
    lora_targets: str = "",
    packed_length: int | None = None,
) -> list[tuple[float, float]]:
    """One example at a time in fp64, with the processor's inputs and the model's own loss.

    Args:
        global_batch: rows of a step.
        packed_length: tokens of rows that hold several examples; None: each holds one.
        lora_targets: a pattern of the names of the layers that an adapter of rank 4 is put beside.

    Returns:
        For each step, the mean loss over the label tokens of the global batch, and the gradient norm before clipping.
    """
    torch.manual_seed(SEED)
    processor = read_processor(str(model_folder), "--model_name")
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    if lora_targets:
        adapter = peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=lora_targets)
        model = peft.get_peft_model(model, adapter)
        torch.manual_seed(SEED)  # the adapters' values are a function of the seed alone
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.reset_lora_parameters("default", init_lora_weights=True)
    model.double().train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    captions = [
        processor.tokenizer(row["text"], add_special_tokens=False)["input_ids"] + [processor.tokenizer.eos_token_id]
        for row in rows
    ]
    examples = [
        example_of(processor, model.config, table.parent / row["image"], caption)
        for row, caption in zip(rows, captions, strict=True)
    ]
    lengths = [labels.shape[1] for _, labels in examples]
    packed = [[row] for row in range(len(rows))]
    if packed_length is not None:
        packed = pack_best_fit(lengths, packed_length)
    steps_per_epoch = -(-len(packed) // global_batch)
    results = []
    for step in range(num_steps):
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.85**epoch
        order = reference_order(len(packed), epoch, lengths if packed_length is None else None, global_batch)
        chosen = [row for place in order[step_of_epoch * global_batch :][:global_batch] for row in packed[place]]
        num_label_tokens = sum(len(captions[row]) for row in chosen)
        loss_sum = 0.0
        for row in chosen:
            loss = own_loss(model, *examples[row]) * len(captions[row])
            (loss / num_label_tokens).backward()
            loss_sum += loss.item()
        results.append((loss_sum / num_label_tokens, torch.nn.utils.clip_grad_norm_(parameters, 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return results


def own_loss(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """transformers' own mean over the label tokens; that of Idefics fails on logits of its additional tokens."""
    if getattr(model.config, "additional_vocab_size", 0):
        logits = model(**inputs).logits
        return F.cross_entropy(logits[0, :-1], labels[0, 1:])
    return model(**inputs, labels=labels).loss


def example_of(
    processor: object, config: object, file: Path, caption: Sequence[int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the model reads of an example, and its labels, [1, tokens] each."""
    placeholder = getattr(processor, "image_token", "")
    text = PROMPT if type(processor).__name__ == "Blip2Processor" else f"{placeholder}{PROMPT}"
    if processor.chat_template:
        content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = dict(processor(images=[Image.open(file)], text=[text], return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    answer = torch.tensor([list(caption)])
    if config.get_text_config().is_encoder_decoder:
        return inputs, answer
    labels = torch.cat([torch.full_like(inputs["input_ids"], -100), answer], dim=1)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs.pop("labels", None)
    suffix = int(type(processor).__name__ == "PaliGemmaProcessor")  # its other texts are prefixes, seen both ways
    for name, kind in {"token_type_ids": suffix, "mm_token_type_ids": 0}.items():
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.full_like(answer, kind)], dim=1)
    for name in inputs.keys() & {"cross_attention_mask", "image_attention_mask"}:  # the images that each token sees
        inputs[name] = torch.cat([inputs[name], *[inputs[name][:, -1:]] * answer.shape[1]], dim=1)
    return inputs, labels
