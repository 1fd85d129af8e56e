"""Every recipe trains a tiny model, started as its first comment says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from configs.flags import parse_flags
from data.batches.layout import BatchLayout
from tests.helpers.image_models import save_image_model, save_pictures
from tests.helpers.made import Made
from tests.helpers.pairwise import select_values
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics
from tests.helpers.refusals import dialogues, write_lines
from tests.helpers.seq2seq_models import save_seq2seq

RECIPES = sorted((ROOT / "configs/recipes").rglob("*.yaml"))
DATA = {
    "chat_dataset": [
        {"messages": [{"role": "user", "content": f"Add 1 to {i}."}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(40)
    ],
    "instruction_dataset": [{"question": f"What is 1 + {i}?", "answer": str(i + 1)} for i in range(40)],
    "text_dataset": [{"text": f"One and {i} is {i + 1}. " * 9} for i in range(40)],
    "alpaca_dataset": [{"instruction": f"Add 1 to {i}.", "input": "", "output": str(i + 1)} for i in range(40)],
    "grammar_dataset": [{"input": f"He have {i}.", "target": f"He has {i}."} for i in range(40)],
    "samsum_dataset": dialogues(40),
}
FAST = (
    "chat_lora.yaml",
    "lora_dialogue_summary.yaml",
    "bart/json_events.yaml",
    "blip2/sgd_bf16_16x4.yaml",
    "litgpt/qlora_nf4_4x4.yaml",
)
PROCESSES = ("--nproc_per_node", "--num_processes")
MOST_RANKS = 2  # of the four or eight that a recipe is for


def command_of(recipe: Path) -> list[str]:
    """The command in the recipe's first lines, as words."""
    (command,) = re.findall(r"^#   ((?:python|torchrun|accelerate launch) .*)$", recipe.read_text(), re.MULTILINE)
    return shlex.split(command)


def named_settings(recipe: Path) -> dict[tuple[str, str], str]:
    """The settings of a recipe that are no numbers, by section and name."""
    sections = {name: section for name, section in yaml.safe_load(recipe.read_text()).items() if section}
    return {
        (section, name): str(value)
        for section, settings in sections.items()
        for name, value in settings.items()
        if isinstance(value, str | bool)
    }


SETTINGS = {recipe: named_settings(recipe) for recipe in RECIPES}
NAMES = sorted(set().union(*SETTINGS.values()))


def values_of(recipe: Path) -> list[str | None]:
    return [recipe.parent.name, *(SETTINGS[recipe].get(name) for name in NAMES)]


