"""The columns of a file of conversations: which hold the turns, and what is said or refused before a row is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import datasets

from chat.conversation import PROMPT_COLUMNS, ChatSettings, columns_to_read, turn_columns
from chat.preference import LABELS, PREFERENCE_COLUMNS, REJECTED
from chat.single_turns import COLUMNS as SINGLE_COLUMNS
from data.files.row_stream import RowStream
from data.files.stored_images import with_stored_images
from data.splits.examples import SplitExamples
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import shows_progress


def used_columns(examples: SplitExamples, config: ChatSettings, *, with_images: bool = False) -> SplitExamples:
    """The examples with the columns that are read.

    Raises:
        ConfigError: if none holds turns, if two do, or if one holds images, sound or video.
    """
    columns = turn_columns(config)
    of_turns = [column for column in columns if column in examples.columns]
    others = {"completion", *PREFERENCE_COLUMNS, *(SINGLE_COLUMNS if with_images else ())}
    if not of_turns and not others & set(examples.columns):
        raise ConfigError(
            f"{examples.name} has no column {' or '.join(columns)}; it has {examples.columns_there}: "
            "name the column of the turns with --chat_dataset.messages_column"
        )
    if len(of_turns) > 1:
        raise ConfigError(
            f"{examples.name} has turns in {' and '.join(of_turns)}; name one with --chat_dataset.messages_column"
        )
    if with_images:
        data = examples.data
        data = data.with_stored_images() if isinstance(data, RowStream) else with_stored_images(data)
        examples = replace(examples, data=data, reads_images=True)
    features = examples.data.features or {}
    lost = datasets.Audio | datasets.Video if with_images else datasets.Image | datasets.Audio | datasets.Video
    for column in examples.columns:
        if _any_part(features.get(column), lambda part: isinstance(part, lost)):
            what = (
                "sound or video, which a run on text and images"
                if with_images
                else "images, sound or video, which a run on text"
            )
            raise ConfigError(f"{examples.name}: column {column} holds {what} alone would lose; give a file without it")
    if config.preference and shows_progress():
        left_out = {"whose two answers are the same": {*REJECTED.values()}, "that are labelled false": {*LABELS}}
        for which, columns_of_it in left_out.items():
            if columns_of_it & set(examples.columns):
                print_line(f"{examples.place}: rows {which} are left out (--chat_dataset.preference chosen)")
    if of_turns and not config.preference:
        unread = {*PROMPT_COLUMNS, *SINGLE_COLUMNS}
        examples = examples.with_columns(*(set(columns_to_read(config)) - unread))
        examples.refuse_absent(of_turns)
    return examples


def nested_columns(examples: SplitExamples) -> frozenset[str]:
    """The columns of structs, in which each dict of a row has the keys of all others, null where it had none.

    A line says so if a null may be a value there: in the arguments of calls, and in the tools' defaults.
    """
    features = examples.data.features or {}
    nested = {column for column in examples.columns if _any_part(features.get(column), _is_struct)}
    places = {
        "the arguments of calls": lambda part: _is_struct(part) and _is_struct(part.get("arguments")),
        "the schemas of tools": lambda part: _is_struct(part) and bool({"default", "const"} & {*part}),
    }
    found = [place for place, is_it in places.items() if any(_any_part(features[column], is_it) for column in nested)]
    if found and shows_progress():
        print_line(
            f"{examples.place}: nulls inside {' and '.join(found)} are left out, since its columns give each of them "
            "the keys of all others; write them as JSON text to keep them"
        )
    return frozenset(nested)


def _is_struct(feature: Any) -> bool:
    return isinstance(feature, Mapping)


def _any_part(feature: Any, is_it: Callable[[Any], bool]) -> bool:
    """Whether it is true of a feature, or of one in it."""
    parts = feature.values() if isinstance(feature, Mapping) else [feature] if isinstance(feature, list) else []
    inner = getattr(feature, "feature", None)
    return is_it(feature) or any(_any_part(part, is_it) for part in (*parts, *([inner] if inner is not None else [])))
