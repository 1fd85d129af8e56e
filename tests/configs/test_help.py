"""The texts of --help, as processes print them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.help import FIRST_SETTINGS, help_text, wants_help
from configs.names import find
from configs.run import SECTIONS, SETTINGS
from tests.helpers.processes import run_command
from utils.errors import ConfigError


def entries(text: str) -> dict[str, str]:
    """Meanings by name of the flags that a help text lists, in its order."""
    parts = re.split(r"^  --(\S+)", text.partition("\nMore:")[0], flags=re.MULTILINE)[1:]
    return {
        name: " ".join(rest.partition("\n\n")[0].split()) for name, rest in zip(parts[::2], parts[1::2], strict=True)
    }


def shown(*words: str) -> dict[str, str]:
    """The entries that `--help WORDS` prints, by dotted name."""
    return {find(name)[0]: meaning for name, meaning in entries(help_text(["--help", *words])).items() if find(name)}


def test_help_prints_fifteen_settings_and_how_to_see_the_rest(tmp_path: Path) -> None:
    done = run_command("--help", cwd=tmp_path, real=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    names = [name for name in entries(done.stdout) if name not in ("config", "help")]
    assert len(names) == 15
    assert names == ["NAME.data_path" if ".data_path" in name else name.split(".")[1] for name in FIRST_SETTINGS]
    end = done.stdout.partition("\nMore:\n")[2]
    assert re.findall(r"^  --help (\S+) ", end, flags=re.MULTILINE) == ["all", "lora_config", "WORD"]
    assert all(section in end for section in SECTIONS)


def test_help_all_explains_every_flag_with_its_type_and_default(tmp_path: Path) -> None:
    done = run_command("--help", "all", cwd=tmp_path, real=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert max(map(len, done.stdout.splitlines())) <= 110
    explained: list[str] = []
    for name, entry in entries(done.stdout).items():
        if name in ("config", "help"):
            continue
        (dotted,) = find(name)
        explained.append(dotted)
        setting = SETTINGS[dotted]
        kind, _, meaning = entry.partition(" ")
        assert kind in ("BOOL", "INT", "FLOAT", "TEXT", "CHOICE", "LIST"), name
        assert len(meaning.split()) > 2, f"--{name} is not explained"
        details = re.fullmatch(r".*\[(.*)\]", meaning)
        assert details, f"--{name}: no default"
        assert details[1].endswith(expected_default(dotted)), name
        assert setting.unit in details[1]
    assert sorted(explained) == sorted(SETTINGS)


def expected_default(dotted: str) -> str:
    setting = SETTINGS[dotted]
    if setting.is_required:
        return "required"
    if setting.default_text:
        return f"default: {setting.default_text}"
    default = setting.stands_for if setting.default is None else setting.default
    default = {None: "unset", "": "empty", (): "empty"}.get(default, default)
    return "default " + (",".join(default) if isinstance(default, tuple) else str(default))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_config.use_fast_kernels", "fused kernels if the model has them"),
        ("train_config.mixed_precision", "bf16 on GPUs that have it, fp16 on other GPUs, fp32 on a CPU"),
        ("train_config.use_fp16", "only on GPUs without bf16"),
        ("train_config.low_cpu_fsdp", "always so"),
        ("train_config.run_validation", "True if there is validation data"),
        ("fsdp_config.fsdp_activation_checkpointing", "as activation_checkpointing says"),
    ],
)
def test_a_default_that_depends_is_said_in_words(name: str, words: str) -> None:
    """Each of these printed a fixed value, which a run without the flag does not act by."""
    assert shown("all")[name].endswith(f"[default: {words}]")


def test_a_default_of_none_is_never_printed_as_a_switch() -> None:
    """A switch with None as its default does neither what True nor what False does."""
    for name, setting in SETTINGS.items():
        if setting.is_switch and setting.default is None:
            assert setting.default_text, name


@pytest.mark.parametrize(
    ("words", "some", "others"),
    [
        (["lora_config"], ["lora_config.r", "lora_config.use_dora"], ["train_config.lr"]),
        (["use_fp16"], ["train_config.use_fp16"], ["train_config.lr"]),
        (["fsdp_config.wrap"], ["fsdp_config.wrap"], ["fsdp_config.optimizer"]),
        (["wandb"], ["tracking_config.use_wandb"], ["tracking_config.use_tensorboard"]),
        (["ROUGE"], ["train_config.eval_generate", "train_config.best_metric"], ["train_config.lr"]),
        (["seed", "wandb"], ["train_config.seed", "tracking_config.use_wandb"], ["train_config.lr"]),
    ],
)
def test_help_with_a_word_prints_the_flags_of_it(words: list[str], some: list[str], others: list[str]) -> None:
    names = shown(*words)
    assert {*some} <= {*names}
    assert not {*others} & {*names}


def test_help_of_a_group_prints_all_its_flags_as_help_all_does(tmp_path: Path) -> None:
    done = run_command("--help", "lora_config", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    group = {name: meaning for name, meaning in shown("all").items() if name.startswith("lora_config.")}
    assert len(group) == 8
    assert {find(name)[0]: meaning for name, meaning in entries(done.stdout).items()} == group


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("zzz", "--help all lists every flag"),
        ("quantisation", "did you mean --quantization?"),
        ("learning_rate", "here it is --lr"),
        ("lora_confg.r", "did you mean --lora_config.r?"),
    ],
)
def test_help_refuses_a_word_of_no_flag(word: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        help_text(["--help", word])
    assert str(refusal.value) == f"--help {word}: no flag has this word; {reason}"


def test_a_process_refuses_a_word_of_no_flag_in_one_line(tmp_path: Path) -> None:
    done = run_command("--help", "learning_rat", cwd=tmp_path)
    line = "error: --help learning_rat: no flag has this word; if learning_rate is meant, here it is --lr\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert list(tmp_path.iterdir()) == []


def test_help_is_given_whatever_stands_next_to_it(tmp_path: Path) -> None:
    done = run_command("--lr", "fast", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--model_name" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_is_wanted_wherever_it_is_asked_for() -> None:
    assert wants_help(["--lr", "--help"])
    assert wants_help(["x", "-h"])
    assert wants_help(["--help=lr"])
    assert not wants_help(["--lr", "1"])
    assert help_text(["--help=lr"]) == help_text(["--help", "lr"]) == help_text(["--epochs", "3", "-h", "lr"])
    assert help_text(["--help", "--lr", "1"]) == help_text(["-h"])
