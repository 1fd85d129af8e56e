"""Conversations with images in the forms of other tools, as their documents show them, become the same samples.

Each test says which pixels and which tokens reach the model, and which are learned.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.images.samples import ImageSamples
from tests.helpers.image_chats import chat_processor, colours_of, flat_picture, learned_of, read_chats, text_of
from utils.errors import ConfigError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
COLOURS = {"red.png": RED, "green.png": GREEN, "blue.png": BLUE}
PICTURE = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"


@pytest.fixture(scope="module")
def processor() -> Any:
    return chat_processor("qwen2_vl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        flat_picture(tmp_path / "pictures" / name, colour, (24, 40))
    return tmp_path


def bytes_of(folder: Path, name: str) -> bytes:
    return (folder / "pictures" / name).read_bytes()


def assert_reads(
    processor: Any, samples: ImageSamples, expected: list[tuple[str, list[str], list[tuple[int, int, int]]]]
) -> None:
    """
    Args:
        expected: of each sample its text, without the white space that tokens do not have; what is learned; and the
            colours of its pictures.
    """
    found = [
        ("".join(text_of(processor, sample).split()), learned_of(processor, sample), colours_of(sample))
        for sample in samples
    ]
    assert found == [("".join(text.split()), learned, colours) for text, learned, colours in expected]
    for sample in samples:
        ids = processor.tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())
        for first, last in sample.places.tolist():
            assert set(ids[first:last]) == {"<|image_pad|>"}
            assert set(sample.labels[first:last].tolist()) == {-100}


def turns(*texts: str) -> str:
    """A conversation as the template writes it."""
    roles = ["user", "assistant"] * len(texts)
    return "".join(f"<s>{role}\n{text}</s>\n" for role, text in zip(roles, texts, strict=False))


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    lines = json.dumps(rows) if file.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(lines)
    return file


def test_llava_instruct(processor: Any, folder: Path) -> None:
    """https://huggingface.co/datasets/liuhaotian/LLaVA-Instruct-150K, and mixes in which some rows have no image."""
    says = [("human", "<image>\nred circle ?"), ("gpt", "one"), ("human", "blue ?"), ("gpt", "two")]
    rows: list[dict[str, Any]] = [
        {"id": "1", "image": "red.png", "conversations": [{"from": who, "value": text} for who, text in says]},
        {"id": "2", "conversations": [{"from": "human", "value": "one ?"}, {"from": "gpt", "value": "green"}]},
    ]
    table = write(folder / "train.json", rows)
    samples = read_chats(processor, table, image_folder=str(folder / "pictures"))
    expected = turns(f"{PICTURE}\nred circle ?", "one", "blue ?", "two")
    assert_reads(
        processor,
        samples,
        [(expected, ["one</s>", "two</s>"], [RED]), (turns("one ?", "green"), ["green</s>"], [])],
    )
    lines = samples.describe("train")
    assert any("1 image in 1 of 2 samples; image tokens of such a sample: 4 at least" in line for line in lines)


def test_llama_factory_sharegpt_and_openai_form(processor: Any, folder: Path) -> None:
    """data/mllm_demo.json of LLaMA-Factory: a placeholder in any turn, before or after the text."""
    names = ["pictures/red.png", "pictures/green.png"]
    messages = [
        {"content": "<image>red ?", "role": "user"},
        {"content": "one circle", "role": "assistant"},
        {"content": "blue ?<image>", "role": "user"},
        {"content": "two", "role": "assistant"},
    ]
    conversations = [
        {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]} for turn in messages
    ]
    expected = turns(f"{PICTURE}red ?", "one circle", f"blue ?{PICTURE}", "two")
    for number, row in enumerate([{"messages": messages}, {"conversations": conversations}]):
        table = write(folder / f"{number}.json", [row | {"images": names}])
        assert_reads(processor, read_chats(processor, table), [(expected, ["one circle</s>", "two</s>"], [RED, GREEN])])


