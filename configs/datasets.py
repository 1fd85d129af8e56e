"""Where each dataset's samples come from. `--dataset NAME` chooses one; settings of another are refused."""

from dataclasses import dataclass

from configs.setting import setting

STREAMING = "read the training samples as they are needed, so that they may be more than fit into memory"


@dataclass(frozen=True)
class SamsumDataset:
    """Dialogues and their summaries (--dataset samsum_dataset)."""

    data_path: str | None = setting(
        None, "a file, or a folder with train.* and validation.*; unset: knkarthick/samsum from the Hugging Face hub"
    )
    streaming: bool = setting(False, STREAMING)


@dataclass(frozen=True)
class AlpacaDataset:
    """Instructions and their answers (--dataset alpaca_dataset)."""

    data_path: str | None = setting(None, "a file, or a folder with train.* and validation.*")
    streaming: bool = setting(False, STREAMING)


@dataclass(frozen=True)
class GrammarDataset:
    """Sentences and their corrections (--dataset grammar_dataset)."""

    data_path: str | None = setting(None, "a file, or a folder with train.* and validation.*")
    streaming: bool = setting(False, STREAMING)


@dataclass(frozen=True)
class CustomDataset:
    """Your own data (--dataset custom_dataset, or in short --dataset FILE.py:FUNCTION)."""

    file: str = setting(
        "datasets/custom_example.py", "FILE.py or FILE.py:FUNCTION that returns the samples of one split"
    )
    data_path: str | None = setting(None, "a file or folder that the function may read")
    train_split: str = setting("train", "split name that the function gets for training")
    test_split: str = setting("validation", "split name that the function gets for evaluation")
    streaming: bool = setting(False, STREAMING)
