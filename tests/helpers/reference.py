"""A plain loop on one process, to compare runs with, and the flags that ask the project for the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
from peft.tuners.lora import LoraLayer
from peft.tuners.prefix_tuning import PrefixEncoder
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from data.batches.packing import pack_best_fit
from tests.helpers import random_documents
from tests.helpers.processes import train_events

GLOBAL_BATCH, CONTEXT_LENGTH, SEED = 8, 96, 3
LR = 1e-3
"""AdamW makes steps of this size out of the rounding of gradients near zero, which differs between processors."""
FAST_LR = 5e-3  # with which a few steps learn something
TOLERANCE = 1e-5


def flags_for(
    model: Path, output: Path, *, batching: str, num_steps: int, documents: str = "get_custom_dataset", lr: float = LR
) -> list[str]:
    """The reference's work; the caller says how it is cut into a global batch of 8 rows, and laid out."""
    flags = ["--model_name", str(model), "--output_dir", str(output), "--seed", str(SEED), "--lr", str(lr)]
    flags += ["--dataset", f"{random_documents.__file__}:{documents}"]
    flags += ["--batching_strategy", batching, "--context_length", str(CONTEXT_LENGTH)]
    flags += ["--max_train_step", str(num_steps), "--num_epochs", "4", "--num_workers_dataloader", "0"]
    flags += ["--mixed_precision", "False"]  # fp32 on GPUs too
    return [*flags, "--gradient_clipping", "--gradient_clipping_threshold", "0.5"]


def lora_flags(targets: Sequence[str]) -> list[str]:
    flags = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
    return [*flags, "--lora_config.target_modules", ",".join(targets)]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, document: Mapping[str, Any]) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


def reference_run(
    model_folder: Path,
    *,
    batching: str,
    num_steps: int,
    lora_targets: Sequence[str] = (),
    adapter: peft.PeftConfig | None = None,
    num_frozen: int = 0,
    quantization: BitsAndBytesConfig | None = None,
    documents: str = "get_custom_dataset",
    loss_of: Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor] = cross_entropy,
    noise_of: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None,
    lr: float = LR,
    lr_ratio: float = 1.0,
) -> list[tuple[float, float]]:
    """A plain loop: one document at a time, torch's own AdamW and clipping, nothing of the project's computing.

    Args:
        lora_targets: the layers of an adapter as `lora_flags` makes it. adapter: any other, as peft is told of it.
        num_frozen: so many layers of a Llama are not trained, from the first on.
        quantization: of the base, by transformers and bitsandbytes, with their own layers.
        lr_ratio: of the learning rate of LoRA's B.
        noise_of: what is added to a document's embeddings; of its token ids [1, tokens], their size, and the step.
        documents: the function of `random_documents` that makes them.
        loss_of: the summed loss of a document's logits [tokens, vocab] and targets [tokens], and the document.

    Returns:
        For each step, the mean loss over the label tokens of the global batch, and the gradient norm before clipping.
    """
    model = plain_model(
        model_folder,
        lora_targets=lora_targets,
        adapter=adapter,
        num_frozen=num_frozen,
        quantization=quantization,
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    factors = [p for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name and lr_ratio != 1]
    others = [parameter for parameter in parameters if all(parameter is not factor for factor in factors)]
    groups = [{"params": others, "of_lr": 1.0}, {"params": factors, "of_lr": lr_ratio}][: 1 + bool(factors)]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)
    examples = getattr(random_documents, documents)(None, None, "train")
    if batching == "packing":
        rows = pack_best_fit([len(document["input_ids"]) for document in examples], CONTEXT_LENGTH)
    else:
        rows = [[index] for index in range(len(examples))]
    steps_per_epoch = -(-len(rows) // GLOBAL_BATCH)
    results, step = list[tuple[float, float]](), 0
    if noise_of is not None:
        model.get_input_embeddings().register_forward_hook(
            lambda layer, args, output: output + noise_of(args[0], output.shape[-1], step)
        )
    for step in range(num_steps):
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.85**epoch * group.get("of_lr", 1.0)
        lengths = None if batching == "packing" else [len(document["input_ids"]) for document in examples]
        order = reference_order(len(rows), epoch, lengths)
        chosen = order[step_of_epoch * GLOBAL_BATCH :][:GLOBAL_BATCH]
        batch = [examples[index] for row in chosen for index in rows[row]]
        num_label_tokens = sum(label != -100 for document in batch for label in document["labels"][1:])
        loss_sum = 0.0
        for document in batch:
            logits = model(input_ids=torch.tensor([document["input_ids"]])).logits[0, :-1]
            targets = torch.tensor(document["labels"][1:])
            loss = loss_of(logits, targets, document)
            (loss / num_label_tokens).backward()
            loss_sum += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss_sum / num_label_tokens, grad_norm.item()))
    return results