def test_llama_factory_alpaca_form(processor: Any, folder: Path) -> None:
    row = {"instruction": "<image>\nred ?", "input": "circle", "output": "two", "images": ["pictures/blue.png"]}
    row |= {"system": "one", "history": [["green ?", "three"]]}
    table = write(folder / "train.json", [row])
    expected = "<s>system\none</s>\n" + turns("green ?", "three", f"{PICTURE}\nred ?\ncircle", "two")
    assert_reads(processor, read_chats(processor, table), [(expected, ["three</s>", "two</s>"], [BLUE])])


def test_ms_swift(processor: Any, folder: Path) -> None:
    """https://swift.readthedocs.io: `messages` with placeholders, or `query` and `response`; absolute paths."""
    images = [str(folder / "pictures" / name) for name in ("red.png", "blue.png")]
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "<image><image>red ?"}]
    rows = [
        {"messages": [*messages, {"role": "assistant", "content": "two"}], "images": images},
        {"query": "<image>red ?", "response": "green", "images": images[1:]},
    ]
    first = "<s>system\none</s>\n" + turns(f"{PICTURE}{PICTURE}red ?", "two")
    assert_reads(
        processor, read_chats(processor, write(folder / "a.jsonl", rows[:1])), [(first, ["two</s>"], [RED, BLUE])]
    )
    second = turns(f"{PICTURE}red ?", "green")
    assert_reads(
        processor, read_chats(processor, write(folder / "b.jsonl", rows[1:])), [(second, ["green</s>"], [BLUE])]
    )


def test_openai(processor: Any, folder: Path) -> None:
    """https://platform.openai.com/docs/guides/vision-fine-tuning: parts of type image_url, a data URI or a file."""
    encoded = base64.b64encode(bytes_of(folder, "green.png")).decode()

    def row(url: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "red ?"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]}

    rows = [row(f"data:image/png;base64,{encoded}"), row("pictures/red.png"), row("https://a.b/c.png")]
    table = write(folder / "train.jsonl", rows[:2])
    expected = turns(f"red ?{PICTURE}", "two")
    samples = read_chats(processor, table)
    assert_reads(processor, samples, [(expected, ["two</s>"], [GREEN]), (expected, ["two</s>"], [RED])])
    with pytest.raises(ConfigError, match=r"row 3: image 1: https://a.b/c.png is a URL, .* give their files"):
        read_chats(processor, write(folder / "url.jsonl", rows))


