"""Causal language models. `tasks.task.Task` says what each method is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from configs.train_settings.data import DEFAULT_CONTEXT_LENGTH
from configs.training import TrainConfig
from data.batches.padding import pad_left, padding_id
from data.sequences.causal import build_sequences
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from data.tokens.encoding import ONE_TEXT
from data.tokens.long_texts import encode_texts
from data.tokens.special_text import SpecialTokens
from tasks.causal_batches import CausalMicroBatch, Collator, causal_meta_batch
from tasks.flops import Cost, StepFlops, flops_per_token
from tasks.generation import (
    AnswerSettings,
    GeneratedAnswer,
    GeneratingModel,
    GenerationSettings,
    PromptedAnswer,
    answer_of,
    decoder_positions,
    generate_tokens,
    last_answer,
    num_new_tokens,
    own_end_ids,
    sampling,
)
from tasks.listening import listening
from tasks.micro_batch import BatchShape, offsets_of
from tasks.task import BatchForm, Task
from utils.errors import ConfigError


class CausalLM(Task[CausalMicroBatch]):
    """Causal language models: each token predicts the next one."""

    NAME = "causal_lm"
    AUTO_MODEL = AutoModelForCausalLM
    PEFT_TYPE = "CAUSAL_LM"
    PACKS = True
    OWN_SETTINGS = ("context_length", "neftune_noise_alpha")
    LENGTHS: ClassVar = {"context_length": DEFAULT_CONTEXT_LENGTH}

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Whether transformers, or code that came with the model, has a causal language model of this type."""
        own_code = getattr(model_config, "auto_map", None) or {}
        return type(model_config) in self.AUTO_MODEL._model_mapping or self.AUTO_MODEL.__name__ in own_code

    def check_config(self, model_config: PreTrainedConfig, model_name: str) -> None:
        """Check that there is a causal language model of this type.

        Raises:
            ConfigError: if not, as for models of images alone.
        """
        if not self.fits(model_config):
            raise ConfigError(
                f"--model_name: {model_name} is a {model_config.model_type} model, and transformers "
                f"{transformers.__version__} has no causal language model of that type ({self.AUTO_MODEL.__name__}); "
                "give a language model"
            )
        if (
            getattr(model_config, "is_encoder_decoder", False)
            and type(model_config) not in AutoModelForSeq2SeqLM._model_mapping
        ):
            raise ConfigError(
                f"--model_name: {model_name} is a {model_config.model_type} model, whose encoder reads no text; give a "
                "language model"
            )

    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]:
        """Check that tokens do not see later ones, and that the head runs on precomputed decoder output.

        Returns:
            No lines to print.

        Raises:
            ConfigError: if not.
        """
        if model.config.get_text_config() is not model.config:
            raise ConfigError(
                f"--model_name: {model_name} is a {type(model).__name__}, a language model inside a larger one (of "
                "images, say), and only plain language models are trained; save its language model alone and give that"
            )
        if _find_decoder(model) is None:
            raise ConfigError(
                f"--model_name: transformers {transformers.__version__} does not say where the decoder of "
                f"{type(model).__name__} is, and the loss is computed after it; give a model of another family"
            )
        is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
        # GPT-NeoX's config says the same of a decoder, but its attention layers are causal.
        if getattr(model.config, "is_decoder", None) is False and not is_causal:
            raise ConfigError(
                f"--model_name: {model_name} is an encoder ({model.config.model_type}, without is_decoder in "
                "config.json): each token sees those that it is to predict; give a causal language model"
            )
        return []

    def backbone(self, model: PreTrainedModel) -> list[nn.Module]:
        """The decoder: the head computes logits from its output alone."""
        return [_find_decoder(model) or model]

    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        # The decoder returns `hidden` whatever it is given. As embeddings it also tells the number of tokens, which
        # some models ask for (Gemma 4).
        return model.forward(input_ids=None, inputs_embeds=hidden, use_cache=False).logits

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        return Reading(ONE_TEXT, build_sequences)

    def make_collator(
        self,
        processor: Any,
        model_config: PreTrainedConfig,
        form: BatchForm,
    ) -> Collator:
        """The Collator of a run, which pads with an id that the model's embedding has."""
        (width,) = form.widths
        return Collator(form.packing, padding_id(processor, form.vocab_size), width, form.offsets, form.num_rows)

    def model_inputs(self, batch: CausalMicroBatch) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "position_ids")
        return {name: getattr(batch, name) for name in names} | offsets_of(batch)

    @torch.no_grad()
    def generate(
        self,
        model: GeneratingModel,
        processor: Any,
        prompt: str,
        settings: AnswerSettings,
    ) -> GeneratedAnswer:
        start = [] if processor.bos_token_id is None or not settings.add_bos else [processor.bos_token_id]
        (encoded,) = encode_texts([prompt], processor, settings.special or SpecialTokens.of(processor))
        ids = torch.tensor([[*start, *encoded.ids.tolist()]], device=model.device)
        max_new_tokens = num_new_tokens(decoder_positions(model.config), ids.shape[1], settings)
        end_ids = sorted({processor.eos_token_id, *settings.more_end_ids, *own_end_ids(model)} - {None})
        output = model.generate(
            input_ids=ids,
            # Given, since transformers cannot infer it: padding and end token have one id here.
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=end_ids or None,
            pad_token_id=processor.eos_token_id,
            **sampling(settings.temperature),
            **listening(processor, settings.listener),
        )
        return answer_of(processor, output[0, ids.shape[1] :], max_new_tokens, end_ids)

    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """The last answer of a sequence; its prompt is all that comes before, earlier turns included."""
        place = last_answer(sequence.labels)
        return PromptedAnswer(sequence.input_ids[: place.start], sequence.input_ids[place], place.start)

    def generate_batch(
        self,
        model: GeneratingModel,
        processor: Any,
        sequences: Sequence[TokenSequence],
        settings: GenerationSettings,
        *,
        in_step: bool,
    ) -> list[str]:
        """The model's text after each sequence's prompt, without special tokens. Prompts are padded on the left."""
        prompts = [self.prompted_answer(sequence).prompt for sequence in sequences]
        input_ids, is_token = pad_left(prompts, settings.padding_id)
        inputs = {"input_ids": input_ids, "attention_mask": is_token.astype(np.int64)}
        on_device = {name: torch.from_numpy(value).to(model.device) for name, value in inputs.items()}
        output = generate_tokens(model, on_device, settings, in_step=in_step)
        return [
            text.strip() for text in processor.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)
        ]

    def make_flops(self, model: nn.Module, cost: Cost = flops_per_token) -> StepFlops:
        return StepFlops(model, cost)

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> CausalMicroBatch:
        return causal_meta_batch(shape)


def _find_decoder(model: PreTrainedModel) -> nn.Module | None:
    """The decoder, whose output the head turns into logits; None if it is not found.

    transformers looks for attributes of certain names. In some families it ends at the model itself (Llama 4) or at a
    part of the head (ModernBERT's decoder). The decoder is the one model inside then.
    """
    found: nn.Module = model.get_decoder()
    if found not in (model, model.get_output_embeddings()):
        return found
    inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inside[0] if len(inside) == 1 else None
