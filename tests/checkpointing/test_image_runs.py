"""A run of a model of image and text goes on bit for bit, and what it saves loads and answers as plain transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from data.processors.processor_loading import image_inputs, prompt_text, read_processor
from tests.helpers.exports import export
from tests.helpers.generated import evaluation
from tests.helpers.image_models import captioned, save_image_model, save_pictures
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal
from tools.generate import main as generate

NUM_EVAL = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, process_group: ProcessGroup) -> Path:
    """A run of LLaVA over two ranks, whose tower has a layer that nothing reads, with its model and pictures."""
    folder = tmp_path_factory.mktemp("images")
    save_image_model("llava", folder / "model")
    save_pictures(folder / "pictures", 12)
    save_pictures(folder / "pictures", NUM_EVAL, seed=1, split="validation")
    process_group.train(flags(folder, folder / "run"), 2)
    return folder


def flags(folder: Path, output: Path, *more: str) -> list[str]:
    """Six steps of four rows over two epochs, a checkpoint every third, everything sharded."""
    given = ["--model_name", str(folder / "model"), "--output_dir", str(output), "--dataset", "caption_dataset"]
    given += ["--caption_dataset.data_path", str(folder / "pictures"), "--enable_fsdp", "--num_epochs", "2"]
    given += ["--batch_size_training", "2", "--lr", "5e-3", "--save_every_steps", "3", "--keep_last", "9"]
    return [*given, "--batching_strategy", "padding", "--num_workers_dataloader", "0", *more]


def test_a_resumed_run_gives_the_same_weights(folder: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    killed = as_if_killed_after(3, folder / "run", tmp_path / "run")
    process_group.train(flags(folder, killed, "--resume", "auto"), 2)
    assert_bit_equal(killed, folder / "run")


@torch.no_grad()
def test_its_weights_load_with_their_processor_and_have_the_loss_that_was_measured(folder: Path) -> None:
    saved = folder / "run/model"
    model = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(saved, backend="pil")
    ask = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], add_generation_prompt=True)
    total, count = 0.0, 0
    for image, text in captioned(NUM_EVAL, seed=1):
        inputs = dict(processor(images=[image], text=[ask], return_tensors="pt"))
        answer = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        answer = torch.cat([answer, torch.tensor([[processor.tokenizer.eos_token_id]])], dim=1)
        labels = torch.cat([torch.full_like(inputs["input_ids"], -100), answer], dim=1)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        total += model(**inputs, labels=labels).loss.item() * answer.shape[1]
        count += answer.shape[1]
    best = min(event["loss"] for event in read_metrics(folder / "run") if event["event"] == "eval")
    assert total / count == pytest.approx(best, rel=1e-5)


def test_an_export_of_its_checkpoint_is_what_the_run_saved(folder: Path, tmp_path: Path) -> None:
    out = export(folder / "run/checkpoints/step-00000006", tmp_path / "out", "--verify")
    found, wanted = (load_file(next(place.glob("*.safetensors"))) for place in (out, folder / "run/model"))
    assert found.keys() == wanted.keys()
    events = [event for event in read_metrics(folder / "run") if event["event"] == "eval"]
    if events[-1]["loss"] == min(event["loss"] for event in events):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    AutoProcessor.from_pretrained(out, backend="pil")


@torch.no_grad()
def test_generate_answers_as_plain_transformers_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "picture.png"
    captioned(1, seed=5)[0][0].save(file)
    capsys.readouterr()
    assert generate([str(folder / "run/model"), "--image", str(file), "--max_new_tokens", "6"]) == 0
    said = capsys.readouterr().out.strip()
    model = AutoModelForImageTextToText.from_pretrained(folder / "run/model", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder / "run/model", backend="pil")
    ask = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], add_generation_prompt=True)
    inputs = processor(images=[Image.open(file)], text=[ask], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=2)
    wanted = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert said == wanted


@pytest.mark.parametrize(
    "name", slow_but(0, ["qwen2_5_vl", "blip2_t5", "gemma3", "blip2_opt", "idefics3", "smolvlm"], num_slow=1)
)
def test_a_family_resumes_exports_loads_and_answers(
    name: str, process_group: ProcessGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "smolvlm" and find_spec("num2words") is None:
        pytest.skip("SmolVLM's processor needs num2words")
    base, run = save_image_model(name, tmp_path / "model"), tmp_path / "run"
    save_pictures(tmp_path / "pictures", 12)
    given = ("--run_validation", "False")
    process_group.train(flags(tmp_path, run, *given), 2)
    killed = as_if_killed_after(3, run, tmp_path / "killed")
    process_group.train(flags(tmp_path, killed, *given, "--resume", "auto"), 2)
    assert_bit_equal(killed, run)

    file = tmp_path / "picture.png"
    captioned(1, seed=5)[0][0].save(file)
    places = base, run / "model", export(run, tmp_path / "exported", "--verify")
    logits = [logits_of(place, file) for place in places]
    assert torch.equal(logits[1], logits[2])
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)
    assert "video_processor" in json.loads((places[2] / "processor_config.json").read_text()) or "vl" not in name

    capsys.readouterr()
    assert generate([str(run), "--image", str(file), "--max_new_tokens", "6"]) == 0
    processor, model, inputs = loaded(places[1], file)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=2)
    asked = inputs["input_ids"].shape[1]
    new = output[:, asked:] if torch.equal(output[:, :asked], inputs["input_ids"]) else output
    assert capsys.readouterr().out.strip() == processor.tokenizer.decode(new[0], skip_special_tokens=True).strip()


def loaded(folder: Path, file: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Processor and model of a folder, and the inputs of an image that nothing is asked about."""
    processor = read_processor(str(folder), "--model_name")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return processor, model, image_inputs(processor, Image.open(file), prompt_text(processor, ""))


@torch.no_grad()
def logits_of(folder: Path, file: Path) -> torch.Tensor:
    _, model, inputs = loaded(folder, file)
    decoder = (
        {"decoder_input_ids": torch.arange(3, 9)[None]} if model.config.get_text_config().is_encoder_decoder else {}
    )
    return model(**inputs, **decoder).logits


def test_captions_at_evaluation_are_those_of_one_process(
    folder: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """`--eval_generate` over two sharded ranks; each caption is what plain transformers writes."""
    given = ["--eval_generate", "--max_new_tokens", "6", "--eval_before_training", "--max_train_step", "1"]
    process_group.train(flags(folder, tmp_path / "sharded", *given), 2)
    alone = [flag for flag in flags(folder, tmp_path / "alone", *given) if flag != "--enable_fsdp"]
    process_group.train(alone, 1)
    rouge, samples = evaluation(tmp_path / "sharded")
    assert evaluation(tmp_path / "alone") == (rouge, samples)
    assert len(samples) == NUM_EVAL
    pictures = captioned(NUM_EVAL, seed=1)
    assert [sample["reference"] for sample in samples] == [text for _, text in pictures]
    for sample, (image, _) in zip(samples, pictures, strict=True):
        image.save(tmp_path / "picture.png")
        processor, model, inputs = loaded(folder / "model", tmp_path / "picture.png")
        output = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=2)
        new = output[0, inputs["input_ids"].shape[1] :]
        assert sample["generated"] == processor.tokenizer.decode(new, skip_special_tokens=True).strip()