def test_parts_of_hugging_face_with_base64(processor: Any, folder: Path) -> None:
    """https://huggingface.co/docs/transformers/chat_templating_multimodal: the text of a picture's bytes."""
    parts = [{"type": "image", "base64": base64.b64encode(bytes_of(folder, "green.png")).decode()}]
    parts += [{"type": "text", "text": "red ?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]}
    samples = read_chats(processor, write(folder / "train.jsonl", [row]))
    assert_reads(processor, samples, [(turns(f"{PICTURE}red ?", "two"), ["two</s>"], [GREEN])])


@pytest.mark.parametrize("indices", [("0", 1), ([0], 1), (1.5, 0), (-1, 0), (0, 2)])
def test_an_index_of_no_image_is_a_bad_row(indices: tuple[Any, ...], processor: Any, folder: Path) -> None:
    parts = [{"type": "image", "index": index} for index in indices]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]
    table = write(folder / "train.jsonl", [{"messages": messages, "images": ["red.png", "blue.png"]}])
    with pytest.raises(ConfigError, match=r"row 1: it has 2 images in its column, and places for 2 in its turns"):
        read_chats(processor, table)


def with_struct(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [{"bytes": bytes_of(folder, name), "path": None} for name in names]


def save_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    data = datasets.Dataset.from_list(rows)
    data.cast_column("images", datasets.List(datasets.Image())).to_parquet(file)
    return file


def test_trl_with_typed_parts_in_parquet(processor: Any, folder: Path) -> None:
    """https://huggingface.co/docs/trl/dataset_formats#vision-datasets: images of the column, parts say where."""

    def parts(*kinds: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": kind} if kind else {"type": "image", "text": None} for kind in kinds]

    row = {
        "messages": [
            {"role": "user", "content": parts("", "red ?", "")},
            {"role": "assistant", "content": parts("one circle")},
        ],
        "images": with_struct(folder, "blue.png", "red.png"),
    }
    samples = read_chats(processor, save_parquet(folder / "train.parquet", [row]))
    expected = turns(f"{PICTURE}red ?{PICTURE}", "one circle")
    assert_reads(processor, samples, [(expected, ["one circle</s>"], [BLUE, RED])])


def test_trl_prompts_and_completions_without_placeholders(processor: Any, folder: Path) -> None:
    """trl-lib/llava-instruct-mix: images come first in the first turn of the user's."""
    row = {
        "images": with_struct(folder, "green.png"),
        "prompt": [{"role": "user", "content": "red ?"}],
        "completion": [{"role": "assistant", "content": "two"}],
    }
    samples = read_chats(processor, save_parquet(folder / "train.parquet", [row]))
    assert_reads(processor, samples, [(turns(f"{PICTURE}red ?", "two"), ["two</s>"], [GREEN])])


def test_parts_that_name_an_image_of_the_column_by_its_index(processor: Any, folder: Path) -> None:
    """HuggingFaceH4/llava-instruct-mix-vsft."""
    content = [{"index": None, "text": "red ?", "type": "text"}]
    content += [{"index": index, "text": None, "type": "image"} for index in (1, 0)]
    answer = {"role": "assistant", "content": [{"index": None, "text": "two", "type": "text"}]}
    row = {
        "messages": [{"role": "user", "content": content}, answer],
        "images": with_struct(folder, "green.png", "red.png"),
    }
    samples = read_chats(processor, save_parquet(folder / "train.parquet", [row]))
    assert_reads(processor, samples, [(turns(f"red ?{PICTURE}{PICTURE}", "two"), ["two</s>"], [RED, GREEN])])


def test_pages_of_a_document_in_qwens_form(processor: Any, folder: Path) -> None:
    """https://github.com/QwenLM/Qwen2.5-VL: each part names its file; one page more in a later turn."""

    def page(name: str) -> dict[str, str]:
        return {"type": "image", "image": f"file://{folder / 'pictures' / name}"}

    messages = [
        {"role": "user", "content": [page("red.png"), page("green.png"), {"type": "text", "text": "one ?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": [page("blue.png"), {"type": "text", "text": "three ?"}]},
        {"role": "assistant", "content": "blue"},
    ]
    samples = read_chats(processor, write(folder / "train.jsonl", [{"messages": messages}]))
    expected = turns(f"{PICTURE}{PICTURE}one ?", "two", f"{PICTURE}three ?", "blue")
    assert_reads(processor, samples, [(expected, ["two</s>", "blue</s>"], [RED, GREEN, BLUE])])
    assert [row for first, last in samples[0].places.tolist() for row in (last - first,)] == [4, 4, 4]


@pytest.mark.parametrize("write_list", [str, json.dumps], ids=["Python", "JSON"])
def test_a_csv_files_lists_of_images(processor: Any, folder: Path, write_list: Any) -> None:
    """As pandas writes a column of lists, and as JSON does; one image alone needs no list."""
    rows = [
        ["<image><image>red ?", "two", write_list(["pictures/red.png", "pictures/green.png"])],
        ["<image>one ?", "blue", "pictures/blue.png"],
    ]
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["instruction", "output", "images"], *rows])
    expected = [
        (turns(f"{PICTURE}{PICTURE}red ?", "two"), ["two</s>"], [RED, GREEN]),
        (turns(f"{PICTURE}one ?", "blue"), ["blue</s>"], [BLUE]),
    ]
    assert_reads(processor, read_chats(processor, folder / "train.csv"), expected)


def test_addresses_of_files_are_read_as_written_and_else_with_their_escapes(processor: Any, folder: Path) -> None:
    shutil.copy(folder / "pictures/red.png", folder / "pictures/a b.png")
    shutil.copy(folder / "pictures/green.png", folder / "pictures/c%20d.png")
    names = [f"file://{folder}/pictures/a%20b.png", f"file://{folder}/pictures/c%20d.png"]
    row = {"instruction": "<image><image>red ?", "output": "two", "images": names}
    samples = read_chats(processor, write(folder / "train.jsonl", [row]))
    assert_reads(processor, samples, [(turns(f"{PICTURE}{PICTURE}red ?", "two"), ["two</s>"], [RED, GREEN])])


def save_shard(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def test_webdataset_shards(processor: Any, folder: Path) -> None:
    """https://github.com/webdataset/webdataset: captions, conversations of one picture, and of several."""
    red, blue, green = (bytes_of(folder, name) for name in ("red.png", "blue.png", "green.png"))
    captions = {"0001.jpg": red, "0001.txt": b"one red circle", "0002.jpg": blue, "0002.txt": b"two"}
    assert_reads(
        processor,
        read_chats(processor, save_shard(folder / "captions.tar", captions)),
        [
            (turns(PICTURE, "one red circle"), ["one red circle</s>"], [RED]),
            (turns(PICTURE, "two"), ["two</s>"], [BLUE]),
        ],
    )
    says = [["<image>\nred ?", "one"], ["<image> and <image>", "three"]]
    of_each = [
        {"conversations": [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts, strict=True)]}
        for texts in says
    ]
    chats = {
        "a/0001.json": json.dumps(of_each[0]).encode(),
        "a/0001.png": blue,
        "a/0002.0.png": green,
        "a/0002.1.png": red,
        "a/0002.json": json.dumps(of_each[1]).encode(),
    }
    assert_reads(
        processor,
        read_chats(processor, save_shard(folder / "chats.tar", chats)),
        [
            (turns(f"{PICTURE}\nred ?", "one"), ["one</s>"], [BLUE]),
            (turns(f"{PICTURE} and {PICTURE}", "three"), ["three</s>"], [GREEN, RED]),
        ],
    )


def test_pictures_in_the_results_of_tools(processor: Any, folder: Path) -> None:
    result = [{"type": "text", "text": "blue"}, {"type": "image", "path": "pictures/green.png"}]
    messages = [
        {"role": "user", "content": "one ?"},
        {"role": "assistant", "content": "two"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "three"},
    ]
    samples = read_chats(processor, write(folder / "train.jsonl", [{"messages": messages}]))
    expected = turns("one ?", "two") + f"<s>tool\nblue{PICTURE}</s>\n<s>assistant\nthree</s>\n"
    assert_reads(processor, samples, [(expected, ["two</s>", "three</s>"], [GREEN])])


def answered(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "two"}], **more}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "one image too few",
        answered("<image> <image>", images=["pictures/red.png"]),
        "it has 1 image in its column, and",
    ),
    (
        "one too many",
        answered("<image>", images=["pictures/red.png"] * 2),
        "it has 2 images in its column, and places for 1",
    ),
    ("none", answered("<image> red", images=[]), "it has 0 images in its column, and places for 1"),
    ("a part without a source", answered([{"type": "image"}]), "it has 0 images in its column, and places for 1"),
    ("no file", answered("<image>", images=["pictures/no.png"]), "image 1: there is no file"),
    ("no image", answered("<image>", images=["train.jsonl"]), "image 1"),
    (
        "a broken URI",
        answered([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}]),
        "its data URI cannot",
    ),
    ("videos", answered("<video>", videos=["a.mp4"]), "column videos holds what"),
    (
        "a video in a part",
        answered([{"type": "video", "video": "a.mp4"}]),
        "of type video, and this run reads text and",
    ),
    ("an audio", answered([{"type": "input_audio", "input_audio": {}}]), "of type input_audio"),
    ("both columns", answered("<image>", images=["pictures/red.png"], image="pictures/red.png"), "images and image"),
]


