"""Generation at evaluation: the model's own answers to prompts of the validation set, and their figures.

Which samples share a batch does not depend on the number of ranks, so neither does any text. Whole batches are dealt
out to the ranks; texts and scores are gathered in host memory, in the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import nn

from configs.training import TrainConfig
from data.batches.mixing import describe_row, row_of, source_of
from data.batches.padding import padding_id
from data.pipeline import RunData
from data.processors.tokenizer_loading import special_ids, tokenizer_of
from data.sequences.tokenized import Sequences
from evaluation.choice import LikeliestAnswer, likeliest, options_of
from evaluation.measure import Answer, Measure, PromptScorer
from evaluation.measures import check_figures, measures_of
from policies.apply_policies import Policies
from policies.generating import generating, seeded
from policies.pretrained import generation_settings
from policies.sharding import unwrap
from ranks.collectives import gather_to_all
from ranks.environment import Environment
from tasks.generation import GeneratingModel, GenerationSettings, PromptedAnswer
from tasks.task import Task
from utils.errors import ConfigError, TrainingError
from utils.wording import plural

NUM_SHOWN = 8  # samples of each evaluation that samples.jsonl gets
SAYS_NOTHING = (
    *("num_beams", "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
    *("use_cache", "transformers_version"),
)
"""Settings of generation_config.json that flags decide here, or that change no text."""


@dataclass(frozen=True)
class Generation:
    """The samples that are answered at each evaluation: always the same, in the same batches."""

    task: Task
    processor: Any
    sequences: Sequences
    samples: np.ndarray  # int64 [n], which sequences, in the order of the data
    batches: tuple[tuple[int, ...], ...]  # places in `samples`
    settings: GenerationSettings
    policies: Policies
    env: Environment
    measures: tuple[Measure, ...]
    scorers: tuple[PromptScorer, ...]  # one of each measure
    seed: int  # of what is drawn
    notes: tuple[str, ...]  # lines to print
    options: tuple[np.ndarray, ...] = ()  # of the measure `choice`; none if it was not asked for
    collate: Callable[[list[Any]], Any] | None = None  # as the run does, for them

    @property
    def num_rounds(self) -> int:
        """How many batches each rank gets; the last may be empty."""
        return -(-len(self.batches) // self.env.world_size)

    def rounds(self) -> Iterator[tuple[int, ...]]:
        """This rank's batches. Every rank gets as many; if batches run out, an empty one."""
        for start in range(0, len(self.batches), self.env.world_size):
            place = start + self.env.rank
            yield self.batches[place] if place < len(self.batches) else ()

    def answers(self, model: nn.Module, rounds: Iterable[tuple[int, ...]]) -> list[Answer]:
        """The answers of all ranks, in the order of the samples. Every rank must call this.

        Args:
            rounds: those of `rounds()`, or the first of them; equally many on every rank.

        Raises:
            TrainingError: on every rank, if a function of the user's fails on an answer.
        """
        mine, done = list[Answer](), list[tuple[int, ...]]()
        with generating(model, self.policies, self.env) as in_step:
            for batch in rounds:
                done.append(batch)
                if batch:
                    mine += self._answer(unwrap(model), batch, in_step=in_step)
                elif in_step:  # the others wait for this rank's part of the weights
                    self._answer(unwrap(model), self.batches[-1], in_step=True)
        if self.options:
            choices = [choice for batch in done for choice in self._choose(model, batch)]
            for answer, choice in zip(mine, choices, strict=True):
                answer.figures["choice"] = choice
        failure = self._score(mine)
        if first := next(filter(None, gather_to_all(failure)), None):
            raise first
        # Sorted by place, the first field: the order of the data, whatever the number of ranks.
        return sorted(answer for part in gather_to_all(mine) for answer in part)

    def _score(self, answers: Sequence[Answer]) -> TrainingError | None:
        """Add the figures of each answer. The error of a function of the user's is returned: all ranks must meet."""
        for answer in answers:
            sequence = self.sequences[int(self.samples[answer.place])]
            prompt, _ = decoded(self.processor, self.task.prompted_answer(sequence))
            try:
                answer.figures.update(_figures(self.scorers, prompt, answer.reference, answer.text))
            except ConfigError as error:
                return TrainingError(f"{error} (of row {row_of(sequence.source_row)}: {answer.text[:80]!r})")
        return None

    def _answer(self, model: nn.Module, batch: tuple[int, ...], *, in_step: bool) -> list[Answer]:
        sequences = [self.sequences[int(self.samples[place])] for place in batch]
        # Of the batch, not of the rank: texts do not depend on the number of ranks, nor on earlier evaluations.
        with seeded(self.seed + batch[0], model, is_needed=self.settings.temperature > 0):
            texts = self.task.generate_batch(
                cast(GeneratingModel, model), self.processor, sequences, self.settings, in_step=in_step
            )
        answers = []
        for place, sequence, text in zip(batch, sequences, texts, strict=True):
            _, reference = decoded(self.processor, self.task.prompted_answer(sequence))
            answers.append(Answer(place, text, reference, {}))
        return answers

    def _choose(self, model: nn.Module, batch: tuple[int, ...]) -> list[float]:
        """For each sample of the batch 100 if its reference is the likeliest option, else 0. Every rank calls it."""
        assert self.collate is not None
        computed = batch or self.batches[-1]  # the others wait for this rank's part of the weights
        samples = [self.task.prompted_answer(self.sequences[int(self.samples[place])]) for place in computed]
        prompts = [sample.prompt for sample in samples]
        chosen = likeliest(model, self.task, self.collate, prompts, self.options, self.env.device)
        is_right = [np.array_equal(self.options[i], sample.answer) for i, sample in zip(chosen, samples, strict=True)]
        return [100.0 * right for right in is_right][: len(batch)]

    def shown(self, answers: Sequence[Answer], datasets: Sequence[str]) -> list[dict[str, Any]]:
        """Some of the answers as records for people, the same samples each time."""
        return [self._record(answers[place], datasets) for place in spread(len(answers), NUM_SHOWN)]

    def _record(self, answer: Answer, datasets: Sequence[str]) -> dict[str, Any]:
        sequence = self.sequences[int(self.samples[answer.place])]
        prompt = self.task.prompted_answer(sequence).prompt
        return {
            "dataset": datasets[source_of(sequence.source_row)],
            "row": row_of(sequence.source_row),
            # With special tokens: people see the prompt as the model reads it.
            "prompt": self.processor.decode(prompt.tolist(), skip_special_tokens=False),
            "reference": answer.reference,
            "generated": answer.text,
            **answer.figures,
        }


