"""Causal language models. See `tasks.task.Task` for what each name is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from configs.run import RunConfig
from configs.training import DEFAULT_CONTEXT_LENGTH, TrainConfig
from data.batches.packing import Offsets
from data.batches.padding import PaddedWidth, padding_id
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.causal import build_sequences
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from data.tokens.encoding import ONE_TEXT
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.flops import StepFlops
from tasks.generation import (
    GenerationSettings,
    PromptedAnswer,
    check_positions,
    decoder_positions,
    generate_tokens,
    last_answer,
    sampling,
)
from utils.errors import ConfigError

NAME = "causal_lm"
AUTO_MODEL = AutoModelForCausalLM
PEFT_TYPE = "CAUSAL_LM"
READS_IMAGES = False
PACKS = True
OWN_SETTINGS = ("context_length",)
LENGTHS = {"context_length": DEFAULT_CONTEXT_LENGTH}

load_processor = load_tokenizer
make_flops = StepFlops


def fits(model_config: Any) -> bool:
    """Whether transformers, or code that came with the model, has a causal language model of this type."""
    own_code = getattr(model_config, "auto_map", None) or {}
    return type(model_config) in AUTO_MODEL._model_mapping or AUTO_MODEL.__name__ in own_code


def check_config(model_config: Any, model_name: str) -> None:
    """Check that there is a causal language model of this type.

    Raises:
        ConfigError: if not, as for models of images alone.
    """
    if not fits(model_config):
        raise ConfigError(
            f"--model_name: {model_name} is a {model_config.model_type} model, and transformers "
            f"{transformers.__version__} has no causal language model of that type ({AUTO_MODEL.__name__}); give a "
            "language model"
        )
    if (
        getattr(model_config, "is_encoder_decoder", False)
        and type(model_config) not in AutoModelForSeq2SeqLM._model_mapping
    ):
        raise ConfigError(
            f"--model_name: {model_name} is a {model_config.model_type} model, whose encoder reads no text; give a "
            "language model"
        )


def check_settings(config: RunConfig) -> None:
    """Every setting that a causal model does not take belongs to another task."""


def check_model(model: Any, model_name: str) -> list[str]:
    """Check that tokens do not see those after them, and that the head can be called on what the decoder gave, as
    `policies.loss.summed_loss.use_summed_loss` calls it.

    Returns:
        No lines to print.

    Raises:
        ConfigError: if it cannot.
    """
    if model.config.get_text_config() is not model.config:
        raise ConfigError(
            f"--model_name: {model_name} is a {type(model).__name__}, a language model inside a larger one (of images, "
            "say), and only plain language models are trained; save its language model alone and give that"
        )
    # In some families, the name by which transformers looks for a decoder is that of the head (ModernBERT's decoder).
    if model.get_decoder() in (model, model.get_output_embeddings()):
        raise ConfigError(
            f"--model_name: transformers {transformers.__version__} does not say where the decoder of "
            f"{type(model).__name__} is, and the loss is computed after it; give a model of another family"
        )
    is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
    # GPT-NeoX's config says the same of a decoder, but its attention layers are causal.
    if getattr(model.config, "is_decoder", None) is False and not is_causal:
        raise ConfigError(
            f"--model_name: {model_name} is an encoder ({model.config.model_type}, without is_decoder in config.json): "
            "each token sees those that it is to predict; give a causal language model"
        )
    return []


def loss_notes(model_config: Any) -> list[str]:
    """A line for a mixture of experts whose config asks for its router's auxiliary loss: that is not trained here."""
    if getattr(model_config.get_text_config(), "output_router_logits", False):
        return ["output_router_logits: the router's auxiliary loss is not added; cross-entropy alone is trained"]
    return []


def stacks(model: Any) -> list[nn.Module]:
    """The decoder: the head computes logits from its output alone."""
    return [model.get_decoder()]


def compute_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Nothing is read, since the decoder's output is given. As embeddings it says how many tokens there are, which some
    models ask (Gemma 4)."""
    return model.forward(input_ids=None, inputs_embeds=hidden, use_cache=False).logits


def inputs_of(processor: Any, model_config: Any, ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "use_cache": False}


def make_reading(processor: Any, model_config: Any, train_config: TrainConfig, lengths: Sequence[int]) -> Reading:
    return Reading(ONE_TEXT, build_sequences)


def make_collator(
    processor: Any,
    model_config: Any,
    *,
    vocab_size: int,
    widths: Sequence[PaddedWidth],
    packing: bool,
    offsets: Offsets,
    num_rows: int = 0,
) -> Collator:
    """The Collator of a run, which pads with an id that the model's embedding has."""
    (width,) = widths
    return Collator(packing, padding_id(processor, vocab_size), width, offsets, num_rows)


def summed_loss(model: nn.Module, batch: CausalMicroBatch, loss_grad: float | None = None) -> torch.Tensor:
    """Sum of next-token cross-entropy over the batch's label tokens, fp32 scalar (see `policies.loss.summed_loss`)."""
    offsets: dict[str, Any] = {}
    if batch.cu_seqlens is not None:
        offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
        offsets |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        targets=batch.targets,
        target_positions=batch.target_positions,
        loss_grad=loss_grad,
        use_cache=False,
        **offsets,
    )


@torch.no_grad()
def generate(
    model: Any,
    processor: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    add_bos: bool = True,
    more_end_ids: Sequence[int] = (),
    image: Path | None = None,
) -> str:
    """The model's answer to a prompt. The model is one process's, not sharded.

    Args:
        temperature: 0 takes the likeliest token each time; above, torch's random state decides.
        add_bos: put the processor's first token before the prompt, as training does except under a chat template.
        more_end_ids: tokens that end the answer, beside the processor's end token.

    Raises:
        ConfigError: if the model has no positions for prompt and answer.
    """
    start = [] if processor.bos_token_id is None or not add_bos else [processor.bos_token_id]
    ids = torch.tensor([start + processor.encode(prompt, add_special_tokens=False)], device=model.device)
    check_positions(decoder_positions(model.config), ids.shape[1], max_new_tokens)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=[processor.eos_token_id, *more_end_ids],
        pad_token_id=processor.eos_token_id,
        **sampling(temperature),
    )
    return processor.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()


def prompted_answer(sequence: TokenSequence) -> PromptedAnswer:
    """The last answer of a sequence, and as its prompt all that comes before: earlier turns of a conversation, too."""
    place = last_answer(sequence.labels)
    return PromptedAnswer(sequence.input_ids[: place.start], sequence.input_ids[place], place.start)


def generate_batch(
    model: Any, processor: Any, sequences: Sequence[TokenSequence], settings: GenerationSettings, *, in_step: bool
) -> list[str]:
    """The model's text behind the prompt of each sequence, without special tokens. Prompts are padded on the left."""
    prompts = [prompted_answer(sequence).prompt for sequence in sequences]
    width = max(map(len, prompts))
    input_ids = np.full((len(prompts), width), settings.padding_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = prompt
        attention_mask[row, width - len(prompt) :] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    on_device = {name: torch.from_numpy(value).to(model.device) for name, value in inputs.items()}
    output = generate_tokens(model, on_device, settings, in_step=in_step)
    return [text.strip() for text in processor.batch_decode(output[:, width:], skip_special_tokens=True)]