@pytest.mark.parametrize(("row", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_row_whose_images_cannot_be_told_is_refused_or_left_out(
    row: dict[str, Any], message: str, processor: Any, folder: Path
) -> None:
    good = answered("<image>", images=["pictures/red.png"])
    table = write(folder / "train.jsonl", [good, row, good])
    if message == "image 1":
        message = "image "
    with pytest.raises(ConfigError, match=r"--chat_dataset.data_path: .*train.jsonl, row 2: ") as refused:
        read_chats(processor, table)
    assert message in str(refused.value)
    assert [sample.source_row for sample in read_chats(processor, table, skip_bad_rows=True)] == [0, 2]


def test_a_column_of_images_that_is_named_is_the_only_one(processor: Any, folder: Path) -> None:
    row = answered("<image>", photo="pictures/red.png")
    (sample,) = read_chats(processor, write(folder / "a.jsonl", [row]), image_column="photo")
    assert colours_of(sample) == [RED]
    with pytest.raises(ConfigError, match=r"row 1: column images holds what a run on text and images alone would lose"):
        read_chats(processor, write(folder / "b.jsonl", [row | {"images": ["x.png"]}]), image_column="photo")


@pytest.mark.parametrize("name", ["image_column", "image_folder"])
def test_a_setting_of_images_is_refused_for_a_model_of_text(name: str, processor: Any, folder: Path) -> None:
    config = DATASETS["chat_dataset"](data_path=str(write(folder / "a.jsonl", [answered("red")])), **{name: "photo"})
    function = find_dataset_function("chat_dataset", config)
    with pytest.raises(ConfigError, match=f"--chat_dataset.{name}: is of images, and this model reads text alone"):
        function(config, processor.tokenizer, "train")


def test_weights_of_rows_are_refused(processor: Any, folder: Path) -> None:
    rows = [answered("<image>", images=["pictures/red.png"], weight=0.5)] * 2
    with pytest.raises(ConfigError, match="weight"):
        read_chats(processor, write(folder / "a.jsonl", rows))


SPELLED: dict[str, Callable[[str], dict[str, Any]]] = {
    "question": lambda token: answered(f"<image>{token} red ?", images=["pictures/red.png"]),
    "answer": lambda token: {
        "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": f"two {token}"}],
        "images": ["pictures/red.png"],
    },
}


