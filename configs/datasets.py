"""Where each dataset's samples come from. `--dataset NAME` chooses one; settings of another are refused."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting

STREAMING = "read the training samples as they are needed, so that they may be more than fit into memory"
_FORMS = "a file, a folder, a glob, a save_to_disk folder, or OWNER/NAME on the hub"


@dataclass(frozen=True)
class DataSource:
    """What every dataset has: where its rows are, and which of them are trained on."""

    data_path: str | None = setting(None, f"{_FORMS} (docs/datasets.md)")
    hub_config: str | None = setting(None, "configuration of a hub dataset that has several")
    train_split: str = setting("train", "split that is trained on: its name on the hub, or its files' (train.*)")
    test_split: str = setting("validation", "split that is evaluated on, named like train_split")
    validation_fraction: float = setting(
        0.0,
        "share of the training rows to evaluate on and not to train on, where there is no test_split",
        minimum=0,
        exclusive_maximum=1,
    )
    streaming: bool = setting(False, STREAMING)


@dataclass(frozen=True)
class SamsumDataset(DataSource):
    """Dialogues and their summaries (--dataset samsum_dataset)."""

    data_path: str | None = setting(None, f"{_FORMS}; unset: knkarthick/samsum from the hub")


@dataclass(frozen=True)
class AlpacaDataset(DataSource):
    """Instructions and their answers, as in alpaca_data.json (--dataset alpaca_dataset)."""

    data_path: str | None = setting(None, f"{_FORMS}; unset: tatsu-lab/alpaca from the hub")
    validation_fraction: float = setting(
        0.01,
        "share of the training rows to evaluate on and not to train on, where there is no test_split",
        minimum=0,
        exclusive_maximum=1,
    )


@dataclass(frozen=True)
class GrammarDataset(DataSource):
    """Sentences and their corrections (--dataset grammar_dataset)."""


@dataclass(frozen=True)
class ChatDataset(DataSource):
    """Conversations; the assistant's turns are learned (--dataset chat_dataset)."""

    messages_column: str | None = setting(None, "column of the turns; unset: messages, or conversations")
    tools_column: str = setting("tools", "column of the tools that a conversation may call, if it is there")
    chat_template: str | None = setting(None, "file with a Jinja chat template; unset: the tokenizer's own")


@dataclass(frozen=True)
class InstructionDataset(DataSource):
    """Prompts and their completions (--dataset instruction_dataset)."""

    prompt_column: str | None = setting(None, "column of the prompt; unset: prompt, instruction, or question")
    input_column: str | None = setting(None, "column of what the prompt is about; unset: input beside instruction")
    completion_column: str | None = setting(None, "column of what is learned; unset: completion, output, or answer")
    prompt_template: str | None = setting(
        None, "text with {prompt} and perhaps {input}, \\n for a new line; unset: by the prompt's column"
    )


@dataclass(frozen=True)
class TextDataset(DataSource):
    """Plain text, all of it learned (--dataset text_dataset)."""

    text_column: str = setting("text", "column of the text")
    sample_by: Literal["line", "paragraph", "document"] = setting(
        "paragraph", "what is one sample in a .txt file: a line, what stands between blank lines, or the file"
    )


@dataclass(frozen=True)
class CustomDataset(DataSource):
    """Your own data (--dataset custom_dataset, or in short --dataset FILE.py:FUNCTION)."""

    file: str = setting(
        "datasets/custom_example.py", "FILE.py or FILE.py:FUNCTION that returns the samples of one split"
    )
    data_path: str | None = setting(None, "a file or folder that the function may read")
    train_split: str = setting("train", "split name that the function gets for training")
    test_split: str = setting("validation", "split name that the function gets for evaluation")
    streaming: bool = setting(False, STREAMING)