def plain_model(
    model_folder: Path,
    *,
    lora_targets: Sequence[str] = (),
    adapter: peft.PeftConfig | None = None,
    num_frozen: int = 0,
    quantization: BitsAndBytesConfig | None = None,
) -> Any:
    """The model of `reference_run`, which takes the same arguments."""
    torch.manual_seed(SEED)
    model = quantized_by_transformers(model_folder, quantization)
    if lora_targets:
        adapter = peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=list(lora_targets))
    if adapter is not None:
        model = peft.get_peft_model(model, adapter)
        torch.manual_seed(SEED)  # the adapters' values are a function of the seed alone
        for layer in model.modules():
            if isinstance(layer, LoraLayer) and adapter.init_lora_weights == "orthogonal":
                layer.orthogonal_init("default")
            elif isinstance(layer, LoraLayer) and adapter.init_lora_weights is True:
                layer.reset_lora_parameters("default", init_lora_weights=True)
            elif isinstance(layer, AdaptedAttention | AdaptedAttentionGPT | PrefixEncoder):
                torch.nn.init.normal_(
                    layer.embedding.weight if isinstance(layer, PrefixEncoder) else layer.adaption_prompt
                )
    for name, parameter in model.named_parameters():
        if any(f".layers.{index}." in name for index in range(num_frozen)):
            parameter.requires_grad = False
    return model


def quantized_by_transformers(model_folder: Path, quantization: BitsAndBytesConfig | None) -> Any:
    """With bitsandbytes' layers, or with plain ones that hold what its weights stand for where its own are less exact.

    These are 8 bits, of which it rounds the inputs, and on a CPU 4 bits whose blocks do not end where rows do: it takes
    the scales of other blocks for them. On some CPUs it computes 4 bits in bf16, which is turned off.
    """
    if quantization is None:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        if getattr(model.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # transformers before 5.23 chooses sdpa, which does no soft-capping
        return model
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit) and module.in_features % module.weight.blocksize == 0:
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.bias = module.bias
            plain.weight = nn.Parameter(dequantized(module), requires_grad=False)
            model.set_submodule(name, plain)
    model.is_loaded_in_8bit = False  # so that peft takes plain layers for what they are
    round_experts(model, quantization)
    return model


def round_experts(model: Any, quantization: BitsAndBytesConfig) -> None:
    """Give experts, which transformers leaves as they are, what bitsandbytes makes of each matrix alone."""
    for name, parameter in model.named_parameters():
        if parameter.dim() != 3 or ".experts." not in name:
            continue
        for matrix in parameter.data:
            if quantization.load_in_8bit:
                packed, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(matrix.half())
                matrix.copy_(packed.float() * scale.unsqueeze(1) / 127)
                continue
            packed, state = bitsandbytes.functional.quantize_4bit(
                matrix.contiguous(),
                blocksize=64,
                compress_statistics=quantization.bnb_4bit_use_double_quant,
                quant_type=quantization.bnb_4bit_quant_type,
            )
            state.shape = torch.Size([1, matrix.numel()])  # as one row, of which every block's scale is right
            matrix.copy_(bitsandbytes.functional.dequantize_4bit(packed, state).view(matrix.shape))


def dequantized(layer: Any) -> torch.Tensor:
    """What the weight of a quantized layer stands for: fp32 [out, in]."""
    weight = layer.weight
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        return weight.float() * weight.SCB.unsqueeze(1) / 127
    state = copy(weight.quant_state)
    state.shape = torch.Size([weight.quant_state.shape.numel()])  # as one row, of which every block's scale is right
    return bitsandbytes.functional.dequantize_4bit(weight.data, state).float().view(weight.quant_state.shape)


def reference_order(
    num_rows: int, epoch: int, lengths: Sequence[int] | None, global_batch: int = GLOBAL_BATCH
) -> list[int]:
    """Rows are shuffled; with lengths, global batches of neighbours in length inside each of four windows are too."""
    generator = np.random.default_rng([SEED, epoch])
    order = generator.permutation(num_rows).tolist()
    if lengths is None:
        return order
    num_batches = num_rows // global_batch
    sizes = [num_batches // 4 + (window < num_batches % 4) for window in range(4)]
    batches, start = [], 0
    for size in sizes:
        window = sorted(order[start : start + size * global_batch], key=lambda row: -lengths[row])
        batches += [window[at : at + global_batch] for at in range(0, len(window), global_batch)]
        start += size * global_batch
    rest = sorted(order[start:], key=lambda row: -lengths[row])
    return [row for batch in generator.permutation(len(batches)) for row in batches[batch]] + rest


def assert_agrees(output: Path, reference: list[tuple[float, float]], tolerance: float = TOLERANCE) -> None:
    events = train_events(output)
    assert [event["step"] for event in events] == list(range(1, len(reference) + 1))
    for event, (loss, grad_norm) in zip(events, reference, strict=True):
        assert event["loss"] == pytest.approx(loss, rel=tolerance), f"loss of step {event['step']}"
        assert event["grad_norm"] == pytest.approx(grad_norm, rel=tolerance), f"grad norm of step {event['step']}"


def plain_eval_loss(model: torch.nn.Module) -> float:
    """Mean loss over the validation set's label tokens, one document at a time."""
    total, count = 0.0, 0
    with torch.no_grad():
        for document in random_documents.get_custom_dataset(None, None, "validation"):
            logits = model(input_ids=torch.tensor([document["input_ids"]])).logits[0, :-1]
            targets = torch.tensor(document["labels"][1:])
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets != -100).sum())
    return total / count