@pytest.mark.parametrize("place", SPELLED)
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "idefics3", "llava"])
def test_a_token_of_an_image_that_a_text_spells_stays_text(name: str, place: str, folder: Path) -> None:
    tokens = {"qwen2_vl": "<|image_pad|>", "gemma3": "<image_soft_token>", "idefics3": "<global-img>"}
    token = tokens.get(name, "<image>")
    # LLaVA's token is the placeholder of others, too: without a column of images it is text.
    row = answered("red <image> ?") if name == "llava" else SPELLED[place](token)
    processor = chat_processor(name)
    table = write(folder / "train.jsonl", [row])
    (sample,) = read_chats(processor, table)
    (clean,) = read_chats(processor, write(folder / "clean.jsonl", [json.loads(json.dumps(row).replace(token, ""))]))
    image_id = processor.tokenizer.convert_tokens_to_ids(token)
    assert (sample.input_ids == image_id).sum() == (clean.input_ids == image_id).sum()
    if name != "idefics3":  # the token that stands for its image is another
        with pytest.raises(ConfigError, match=r"spells|does not write its text"):
            read_chats(processor, table, split_special_tokens=False)


def test_a_template_that_rewrites_history_gives_samples_with_the_images_of_their_turns(folder: Path) -> None:
    """It drops earlier thoughts, so each answer is learned in a sample of its own, as in conversations of text."""
    processor = chat_processor("qwen2_vl")
    thoughts = "{% if m.get('thinking') and loop.last %}<think>{{ m['thinking'] }}</think>{% endif %}"
    processor.chat_template = processor.chat_template.replace(
        "{% if m['content'] is string", f"{thoughts}{{% if m['content'] is string", 1
    )
    messages = [
        {"role": "user", "content": "<image>one ?"},
        {"role": "assistant", "content": "two", "thinking": "red"},
        {"role": "user", "content": "<image> blue ?"},
        {"role": "assistant", "content": "three", "thinking": "green"},
    ]
    row = {"messages": messages, "images": ["pictures/red.png", "pictures/blue.png"]}
    samples = read_chats(processor, write(folder / "train.jsonl", [row]))
    first = turns(f"{PICTURE}one ?", "<think>red</think>two")
    second = turns(f"{PICTURE}one ?", "two", f"{PICTURE} blue ?", "<think>green</think>three")
    assert_reads(
        processor,
        samples,
        [
            (first, ["<think>red</think>two</s>"], [RED]),
            (second, ["<think>green</think>three</s>"], [RED, BLUE]),
        ],
    )


