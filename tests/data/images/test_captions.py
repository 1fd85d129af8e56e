"""Images and captions are read from every form that people keep them in; what is broken is named by its row."""

from __future__ import annotations

import csv
import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.images.opening import image_source, open_image, read_size
from data.images.sequences import ImageSequences, build_image_sequences
from data.pipeline import load_sequences
from data.processors.image_tokens import placeholders_of
from data.processors.processor_loading import refusal_of_size
from data.tokens.encoding import Caption
from data.tokens.spans import BadExample
from tests.helpers.image_models import MODELS, captioned, save_pictures
from utils.errors import ConfigError

CaptionDataset = DATASETS["caption_dataset"]
NUM_ROWS = 6


@pytest.fixture(scope="module")
def processor() -> Any:
    return MODELS["blip2_opt"]()[1]


def read(
    processor: Any, path: Path, split: str = "train", *, max_text_length: int = 50, **settings: Any
) -> ImageSequences:
    config = CaptionDataset(data_path=str(path), **settings)

    def build(rows: Any, name: str) -> ImageSequences:
        return build_image_sequences(
            rows,
            name=name,
            max_text_length=max_text_length,
            refusal_of=partial(refusal_of_size, processor),
            placeholders=placeholders_of(processor),
        )

    function = find_dataset_function("caption_dataset", config)
    encode = Caption(processor.tokenizer.eos_token_id)
    sequences = load_sequences(function, config, processor, split, split_slice=None, build=build, encode=encode)
    assert isinstance(sequences, ImageSequences)
    return sequences


def assert_holds(processor: Any, sequences: ImageSequences, examples: list[tuple[Image.Image, str]]) -> None:
    assert len(sequences) == len(examples)
    for sequence, (image, text) in zip(sequences, examples, strict=True):
        words, end = sequence.labels[:-1].tolist(), sequence.labels[-1]
        assert (processor.tokenizer.decode(words).strip(), end) == (text, processor.tokenizer.eos_token_id)
        opened = sequence.pictures.open(sequence.place)
        assert np.array_equal(np.array(opened.image), np.array(image))


