"""Models that write about an image, such as BLIP-2 and LLaVA. `tasks.task.Task` says what each method is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from configs.train_settings.data import DEFAULT_CONTEXT_LENGTH
from configs.training import TrainConfig
from data.batches.padding import padding_id
from data.images.samples import ImageSample
from data.processors import processor_loading
from data.processors.processor_loading import (
    blank_image,
    image_inputs,
    learned_token_type,
    prompt_text,
)
from data.processors.written_images import TEXT_INPUTS
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from data.tokens.encoding import Caption
from tasks.causal_lm import CausalLM
from tasks.flops import Cost, Flops, UnknownFlops, flops_per_token
from tasks.generation import (
    AnswerSettings,
    GeneratedAnswer,
    GeneratingModel,
    GenerationSettings,
    PromptedAnswer,
    last_answer,
)
from tasks.image_batches import (
    DecoderIds,
    ImageCollator,
    ImageTextMicroBatch,
    lengthened,
)
from tasks.image_flops import ImageFlops
from tasks.image_generation import answer_about, answers_of
from tasks.image_masks import ImageMasks
from tasks.image_meta_batch import image_meta_batch
from tasks.image_positions import GridPositions
from tasks.image_reading import BuildImageSequences, end_id
from tasks.image_rows import RowsOfImages
from tasks.image_sample_batches import CaptionsOrSamples
from tasks.image_settings import check_image_settings
from tasks.micro_batch import BatchShape
from tasks.seq2seq_lm import Seq2SeqLM, check_decoder_tokens
from tasks.task import BatchForm, Task
from utils.errors import ConfigError

_OF_TILES = "pixel_values_local"  # of DeepSeek-OCR-2: an input that small images do not have


class ImageText(Task[ImageTextMicroBatch]):
    """Models that write about an image: captions are learned."""

    NAME = "image_text"
    AUTO_MODEL = AutoModelForImageTextToText
    READS_IMAGES = True
    PACKS = True
    OWN_SETTINGS = (
        *("context_length", "max_text_length", "max_pixels", "min_pixels", "image_processor"),
        *("freeze_vision", "freeze_qformer", "freeze_language_model"),
        "cache_vision_features",
    )
    LENGTHS: ClassVar = {"context_length": DEFAULT_CONTEXT_LENGTH}

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Whether transformers has a model of images and text of this type, which is made of parts.

        It lists the text model of Mistral Small 4, too (`utils.compat.list_text_model`).
        """
        return type(model_config) in self.AUTO_MODEL._model_mapping and bool(model_config.sub_configs)

    def check_config(self, model_config: PreTrainedConfig, model_name: str) -> None:
        """Check that config.json has a vision encoder, and the token of an image, which old ones of BLIP-2 lack.

        Raises:
            ConfigError: if not.
        """
        if not hasattr(model_config, "vision_config"):  # Fuyu, Emu3 and Chameleon, whose images are tokens or patches
            raise ConfigError(
                f"--model_name: {model_name} is a {model_config.model_type} model, whose config.json has no "
                "vision_config, and of models of image and text only those with a vision encoder are trained; give a "
                "model of another family"
            )
        for name in ("image_token_index", "image_token_id"):  # one is the other's alias, where a family has both
            # 0 for a family that does not have this name.
            if getattr(model_config, name, 0) is None:
                raise ConfigError(
                    f"--model_name: config.json of {model_name} has no {name}, the token that stands for the image in "
                    "the text; add the id that the processor's tokenizer has for it (BLIP-2: <image>) there"
                )
        text = model_config.get_text_config()
        if getattr(text, "is_encoder_decoder", False):
            check_decoder_tokens(text, model_name)

    def check_settings(self, config: RunConfig) -> None:
        """Check the settings that have no meaning for a model of images.

        Raises:
            ConfigError: for the first of them.
        """
        check_image_settings(config)

    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]:
        """Check that the head and what computes its input were found, and let all weights be trained.

        Returns:
            A line for a family that freezes parts by its config, though not if `from_pretrained` reads it (Idefics).

        Raises:
            ConfigError: if they were not found, or the vision encoder has inputs that only large images have.
        """
        # Llama 4 and Mllama, whose language models do not say it themselves, have not been tried with images.
        if model.get_output_embeddings() is None or head(model).get_decoder() is head(model):
            raise ConfigError(
                f"--model_name: transformers {transformers.__version__} does not say where the language model of "
                f"{type(model).__name__} ends, and the loss is computed after it; give a model of another family"
            )
        features = getattr(model.base_model, "get_image_features", None)
        if features is not None and _OF_TILES in inspect.signature(features).parameters:
            raise ConfigError(
                f"--model_name: {type(model).__name__} sees the tiles of large images in a call of its own "
                f"({_OF_TILES}), which ranks and batches without them would lack; give a model of another family"
            )
        frozen = [name for name in ("freeze_text_layers", "freeze_vision_layers") if getattr(model.config, name, False)]
        if not frozen:
            return []
        model.requires_grad_(True)
        return [
            f"{' and '.join(frozen)} of config.json: not followed; --freeze_language_model and --freeze_vision freeze"
        ]

    def backbone(self, model: PreTrainedModel) -> list[nn.Module]:
        """The backbone of the language model inside, or the whole model below its head, which inserts images."""
        owner = head(model)
        if owner is model:
            return [model.base_model]
        return _text_task(owner).backbone(owner)

    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        owner = head(model)
        return _text_task(owner).compute_logits(owner, hidden)

    def inputs_of(self, processor: Any, model_config: PreTrainedConfig, ids: torch.Tensor) -> dict[str, Any]:
        """A blank image, then the tokens, which a decoder of its own reads if there is one."""
        inputs: dict[str, Any] = image_inputs(processor, blank_image(), prompt_text(processor, ""))
        if getattr(model_config.get_text_config(), "is_encoder_decoder", False):
            return inputs | {"decoder_input_ids": ids[:1], "use_cache": False}
        # A token of the image's own would stand for one more of its features.
        text = ids[:1].masked_fill(torch.isin(ids[:1], inputs["input_ids"].unique()), 0)
        of_text = {name: inputs[name][0] for name in TEXT_INPUTS if name in inputs}
        longer = lengthened(of_text, text[0], learned_token_type(processor))
        return inputs | {name: value[None] for name, value in longer.items()} | {"use_cache": False}

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        """Captions, cut to --max_text_length; the processor adds the tokens around them when a batch is made.

        Or conversations, whose tokens are those of their images, too.
        """
        is_apart = getattr(model_config.get_text_config(), "is_encoder_decoder", False)
        build = BuildImageSequences(processor, train_config.max_text_length, is_apart)
        return Reading(Caption(end_id(processor, model_config), takes_templates=not is_apart), build)

    def make_collator(
        self,
        processor: Any,
        model_config: PreTrainedConfig,
        form: BatchForm,
    ) -> Callable[[list[Any]], Any]:
        """The collator of a run. Padded batches are not filled up with rows of padding: each row needs an image."""
        (width,), text, decoder = form.widths, model_config.get_text_config(), None
        if getattr(text, "is_encoder_decoder", False):
            decoder = DecoderIds(text.decoder_start_token_id, text.pad_token_id)
        rows = RowsOfImages(
            padding_id(processor.tokenizer, form.vocab_size),
            width,
            learned_token_type(processor),
            packing=form.packing,
            offsets=form.offsets,
            num_rows=form.num_rows,
            positions=GridPositions.of_config(model_config),
            masks=ImageMasks.of_config(model_config),
        )
        return CaptionsOrSamples(
            ImageCollator(processor, rows, decoder), processor, rows, model_config, form.vision_features
        )

    def model_inputs(self, batch: ImageTextMicroBatch) -> dict[str, Any]:
        return batch.model_inputs()

    def shortened(self, sequence: Any, num_tokens: int, num_labels: int) -> Any:
        """The whole example: what the processor writes for an image cannot be cut."""
        return sequence

    @torch.no_grad()
    def generate(
        self,
        model: GeneratingModel,
        processor: Any,
        prompt: str,
        settings: AnswerSettings,
    ) -> GeneratedAnswer:
        """The text that the model writes about an image. The model is one process's, not sharded.

        Args:
            prompt: a question about the image, or "".

        Raises:
            BadExample: if the image cannot be read.
            ConfigError: if the processor refuses the image, or the model has no positions for image, prompt and answer.
        """
        return answer_about(model, processor, prompt, settings)

    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """The last answer of a conversation, with all that comes before it.

        Of a caption the caption alone: how many positions its image takes is known once it is opened.
        """
        if isinstance(sequence, ImageSample):
            place = last_answer(sequence.labels)
            return PromptedAnswer(sequence.input_ids[: place.start], sequence.input_ids[place], place.start)
        return PromptedAnswer(sequence.input_ids[:0], sequence.labels, num_positions=0)

    def generate_batch(
        self,
        model: GeneratingModel,
        processor: Any,
        sequences: Sequence[Any],
        settings: GenerationSettings,
        *,
        in_step: bool,
    ) -> list[str]:
        """The text that the model writes about each image, or after each prompt, without special tokens."""
        return answers_of(model, processor, sequences, settings, in_step=in_step)

    def load_processor(self, train_config: TrainConfig) -> Any:
        return processor_loading.load_processor(train_config)

    def make_flops(self, model: nn.Module, cost: Cost = flops_per_token) -> Flops:
        """By tokens and patches; unknown if the language model is an encoder-decoder."""
        config: Any = getattr(model, "config", None)
        is_apart = getattr(config.get_text_config(), "is_encoder_decoder", False)
        return UnknownFlops() if is_apart else ImageFlops(model, cost)

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> ImageTextMicroBatch:
        return image_meta_batch(model_config, shape, train_config.max_text_length)


def head(model: PreTrainedModel) -> PreTrainedModel:
    """The model whose own forward calls the head: the model itself, or, as in BLIP-2, a language model inside it."""
    output = model.get_output_embeddings()
    owner: nn.Module = model
    while inner := next((child for child in owner.children() if _has_head(child, output)), None):
        owner = inner
    return cast(PreTrainedModel, owner)


def _text_task(language_model: PreTrainedModel) -> Task:
    """The task that the language model inside would be of by itself."""
    return Seq2SeqLM() if language_model.config.is_encoder_decoder else CausalLM()


def _has_head(module: nn.Module, output: nn.Module) -> bool:
    find = getattr(module, "get_output_embeddings", None)
    return find is not None and find() is output