def test_a_template_that_leaves_out_images_of_earlier_turns_is_refused(folder: Path) -> None:
    processor = chat_processor("qwen2_vl")
    processor.chat_template = processor.chat_template.replace(
        "c['type'] == 'image'", "c['type'] == 'image' and loop.first"
    )
    table = write(folder / "train.jsonl", [answered("one <image>", images=["pictures/red.png"])])
    with pytest.raises(ConfigError, match="row 1: the chat template writes 0 of its 1 images"):
        read_chats(processor, table)


def test_what_is_cut_is_never_an_image(processor: Any, folder: Path) -> None:
    long = answered("<image>" + "red " * 40, images=["pictures/red.png"])
    late = answered("red " * 40 + "<image>", images=["pictures/red.png"])
    early = answered("<image> red", images=["pictures/red.png"])
    early["messages"][1]["content"] = "blue " * 60
    table = write(folder / "train.jsonl", [early, late, long])
    samples = read_chats(processor, table, context_length=40)
    assert [sample.source_row for sample in samples] == [0]
    assert len(samples[0].input_ids) == 40
    assert colours_of(samples[0]) == [RED]
    assert any(
        "1 sample left out: longer than context_length, and an image" in line for line in samples.describe("train")
    )
    kept = read_chats(processor, table, context_length=40, truncation="left")
    assert [sample.source_row for sample in kept] == [1]
    first, last = kept[0].places[0].tolist()
    assert (
        processor.tokenizer.decode(kept[0].input_ids[first:last].tolist()).count("<|image_pad|>") == last - first == 4
    )


def test_a_file_without_a_column_of_images_says_so(processor: Any, folder: Path) -> None:
    """Its placeholders are text, so nothing else would tell that its images are in a column of another name."""
    row = {"messages": [{"role": "user", "content": "<image>red ?"}, {"role": "assistant", "content": "one"}]}
    table = write(folder / "train.jsonl", [row | {"picture": "pictures/red.png"}])
    lines = read_chats(processor, table).describe("train")
    assert any("no images in 1 sample (--chat_dataset.image_column" in line for line in lines)
    (named,) = read_chats(processor, table, image_column="picture")
    assert colours_of(named) == [RED]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "pictures/red.png", "caption": None}, "; its image has no text, caption or txt"),
        ({"image": None, "caption": "one"}, "; its caption has no image"),
        ({"images": ["pictures/red.png"], "query": "<image>red ?"}, "; its query has no response"),
    ],
)
def test_a_row_that_lacks_a_part_says_which(row: dict[str, Any], reason: str, processor: Any, folder: Path) -> None:
    whole = {"image": "pictures/red.png", "caption": "one", "query": None, "response": None}
    table = write(folder / "train.jsonl", [whole, row])
    with pytest.raises(ConfigError, match=f"row 2: it has no messages or conversations{reason}"):
        read_chats(processor, table)
