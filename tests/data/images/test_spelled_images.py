"""A token that stands for an image, spelled in a caption or a prompt, is found before training, with its row."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.images.sequences import ImageSequences, build_image_sequences
from data.pipeline import load_sequences
from data.processors.image_tokens import placeholders_of
from data.processors.processor_loading import prompt_text, refusal_of_size
from data.processors.written_images import ImageWriter
from data.tokens.encoding import Caption
from tests.helpers.image_chats import chat_processor
from tests.helpers.image_models import MODELS, save_pictures
from utils.errors import ConfigError

FAMILIES = ["llava", "qwen2_vl", "blip2_opt", "paligemma", "idefics3", "gemma3"]


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()[1]


def read(processor: Any, table: Path, **settings: Any) -> ImageSequences:
    config = DATASETS["caption_dataset"](data_path=str(table), **settings)
    build = partial(
        build_image_sequences,
        max_text_length=50,
        refusal_of=partial(refusal_of_size, processor),
        placeholders=placeholders_of(processor),
    )
    function = find_dataset_function("caption_dataset", config)
    encode = Caption(processor.tokenizer.eos_token_id)
    found = load_sequences(function, config, processor, "train", split_slice=None, build=build, encode=encode)
    assert isinstance(found, ImageSequences)
    return found


def image_token(processor: Any) -> str:
    token = processor.image_token
    return str(getattr(token, "content", token))


def table_with(folder: Path, **more: str) -> Path:
    """Three pictures, of which the second has other texts."""
    table = save_pictures(folder, 3)
    rows = [json.loads(line) | {"question": "what is it ?"} for line in table.read_text().splitlines()]
    rows[1] |= more
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


def test_of_a_caption(processor: Any, tmp_path: Path) -> None:
    table = table_with(tmp_path, text=f"one {image_token(processor)} circle")
    as_tokens = {"split_special_tokens": False}
    with pytest.raises(ConfigError, match=r"train.jsonl, row 2: its caption spells the token of an image"):
        read(processor, table, **as_tokens)
    assert read(processor, table, **as_tokens, skip_bad_rows=True).source_rows.tolist() == [0, 2]
    plain = read(processor, table)  # by default it is text
    assert not set(plain.input_ids.tolist()) & set(placeholders_of(processor).ids)


def test_of_a_prompt(processor: Any, tmp_path: Path) -> None:
    token = image_token(processor)
    table = table_with(tmp_path, question=f"what is {token} and {token} ?")
    with pytest.raises(ConfigError, match=r"train.jsonl, row 2: its prompt spells .*image"):
        read(processor, table, prompt_column="question")
    kept = read(processor, table, prompt_column="question", skip_bad_rows=True)
    assert kept.source_rows.tolist() == [0, 2]
    for sequence in kept:
        assert sequence.pictures.open(sequence.place).prompt == "what is it ?"


def test_of_the_prompt_of_all_rows(processor: Any, tmp_path: Path) -> None:
    token = image_token(processor)
    with pytest.raises(ConfigError, match=r"^--caption_dataset.prompt: its prompt spells .*; take that out$"):
        read(processor, save_pictures(tmp_path, 2), prompt=f"{token} {token} shows")


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gemma3"])
def test_a_prompt_in_llavas_form_has_the_image_where_it_says(name: str) -> None:
    processor = chat_processor(name)
    written = prompt_text(processor, "one\n<image>\nred ?")
    image = ImageWriter.of(processor).placeholder
    assert written.count(image) == 1
    assert "<image>" not in written.replace(image, "")
    if name != "llava":  # whose template writes images first
        assert written.index("one") < written.index(image) < written.index("red")
    assert placeholders_of(processor).refusal_of_prompt("<image> and <image>")
    assert placeholders_of(processor).refusal_of_prompt("<image>\nred ?") is None
