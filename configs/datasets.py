"""Settings of the datasets. `--dataset NAME` chooses one; settings of any other are refused."""

import os
from dataclasses import dataclass
from glob import iglob
from typing import ClassVar, Literal

from configs.setting import setting

STREAMING = "read training examples while training, for data that does not fit into memory"
FRACTION = "share of the training examples to hold out for evaluation, if there is no test_split"
EMPTY = "learn answers, or texts, that are empty, as an end token alone; otherwise they are counted and not learned"
MASK_PROMPT = "learn answers alone; False: learn their prompts, too"
_FORMS = "a file, a glob, several as a,b, a folder, a save_to_disk folder, or OWNER/NAME on the hub"


ROLES = ("system", "developer", "user", "assistant", "tool", "function_call")
"""The roles of turns; a function_call turn is the assistant's and holds the JSON of a call."""


def split_paths(data_path: str) -> list[str]:
    """The files and globs of a list, `a.jsonl,b/*.jsonl`; what is there is one, whatever its name holds."""
    whole = os.path.expanduser(data_path)
    if "," not in whole or os.path.exists(whole) or next(iglob(whole, recursive=True), None) is not None:
        return [data_path]
    return [part for part in map(str.strip, data_path.split(",")) if part]


@dataclass(frozen=True)
class DataSource:
    """The settings of every dataset: where its examples are, and which are for training."""

    DEFAULT_TRUNCATION: ClassVar[Literal["right", "split"]] = "right"  # of --truncation; half an answer teaches nothing

    data_path: str | None = setting(None, f"{_FORMS} (docs/datasets.md)", is_path=True)
    hub_config: str | None = setting(None, "configuration of a hub dataset that has several")
    train_split: str = setting("train", "training split: its name on the hub, or of its files (train.*)")
    test_split: str = setting("validation", "evaluation split, named like train_split")
    validation_fraction: float = setting(0.0, FRACTION, minimum=0, exclusive_maximum=1)
    streaming: bool = setting(False, STREAMING)
    skip_bad_rows: bool = setting(
        False, "leave out rows that cannot be used, and count them; otherwise they end the run"
    )
    learn_empty_answers: bool = setting(False, EMPTY)


@dataclass(frozen=True)
class SamsumDataset(DataSource):
    """Dialogues and their summaries (--dataset samsum_dataset)."""

    data_path: str | None = setting(None, f"{_FORMS}; unset: knkarthick/samsum from the hub", is_path=True)
    dialogue_column: str = setting("dialogue", "column with the dialogue, or whatever text is summarized")
    summary_column: str = setting("summary", "column with the summary")
    mask_prompt: bool = setting(True, MASK_PROMPT)


@dataclass(frozen=True)
class AlpacaDataset(DataSource):
    """Instructions and answers, as in alpaca_data.json (--dataset alpaca_dataset)."""

    data_path: str | None = setting(None, f"{_FORMS}; unset: tatsu-lab/alpaca from the hub", is_path=True)
    validation_fraction: float = setting(0.01, FRACTION, minimum=0, exclusive_maximum=1)
    instruction_column: str = setting("instruction", "column with the instruction")
    input_column: str = setting("input", "column with input to the instruction; it may be missing")
    output_column: str = setting("output", "column with the answer")
    system_column: str = setting("system", "column with text that takes the place of Alpaca's first lines, if there is")
    history_column: str = setting("history", "column with earlier turns, pairs of instruction and answer, if there is")
    mask_prompt: bool = setting(True, MASK_PROMPT)


@dataclass(frozen=True)
class GrammarDataset(DataSource):
    """Sentences and their corrections (--dataset grammar_dataset)."""

    input_column: str = setting("input", "column with the sentence")
    target_column: str = setting("target", "column with its correction")
    mask_prompt: bool = setting(True, MASK_PROMPT)


