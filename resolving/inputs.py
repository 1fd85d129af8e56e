"""Settings, data and their sizes: read by each rank alone, before the process group starts and weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from checkpointing.continuation import Continuation
from checkpointing.finding import Checkpoint
from configs.run import RunConfig
from data.images.vision_features import FeatureStore
from data.pipeline import RunData, load_data
from data.processors.tokenizer_loading import num_rows_needed, special_ids, tokenizer_of
from data.sequences.ends import begins_with, end_ids
from data.sequences.token_columns import TEACHER, TEACHER_IDS, WEIGHTS
from data.tokens.encoding import OneText
from data.tokens.labels import IGNORE_INDEX
from policies.adapters.folder import saved_labels
from policies.config_overrides import override
from policies.loading import build_model
from ranks.environment import Environment, print_rank_zero
from reporting.data_preview import preview_data
from resolving.batches_and_steps import resolve_num_steps
from resolving.beginning import Beginning
from resolving.data_facts import DataFacts, facts_of_data
from resolving.enough_steps import with_enough_steps
from resolving.lengths import num_positions
from resolving.resolved import Resolved, resolve
from resolving.sizes import check_batch_sizes
from utils.errors import ConfigError
from utils.processor_type import Processor

if TYPE_CHECKING:
    from evaluation.generation import Generation


@dataclass(frozen=True)
class Inputs:
    """All that each rank knows of a run before the process group starts and weights are read."""

    resolved: Resolved
    processor: Processor  # a tokenizer, or a processor that has one
    vocab_size: int  # rows that the embeddings will have at least
    data: RunData
    generation: Generation | None  # the answers to generate at each evaluation
    preview: dict[str, Any]  # the section `data` of run.yaml
    num_steps: int  # optimizer steps of the whole run
    vision_features: FeatureStore | None = None  # of its images, under --cache_vision_features

    def identity(self) -> dict[str, Any]:
        """Facts that a checkpoint and the run that resumes from it must have in common, besides the model's."""
        return {
            "precision": self.resolved.policies.precision.name,
            "data_fingerprint": self.data.checksum(),
            "row_length": self.resolved.context_length,
        }

    def continuation(self) -> Continuation:
        """What the saved model needs to go on as the samples were built."""
        config, tokenizer = self.resolved.config, tokenizer_of(self.processor)
        reading = self.resolved.task.make_reading(
            self.processor, self.resolved.model_config, config.train_config, self.resolved.lengths
        )
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        ends = end_ids(self.data.train, special_ids(tokenizer) - {bos} | {eos}, self.resolved.lengths[-1])
        says = {source.adds_start_token for source in config.sources.values()}
        if not isinstance(reading.encode, OneText):
            return Continuation(ends, adds_start=False)
        ends = tuple(sorted({*ends, eos})) if True in says else ends
        if bos is None:
            return Continuation(ends, adds_start=False)
        template = str(tokenizer.chat_template or "")
        may_be_added = None in says and "bos_token" not in template and tokenizer.bos_token not in template
        adds_start = True in says or (may_be_added and begins_with(self.data.train, bos))
        return Continuation(ends, adds_start)

    def data_facts(self) -> DataFacts:
        """The facts of the data for a plan."""
        return facts_of_data(self.data, self.processor, self.resolved)


def read_inputs(config: RunConfig, env: Environment, checkpoint: Checkpoint | None) -> Inputs:
    """Read all that needs no other rank, before the process group starts: no collective can time out meanwhile.

    Args:
        checkpoint: the one that the run goes on from, its small files read.
    """
    resumed_size = checkpoint.global_batch_size if checkpoint else None
    began_with = Beginning.of(checkpoint.values) if checkpoint else None
    resolved = resolve(
        config,
        env,
        resumed_size=resumed_size,
        began_with=began_with,
        was_compiled=checkpoint.was_compiled if checkpoint else None,
        were_shared=checkpoint.shares_prompts if checkpoint else None,
    )
    check_targets(resolved)
    processor = resolved.task.load_processor(resolved.config.train_config)
    resolved, data, vocab_size = read_data(resolved, processor, env, is_resumed=checkpoint is not None)
    config = resolved.config
    generation = _generation_of(resolved, data, processor, vocab_size, env)
    notes = [*resolved.notes, *data.notes, *data.epoch_notes(resolved.batches)]
    notes += [*template_notes(config, tokenizer_of(processor)), *column_notes(config, data)]
    print_rank_zero(env, *config.notes, *notes, *(generation.notes if generation else ()))
    width = replace(resolved.widths[0], limit=resolved.began_with.packed_length or resolved.context_length)
    return Inputs(
        resolved=resolved,
        processor=processor,
        vocab_size=vocab_size,
        data=data,
        generation=generation,
        preview=preview_data(data, tokenizer_of(processor), config.train_config, resolved.batches, width, env),
        num_steps=resolve_num_steps(
            config.train_config, config.tracking_config, data.steps_per_epoch(resolved.batches)
        ),
    )


