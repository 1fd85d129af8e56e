"""Encoder-decoders, such as BART and T5. `tasks.task.Task` says what each method is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from configs.train_settings.data import DEFAULT_SOURCE_LENGTH, DEFAULT_TARGET_LENGTH
from configs.training import TrainConfig
from data.batches.padding import EXACT, pad_right, padding_id
from data.sequences.reading import Reading
from data.sequences.source_target import Affixes, SourceTargetBuilder
from data.sequences.tokenized import TokenSequence
from data.tokens.encoding import SourceAndTarget
from data.tokens.labels import IGNORE_INDEX, shift_right
from data.tokens.loss_mask import affixes, encode_plainly
from tasks.flops import Cost, Seq2SeqFlops, flops_per_token
from tasks.generation import (
    AnswerSettings,
    GeneratedAnswer,
    GeneratingModel,
    GenerationSettings,
    PromptedAnswer,
    answer_of,
    check_positions,
    decoder_positions,
    generate_tokens,
    own_end_ids,
    sampling,
)
from tasks.listening import listening
from tasks.micro_batch import BatchShape
from tasks.seq2seq_batches import Seq2SeqCollator, Seq2SeqMicroBatch, seq2seq_meta_batch
from tasks.task import BatchForm, Task
from utils.errors import ConfigError

FAMILIES = ("bart", "mt5", "pegasus", "t5")
"""Model types whose loss is computed as their own code does; tests check each."""


class Seq2SeqLM(Task[Seq2SeqMicroBatch]):
    """Encoder-decoders: an encoder reads the source, a decoder writes the target."""

    NAME = "seq2seq_lm"
    AUTO_MODEL = AutoModelForSeq2SeqLM
    PEFT_TYPE = "SEQ_2_SEQ_LM"
    OWN_SETTINGS = ("max_source_length", "max_target_length", "source_prefix")
    LENGTHS: ClassVar = {"max_source_length": DEFAULT_SOURCE_LENGTH, "max_target_length": DEFAULT_TARGET_LENGTH}

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Whether transformers has an encoder-decoder of text of this type."""
        return (
            bool(getattr(model_config, "is_encoder_decoder", False))
            and type(model_config) in self.AUTO_MODEL._model_mapping
        )

    def check_config(self, model_config: PreTrainedConfig, model_name: str) -> None:
        """Check that it is a family that was tried, since some compute their loss or their decoder's inputs otherwise.

        Raises:
            ConfigError: if not.
        """
        if model_config.model_type not in FAMILIES:
            raise ConfigError(
                f"--model_name: {model_name} is a {model_config.model_type} model, and the encoder-decoders that are "
                f"known to train here are {', '.join(FAMILIES)}; give one of these"
            )
        check_decoder_tokens(model_config, model_name)

    def check_settings(self, config: RunConfig) -> None:
        """Check the settings that have no meaning for an encoder-decoder.

        Raises:
            ConfigError: for the first of them.
        """
        train = config.train_config
        if train.truncation == "split":
            raise ConfigError(
                "--truncation: split makes several samples of one text, and a target belongs to its whole source; give "
                "right, left, drop or error"
            )
        for name, source in config.dataset_configs.items():
            if not getattr(source, "mask_prompt", True):
                raise ConfigError(
                    f"--{name}.mask_prompt: False learns the prompt, too, and an encoder only reads it; leave it out"
                )
        if train.add_special_tokens and train.use_peft:
            raise ConfigError(
                "--add_special_tokens: an adapter cannot train the embeddings that encoder and decoder share; train "
                "without --use_peft, or leave it out"
            )

    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]:
        """Check that the decoder's inputs are the labels shifted by one place, as the collator makes them.

        Layers are no longer dropped at random: each rank would drop others, and wait for those of the rest.

        Returns:
            Lines to print.

        Raises:
            ConfigError: if they are not.
        """
        labels = torch.tensor([[5, 6, 7, IGNORE_INDEX]])
        prepare: Any = model.prepare_decoder_input_ids_from_labels  # of some classes, so PreTrainedModel has none
        own = prepare(labels.clone())
        if own.tolist() != shift_right(labels, _start(model.config), model.config.pad_token_id).tolist():
            raise ConfigError(
                f"--model_name: transformers {transformers.__version__} shifts the labels of {type(model).__name__} in "
                "a way that is not known here; give a model of another family"
            )
        dropping: list[Any] = [stack for stack in self.backbone(model) if getattr(stack, "layerdrop", 0) > 0]
        # FSDP gathers a layer's weights from all ranks: one that drops it would leave the others waiting.
        for stack in dropping:
            stack.layerdrop = 0.0
        return ["layerdrop: off, since ranks would drop different layers"] if dropping else []

    def backbone(self, model: PreTrainedModel) -> list[nn.Module]:
        """Encoder and decoder; the head computes logits from the decoder's output alone."""
        return [model.get_encoder(), model.get_decoder()]

    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The encoder is left out, and the decoder returns `hidden` without reading its input."""
        any_token = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        return model.forward(encoder_outputs=(hidden,), decoder_input_ids=any_token, use_cache=False).logits

    def inputs_of(self, processor: Any, model_config: PreTrainedConfig, ids: torch.Tensor) -> dict[str, Any]:
        """Encoder and decoder read the same ids."""
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        """Source and target apart, each cut to its own length without its special tokens."""
        source, target = (Affixes(*affixes(processor, argument)) for argument in ("text", "text_target"))
        return Reading(SourceAndTarget(train_config.source_prefix), SourceTargetBuilder(lengths[1], source, target))

    def make_collator(
        self,
        processor: Any,
        model_config: PreTrainedConfig,
        form: BatchForm,
    ) -> Seq2SeqCollator:
        """The collator of a run; the decoder begins with the token of the model's config."""
        width, target_width = form.widths
        return Seq2SeqCollator(
            padding_id=padding_id(processor, form.vocab_size),
            decoder_start_id=_start(model_config),
            decoder_padding_id=model_config.pad_token_id,
            width=width,
            target_width=target_width,
            num_rows=form.num_rows,
        )

    def model_inputs(self, batch: Seq2SeqMicroBatch) -> dict[str, Any]:
        return {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "decoder_input_ids")}

    def shortened(self, sequence: TokenSequence, num_tokens: int, num_labels: int) -> TokenSequence:
        """The beginnings of source and target, which have nothing to do with each other's places."""
        return sequence._replace(input_ids=sequence.input_ids[:num_tokens], labels=sequence.labels[:num_labels])

    @torch.no_grad()
    def generate(
        self,
        model: GeneratingModel,
        processor: Any,
        prompt: str,
        settings: AnswerSettings,
    ) -> GeneratedAnswer:
        """The target that the model writes for a source, whose task prefix is included.

        The model's generation_config.json decides about beams, lengths and forced tokens.

        Raises:
            ConfigError: if the model has no positions for source or target.
        """
        (encoded,) = encode_plainly(processor, settings.special, text=[prompt])
        ids = torch.from_numpy(encoded.astype(np.int64))[None].to(model.device)
        num_tokens, positions = ids.shape[1], getattr(model.config, "max_position_embeddings", None)
        if positions is not None and num_tokens > positions:
            raise ConfigError(
                f"--prompt: its {num_tokens:,} tokens are more than the {positions:,} positions of this model's "
                "encoder; give a shorter one"
            )
        check_positions(decoder_positions(model.config), 1, settings.max_new_tokens)  # after decoder_start_token_id
        # Sampling is of one sequence: beams in generation_config.json would make it a beam sample.
        num_beams = 1 if settings.temperature > 0 else model.generation_config.num_beams or 1
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings.max_new_tokens,
            num_beams=num_beams,
            **sampling(settings.temperature),
            **listening(processor, settings.listener, num_beams=num_beams),
        )
        answer = answer_of(processor, output[0, 1:], settings.max_new_tokens, own_end_ids(model))
        if settings.listener is not None and num_beams > 1:
            settings.listener.hear(answer.text)
        return answer

    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """The source and the target; the decoder begins with one token."""
        return PromptedAnswer(sequence.input_ids, sequence.labels[sequence.labels != IGNORE_INDEX], num_positions=1)

    def generate_batch(
        self,
        model: GeneratingModel,
        processor: Any,
        sequences: Sequence[TokenSequence],
        settings: GenerationSettings,
        *,
        in_step: bool,
    ) -> list[str]:
        """The target that the model writes for each sequence's source, without special tokens."""
        input_ids, is_token, _ = pad_right([sequence.input_ids for sequence in sequences], EXACT, settings.padding_id)
        inputs = {"input_ids": input_ids, "attention_mask": is_token.astype(np.int64)}
        on_device = {name: torch.from_numpy(value).to(model.device) for name, value in inputs.items()}
        output = generate_tokens(model, on_device, settings, in_step=in_step)
        return [text.strip() for text in processor.batch_decode(output, skip_special_tokens=True)]

    def make_flops(self, model: nn.Module, cost: Cost = flops_per_token) -> Seq2SeqFlops:
        return Seq2SeqFlops(model, cost)

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> Seq2SeqMicroBatch:
        return seq2seq_meta_batch(shape.rows, *shape.widths)


def check_decoder_tokens(text_config: PreTrainedConfig, model_name: str) -> None:
    """Check that this config of a text model names the tokens with which the decoder begins and is padded.

    Raises:
        ConfigError: if not.
    """
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(text_config, name, None) is None:
            raise ConfigError(
                f"--model_name: config.json of {model_name} has no {name}, and the decoder's inputs are made with it; "
                "add it there"
            )
        value, size = getattr(text_config, name), text_config.vocab_size
        if not 0 <= value < size:
            raise ConfigError(
                f"--model_name: config.json of {model_name} says {name} {value}, and its vocab_size is {size:,}; "
                "correct it there"
            )


def _start(model_config: PreTrainedConfig) -> int:
    return model_config.decoder_start_token_id
