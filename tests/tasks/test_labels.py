"""Labels as data write them: which classes there are, in which order, and what each text is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from configs.training import TrainConfig
from data.batches.rows import make_rows
from data.pipeline import RunData
from data.sequences.labeled import LabeledBuilder
from data.tokens.labeled_texts import PairAffixes
from tasks.labels import Labels, read_labels, weights_of_classes
from tasks.text_settings import check_settings_of_labels
from utils.errors import ConfigError


def data_of(train: list[Any], validation: list[Any]) -> RunData:
    build = LabeledBuilder(PairAffixes())

    def sequences(labels: list[Any]) -> Any:
        return build([{"input_ids": [5, 6], "label": label} for label in labels], name="d", context_length=8)

    splits = [sequences(train), sequences(validation) if validation else None]
    rows = [split and make_rows(split, batching_strategy="padding", context_length=8) for split in splits]
    return RunData(splits[0], splits[1], rows[0], rows[1], None, (), None, ())


def read(
    train: list[Any], validation: list[Any] = (), asked: Any = None, config: Any = None
) -> tuple[Labels, list[Any]]:  # type: ignore[assignment]
    labels, data = read_labels(data_of(train, validation or []), config or LlamaConfig(), asked, ["d"])
    assert data.train_rows is not None
    assert data.train_rows.sequences is data.train
    assert all(text.labels[0] == 2 for text in data.train), "the tokens of the first text"
    return labels, [text.labels[1:].tolist() for text in data.train]


@pytest.mark.parametrize(
    ("train", "names", "numbers"),
    [
        (["b", "a", "b"], ("a", "b"), [[1], [0], [1]]),
        ([10, 9, 2], ("2", "9", "10"), [[2], [1], [0]]),
        (["10", "9", "2"], ("2", "9", "10"), [[2], [1], [0]]),
        ([True, False], ("false", "true"), [[1], [0]]),
        ([1.0, 0.0], ("0", "1"), [[1], [0]]),
        ([np.int64(1), torch.tensor(0)], ("0", "1"), [[1], [0]]),
        (["nicht gut", "gut ✓"], ("gut ✓", "nicht gut"), [[1], [0]]),
    ],
)
def test_classes_are_those_of_the_training_data_in_order(train: list[Any], names: Any, numbers: Any) -> None:
    assert read(train) == (Labels("single_label_classification", names), numbers)


def test_lists_are_several_classes_and_may_be_empty() -> None:
    labels, numbers = read([["b", "a"], [], ["c"]])
    assert labels == Labels("multi_label_classification", ("a", "b", "c"))
    assert numbers == [[0, 1], [], [2]]
    assert read([["b"], []])[0].names == ("b",)
    assert read([[np.int64(3)], (2, 3)])[1] == [[1], [0, 1]]


def test_numbers_of_which_some_have_fractions_are_numbers() -> None:
    labels, numbers = read([1, "2.5", -3.0])
    assert labels == Labels("regression", ())
    assert np.array(numbers, dtype=np.int32).view(np.float32).ravel().tolist() == [1.0, 2.5, -3.0]
    assert read([1, 2, 3], asked="regression")[0].names == ()


def test_numbers_of_which_one_is_missing_are_no_classes() -> None:
    for wrong in ("nan", "n/a", float("inf")):
        with pytest.raises(ConfigError, match=r"dataset \(train\), row 3: label .* is no number"):
            read([0.5, 1.25, wrong, 2.5])
    labels, _ = read(["v1", "2.5", "v3"])
    assert labels.problem_type == "single_label_classification"


def test_labels_that_look_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match="labels ' good' and 'good' of the training data differ in white space alone"):
        read(["good", " good", "bad"])


def test_a_classifier_keeps_the_order_of_its_classes() -> None:
    config = LlamaConfig(id2label={0: "z", 1: "y", 2: "x"}, architectures=["LlamaForSequenceClassification"])
    assert read(["x", "z"], config=config)[0].names == ("z", "y", "x")
    assert read([2, 0], config=config) == (Labels("single_label_classification", ("z", "y", "x")), [[2], [0]])
    assert read(["x", "new"], config=config)[0].names == ("new", "x")
    config.architectures = ["LlamaForCausalLM"]
    assert read(["x", "z"], config=config)[0].names == ("x", "z")


@pytest.mark.parametrize(
    ("train", "validation", "asked", "said"),
    [
        (
            ["a", "b"],
            ["a", "c"],
            None,
            r"\(validation\), row 2: label 'c' is none of the 2 classes .* \(a, b\)",
        ),
        (["a", "a"], [], None, "all texts of the training data are 'a'"),
        ([[0, 1], [1, 0]], [], None, "all texts of the training data are '0' and '1'"),
        ([[], []], [], None, "all texts of the training data are of no class"),
        (["a", None], [], None, r"dataset \(d\), row 2: label is empty"),
        (["a", float("nan")], [], None, "row 2: label is empty"),
        ([["a"], ["b", None]], [], None, "row 2: label has a class that is empty"),
        ([["a"], [{}]], [], None, "row 2: label has a class that is no label but dict"),
        ([["a"], [["b"]]], [], None, "row 2: label is a list of lists"),
        ([[1, 0], [1, 1]], [], None, "row 2: label names 1 twice; a list has the classes of its text"),
        (["a", "1.5"], [], "regression", r"dataset \(train\), row 1: label 'a' is no number"),
        ([0.5, 10**400, 1.5], [], None, r"dataset \(train\), row 2: label 1000.* is no number"),
        ([0.5, 1.5], [-1e39], None, r"dataset \(validation\), row 1: label -1e\+39 is larger than fp32 holds"),
        ([["a"], ["b"]], [], "single_label_classification", r"row 1: label \['a'\] is a list"),
        ([*range(10_001)], [], None, "--problem_type: the training data have 10,001 labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(train: Any, validation: Any, asked: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(train, validation, asked)


def test_what_decides_must_be_a_figure_of_the_labels_kind() -> None:
    classes, numbers = Labels("single_label_classification", ("a", "b")), Labels("regression", ())
    for labels, metric in ((classes, "macro_f1"), (numbers, "correlation"), (numbers, "eval_loss")):
        check_settings_of_labels(TrainConfig(model_name="m", best_metric=metric), labels)
    for labels, metric, told in (
        (classes, "mse", "the labels are classes, which have no mse; give accuracy or macro_f1"),
        (numbers, "accuracy", "the labels are numbers, which have no accuracy; give mse or correlation"),
    ):
        with pytest.raises(ConfigError, match=f"--best_metric: {told}"):
            check_settings_of_labels(TrainConfig(model_name="m", best_metric=metric), labels)


def test_weights_of_classes() -> None:
    labels = Labels("single_label_classification", ("a", "b", "c"))
    count = lambda: np.array([1, 2, 3])  # noqa: E731
    assert weights_of_classes((), labels, count) == ()
    assert weights_of_classes(("balanced",), labels, count) == (2.0, 1.0, pytest.approx(2 / 3))
    assert weights_of_classes(("balanced",), labels, lambda: np.array([6, 0, 2])) == (pytest.approx(2 / 3), 1.0, 2.0)
    assert weights_of_classes(("c=3", "a=0"), labels, count) == (0.0, 1.0, 3.0)
    for given, said in (
        (("d=1",), "d is no class"),
        (("a=x",), "x of a is no weight"),
        (("a=1e39",), "1e39 of a is no weight"),
        (("a",), "a is no class"),
        (("a=1", "a=2"), "a=1, a=2 gives a class two weights"),
        (("a=0", "b=0", "c=0"), "all are 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            weights_of_classes(given, labels, count)
    with pytest.raises(ConfigError, match="the labels are numbers"):
        weights_of_classes(("balanced",), Labels("regression", ()), count)