def _generation_of(
    resolved: Resolved, data: RunData, processor: Processor, vocab_size: int, env: Environment
) -> Generation | None:
    config = resolved.config
    if not config.train_config.eval_generate:
        return None
    from evaluation.generation import plan_generation  # with its measures, which other runs have no use for

    return plan_generation(
        config.train_config,
        data,
        resolved.task,
        processor,
        resolved.policies,
        env,
        datasets=tuple(config.sources),
        vocab_size=vocab_size,
        num_positions=num_positions(config.train_config, config.prefix_config, resolved.model_config),
    )


def template_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for each dataset that writes prompts of its own for a model that was trained on those of a template."""
    if not tokenizer.chat_template:
        return []
    flags_of = {name: source.flags_of_template for name, source in config.sources.items()}
    return [
        f"{name}: prompts are written in its own words, and the tokenizer has a chat template; {flags} uses it"
        for name, flags in flags_of.items()
        if flags is not None
    ]


def column_notes(config: RunConfig, data: RunData) -> list[str]:
    """Lines on weights and a teacher in the training data.

    Raises:
        ConfigError: if all that is learned has the weight 0, or a teacher was asked for and there is none.
    """
    notes, share, of_tokens = [], config.train_config.teacher_weight, data.train.of_tokens
    if (weights := of_tokens.get(WEIGHTS)) is not None:
        is_whole = data.train_rows is not None  # of a stream only the beginning is known
        if is_whole and not weights[data.train.labels != IGNORE_INDEX].any():
            flags = [f"--{name}.weight_column: " for name, source in config.sources.items() if source.weight_column]
            raise ConfigError(
                f"{flags[0] if flags else '--dataset: '}the weight of every label token in the training data is 0, so "
                "nothing would be learned; give weights above 0, or leave the column out"
            )
        notes.append(f"loss weights: each token's loss is multiplied by its own, {weights.mean():.3g} on average")
    if (ids := of_tokens.get(TEACHER_IDS)) is not None:
        notes.append(
            f"teacher: {share:g} of the loss is the divergence from its {ids.shape[1]} likeliest tokens "
            "(--teacher_weight)"
        )
    elif config.was_given("train_config.teacher_weight") and share:
        raise ConfigError(
            f"--teacher_weight: the training data has no {' and '.join(TEACHER)}; write them with "
            "python -m tools.teacher_logprobs, or leave this out"
        )
    return notes


def check_targets(resolved: Resolved) -> None:
    """Check the names of --lora_config.target_modules, if they were given, against the model's own, built without
    weights: a mistyped one costs no reading of data.

    Raises:
        ConfigError: if LoRA cannot adapt one of them.
    """
    config = resolved.config
    train = config.train_config
    is_new = train.use_peft and train.peft_method == "lora" and not train.from_peft_checkpoint
    if is_new and config.was_given("lora_config.target_modules"):
        from policies.adapters.targets import choose_targets  # peft takes seconds to import

        # On the meta device, so that it takes neither time nor memory.
        dtype = resolved.policies.precision.storage_dtype
        choose_targets(build_model(train, resolved.model_config, resolved.task.AUTO_MODEL, dtype), config.lora_config)


def read_data(
    resolved: Resolved, processor: Any, env: Environment, *, is_resumed: bool = False
) -> tuple[Resolved, RunData, int]:
    """The settings with batches that follow the data, the data, and the rows that embeddings will have at least.

    Args:
        is_resumed: the run goes on from a checkpoint, so its batches are chosen already.

    Raises:
        ConfigError: if the data cannot be read, or a batch of it is too large for this rank.
    """
    config = resolved.config
    reading = resolved.task.make_reading(processor, resolved.model_config, config.train_config, resolved.lengths)
    vocab_size = max(resolved.model_config.get_text_config().vocab_size, num_rows_needed(tokenizer_of(processor)))
    # No type: for images the processor itself goes where texts have their tokenizer.
    data = load_data(
        config.train_config,
        config.sources,
        processor,
        build_sequences=reading.build_sequences,
        vocab_size=vocab_size,
        context_length=resolved.context_length,
        packed_length=resolved.began_with.packed_length,
        encode=reading.encode,
    )
    if adapter := config.train_config.from_peft_checkpoint:
        override(resolved.model_config, saved_labels(adapter))  # before the data name their classes
    task, model_config, data = resolved.task.with_data(
        resolved.model_config, config.train_config, tokenizer_of(processor), data, tuple(config.sources)
    )
    resolved = replace(resolved, task=task, model_config=model_config)
    if not is_resumed:
        resolved, data = with_enough_steps(resolved, data)
    train, memory_bytes = resolved.config.train_config, env.device_facts.memory_bytes
    check_batch_sizes(
        train,
        data,
        resolved.model_config,
        vocab_size,
        memory_bytes=memory_bytes,
        num_sharing=resolved.policies.context.size,
    )
    return resolved, data, vocab_size