def num_ranks(words: list[str]) -> int:
    """How many processes a command starts, over all machines."""
    given = {flag: int(value) for flag, value in pairwise(words) if flag in ("--nnodes", *PROCESSES)}
    return given.get("--nnodes", 1) * next((given[flag] for flag in PROCESSES if flag in given), 1)


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A tiny model by task."""

    def make(task: str) -> Path:
        if task == "causal_lm":
            return tiny_model
        folder = tmp_path_factory.mktemp("models") / task
        if task == "image_text":
            return save_image_model("blip2_opt", folder)
        return save_seq2seq("bart", folder, max_position_embeddings=1024)

    return Made(make)


def short(recipe: Path) -> str:
    return str(recipe.relative_to(ROOT / "configs/recipes"))


@pytest.mark.parametrize("recipe", RECIPES, ids=short)
def test_a_recipe_is_accepted(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = command_of(recipe)
    settings = parse_flags(words[words.index("finetuning.py") + 1 :]).train_config
    assert settings.lr == float(yaml.safe_load(recipe.read_text())["train_config"].get("lr", settings.lr))


@pytest.mark.parametrize(
    "recipe", select_values(RECIPES, values_of, fast=lambda recipe: short(recipe) in FAST), ids=short
)
def test_a_recipe_trains_as_its_first_lines_say(
    recipe: Path,
    models: Made,
    process_group: ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = command_of(recipe)
    flags = words[words.index("finetuning.py") + 1 :]
    assert flags[flags.index("--config") + 1] in (str(recipe.relative_to(ROOT)), recipe.stem)
    settings = yaml.safe_load(recipe.read_text())["train_config"]
    for flag, value in (("--config", recipe), ("--model_name", models[settings.get("task", "causal_lm")])):
        flags[flags.index(flag) + 1] = str(value)
    dataset = settings.get("dataset", "samsum_dataset")
    for split, numbers in (("train", range(16)), ("validation", range(16, 20))):
        if dataset == "caption_dataset":
            save_pictures(tmp_path / "data", len(numbers), split=split)
        else:
            write_lines(tmp_path / f"data/{split}.jsonl", [DATA[dataset][number] for number in numbers])
    if (place := f"--{dataset}.data_path") in flags:
        flags[flags.index(place) + 1] = str(tmp_path / "data")
    else:
        flags += [place, str(tmp_path / "data")]
    if dataset == "chat_dataset":  # the tiny model has no template of its own
        flags += ["--chat_dataset.chat_template", str(ROOT / "datasets/samples/formats/chat.jinja")]
    flags += ["--output_dir", "run", "--num_workers_dataloader", "0"]
    flags += ["--max_train_step", "1", "--max_eval_step", "2"]
    if settings.get("eval_generate"):
        flags += ["--max_new_tokens", "8"]  # random weights would write all that they may
    monkeypatch.chdir(tmp_path)
    process_group.train(flags, min(MOST_RANKS, num_ranks(words)))
    events = read_metrics(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "train"] == [1]
    assert events[-1]["status"] == "finished"


@pytest.mark.parametrize("name", ["full", "ddp", "fsdp"])
def test_the_captioning_labs_runs_are_as_long_and_over_four_gpus_as_fast_as_there(name: str) -> None:
    recipe = ROOT / f"configs/recipes/blip2/{name}_bf16_16x4.yaml"
    train = parse_flags(["--config", str(recipe), "--model_name", "M"]).train_config
    assert (train.num_epochs, train.num_workers_dataloader, train.save_model) == (4, 8, False)
    assert train.lr == 2e-5
    assert train.lr_scale_with_world_size == ("none" if name == "full" else "linear")  # 8e-5 over four


def test_every_recipe_is_on_the_page() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert [recipe.stem for recipe in RECIPES if not re.search(rf"\b{recipe.stem}(\.yaml)?`", page)] == []


@pytest.mark.parametrize(("world_size", "num_steps"), [(4, 3683), (2, 7366)])
def test_processes_share_out_samsum_as_the_page_says(world_size: int, num_steps: int) -> None:
    train = parse_flags(
        ["--config", str(ROOT / "configs/recipes/bart/accelerate.yaml"), "--model_name", "M"]
    ).train_config
    layout = BatchLayout(train.batch_size_training, train.gradient_accumulation_steps, world_size)
    assert layout.num_steps(14_732) == num_steps


@pytest.mark.slow
def test_four_processes_begin_an_epoch_of_3683_steps(models: Made, process_group: ProcessGroup, tmp_path: Path) -> None:
    """BART's recipe with as many rows as SAMSum has, a step of it."""
    write_lines(tmp_path / "data/train.jsonl", (DATA["samsum_dataset"] * 369)[:14_732])
    flags = ["--config", str(ROOT / "configs/recipes/bart/accelerate.yaml"), "--model_name", str(models["seq2seq_lm"])]
    flags += ["--samsum_dataset.data_path", str(tmp_path / "data"), "--output_dir", str(tmp_path / "run")]
    flags += ["--max_train_step", "1", "--run_validation", "False", "--save_model", "False"]
    process_group.train(flags, 4)
    start, step = read_metrics(tmp_path / "run")[:2]
    assert (start["world_size"], start["num_train_samples"], start["steps_per_epoch"]) == (4, 14_732, 3_683)
    assert step["step"] == 1
