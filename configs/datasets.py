"""The dataset formats, and the settings that all of them have. `--dataset NAME` chooses one."""

import os
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import ClassVar, Literal

from configs.setting import setting

FORMATS = (
    "samsum",
    "alpaca",
    "grammar",
    "chat",
    "instruction",
    "text",
    "segments",
    "caption",
    "preference",
    "classification",
)
"""The files of datasets/, in the order of --help. X.py has the settings and the function of `--dataset X_dataset`."""

BUILT_IN_FOLDER = Path(__file__).resolve().parents[1] / "datasets"

STREAMING = "read training examples while training, for data that does not fit into memory"
FRACTION = (
    "share of the training examples to hold out for evaluation, if there is no test_split; auto: 0.05, at most 500 "
    "examples, and none of a stream"
)
EMPTY = "learn answers, or texts, that are empty, as an end token alone; otherwise they are counted and not learned"
SPECIAL = "special tokens that the data spells, like </s> in HTML, stay text; False: they become the tokens"
MASK_PROMPT = "learn answers alone; False: learn their prompts, too"
QUOTING = (
    "quotes in .csv and .tsv files: auto refuses what could be stray ones; double: a cell in quotes may go over lines; "
    "none: they are text"
)
WEIGHT = "column with a number of at least 0 that each row's loss is multiplied by in training"
FORMS = "a file, a glob, several as a,b, a folder, a save_to_disk folder, or OWNER/NAME on the hub"


def split_paths(data_path: str) -> list[str]:
    """The files and globs of a list, `a.jsonl,b/*.jsonl`. A path that exists is one, even with a comma in it."""
    whole = os.path.expanduser(data_path)
    if "," not in whole or os.path.exists(whole) or next(iglob(whole, recursive=True), None) is not None:
        return [data_path]
    return [part for part in map(str.strip, data_path.split(",")) if part]


@dataclass(frozen=True)
class DataSource:
    """The settings of every dataset: where its examples are, and which are for training. Formats add their own."""

    DEFAULT_TRUNCATION: ClassVar[Literal["right", "left", "split"]] = "right"  # half an answer teaches nothing
    HAS_LABELS: ClassVar[bool] = False  # of whole texts: tasks that learn them take it, and no others
    HAS_IMAGES: ClassVar[bool] = False  # only models that see images take it, and a run takes no other dataset with it
    HAS_PAIRS: ClassVar[bool] = False  # of answers; only losses of preferences take them

    MAY_HAVE_IMAGES: ClassVar[bool] = False  # models that see images take it, too

    data_path: str | None = setting(None, f"{FORMS} (docs/datasets.md)", is_path=True)
    hub_config: str | None = setting(None, "configuration of a hub dataset that has several")
    train_split: str = setting("train", "training split: its name on the hub, or of its files (train.*)")
    test_split: str = setting("validation", "evaluation split, named like train_split")
    validation_fraction: Literal["auto"] | float = setting(0.0, FRACTION, minimum=0, exclusive_maximum=1)
    streaming: bool = setting(False, STREAMING)
    skip_bad_rows: bool = setting(
        False, "leave out rows that cannot be used, and count them; otherwise they end the run"
    )
    learn_empty_answers: bool = setting(False, EMPTY)
    split_special_tokens: bool = setting(True, SPECIAL)
    quoting: Literal["auto", "double", "none"] = setting("auto", QUOTING)
    weight_column: str | None = setting(None, WEIGHT)

    @property
    def adds_start_token(self) -> bool | None:
        """Whether a causal model's samples get the tokenizer's start token, though no template writes it.

        None if only the samples tell.
        """
        return not self.HAS_IMAGES

    @property
    def flags_of_template(self) -> str | None:
        """Flags with which prompts are written by a chat template; None if they are, or if these flags cannot be."""
        return None

    def check(self, flag: str) -> None:
        """Refuse values that contradict each other. Called if the dataset is chosen.

        Args:
            flag: the name of the dataset's flags, `--chat_dataset`.

        Raises:
            ConfigError: for the first conflict.
        """


@dataclass(frozen=True)
class CustomDataset(DataSource):
    """Your own data (--dataset custom_dataset, or in short --dataset FILE.py:FUNCTION)."""

    file: str | None = setting(
        None,
        "FILE.py or FILE.py:FUNCTION that returns the examples of one split; unset: data_path holds tokenized rows "
        "(input_ids, optional labels and attention_mask)",
        is_path=True,
    )
    data_path: str | None = setting(None, f"what the function reads; without file: {FORMS}", is_path=True)
    train_split: str = setting("train", "split name passed to the function for training")
    test_split: str = setting("validation", "split name passed to the function for evaluation")
    streaming: bool = setting(False, STREAMING)

    @property
    def adds_start_token(self) -> bool | None:
        return None
