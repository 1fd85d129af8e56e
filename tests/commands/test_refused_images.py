"""Images, captions and models that cannot be trained on end a run with one line, mostly before weights are read."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from PIL import Image

from tests.helpers.image_models import save_image_model, save_pictures
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, run_command
from tests.helpers.refusals import Bench, error_lines
from tools.chat import main as chat
from tools.generate import main as generate


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return Made(lambda name: save_image_model(name, folder / name))


@pytest.fixture
def images(models: Made, tmp_path: Path, process_group: ProcessGroup) -> Bench:
    return Bench(models["blip2_opt"], save_pictures(tmp_path / "pictures", 4), tmp_path / "own", process_group)


def flags_for(bench: Bench, *more: str) -> list[str]:
    bench.folder.mkdir(exist_ok=True)
    return ["--dataset", "caption_dataset", "--caption_dataset.data_path", str(bench.samples), *more]


def break_row(table: Path, **values: object) -> None:
    """The third row, with other values."""
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[2] |= values
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("spoil", "message", "num_ranks"),
    [
        (lambda table: (table.parent / "train-2.png").unlink(), "column image: there is no file", 2),
        (lambda table: (table.parent / "train-2.png").write_bytes(b"GIF89a"), "image ", 1),
        (lambda table: break_row(table, text=["a"]), "column text is not text but list", 1),
    ],
    ids=["no file", "no image", "no text"],
)
def test_a_bad_row_is_named_before_weights_are_read(
    spoil: Callable[[Path], object], message: str, num_ranks: int, images: Bench
) -> None:
    spoil(images.samples)
    refused = images.refused(*flags_for(images), world_size=num_ranks)
    assert f"train.jsonl, row 3: {message}" in refused


def test_a_shape_that_the_processor_refuses_is_named_before_weights_are_read(models: Made, images: Bench) -> None:
    Image.new("RGB", (2, 4000)).save(images.samples.parent / "train-2.png")
    refused = images.refused(*flags_for(images), "--model_name", str(models["qwen2_5_vl"]))
    assert "train.jsonl, row 3: the processor refuses image " in refused
    assert "train-2.png, 2 x 4000 pixels (absolute aspect ratio" in refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset text_dataset", "--dataset: a model of image and text is trained on captions or conversations"),
        ("--batching_strategy packing", "--batching_strategy: with this model the documents of a packed row would"),
        ("--task causal_lm", "--task: "),
        ("--use_peft --peft_method llama_adapter", "--peft_method: llama_adapter is for models of text alone"),
        ("--freeze_vision --freeze_qformer --freeze_language_model --use_peft", "nothing is left to train"),
        ("--enable_fsdp --wrap LlamaDecoderLayer", "--wrap: Blip2ForConditionalGeneration has no module of class"),
        ("--enable_fsdp --wrap OPTDecoder", "--wrap: OPTDecoder shares a weight with modules outside it"),
    ],
)
def test_flags_that_do_not_fit_the_model_are_refused(flags: str, message: str, images: Bench) -> None:
    assert message in images.refused(*(flags_for(images) if "--dataset" not in flags else []), *flags.split())


@pytest.mark.parametrize(
    ("name", "lacks", "flags", "message"),
    [
        ("llava", "", "--freeze_qformer", "--freeze_qformer: LlavaForConditionalGeneration has no such part; leave it"),
        ("blip2_opt", "processor_config.json", "", "--model_name: no processor could be loaded from"),
        ("blip2_opt", "image_token_index", "", "has no image_token_index, the token that stands for the image in"),
        ("blip2_t5", "image_token_index", "--dry_run", "has no image_token_index, the token that stands for the image"),
        ("blip2_t5", "decoder_start_token_id", "", "has no decoder_start_token_id, and the decoder's inputs are made"),
    ],
)
def test_a_model_that_lacks_something_is_refused(
    name: str, lacks: str, flags: str, message: str, models: Made, images: Bench, tmp_path: Path
) -> None:
    model = shutil.copytree(models[name], tmp_path / "model")
    if lacks.endswith(".json"):
        (model / lacks).unlink()
    elif lacks:
        config = json.loads((model / "config.json").read_text())
        config.pop(lacks, None)
        config["text_config"].pop(lacks, None)
        (model / "config.json").write_text(json.dumps(config))
    refused = images.refused(*flags_for(images), "--model_name", str(model), *flags.split())
    assert message in refused


def test_a_model_of_text_takes_no_images(tiny_model: Path, images: Bench) -> None:
    message = images.refused(*flags_for(images), "--model_name", str(tiny_model))
    assert "--dataset: caption_dataset is for models of image and text" in message
    message = images.refused(*flags_for(images), "--model_name", str(tiny_model), "--freeze_vision")
    assert "--freeze_vision: this is a model for --task causal_lm" in message


def test_a_picture_that_breaks_below_its_header_ends_the_run_with_its_row(images: Bench) -> None:
    file = images.samples.parent / "train-2.png"
    file.write_bytes(file.read_bytes()[:80])
    flags = images.flags(*flags_for(images), "--batch_size_training", "1", "--num_workers_dataloader", "1")
    outcomes = images.group.run([*flags, "--run_validation", "False"], 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    said = [line for outcome in outcomes for line in error_lines(outcome.stderr)]
    assert any("train.jsonl, row 3: image " in line and "cannot be read" in line for line in said), said
    assert not any("Traceback" in outcome.stderr for outcome in outcomes)


@pytest.mark.slow
def test_without_pillow_it_says_what_to_install(images: Bench) -> None:
    hidden = images.folder.parent / "hidden/PIL"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'PIL'\", name='PIL')")
    done = run_command(*images.flags(*flags_for(images)), real=True, PYTHONPATH=str(hidden.parent))
    assert done.returncode == 2
    (line,) = error_lines(done.stderr)
    assert line.endswith("pip install -r requirements-images.txt")


@pytest.mark.skipif(importlib.util.find_spec("num2words") is not None, reason="it loads with num2words")
def test_a_processor_names_the_package_that_it_needs(images: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    transformers.SmolVLMConfig().save_pretrained(model)
    transformers.SmolVLMImageProcessorPil().save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(images.model / name, model / name)
    message = images.refused(*flags_for(images), "--model_name", str(model), "--random_weights")
    assert message.endswith("the processor of this family needs num2words: pip install num2words")


def test_generate_asks_for_an_image_and_names_a_broken_one(
    images: Bench, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_text("no image")
    cases = [
        ([str(images.model), "--prompt", "a"], f"{images.model}: this model writes about an image; ask by "),
        ([str(images.model), "--image", str(tmp_path / "a.png")], "--image: image "),
        ([str(images.model), "--image", str(tmp_path / "b.png")], "--image: "),
        ([str(tiny_model), "--prompt", "a", "--image", str(tmp_path / "a.png")], "reads text alone; leave it out"),
    ]
    for argv, message in cases:
        assert generate(argv) == 2
        assert message in capsys.readouterr().err


def test_a_tool_that_takes_no_image_names_the_one_that_does(images: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat([str(images.model)]) == 2
    assert f"; ask by python -m tools.generate {images.model} --image FILE" in capsys.readouterr().err