def write_table(folder: Path, form: str) -> Path:
    """The pictures in this form; the place that data_path names."""
    examples = captioned(NUM_ROWS)
    if form == "jsonl":
        save_pictures(folder, NUM_ROWS)
        return folder
    if form in ("saved", "parquet"):
        images, texts = zip(*examples, strict=True)
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        data = datasets.Dataset.from_dict({"image": list(images), "text": list(texts)}, features=features)
        if form == "parquet":
            data.to_parquet(folder / "train.parquet")
            return folder
        datasets.DatasetDict({"train": data, "validation": data.select(range(2))}).save_to_disk(str(folder / "data"))
        return folder / "data"
    place = folder / "train"
    place.mkdir()
    rows = []
    for index, (image, text) in enumerate(examples):
        (place / "shapes").mkdir(exist_ok=True)
        image.save(place / f"shapes/{index}.png")
        rows.append({"file_name": f"shapes/{index}.png", "text": text, "id": index})
    if form == "imagefolder.jsonl":
        (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with (place / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return folder


@pytest.mark.parametrize("form", ["jsonl", "saved", "parquet", "imagefolder.jsonl", "imagefolder.csv"])
def test_each_form_gives_the_same_images_and_captions(form: str, processor: Any, tmp_path: Path) -> None:
    assert_holds(processor, read(processor, write_table(tmp_path, form)), captioned(NUM_ROWS))


def test_a_split_of_a_saved_folder_and_a_share_that_is_set_aside(processor: Any, tmp_path: Path) -> None:
    saved = write_table(tmp_path, "saved")
    assert_holds(processor, read(processor, saved, "validation"), captioned(NUM_ROWS)[:2])
    table = save_pictures(tmp_path / "one", NUM_ROWS)
    parts = [read(processor, table, split, validation_fraction=0.34) for split in ("train", "validation")]
    texts = {processor.tokenizer.decode(s.labels[:-1]).strip(): part for part in parts for s in part for part in [part]}
    assert [len(part) for part in parts] == [NUM_ROWS - 2, 2]
    assert texts
    for part in parts:
        for sequence in part:
            text = processor.tokenizer.decode(sequence.labels[:-1]).strip()
            image = next(image for image, caption in captioned(NUM_ROWS) if caption == text)
            assert np.array_equal(np.array(sequence.pictures.open(sequence.place).image), np.array(image))


def test_a_long_caption_is_cut_and_counted_and_an_empty_one_left_out(processor: Any, tmp_path: Path) -> None:
    table = save_pictures(tmp_path, 3)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[0]["text"], rows[1]["text"] = "red " * 40, " "
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sequences = read(processor, table, max_text_length=8)
    assert len(sequences[0].labels) == 8
    assert len(sequences) == 2
    lines = " ".join(sequences.describe("train"))
    assert "1 caption cut: longer than max_text_length 8" in lines
    assert "1 sample left out: their captions are empty" in lines


def test_prompts_of_a_column_go_with_their_images(processor: Any, tmp_path: Path) -> None:
    table = save_pictures(tmp_path, 3)
    rows = [json.loads(line) | {"question": f"what is it {index} ?"} for index, line in enumerate(table.open())]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sequences = read(processor, table, prompt_column="question")
    assert [s.pictures.open(s.place).prompt for s in sequences] == [row["question"] for row in rows]


BROKEN = [
    ("absent", {"image": "no.png"}, "row 2: column image: there is no file"),
    ("text file", {"image": "train.jsonl"}, "row 2: image"),
    ("number", {"image": 7}, "row 2: column image is no image and no path of one but int"),
    ("null", {"image": None}, "row 2: column image is no image and no path of one but empty"),
    ("url", {"image": "https://a.b/c.png"}, "row 2: column image: https://a.b/c.png is a URL"),
    ("list", {"text": ["a"]}, "row 2: column text is not text but list"),
    ("no text", {"text": None}, "row 2: column text is empty"),
]


@pytest.mark.parametrize(("row", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_bad_row_is_named_or_left_out(row: dict, message: str, processor: Any, tmp_path: Path) -> None:
    table = save_pictures(tmp_path, 3)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[1] |= row
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"--caption_dataset.data_path: .*train.jsonl, row 2: ") as refused:
        read(processor, table)
    assert message in str(refused.value)
    kept = read(processor, table, skip_bad_rows=True)
    assert [sequence.source_row for sequence in kept] == [0, 2]


def test_a_shape_that_the_processor_refuses_is_a_bad_row(tmp_path: Path) -> None:
    qwen = MODELS["qwen2_5_vl"]()[1]
    table = save_pictures(tmp_path, 6)
    for index, size in ((1, (402, 2)), (4, (3, 900)), (5, (400, 2))):  # the last is at the limit, and taken
        Image.new("RGB", size).save(tmp_path / f"train-{index}.png")
    with pytest.raises(ConfigError) as refused:
        read(qwen, table)
    assert str(refused.value) == (
        f"--caption_dataset.data_path: {table}, row 2: the processor refuses image {tmp_path / 'train-1.png'}, 402 x 2 "
        "pixels (absolute aspect ratio must be smaller than 200, got 201.0); mend it, or leave such rows out with "
        "--skip_bad_rows"
    )
    kept = read(qwen, table, skip_bad_rows=True)
    assert [sequence.source_row for sequence in kept] == [0, 2, 3, 5]
    assert "train: 2 samples left out by --skip_bad_rows" in kept.describe("train")


def test_columns_of_other_names_are_asked_for(processor: Any, tmp_path: Path) -> None:
    table = save_pictures(tmp_path, 3)
    table.write_text(table.read_text().replace('"image"', '"picture"').replace('"text"', '"says"'))
    with pytest.raises(ConfigError, match="has no column image, text; it has picture, says: name them with"):
        read(processor, table)
    assert_holds(processor, read(processor, table, image_column="picture", text_column="says"), captioned(3))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_an_image_of_any_mode_has_three_channels(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "image.tiff"
    Image.new(mode if mode != "P" else "RGB", (6, 4)).convert(mode).save(file)
    assert (open_image(file).mode, open_image(file).size) == ("RGB", (6, 4))


def test_fractions_are_refused_since_they_would_be_black(tmp_path: Path) -> None:
    Image.new("F", (6, 4), 0.5).save(tmp_path / "a.tiff")
    for read in (read_size, open_image):
        with pytest.raises(BadExample, match=r"a\.tiff cannot be read .its pixels are fractions, of an unknown range"):
            read(tmp_path / "a.tiff")


def test_bytes_that_are_no_image_are_named_without_an_address_in_memory() -> None:
    said = r"^image of 4 bytes cannot be read .cannot identify image file in its bytes.$"
    with pytest.raises(BadExample, match=said):
        open_image(b"none")


@pytest.mark.parametrize("name", ["image.png", "image.tiff", "image.pgm"])
def test_greys_of_16_bits_keep_their_order(name: str, tmp_path: Path) -> None:
    greys = np.array([[0, 300, 20_000, 40_000, 2**16 - 1]], dtype=np.uint16)
    Image.fromarray(greys).save(tmp_path / name)
    shown = np.asarray(open_image(tmp_path / name))
    assert shown[0].tolist() == [[grey // 256] * 3 for grey in greys[0].tolist()]


def test_greys_of_12_bits_keep_their_upper_8(tmp_path: Path) -> None:
    """Pillow leaves their numbers as they are, up to 4,095."""
    greys, bits = [0, 300, 2_000, 2**12 - 1], 12
    packed = int("".join(f"{grey:0{bits}b}" for grey in greys), 2).to_bytes(len(greys) * bits // 8, "big")
    values = {256: len(greys), 257: 1, 258: bits, 259: 1, 262: 1, 273: 200, 277: 1, 278: 1, 279: len(packed)}
    tags = b"".join(struct.pack("<HHII", tag, 4 if tag > 270 else 3, 1, value) for tag, value in values.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(values)) + tags
    (tmp_path / "image.tiff").write_bytes(header.ljust(200, b"\0") + packed)
    shown = np.asarray(open_image(tmp_path / "image.tiff"))
    assert shown[0].tolist() == [[grey // 16] * 3 for grey in greys]


@pytest.mark.parametrize("grey", [-5, 2**16])
def test_numbers_beyond_16_bits_are_refused_since_all_might_be_black_or_white(grey: int, tmp_path: Path) -> None:
    Image.fromarray(np.array([[grey, 7]], dtype=np.int32)).save(tmp_path / "a.tiff")
    with pytest.raises(BadExample, match=r"a\.tiff cannot be read .its pixels are whole numbers from -?[57] to "):
        open_image(tmp_path / "a.tiff")


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    file = tmp_path / "image.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (6, 4)).save(file, exif=exif)
    assert open_image(file).size == (4, 6)


@pytest.mark.parametrize("kind", ["jpg", "tiff", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_that_a_header_says_is_that_of_the_turned_pixels(kind: str, orientation: int, tmp_path: Path) -> None:
    """Pillow has turned the size of a TIFF when it opens the file, and that of no other."""
    file, exif = tmp_path / f"image.{kind}", Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (6, 4)).save(file, exif=exif)
    assert read_size(file) == open_image(file).size == ((4, 6) if orientation > 4 else (6, 4))


@pytest.mark.parametrize("is_late", [False, True], ids=["before the pixels", "behind them"])
@pytest.mark.parametrize("kind", ["eXIf", "zTXt", "iTXt"])
def test_a_png_is_turned_wherever_a_note_says_so(kind: str, is_late: bool, tmp_path: Path) -> None:
    """The size that its header says, of which a text is made, is that of its pixels."""
    file, exif, notes = tmp_path / "image.png", Image.Exif(), PngInfo()
    exif[0x0112] = 6
    if kind == "zTXt":  # as ImageMagick writes it
        notes.add_text("Raw profile type exif", f"\nexif\n{len(exif.tobytes())}\n{exif.tobytes().hex()}\n", zip=True)
    elif kind == "iTXt":
        notes.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta tiff:Orientation="6"/>')
    Image.new("RGB", (6, 4)).save(file, pnginfo=notes, **({"exif": exif} if kind == "eXIf" else {}))
    if is_late:
        data = file.read_bytes()
        start, end = data.index(kind.encode()) - 4, data.index(b"IEND") - 4
        stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
        file.write_bytes(data[:start] + data[stop:end] + data[start:stop] + data[end:])
    assert read_size(file) == open_image(file).size == (4, 6)


def test_an_image_that_is_cut_off_is_named(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    Image.effect_noise((64, 64), 50).save(file)
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(BadExample, match=r"image .*image.png cannot be read \("):
        open_image(file)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a" * 299, r"^image 1: /.*/a+\.\.\. cannot be opened .File name too long.$"),
        ("iVBORw0KGg/" * 90, r"^image 1: there is no file /.*\.\.\.; if this is base64, write data:;base64, before it"),
        ("~nosuch/a.png", r"^image 1: there is no file /.*/~nosuch/a\.png$"),
    ],
    ids=["long name", "base64", "nobody"],
)
def test_a_text_that_cannot_be_a_path_is_a_bad_row(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadExample, match=message) as refused:
        image_source(value, "image 1", tmp_path)
    assert len(str(refused.value)) < 400
