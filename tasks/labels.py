"""The labels of a run's data as numbers: which classes there are, and what each text is."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from transformers import PreTrainedConfig

from data.batches.mixing import describe_row
from data.batches.rows import Rows
from data.pipeline import RunData
from data.sequences.token_columns import LARGEST_FP32
from data.sequences.tokenized import Sequences
from utils.errors import ConfigError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' names, in config.json: one class of each text, several classes, a number."""

MOST_CLASSES = 10_000  # more are numbers, or texts, that were taken for classes
_NUM_NAMED = 8  # classes in a message


@dataclass(frozen=True)
class Labels:
    """The kind of a run's labels, and the names of its classes in the order of their numbers; none for a number."""

    problem_type: ProblemType
    names: tuple[str, ...]

    def __str__(self) -> str:
        if not self.names:
            return "a number of each text (regression)"
        shown = ", ".join(self.names[:_NUM_NAMED]) + (", ..." if len(self.names) > _NUM_NAMED else "")
        several = ", several of each text" if self.problem_type == "multi_label_classification" else ""
        noun = "class" if len(self.names) == 1 else "classes"
        return f"{len(self.names):,} {noun}{several}: {shown}"

    def check_saved(self, model_config: PreTrainedConfig) -> None:
        """Check that they are those of the adapter that is trained on, whose head has an output for each.

        Args:
            model_config: with the classes of the adapter; without a `problem_type`, if these are unknown.

        Raises:
            ConfigError: if they are others.
        """
        saved = tuple((model_config.id2label or {}).values())
        if getattr(model_config, "problem_type", None) is not None and saved != self._names_of_outputs:
            raise ConfigError(
                f"--from_peft_checkpoint: the head of this adapter has the classes {', '.join(saved)}, and the labels "
                f"of the data are {self}; merge it with tools.export --merge, and train that model, which gets a new "
                "head"
            )

    @property
    def _names_of_outputs(self) -> tuple[str, ...]:
        return self.names or ("LABEL_0",)

    def write(self, model_config: PreTrainedConfig) -> None:
        """Put them into a config, whose model has one output for each class, or one for a number."""
        names = self._names_of_outputs
        model_config.problem_type = self.problem_type
        model_config.id2label = dict(enumerate(names))
        model_config.label2id = {name: number for number, name in enumerate(names)}


def read_labels(
    data: RunData, model_config: PreTrainedConfig, asked: ProblemType | None, datasets: Sequence[str]
) -> tuple[Labels, RunData]:
    """The labels of the training data, and the data with numbers for them.

    A sequence's `labels` hold after that, behind the tokens of the first text: its class, its classes, or the bits of
    an fp32 number.

    Args:
        asked: --problem_type.
        datasets: the names of the mixed datasets, for messages.

    Raises:
        ConfigError: naming the row of a label that does not fit.
    """
    written = _written(data.train)
    values = {raw: json.loads(raw) for raw in dict.fromkeys(written)}
    problem_type = asked or _problem_type(values.values())
    found = (
        set() if problem_type == "regression" else {name for value in values.values() for name in _classes_of(value)}
    )
    _check_spelling(found)
    names = _names(found, model_config)
    # Data may give the numbers that a classifier already has for its classes.
    number_of = {name if found <= {*names} else str(number): number for number, name in enumerate(names)}
    labels = Labels(problem_type, names)
    if len(names) > MOST_CLASSES:
        raise ConfigError(
            f"--problem_type: the training data have {len(names):,} labels, and at most {MOST_CLASSES:,} classes are "
            "learned; give --problem_type regression if they are numbers"
        )
    kinds = {frozenset(_classes_of(value)) for value in values.values()} if problem_type != "regression" else ()
    if len(kinds) == 1 and found.issuperset(names):
        shown = " and ".join(map(repr, names)) or "of no class"
        raise ConfigError(f"dataset: all texts of the training data are {shown}; there is nothing to tell apart")
    example = json.dumps(values[written[0]], ensure_ascii=False)
    train = _numbered(data.train, labels, number_of, "train", datasets)
    evaluation = data.evaluation and _numbered(data.evaluation, labels, number_of, "validation", datasets)
    return labels, replace(
        data,
        train=train,
        evaluation=evaluation,
        train_rows=_of(data.train_rows, train),
        eval_rows=_of(data.eval_rows, evaluation),
        notes=(*data.notes, f"labels: {labels}; the first text's: {example}"),
    )


def counts_of_classes(sequences: Sequences, num_classes: int) -> np.ndarray:
    """How many texts are of each class, int64 [classes]."""
    numbers = np.delete(sequences.labels, sequences.label_offsets[:-1])
    return np.bincount(numbers, minlength=num_classes)


def _of(rows: Rows | None, sequences: Sequences | None) -> Rows | None:
    if rows is None or sequences is None:
        return None
    return Rows(sequences, rows.indices, rows.offsets, packed=rows.packed)


def _written(sequences: Sequences) -> list[bytes]:
    """The JSON of each sequence's label."""
    whole, ends = sequences.labels.astype(np.uint8).tobytes(), sequences.label_offsets.tolist()
    return [whole[start + 1 : end] for start, end in pairwise(ends)]


def _problem_type(values: Collection[Any]) -> ProblemType:
    """Lists are several classes; numbers, one of which has a fraction, are numbers; all else is one class.

    So are numbers of which a few are missing, most of them with fractions: the row of a `nan` is named then.
    """
    if any(isinstance(value, list) for value in values):
        return "multi_label_classification"
    numbers = [_number(value) for value in values]
    num_fractions = sum(number is not None and not number.is_integer() for number in numbers)
    are_numbers = num_fractions > 0 and (None not in numbers or 2 * num_fractions > len(numbers))
    return "regression" if are_numbers else "single_label_classification"


