"""Images and their captions, for models of image and text: `image` and `text`, and optionally a prompt.

python finetuning.py --model_name M --dataset caption_dataset --caption_dataset.data_path pictures/

A `save_to_disk` folder or parquet files that hold the images; a folder of images with metadata.jsonl or metadata.csv
(`file_name`); or any table with the images' paths, which start from the table's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import TextSpan
from utils.errors import ConfigError

if TYPE_CHECKING:
    from data.images.caption_rows import CaptionRows

IMAGE_COLUMNS, TEXT_COLUMNS = ("image", "file_name"), ("text", "caption")


@dataclass(frozen=True)
class CaptionDataset(DataSource):
    """Images and their captions, for models of image and text (--dataset caption_dataset)."""

    HAS_IMAGES = True

    image_column: str | None = setting(
        None, "column with the image, or with its path from the file's folder on; unset: image, or file_name"
    )
    text_column: str | None = setting(None, "column with the caption; unset: text, or caption")
    prompt_column: str | None = setting(None, "column with what the model is asked about the image; unset: prompt")
    prompt: str = setting("", "what the model is asked about every image, \\n for a new line; empty: nothing")

    def check(self, flag: str) -> None:
        if self.streaming:
            raise ConfigError(
                "--streaming: images are read while training anyway, and only captions before; leave it out"
            )
        if self.prompt and self.prompt_column:
            raise ConfigError(f"{flag}.prompt: {flag}.prompt_column gives each row its own; give one")


def get_caption_dataset(
    dataset_config: CaptionDataset,
    processor: Any,
    split: str,
    split_slice: str | None = None,
    encode: Encode = ONE_TEXT,
) -> CaptionRows:
    """Tokenized captions, and where their images are; a caption and its end token are label tokens."""
    from data.images.caption_rows import CaptionRows, Pictures, folder_of_paths, text_alone, undecoded
    from data.images.opening import import_pillow
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    flag = "caption_dataset"
    import_pillow()
    asked = (dataset_config.image_column, dataset_config.text_column, dataset_config.prompt_column)
    columns = (*IMAGE_COLUMNS, *TEXT_COLUMNS, *(name for name in asked if name))
    examples = load_split(flag, dataset_config, split, split_slice, other_columns=columns)
    image = asked[0] or _first(IMAGE_COLUMNS, examples.columns)
    text = asked[1] or _first(TEXT_COLUMNS, examples.columns)
    if missing := [name for name in (image, text, asked[2]) if name and name not in examples.columns]:
        raise ConfigError(
            f"{examples.name} has no column {', '.join(missing)}; it has {examples.columns_there}: name them "
            "with --caption_dataset.image_column, .text_column and .prompt_column"
        )
    texts = tuple(filter(None, (text, asked[2])))
    examples = replace(undecoded(examples, image).with_columns(image, *texts), text_columns=texts)
    pictures = Pictures(
        examples=examples,
        image_column=image,
        prompt_column=asked[2],
        prompt=dataset_config.prompt.replace("\\n", "\n"),
        folder=folder_of_paths(flag, dataset_config, split),
    )
    # The prompt goes through the model's processor, with the image.
    spans = partial(to_spans, text=text)
    tokens = tokenize_split(text_alone(examples, image, *texts), processor.tokenizer, spans, encode=encode)
    return CaptionRows(tokens, pictures)


def to_spans(example: Mapping[str, Any], *, text: str) -> list[TextSpan]:
    return [TextSpan(example[text], True)]


def _first(names: tuple[str, ...], there: tuple[str, ...]) -> str:
    return next((name for name in names if name in there), names[0])
