"""Absurd values for every flag: each is taken, or refused in one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.flags import build_config, collect_flags, parse_flags
from configs.formats import DATASETS
from configs.names import flag
from configs.run import SETTINGS
from configs.setting import Setting
from configs.values import NO_VALUE
from utils.errors import ConfigError

LONG = 20_000  # beyond the limits of paths, names and numbers
VALUES = {
    "nothing": "",
    "space": " ",
    "zero": "0",
    "minus one": "-1",
    "minus zero": "-0.0",
    "a half": "0.5",
    "huge": "1e30",
    "just too large": str(10**18 + 1),
    "many digits": "9" * LONG,
    "many zeros": "0." + "0" * LONG + "1",
    "tiny": "1e-400",
    "nan": "nan",
    "inf": "inf",
    "minus inf": "-inf",
    "hexadecimal": "0x10",
    "arabic digits": "١٢",
    "list": "[1, 2]",
    "nested list": "[" * 2000 + "]" * 2000,
    "commas": ",,,",
    "dict": "{'a': 1}",
    "call": "__import__('os').system('true')",
    "none": "None",
    "true": "True",
    "long text": "x" * LONG,
    "long text of words": "x " * LONG,
    "long path": "/x" * LONG,
    "no home": "~nosuch/folder",
    "newline": "a\nb",
    "only newlines": "\r\n\u2028\x85",
    "NUL": "a\0b",
    "escape": "\x1b[31mred",
    "surrogate": "\udcff",
    "emoji": "🙂",
    "quotes": "'\"",
    "format": "{0}%s%(a)s",
    "dashes": "-",
}


def assert_taken_or_refused(flags: dict[str, str], named: str) -> None:
    try:
        build_config(flags)
    except ConfigError as error:
        message = str(error)
        assert named in message, message[:300]
        assert len(message.splitlines()) == 1
        assert len(message) < 5000, f"{len(message)} characters"


def with_model(dotted: str, flags: dict[str, str]) -> dict[str, str]:
    """The flags, and a model's name unless they set it themselves, by `dotted`."""
    return flags if dotted == "train_config.model_name" else {"model_name": "M"} | flags


def spelled(dotted: str, setting: Setting, value: str) -> list[str]:
    flags = [f"--{dotted}={value}"]
    return flags if setting.name == "model_name" else ["--model_name", "M", *flags]


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_an_absurd_value_of_any_flag_is_taken_or_refused_in_one_line(value: str) -> None:
    flags = collect_flags([f"--{dotted}={value}" for dotted in SETTINGS])
    assert flags == dict.fromkeys(SETTINGS, value)
    for dotted, raw in flags.items():
        named = flag(dotted).rpartition(".")[2].removeprefix("--")
        assert_taken_or_refused(with_model(dotted, {dotted: raw}), named)


@pytest.mark.parametrize(
    "text", ['"a\\0b"', "[]", "[[1]]", "{}", "{a: 1}", "~", "!!python/object:os.system x", "&a [*a]"]
)
def test_an_absurd_value_in_a_recipe_is_taken_or_refused_in_one_line(text: str, tmp_path: Path) -> None:
    for dotted in SETTINGS:
        section, name = dotted.split(".")
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"{section}:\n  {name}: {text}\n")
        assert_taken_or_refused(with_model(dotted, {"config": str(recipe)}), name)


@pytest.mark.parametrize("text", ["[" * 1500, "{a: " * 1500, "- " * 1500])
def test_a_deeply_nested_recipe_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^--config: .*recipe.yaml is nested too deeply"):
        parse_flags(["--config", str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize(
    "name", ["", " ", "x" * LONG, "a\nb", "a b", "[1]", "🙂", "\udcff", "a.b.c", ".", "train_config."]
)
@pytest.mark.parametrize("value", ["", "=1", f"={NO_VALUE}"])
def test_an_absurd_name_of_a_flag_is_refused_in_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_flags(["--model_name", "M", f"--{name}{value}"])
    message = str(refusal.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 5000


@pytest.mark.parametrize("name", ["train_split", "test_split"])
def test_a_split_without_a_name_is_refused(name: str) -> None:
    """It found every file of a folder, the validation file too."""
    for dataset in DATASETS:
        given = ["--model_name", "M", "--dataset", dataset, f"--{dataset}.{name}"]
        for value in ("", *(() if dataset == "custom_dataset" else (" ", ".", "..", "../other", "/"))):
            with pytest.raises(ConfigError, match=rf"^--{dataset}\.{name}: "):
                parse_flags([*given, value])


PATHS = [dotted for dotted, setting in SETTINGS.items() if setting.is_path]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("~nosuch/folder", "'~nosuch' is nobody's home folder here; write the whole path"),
        ("folder/" + "x" * 256, "a name in the path is 256 bytes long; give one of at most 255"),
        ("ä" * 128, "a name in the path is 256 bytes long; give one of at most 255"),
        ("folder/" * 700, "bytes long; give one of at most 3,840"),
    ],
)
def test_a_path_that_the_system_cannot_have_is_refused(path: str, reason: str) -> None:
    assert len(PATHS) > 12
    for dotted in PATHS:
        value = f"{path}.py" if dotted == "custom_dataset.file" else path
        with pytest.raises(ConfigError) as refusal:
            parse_flags(spelled(dotted, SETTINGS[dotted], value))
        assert str(refusal.value).startswith(f"--{dotted}: ")
    with pytest.raises(ConfigError) as refusal:
        parse_flags(["--model_name", "M", "--dataset", f"{path}.py:function"])
    assert str(refusal.value).startswith("--dataset: ")
    with pytest.raises(ConfigError) as refusal:
        parse_flags(["--model_name", "M", "--output_dir", path])
    assert str(refusal.value).endswith(reason)


def test_a_path_at_home_is_taken() -> None:
    assert parse_flags(["--model_name", "M", "--output_dir", "~/run"]).train_config.output_dir == "~/run"