def _number(value: Any) -> float | None:
    try:
        number = None if isinstance(value, bool | list) else float(value)
    except (ValueError, OverflowError):  # a whole number may be larger than any float
        return None
    return number if number is None or np.isfinite(number) else None


def _names(found: Collection[str], model_config: PreTrainedConfig) -> tuple[str, ...]:
    """The classes of the model if it knows all that there are, else those of the data: sorted, numbers by size."""
    known = cast(Mapping[int, str], model_config.id2label)
    sides = (set(known.values()), {str(number) for number in known})
    if found and _has_classes(model_config) and any(side.issuperset(found) for side in sides):
        return tuple(known[number] for number in sorted(known))
    numbers = {name: _number(name) for name in found}
    if None in numbers.values():
        return tuple(sorted(found))
    return tuple(sorted(found, key=lambda name: (numbers[name], name)))


def _check_spelling(names: Collection[str]) -> None:
    """
    Raises:
        ConfigError: if two classes differ in white space around them alone, as after the commas of a CSV file.
    """
    seen: dict[str, str] = {}
    for name in sorted(names):
        if (other := seen.setdefault(name.strip(), name)) != name:
            raise ConfigError(
                f"dataset: the labels {other!r} and {name!r} of the training data differ in white space alone; write "
                "them alike"
            )


def _has_classes(model_config: PreTrainedConfig) -> bool:
    """Whether it is of a classifier, or of an adapter that makes one of a base model."""
    is_adapted = getattr(model_config, "problem_type", None) is not None
    return is_adapted or any(name.endswith("ForSequenceClassification") for name in model_config.architectures or ())


def _classes_of(value: Any) -> list[str]:
    """The names of a label's classes. A whole number is its own name."""
    return [_name(one) for one in (value if isinstance(value, list) else [value])]


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _numbered(
    sequences: Sequences, labels: Labels, number_of: Mapping[str, int], split: str, datasets: Sequence[str]
) -> Sequences:
    written = _written(sequences)
    numbers: dict[bytes, np.ndarray] = {}
    for place, raw in enumerate(written):
        if raw not in numbers:
            try:
                numbers[raw] = _to_numbers(json.loads(raw), labels, number_of)
            except ValueError as error:
                row = describe_row(int(sequences.source_rows[place]), datasets)
                raise ConfigError(f"dataset ({split}), row {row}: {error}") from error
    firsts = sequences.labels[sequences.label_offsets[:-1]]
    parts = [np.concatenate([[first], numbers[raw]]) for first, raw in zip(firsts, written, strict=True)]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    return replace(
        sequences,
        labels=np.concatenate(parts).astype(np.int32),
        label_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _to_numbers(value: Any, labels: Labels, number_of: Mapping[str, int]) -> np.ndarray:
    """A label's numbers, int32: its classes', or the bits of an fp32 number.

    Raises:
        ValueError: if it is of another kind, or of a class that the training data do not have.
    """
    if labels.problem_type == "regression":
        number = _number(value)
        if number is None:
            raise ValueError(
                f"label {value!r} is no number; give --problem_type single_label_classification if it is a class"
            )
        if abs(number) > LARGEST_FP32:
            raise ValueError(f"label {value!r} is larger than fp32 holds; divide all labels by one number")
        return np.array([number], dtype=np.float32).view(np.int32)
    if isinstance(value, list) and labels.problem_type == "single_label_classification":
        raise ValueError(f"label {value!r} is a list; give --problem_type multi_label_classification")
    classes = _classes_of(value)
    if (unknown := next((name for name in classes if name not in number_of), None)) is not None:
        shown = ", ".join(labels.names[:_NUM_NAMED]) + (", ..." if len(labels.names) > _NUM_NAMED else "")
        raise ValueError(
            f"label {unknown!r} is none of the {f'{len(labels.names):,} classes'} in the training data ({shown})"
        )
    return np.array(sorted({number_of[name] for name in classes}), dtype=np.int32)


def weights_of_classes(asked: Sequence[str], labels: Labels, count: Callable[[], np.ndarray]) -> tuple[float, ...]:
    """What --class_weights says, for each class; empty: all alike.

    Args:
        count: returns how many training texts are of each class.

    Raises:
        ConfigError: if it does not fit the classes.
    """
    if not asked:
        return ()
    if not labels.names:
        raise ConfigError("--class_weights: the labels are numbers, and not classes; leave it out")
    if tuple(asked) == ("balanced",):
        counts = count()
        num_there = np.count_nonzero(counts)  # a classifier may know classes that these data do not have
        return tuple(float(counts.sum() / (num_there * number)) if number else 1.0 for number in counts)
    given = dict(part.rpartition("=")[::2] for part in asked)
    if (unknown := next((name for name in given if name not in labels.names), None)) is not None:
        shown = unknown or asked[0]
        raise ConfigError(
            f"--class_weights: {shown} is no class; give balanced, or CLASS=WEIGHT of some of "
            f"{', '.join(labels.names[:_NUM_NAMED])}"
        )
    weights = {name: _number(weight) for name, weight in given.items()}
    if wrong := next(
        (name for name, weight in weights.items() if weight is None or not 0 <= weight <= LARGEST_FP32), None
    ):
        raise ConfigError(f"--class_weights: {given[wrong]} of {wrong} is no weight; give a number from 0 on")
    if len(given) < len(asked):
        raise ConfigError(f"--class_weights: {', '.join(asked)} gives a class two weights; leave one of them out")
    found = tuple(float(weights.get(name) or 0.0) if name in weights else 1.0 for name in labels.names)
    if not any(found):
        raise ConfigError("--class_weights: all are 0, so nothing would be learned; give one above 0")
    return found