@dataclass(frozen=True)
class ChatDataset(DataSource):
    """Conversations; the assistant's turns are the labels (--dataset chat_dataset)."""

    messages_column: str | None = setting(None, "column with the turns; unset: messages, or conversations")
    tools_column: str = setting("tools", "column with the tools that a conversation may call; it may be missing")
    chat_template: str | None = setting(
        None, "file with a Jinja chat template; unset: the tokenizer's own", is_path=True
    )
    roles: tuple[str, ...] = setting(
        (), f"the data's own names of roles, as in critic=user,writer=assistant; roles are {', '.join(ROLES)}"
    )
    preference: Literal["chosen"] | None = setting(
        None, "of preference data (chosen and rejected, label, kto_tag), learn the good answers; unset: refuse it"
    )
    learn: Literal["all", "last"] = setting("all", "which of the assistant's turns are learned: all, or the last")

    def role_names(self) -> dict[str, str]:
        """The role of each name in `roles`."""
        return dict(pair.split("=", 1) for pair in self.roles)


@dataclass(frozen=True)
class InstructionDataset(DataSource):
    """Prompts, and completions as labels (--dataset instruction_dataset)."""

    prompt_column: str | None = setting(None, "column with the prompt; unset: prompt, instruction, or question")
    input_column: str | None = setting(
        None, "column with input to the prompt; unset: input, if the prompt is instruction"
    )
    completion_column: str | None = setting(None, "column with the completion; unset: completion, output, or answer")
    prompt_template: str | None = setting(
        None,
        "text with {prompt} and optionally {input} and {system}, \\n for a new line; unset: depends on the prompt's "
        "column",
    )
    system_column: str = setting("system", "column with the system's text, if there is")
    history_column: str = setting("history", "column with earlier turns, pairs of prompt and completion, if there is")
    as_chat: bool = setting(False, "write prompt and completion as a question and its answer, by the chat template")
    mask_prompt: bool = setting(True, MASK_PROMPT)
    chat_template: str | None = setting(
        None, "file with a Jinja chat template for as_chat; unset: the tokenizer's own", is_path=True
    )


@dataclass(frozen=True)
class SegmentsDataset(DataSource):
    """Text in parts, each learned or not (--dataset segments_dataset)."""

    segments_column: str = setting("segments", "column with the parts, a list of text and label (true or false)")


@dataclass(frozen=True)
class TextDataset(DataSource):
    """Plain text; every token is a label (--dataset text_dataset)."""

    DEFAULT_TRUNCATION = "split"

    text_column: str = setting("text", "column with the text")
    sample_by: Literal["line", "paragraph", "document"] = setting(
        "paragraph", "what is one example in a .txt file: a line, a paragraph between blank lines, or the whole file"
    )


@dataclass(frozen=True)
class CaptionDataset(DataSource):
    """Images and their captions, for models of image and text (--dataset caption_dataset)."""

    image_column: str | None = setting(
        None, "column with the image, or with its path from the file's folder on; unset: image, or file_name"
    )
    text_column: str | None = setting(None, "column with the caption; unset: text, or caption")
    prompt_column: str | None = setting(None, "column with what the model is asked about the image; unset: prompt")
    prompt: str = setting("", "what the model is asked about every image, \\n for a new line; empty: nothing")


@dataclass(frozen=True)
class CustomDataset(DataSource):
    """Your own data (--dataset custom_dataset, or in short --dataset FILE.py:FUNCTION)."""

    file: str | None = setting(
        None,
        "FILE.py or FILE.py:FUNCTION that returns the examples of one split; unset: data_path holds tokenised rows "
        "(input_ids, optional labels and attention_mask)",
        is_path=True,
    )
    data_path: str | None = setting(None, f"what the function reads; without file: {_FORMS}", is_path=True)
    train_split: str = setting("train", "split name passed to the function for training")
    test_split: str = setting("validation", "split name passed to the function for evaluation")
    streaming: bool = setting(False, STREAMING)
