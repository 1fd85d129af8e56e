"""Models of image and text train as a plain loop with transformers' own loss does, however the batch is split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cuts import draws, random_cut
from tests.helpers.image_models import needs_num2words, save_image_model, save_pictures
from tests.helpers.image_reference import image_flags, image_reference
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.reference import assert_agrees, lora_flags

NUM_STEPS, NUM_ROWS = 2, 20
PACKED_LENGTH = 128
PACKED_CASES = ["qwen2_5_vl", "gemma3"]
SLOW_PACKED_CASES = ["llava", "idefics3", "qwen2_vl"]
NUM_DRAWS = 5  # of cuts for each case; the first is a fast test
LANGUAGE_TARGETS = r".*(language|text)_model.*\.(q_proj|v_proj)"
CASES = [  # every layout and kind of training
    ("blip2_opt", "single", False),
    ("idefics3", "ddp", False),
    ("qwen2_5_vl", "fsdp", True),
]
SLOW_CASES = [  # every family
    ("blip2_t5", "fsdp", False),
    ("llava", "fsdp", True),
    ("gemma3", "fsdp", False),
    ("paligemma", "single", False),
    ("mllama", "single", False),
    ("idefics1", "fsdp", False),
    ("qwen2_vl", "fsdp", False),
]
MORE_CASES = [
    ("blip2_opt", "ddp", False),
    ("blip2_opt", "fsdp", True),
    ("blip2_opt", "fsdp", False),
    ("qwen2_5_vl", "ddp", False),
    ("blip2_opt", "ddp", True),
    ("blip2_t5", "ddp", False),
    ("llava", "ddp", False),
    ("llava", "fsdp", False),
    ("gemma3", "ddp", False),
    ("idefics3", "fsdp", False),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pictures(tmp_path_factory.mktemp("pictures"), NUM_ROWS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return Made(lambda name: save_image_model(name, folder / name))


@pytest.fixture(scope="module")
def references(models: Made, pictures: Path) -> Made:
    return Made(
        lambda name, global_batch, targets: image_reference(
            models[name], pictures, num_steps=NUM_STEPS, global_batch=global_batch, lora_targets=targets
        )
    )


@pytest.mark.parametrize("draw", draws(NUM_DRAWS))
@pytest.mark.parametrize(
    ("name", "layout", "lora"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
        pytest.param("smolvlm", "fsdp", False, marks=[needs_num2words, pytest.mark.slow]),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES),
    ],
)
def test_loss_and_gradients_do_not_depend_on_the_split(
    name: str,
    layout: str,
    lora: bool,
    draw: int,
    models: Made,
    references: Made,
    pictures: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    cut = random_cut(name, layout, lora, draw, ranks=(1,) if layout == "single" else (2, 3))
    flags = [*image_flags(models[name], pictures, tmp_path / "run", num_steps=NUM_STEPS), *cut.flags]
    flags += ["--save_model", "False", "--batching_strategy", "padding"]
    flags += ["--enable_fsdp"] if layout == "fsdp" else []
    # A tower's layers have such names, too, and get no adapter.
    flags += lora_flags(["q_proj", "v_proj"]) if lora else []
    process_group.train(flags, cut.ranks)
    targets = LANGUAGE_TARGETS if lora else ""
    # In fp32, plain transformers is 6e-6 off for PaliGemma, whose embeddings are multiplied by the root of their size.
    tolerance = 2e-5 if name == "paligemma" else 1e-5
    assert_agrees(tmp_path / "run", references[name, cut.global_batch, targets], tolerance=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        *PACKED_CASES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PACKED_CASES),
        pytest.param("smolvlm", marks=[needs_num2words, pytest.mark.slow]),
    ],
)
def test_packed_rows_give_the_losses_and_gradients_of_one_example_at_a_time(
    name: str, models: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    pictures = save_pictures(tmp_path / "pictures", NUM_ROWS, widths=(32, 64, 48))
    cut = random_cut("packed", name, ranks=(2,))
    flags = [*image_flags(models[name], pictures, tmp_path / "run", num_steps=NUM_STEPS), *cut.flags]
    flags += ["--context_length", str(PACKED_LENGTH), "--batching_strategy", "packing", "--save_model", "False"]
    process_group.train([*flags, "--enable_fsdp"], cut.ranks)
    reference = image_reference(
        models[name], pictures, num_steps=NUM_STEPS, global_batch=cut.global_batch, packed_length=PACKED_LENGTH
    )
    assert_agrees(tmp_path / "run", reference, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llava", "CLIPEncoderLayer,LlamaDecoderLayer"),  # it reads hidden states from inside of the encoder
        pytest.param("qwen2_5_vl", "Qwen2_5_VLVisionBlock,Qwen2_5_VLDecoderLayer", marks=pytest.mark.slow),
    ],
)
def test_a_vision_encoder_that_is_one_unit_gives_the_steps_of_its_layers(
    name: str, layers: str, pictures: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    model = save_image_model(name, tmp_path / "model", text_config={"intermediate_size": 512})
    flags = ["--batch_size_training", "2", "--save_model", "False", "--batching_strategy", "padding", "--enable_fsdp"]
    runs = tmp_path / "joined", tmp_path / "apart"
    for run, wrap in zip(runs, ([], ["--wrap", layers]), strict=True):
        process_group.train([*image_flags(model, pictures, run, num_steps=NUM_STEPS), *flags, *wrap], 2)
    joined, apart = ([(e["loss"], e["grad_norm"]) for e in train_events(run)] for run in runs)
    assert joined == apart
    num_units = [int(re.findall(r"num_units: (\d+)", (run / "run.yaml").read_text())[0]) for run in runs]
    assert num_units[0] == num_units[1] - 1


def test_what_a_vision_encoder_hands_its_layers_is_not_rounded_because_they_are_units(
    models: Made, pictures: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """In bf16-mixed each unit casts its inputs. The angles of patches are in fp32, as transformers' layers ask."""
    whole = ["--wrap", "Qwen2_5_VisionTransformerPretrainedModel,Qwen2_5_VLDecoderLayer"]
    runs = tmp_path / "whole", tmp_path / "layers"
    for run, wrap in zip(runs, (whole, []), strict=True):
        flags = image_flags(models["qwen2_5_vl"], pictures, run, num_steps=NUM_STEPS)
        flags[flags.index("--mixed_precision") + 1] = "True"
        flags += ["--enable_fsdp", "--batching_strategy", "padding", "--save_model", "False"]
        process_group.train([*flags, *wrap], 1)
    encoder, layers = ([(e["loss"], e["grad_norm"]) for e in train_events(run)] for run in runs)
    assert layers == encoder


def test_a_4_bit_base_gives_the_same_steps_on_any_number_of_ranks(
    models: Made, pictures: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The language model is packed, the tower is not; an adapter trains on it, sharded and alone."""
    events = []
    for name, layout, ranks in (("alone", [], 1), ("sharded", ["--enable_fsdp"], 2)):
        flags = image_flags(models["llava"], pictures, tmp_path / name, num_steps=NUM_STEPS)
        flags += [*lora_flags(["q_proj", "v_proj"]), "--quantization", "4bit", "--global_batch_size", "8"]
        process_group.train([*flags, "--batch_size_training", str(4 // ranks), *layout], ranks)
        events.append([(event["loss"], event["grad_norm"]) for event in train_events(tmp_path / name)])
    assert_agrees(tmp_path / "sharded", events[0], tolerance=1e-5)
    plain = image_reference(models["llava"], pictures, num_steps=1, global_batch=8, lora_targets=LANGUAGE_TARGETS)
    assert abs(events[0][0][0] / plain[0][0] - 1) > 1e-4, "nothing was rounded to 4 bits"
    assert events[0][0][0] == pytest.approx(plain[0][0], rel=0.1)