def spread(num_items: int, num_chosen: int) -> list[int]:
    """`num_chosen` item numbers, evenly spaced, from the first on; all if there are fewer."""
    num_chosen = min(num_items, num_chosen)
    return [number * num_items // num_chosen for number in range(num_chosen)]


def plan_generation(
    train: TrainConfig,
    data: RunData,
    task: Task,
    processor: Any,
    policies: Policies,
    env: Environment,
    *,
    datasets: Sequence[str],
    vocab_size: int,
    num_positions: int | None,
) -> Generation:
    """The generation at each evaluation of a run with --eval_generate.

    Its samples have a prompt, and their loss is evaluated, too.

    Args:
        datasets: the names of the mixed datasets, for messages.
        num_positions: of the model's decoder; None if it has no limit.

    Raises:
        ConfigError: if there is no such sample, or an answer could be longer than the model has positions for.
    """
    if data.evaluation is None or data.eval_rows is None:
        raise ConfigError("--eval_generate: there is no validation data to generate from; leave it out")
    sequences, rows = data.evaluation, data.eval_rows
    evaluated = np.unique(rows.indices[: rows.offsets[-1]])
    prompted = {int(index): task.prompted_answer(sequences[index]) for index in evaluated}
    # A prompt of special tokens alone, such as <s>, asks nothing.
    special = special_ids(tokenizer_of(processor))
    samples = [
        index
        for index, sample in prompted.items()
        if task.READS_IMAGES or not special.issuperset(sample.prompt.tolist())
    ]
    if not samples:
        raise ConfigError(
            "--eval_generate: no validation sample has a prompt, that is tokens without a label before its answer (as "
            "with text_dataset); leave it out"
        )
    notes = []
    if left_out := len(prompted) - len(samples):
        notes.append(
            f"eval_generate: left out without a prompt before the answer: {plural(left_out, 'validation sample')}"
        )
    if train.max_generate_samples:
        samples = [samples[place] for place in spread(len(samples), train.max_generate_samples)]
    _check_lengths(train, {index: prompted[index] for index in samples}, sequences, datasets, num_positions)
    texts = [decoded(processor, prompted[index]) for index in samples]
    measures = measures_of(train)
    notes += [note for measure in measures for note in measure.notes([reference for _, reference in texts])]
    scorers = tuple(measure.make_prompt_scorer() for measure in measures)
    prompt, reference = texts[0]
    # The figures that a function of the user returns are listed nowhere.
    of_first = [
        measure.NAMES or score(prompt, reference, reference) for measure, score in zip(measures, scorers, strict=True)
    ]
    check_figures(train, task, [name for names in of_first for name in names])
    chooses = any(isinstance(measure, LikeliestAnswer) for measure in measures)
    notes += _notes_on_settings(train)
    last_tokens = {int(prompted[index].answer[-1]) for index in samples}
    # By length, so that the prompts of a batch need little padding.
    by_length = sorted(range(len(samples)), key=lambda place: -len(prompted[samples[place]].prompt))
    size = train.val_batch_size
    return Generation(
        task=task,
        processor=processor,
        sequences=sequences,
        samples=np.array(samples),
        batches=tuple(tuple(by_length[start : start + size]) for start in range(0, len(samples), size)),
        settings=GenerationSettings(
            num_beams=train.num_beams,
            max_new_tokens=train.max_new_tokens,
            padding_id=padding_id(tokenizer_of(processor), vocab_size),
            # A chat template may end the assistant's turn by another token than the tokenizer's end token.
            end_ids=tuple(sorted(last_tokens & special | {tokenizer_of(processor).eos_token_id})),
            temperature=train.temperature,
            top_p=train.top_p,
        ),
        policies=policies,
        env=env,
        measures=measures,
        scorers=scorers,
        seed=train.seed,
        options=options_of((prompted[index] for index in samples), task, num_positions) if chooses else (),
        notes=tuple(notes),
    )


def decoded(processor: Any, sample: PromptedAnswer) -> tuple[str, str]:
    """Prompt and reference as text, without special tokens, as generated texts are decoded."""
    prompt, answer = (
        str(processor.decode(ids.tolist(), skip_special_tokens=True)).strip() for ids in (sample.prompt, sample.answer)
    )
    return prompt, answer


def _figures(scorers: Sequence[PromptScorer], prompt: str, reference: str, text: str) -> dict[str, float]:
    return {name: figure for score in scorers for name, figure in score(prompt, reference, text).items()}


def _check_lengths(
    train: TrainConfig,
    prompted: Mapping[int, PromptedAnswer],
    sequences: Sequences,
    datasets: Sequence[str],
    num_positions: int | None,
) -> None:
    """Refuse answers that could be longer than the model has positions for."""
    longest, sample = max(prompted.items(), key=lambda item: item[1].num_positions)
    if num_positions is None or sample.num_positions + train.max_new_tokens <= num_positions:
        return
    row = describe_row(int(sequences.source_rows[longest]), datasets)
    room = num_positions - sample.num_positions
    remedies = [f"at most {room}"] if room > 0 else []
    remedies += ["a smaller --context_length"] if sample.num_positions == len(sample.prompt) else []
    raise ConfigError(
        f"--max_new_tokens: {train.max_new_tokens} after the {plural(sample.num_positions, 'token')} before the answer "
        f"of validation row {row} are more than the {num_positions:,} positions of this model; give "
        f"{' or '.join(remedies)}"
    )


def _notes_on_settings(train: TrainConfig) -> list[str]:
    """A line that names the settings of generation_config.json which flags do not override, such as a least length."""
    settings, _ = generation_settings(train.model_name)
    given = {} if settings is None else settings.to_diff_dict()
    named = [
        f"{name} {value}"
        for name, value in given.items()
        if value and name not in SAYS_NOTHING and not name.startswith("_") and not name.endswith("token_id")
    ]
    return [f"eval_generate: generation_config.json of the model also says: {', '.join(named)}"] if named else []
