"""Classes, or a number, of whole texts. `tasks.task.Task` says what each method is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from configs.run import RunConfig
from configs.train_settings.data import DEFAULT_CONTEXT_LENGTH
from configs.training import TrainConfig
from data.batches.padding import padding_id
from data.pipeline import RunData
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.labeled import LabeledBuilder
from data.sequences.reading import Reading
from data.tokens.encoding import LabeledTexts
from data.tokens.labeled_texts import PairAffixes
from tasks.causal_batches import Collator
from tasks.flops import Cost, StepFlops, flops_per_token
from tasks.label_figures import (
    FIGURES_OF_CLASSES,
    FIGURES_OF_NUMBERS,
    figures_of_classes,
    figures_of_numbers,
    sums_of_classes,
    sums_of_numbers,
)
from tasks.label_losses import label_losses
from tasks.labels import counts_of_classes, read_labels, weights_of_classes
from tasks.micro_batch import BatchShape
from tasks.task import BatchForm, Task
from tasks.text_batches import TextCollator, TextMicroBatch, text_meta_batch
from tasks.text_settings import check_settings_of_labels, check_text_settings
from utils.errors import ConfigError

CAUSAL_DESPITE_CONFIG = ("gpt_neox",)  # its config says is_decoder false, and its attention is causal


@dataclass(frozen=True)
class TextClassification(Task[TextMicroBatch]):
    """Models with a head for whole texts: encoders, and causal models that are read at a text's last token."""

    class_weights: tuple[float, ...] = ()  # of each class's samples in the loss; empty: all alike
    label_smoothing: float = 0.0

    NAME: ClassVar[str] = "text_classification"
    AUTO_MODEL: ClassVar[Any] = AutoModelForSequenceClassification
    PEFT_TYPE: ClassVar[str | None] = "SEQ_CLS"
    PACKS: ClassVar[bool] = True
    HEAD: ClassVar[Any] = "texts"
    LEARNS: ClassVar[Any] = "labels"
    MEAN_OVER: ClassVar[str] = "samples"
    OWN_SETTINGS: ClassVar[tuple[str, ...]] = ("context_length", "problem_type", "class_weights")
    LENGTHS: ClassVar[Mapping[str, int]] = {"context_length": DEFAULT_CONTEXT_LENGTH}
    EVAL_FIGURES: ClassVar[Mapping[str, bool]] = FIGURES_OF_CLASSES | FIGURES_OF_NUMBERS

    def is_made_for(self, model_config: PreTrainedConfig) -> bool:
        """Only a model that was saved with such a head says so; every base model could get one."""
        names = model_config.architectures or ()
        return self.fits(model_config) and any(name.endswith("ForSequenceClassification") for name in names)

    def check_config(self, model_config: PreTrainedConfig, model_name: str) -> None:
        """Check that it is no encoder-decoder, whose head reads the decoder's end token.

        Raises:
            ConfigError: if it is.
        """
        if getattr(model_config, "is_encoder_decoder", False):
            raise ConfigError(
                f"--task: {model_name} is a {model_config.model_type} model, an encoder-decoder, and texts are "
                "classified by encoders and causal models; give one of these"
            )

    def check_settings(self, config: RunConfig) -> None:
        """Check the settings that have no meaning for a text's label.

        Raises:
            ConfigError: for the first of them.
        """
        check_text_settings(config, self.NAME)

    def packs(self, model_config: PreTrainedConfig) -> bool:
        """Whether texts may share a row: those of causal models."""
        is_causal = type(model_config) in AutoModelForCausalLM._model_mapping
        is_encoder = getattr(model_config, "is_decoder", None) is False
        return is_causal and (not is_encoder or model_config.model_type in CAUSAL_DESPITE_CONFIG)

    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]:
        """Check that the backbone is where transformers says.

        Raises:
            ConfigError: if not.
        """
        if not isinstance(getattr(model, model.base_model_prefix, None), PreTrainedModel):
            raise ConfigError(
                f"--model_name: transformers {transformers.__version__} does not say where the layers of "
                f"{type(model).__name__} are; give a model of another family"
            )
        return []

    # From examples to batches

    def load_processor(self, train_config: TrainConfig) -> Any:
        """A tokenizer with a pad token: transformers finds the last token of a text by it."""
        tokenizer = load_tokenizer(train_config)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        return Reading(LabeledTexts(), LabeledBuilder(PairAffixes.of(processor)))

    def with_data(
        self,
        model_config: PreTrainedConfig,
        train_config: TrainConfig,
        processor: Any,
        data: RunData,
        datasets: Sequence[str],
    ) -> tuple[Task, PreTrainedConfig, RunData]:
        """The classes of the training data become the model's, by their names in its config."""
        labels, data = read_labels(data, model_config, train_config.problem_type, datasets)
        if train_config.from_peft_checkpoint:
            labels.check_saved(model_config)
        labels.write(model_config)
        model_config.get_text_config().pad_token_id = processor.pad_token_id
        weights = weights_of_classes(
            train_config.class_weights, labels, lambda: counts_of_classes(data.train, len(labels.names))
        )
        check_settings_of_labels(train_config, labels)
        task = replace(self, class_weights=weights, label_smoothing=train_config.label_smoothing)
        return task, model_config, data

    def config_values(self, model_config: PreTrainedConfig) -> dict[str, Any]:
        names = ("id2label", "label2id", "problem_type")
        pad_token_id = model_config.get_text_config().pad_token_id
        return {name: getattr(model_config, name) for name in names} | {"pad_token_id": pad_token_id}

    def make_collator(self, processor: Any, model_config: PreTrainedConfig, form: BatchForm) -> TextCollator:
        collate = Collator(
            form.packing, padding_id(processor, form.vocab_size), form.widths[0], form.offsets, form.num_rows
        )
        is_causal = self.packs(model_config)
        return TextCollator(
            collate,
            problem_type=cast(Any, model_config.problem_type),
            num_classes=len(model_config.id2label or ()),
            reads_last=is_causal,
            attends_both_ways=not is_causal,
            has_token_types=not is_causal
            and "token_type_ids" in processor.model_input_names
            and getattr(model_config, "type_vocab_size", 0) > 1,
        )

    # The model and its loss

    def backbone(self, model: PreTrainedModel) -> list[nn.Module]:
        return [getattr(model, model.base_model_prefix)]

    def shortened(self, sequence: Any, num_tokens: int, num_labels: int) -> Any:
        """The first tokens of a text."""
        return sequence._replace(input_ids=sequence.input_ids[:num_tokens])

    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> NoReturn:
        raise NotImplementedError("texts have scores, and tokens no logits")

    def model_inputs(self, batch: TextMicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        for name in ("position_ids", "token_type_ids", "read_positions"):
            if getattr(batch, name) is not None:
                inputs[name] = getattr(batch, name)
        if batch.cu_seqlens is not None:
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
        return inputs

    def inputs_of(self, processor: Any, model_config: PreTrainedConfig, ids: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": ids}

    def scores(self, model: nn.Module, batch: TextMicroBatch) -> torch.Tensor:
        """fp32 [samples, classes], or [samples, 1] of a number."""
        uses_cache = {} if batch.read_positions is None else {"use_cache": False}
        output = model(**self.model_inputs(batch), **uses_cache)
        scores: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
        return scores.float()

    def summed_loss(self, model: nn.Module, batch: TextMicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        return self._summed(self.scores(model, batch), batch, self.label_smoothing)

    @torch.no_grad()
    def token_losses(self, model: nn.Module, batch: TextMicroBatch) -> torch.Tensor:
        """The scores of each text: trials compare them."""
        return self.scores(model, batch)[: batch.num_samples].flatten()

    def _summed(self, scores: torch.Tensor, batch: TextMicroBatch, smoothing: float = 0.0) -> torch.Tensor:
        losses = label_losses(scores[: batch.num_samples], batch.wanted, self.class_weights, smoothing)
        # Of a batch without texts the sum is 0, and so is its gradient.
        return losses.sum() + (0.0 * scores.sum() if batch.num_samples == 0 else 0.0)

    # Evaluations

    def eval_sums(self, model: nn.Module, batch: TextMicroBatch) -> torch.Tensor:
        scores = self.scores(model, batch)
        loss, found, wanted = self._summed(scores, batch), scores[: batch.num_samples].double(), batch.wanted
        own = (
            sums_of_numbers(found[:, 0], wanted.double())
            if wanted.dtype != torch.int64 and wanted.dim() == 1
            else (sums_of_classes(found, wanted))
        )
        return torch.cat([loss.double()[None], own])

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        if not num_loss_terms:
            return {}
        return figures_of_numbers(sums, num_loss_terms) if len(sums) == 6 else figures_of_classes(sums, num_loss_terms)

    # Plans

    def make_flops(self, model: nn.Module, cost: Cost = flops_per_token) -> StepFlops:
        model_config: Any = model.config
        return StepFlops(model, cost, attends_both_ways=not self.packs(model_config))

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> TextMicroBatch:
        wanted = torch.empty(shape.rows, dtype=torch.int64, device="meta")
        return text_meta_batch(shape, wanted, reads_last=self.packs(model_config))

    # Answers

    def prompted_answer(self, sequence: Any) -> NoReturn:
        raise self._no_answers()

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_answers()

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_answers()

    @staticmethod
    def _no_answers() -> ConfigError:
        return ConfigError(
            "this model tells classes of texts, and writes none; use it by "
            "transformers.pipeline('text-classification', FOLDER)"
        )
