"""No key vanishes, whatever it is; and files that cannot be read are refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.flags import parse_flags
from configs.hints import HINTS
from configs.run import SETTINGS
from configs.unsupported_flags import UNSUPPORTED
from tests.helpers.translated import refusal_of, translate_text
from tools.translate.__main__ import TOOLS, main
from tools.translate.engine import translate
from tools.translate.recipe import recipe_text
from tools.translate.source import read_source
from tools.translate.translation import Translation
from utils.errors import ConfigError

BEGINNINGS: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": "m", "learning_rate": 1e-4, "datasets": [{"path": "a/b", "type": "alpaca"}]},
    "llamafactory": {"model_name_or_path": "m", "stage": "sft"},
    "trl": {"model_name_or_path": "m", "dataset_name": "a/b"},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    },
    "litgpt": {"checkpoint_dir": "m", "data": "Alpaca2k", "train": {"epochs": 1}},
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    1,
    4,
    0.1,
    "auto",
    "none",
    "words of text",
    "*",
    [1, 2],
    ["a", None],
    {"a": 1, "b": None},
    [],
)


def drawn(tool: str, draw: random.Random) -> dict[str, Any]:
    """A file of a tool with keys that it, the hints or nobody knows, some of them nested, with values of all kinds."""
    known = [*TOOLS[tool].rules, *TOOLS[tool].missing, *TOOLS[tool].needless, *HINTS, *UNSUPPORTED]
    names = [name.split(".")[-1] for name in [*known, *SETTINGS]] + ["unheard_of", "x"]
    content = dict(BEGINNINGS[tool])
    for _ in range(5):
        content.setdefault(draw.choice(names), draw.choice(VALUES))
    groups = {name.split(".")[0] for name in TOOLS[tool].rules if "." in name} - BEGINNINGS[tool].keys()
    for group in draw.sample(sorted(groups), k=min(1, len(groups))):
        inside = [name.split(".", 1)[1] for name in TOOLS[tool].rules if name.startswith(f"{group}.")] + names
        content[group] = {draw.choice(inside).split(".")[-1]: draw.choice(VALUES) for _ in range(2)}
    return content


def leaves(value: Any, key: str = "") -> list[str]:
    """The keys of a file, found without the translator."""
    if isinstance(value, dict) and value:
        return [leaf for name, one in value.items() for leaf in leaves(one, f"{key}.{name}" if key else name)]
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return [leaf for index, one in enumerate(value) for leaf in leaves(one, f"{key}[{index}]")]
    return [key]


def outcome(file: Path, tool: str) -> tuple[Translation | None, str]:
    """The translation, or the refusal."""
    try:
        return translate(read_source(file), TOOLS[tool]), ""
    except ConfigError as error:
        return None, "\n".join(error.parts())


@pytest.mark.parametrize("tool", TOOLS)
def test_each_key_is_in_the_recipe_or_the_file_is_refused_with_the_key(tool: str, tmp_path: Path) -> None:
    file, translated = tmp_path / "theirs.yaml", 0
    for number in range(100):
        content = drawn(tool, random.Random(number))
        file.write_text(yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False))  # without anchors
        found, refusal = outcome(file, tool)
        if found is None:
            assert refusal.startswith(f"{file}: "), (number, refusal)
            assert "\n" not in refusal, (number, refusal)
            continue
        translated += 1
        recipe = recipe_text(found, tool, "recipe.yaml").replace("\n#     ", " ")
        for key in leaves(content):
            assert key in recipe, (number, key)
            assert found.outcomes[key].text, (number, key)
        (tmp_path / "recipe.yaml").write_text(recipe)
        parse_flags(["--config", str(tmp_path / "recipe.yaml"), "--model_name", "m"])
    assert translated >= 15  # many values are no values of their keys, so many files are refused


@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_is_known_by_its_keys(tool: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(BEGINNINGS[tool]))
    assert next(name for name, one in TOOLS.items() if one.fits(read_source(file).tree)) == tool


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("base_model: [a", "line 1: not valid YAML ("),
        ("base_model: m\n\tlr: 1", "line 2: not valid YAML ("),
        ("base_model: m\nlora_r: 8\nlora_r: 9", "line 3: lora_r: given twice; leave one of them out"),
        ('base_model: m\n"a\\nb": 9', "line 2: 'a\\nb': a name is one line of text; mend it"),
        ("base_model: m\nnum_epochs: .inf", "line 2: num_epochs: '.inf' is not a number; give one"),
        ("base_model: m\nnum_epochs: nan", "line 2: num_epochs: 'nan' is not a number; give one"),
        ("base_model: m\nval_set_size: -1", "line 2: val_set_size: is below 0; give a share of the rows"),
        ("base_model: m\ndatasets: [{path: " + "x" * 300 + ", type: stars}]", "line 2: datasets[0].type: stars is no"),
        ("base_model: m\nmodel.lora_rank: 9", "line 2: 'model.lora_rank': a name with a dot; write it nested"),
        ("base_model: m\nlora_r: &r 8\nlora_alpha: *r", "line 2: a YAML anchor (&NAME); write the value out"),
        ("a: &a [*a]", "line 1: a YAML anchor (&NAME); write the value out"),
        ("base_model: !!python/object:os.system m", "line 1: a YAML tag (!NAME); write a plain value"),
        ("base_model: m\n? [a, b]\n: c", "line 2: a name is missing; write NAME: VALUE"),
        ("- base_model: m", "holds no settings; give a file of NAME: VALUE lines"),
        ("", "holds no settings; give a file of NAME: VALUE lines"),
        ("a: b", "no file of a tool that is known here; give --tool axolotl|llamafactory|trl|torchtune|litgpt"),
        ("a: " + "[" * 2000, "is nested too deeply; no training tool's file is"),
        ("base_model: {a: b}", "line 1: base_model: is a group of settings, and --model_name has one value; give that"),
        ("base_model: m\nseed: ten", "line 2: seed: 'ten' is not a whole number (--seed)"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    text: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of(text, tmp_path, capsys).startswith(refusal)


def test_a_recipe_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump(BEGINNINGS["trl"])
    recipe = translate_text(text, tmp_path, capsys).recipe
    assert main([str(tmp_path / "theirs.yaml"), "--out", str(tmp_path / "recipe.yaml")]) == 2
    assert "recipe.yaml exists; give another name, or --overwrite" in capsys.readouterr().err
    assert (tmp_path / "recipe.yaml").read_text() == recipe


def test_names_and_reasons_of_a_tool_are_not_those_that_all_tools_share() -> None:
    for tool in TOOLS.values():
        own = {name: {**tool.needless, **tool.missing}[name] for name in {**tool.needless, **tool.missing}}
        assert not {name for name in own if UNSUPPORTED.get(name) == own[name]}, tool.name
        assert not tool.rules.keys() & own.keys(), tool.name
