"""Conversations (`messages` with `role` and `content`, or ShareGPT's `conversations`), by the chat template.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset chat_dataset
    --chat_dataset.data_path my_chats/

The assistant's turns are label tokens, each with the token that ends it; system, user and tool turns are not. For a
model of image and text, turns may have images: parts of their content, or `<image>` and a column `images`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chat.conversation import columns_to_read, read_conversation
from chat.samples import chat_samples
from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode, check_takes_templates
from data.tokens.spans import ChatSamples
from utils.errors import ConfigError

if TYPE_CHECKING:
    from chat.template import ChatTemplate
    from data.images.opening import ImageSource
    from data.processors.image_reading import ImageReader
    from data.splits.examples import SplitExamples

ROLES = ("system", "developer", "user", "assistant", "tool", "function_call")
"""The roles of turns; a function_call turn is the assistant's and holds the JSON of a call."""


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
    image_column: str | None = setting(None, "column with a row's images; unset: images, or image")
    image_folder: str | None = setting(
        None, "folder that paths of images start from; unset: that of the data's own files", is_path=True
    )
    learn: Literal["all", "last"] = setting("all", "which of the assistant's turns are learned: all, or the last")

    MAY_HAVE_IMAGES = True

    @property
    def adds_start_token(self) -> bool:
        return False  # the template writes it

    def role_names(self) -> dict[str, str]:
        """The role of each name in `roles`."""
        return dict(pair.split("=", 1) for pair in self.roles)

    def check(self, flag: str) -> None:
        for pair in self.roles:
            name, equals, role = pair.partition("=")
            if not (name and equals and role in (*ROLES, name)):
                raise ConfigError(
                    f"{flag}.roles: {pair!r} names no role; write NAME=ROLE, with one of {', '.join(ROLES)}"
                )


def get_chat_dataset(
    dataset_config: ChatDataset,
    tokenizer: Any,
    split: str,
    split_slice: str | None = None,
    encode: Encode = ONE_TEXT,
) -> Any:
    """Tokenized conversations (`input_ids`, `labels`); of a processor for images, also where their images are."""
    from chat.columns import nested_columns, used_columns
    from chat.template import ChatTemplate, use_template
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
    with_images = processor is not tokenizer
    if not with_images:
        check_takes_templates(encode, "--dataset")
    for name in ("image_column", "image_folder"):
        if getattr(dataset_config, name) and not with_images:
            raise ConfigError(f"--chat_dataset.{name}: is of images, and this model reads text alone; leave it out")
    use_template(tokenizer, dataset_config.chat_template, processor=processor)
    images = _image_reader(dataset_config, processor, split) if with_images else None
    examples = load_split(
        "chat_dataset",
        dataset_config,
        split,
        split_slice,
        other_columns=columns_to_read(dataset_config, with_images=with_images),
    )
    examples = used_columns(examples, dataset_config, with_images=with_images)
    template = ChatTemplate.of(
        tokenizer,
        split_special_tokens=dataset_config.split_special_tokens,
        image=images.writer.placeholder if images is not None else None,
    )
    options = {
        "config": dataset_config,
        "nested_columns": nested_columns(examples),
        "template": template,
        "images": images,
    }
    spans = partial(to_spans, **options)
    rows = tokenize_split(examples, tokenizer, spans, by_template=True, with_images=with_images, encode=encode)
    return rows if images is None else _with_store(rows, examples, images, options)


def _image_reader(dataset_config: ChatDataset, processor: Any, split: str) -> ImageReader:
    from data.images.caption_rows import folder_of_paths
    from data.images.opening import import_pillow
    from data.processors.image_reading import ImageReader
    from data.processors.written_images import ImageWriter

    import_pillow()
    given = dataset_config.image_folder
    folder = Path(given).expanduser() if given else folder_of_paths("chat_dataset", dataset_config, split)
    return ImageReader(ImageWriter.of(processor), folder)


def _with_store(rows: Any, examples: SplitExamples, images: ImageReader, options: Mapping[str, Any]) -> Any:
    """The tokenized rows with what opens their images; a stream's rows hold that themselves."""
    from data.images.sample_building import ChatRows, StoredImages
    from data.streaming.tokenized_stream import TokenizedStream

    if isinstance(rows, TokenizedStream):
        return rows
    read = {name: options[name] for name in ("config", "nested_columns")}
    return ChatRows(rows, StoredImages(examples, partial(sources_in, images=images, **read)))


def to_spans(
    example: Mapping[str, Any],
    *,
    config: ChatDataset,
    template: ChatTemplate,
    nested_columns: frozenset[str] = frozenset(),
    images: ImageReader | None = None,
) -> ChatSamples:
    conversation = read_conversation(
        example,
        config,
        chat_template=template.tokenizer.chat_template,
        nested_columns=nested_columns,
        takes_images=images is not None,
    )
    samples = chat_samples(conversation, template)
    return samples if images is None else images.written(samples, conversation.images)


def sources_in(
    example: Mapping[str, Any], *, config: ChatDataset, nested_columns: frozenset[str], images: ImageReader
) -> list[ImageSource]:
    """Where the images of a conversation are, in order."""
    conversation = read_conversation(example, config, nested_columns=nested_columns, takes_images=True)
    return images.sources(conversation.images)
