"""--config: the same names and the same parser as the command line, below it in rank."""

import pytest

from configs.flags import parse_flags
from configs.run import SETTINGS
from utils.errors import ConfigError


def parse(tmp_path, text, *flags):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_flags(["--config", str(path), *flags])


RECIPE = """
model_name: M            # bare
fsdp_config.pure_bf16: true
batch-size-training: 2
enable_fsdp: yes
use_peft: True
output_dir: 2024_01
tokenizer_name:
lora_config:             # a section
  r: 16
  target_modules: [q_proj, "k_proj"]
samsum_dataset: {data_path: 007}
"""


def test_a_recipe_may_be_flat_dotted_or_nested(tmp_path):
    config = parse(tmp_path, RECIPE)
    assert config.train_config.model_name == "M"
    assert config.train_config.batch_size_training == 2
    assert config.train_config.enable_fsdp is True
    assert config.train_config.output_dir == "2024_01"
    assert config.train_config.tokenizer_name is None
    assert config.fsdp_config.pure_bf16 is True
    assert config.lora_config.r == 16
    assert config.lora_config.target_modules == ("q_proj", "k_proj")
    assert config.datasets["samsum_dataset"].data_path == "007"
    assert config.was_given("lora_config.r")


def test_a_file_of_another_tool_is_refused_with_all_of_its_names_and_the_way_to_a_recipe(tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, "{base_model: m, datasets: [{path: a, type: alpaca}], sample_packing: true}")
    lines = "\n".join(caught.value.parts()).splitlines()
    file = tmp_path / "recipe.yaml"
    assert lines[0] == f"{file}: base_model: unknown flag; here it is --model_name (2 more below)"
    assert [line.split(": ")[1] for line in lines[1:3]] == ["datasets", "sample_packing"]
    assert lines[3] == (f"if {file} is a file of another tool, `python -m tools.translate {file}` makes a recipe of it")


def test_flags_go_before_the_recipe_wherever_they_stand(tmp_path):
    config = parse(tmp_path, RECIPE, "--lora_config.r", "4", "--nopure_bf16")
    assert config.lora_config.r == 4
    assert config.fsdp_config.pure_bf16 is False
    assert config.lora_config.target_modules == ("q_proj", "k_proj")


@pytest.mark.parametrize(
    ("recipe", "given", "replaced"),
    [
        ("gradient_accumulation_steps: 4", "--global_batch_size 32", "gradient_accumulation_steps"),
        ("global_batch_size: 32", "--gradient_accumulation_steps 4", "global_batch_size"),
        ("warmup_ratio: 0.1", "--warmup_steps 0", "warmup_ratio"),
        ("warmup_steps: 9", "--warmup_ratio 0.1", "warmup_steps"),
        ("evals_per_epoch: 2", "--eval_every_steps 10", "evals_per_epoch"),
        ("timeout_seconds: 60", "--step_timeout_seconds 90", "timeout_seconds"),
        ("enable_fsdp: True, sharding_strategy: SHARD_GRAD_OP", "--hsdp", "sharding_strategy"),
        ("enable_fsdp: True, hsdp: True", "--sharding_strategy FULL_SHARD", "hsdp"),
    ],
)
def test_a_flag_replaces_what_sets_the_same_in_a_recipe(recipe, given, replaced, tmp_path):
    config = parse(tmp_path, f"{{model_name: M, {recipe}}}", *given.split())
    flag = given.split()[0]
    assert f"{flag} replaces the recipe's --{replaced}" in config.notes
    (section,) = {name.split(".")[0] for name in SETTINGS if name.endswith(f".{replaced}")}
    assert not config.was_given(f"{section}.{replaced}")


def test_a_flag_that_is_off_replaces_nothing(tmp_path):
    config = parse(tmp_path, "{model_name: M, enable_fsdp: True, sharding_strategy: SHARD_GRAD_OP}", "--nohsdp")
    assert config.fsdp_config.sharding_strategy == "SHARD_GRAD_OP"


def test_two_flags_that_set_the_same_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--global_batch_size: it sets --gradient_accumulation_steps"):
        parse(tmp_path, "{model_name: M}", "--global_batch_size", "32", "--gradient_accumulation_steps", "4")


def test_a_shared_name_in_a_recipe_is_set_in_both_groups(tmp_path):
    config = parse(tmp_path, "{model_name: M, mixed_precision: false}")
    assert not config.train_config.mixed_precision
    assert not config.fsdp_config.mixed_precision
    assert "--mixed_precision set in train_config and fsdp_config" in config.notes


def test_words_for_unset_and_for_off_are_read_as_such(tmp_path):
    """As `auto` and False of run.yaml files written by earlier versions."""
    text = "{model_name: M, accumulate_unsharded: auto, async_save: auto, resume: False, context_length: null}"
    config = parse(tmp_path, text)
    train = config.train_config
    assert (config.fsdp_config.accumulate_unsharded, train.async_save, train.context_length) == (None, None, None)
    assert train.resume is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "{path}: lrr: unknown flag; did you mean --lr?"),
        ("fsdp_config:\n  precision: 16", "{path}: fsdp_config.precision: unknown flag; here it is "),
        ("lr: fast", "{path}: lr: 'fast' is not a number"),
        ("lr: [1, 2]", "{path}: lr: a list is not a number"),
        ("resume: [a, b]", "{path}: resume: a list is not False or text"),
        ("lr:", "{path}: lr: '' is not a number"),
        ("datasets:\n- {path: a, type: alpaca}", "{path}: datasets: unknown flag; here it is --dataset NAME with "),
        ("tokenizer: {path: a}", "{path}: tokenizer: unknown flag; here it is --tokenizer_name"),
        ("lr: {a: 1}", "{path}: lr: is not a group of settings; the groups are train_config, "),
        ("fsdp_config: {lora_config: {r: 1}}", "{path}: fsdp_config.lora_config: is not a group of settings; "),
        ("fsdp_config:", "{path}: fsdp_config: is a group of settings; set one of them, like "),
        ("target_modules: [[a]]", "{path}: target_modules: an entry of the list is not a plain value; "),
        ("target_modules: []", "{path}: target_modules: an entry of the list is empty; "),
        ("? [a]\n: 1", "{path}: line 1: a name is missing; write NAME: VALUE"),
        ("lr: 1\nlr: 2", "{path}: lr: given twice; "),
        ("lr: 1\ntrain_config: {lr: 2}", "{path}: train_config.lr: given twice; "),
        ("config: other.yaml", "{path}: config: belongs on the command line; "),
        ("", "--config: {path} holds no settings; "),
        ("# lr: 1", "--config: {path} holds no settings; "),
        ("- lr", "--config: {path} holds no settings; "),
        ("lr", "--config: {path} holds no settings; "),
        ("lr: [", "--config: {path} is not valid YAML: "),
        ("lr: 1\n---\nlr: 2", "--config: {path} is not valid YAML: "),
        (b"\xff\xfe\x00", "--config: {path!r} is not a text file; "),
        ("settings: {}\ncommand: torchrun", "--config: {path} is a run's record, not a recipe; the `command` in it "),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named_with_its_file(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text, "--model_name", "M")
    assert str(caught.value).startswith(message.format(path=str(tmp_path / "recipe.yaml")))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("path", "reason"), [("missing.yaml", "No such file"), (".", "Is a directory")])
def test_a_recipe_that_cannot_be_read_is_refused(path, reason):
    with pytest.raises(ConfigError, match=rf"^--config: cannot read {path}: {reason}.*; give the path of a YAML file$"):
        parse_flags(["--config", path])


def test_a_shipped_recipe_is_found_by_its_name_and_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = parse_flags(["--config", "chat_lora", "--model_name", "M"])
    assert shipped.train_config.dataset == "chat_dataset"
    assert shipped.recipe.endswith("/configs/recipes/chat_lora.yaml")
    assert parse_flags(["--config", "litgpt/fsdp_bf16_8x4", "--model_name", "M"]).train_config.enable_fsdp
    (tmp_path / "chat_lora").write_text("model_name: mine")
    assert parse_flags(["--config", "chat_lora"]).train_config.model_name == "mine"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("chat_lara", "did you mean chat_lora?"),
        ("Full", "did you mean full?"),
        ("lora_alpca", "did you mean llama_recipes/lora_alpaca?"),
        ("fsdp_bf16_8x4", "did you mean litgpt/fsdp_bf16_8x4?"),
        ("xyz", "recipes are chat_lora, chat_qlora, "),
    ],
)
def test_a_misspelt_recipe_names_the_nearest(name, hint):
    with pytest.raises(ConfigError) as refusal:
        parse_flags(["--config", name, "--model_name", "M"])
    assert str(refusal.value).startswith(f"--config: {name!r} is neither a file nor the name of a recipe; {hint}")


def test_a_dataset_on_the_command_line_overrides_the_recipes_and_its_settings():
    config = parse_flags(["--config", "full", "--model_name", "M", "--dataset", "text_dataset"])
    assert config.train_config.dataset == "text_dataset"
    assert config.notes == ("--chat_dataset.validation_fraction of the recipe is left out with --dataset text_dataset",)
    given = ["--config", "full", "--model_name", "M", "--dataset", "text_dataset,chat_dataset"]
    assert parse_flags(given).datasets["chat_dataset"].validation_fraction == "auto"


LORA = ("lora_config.r", "lora_alpha", "lora_dropout", "target_modules")


@pytest.mark.parametrize(
    ("recipe", "given", "left_out"),
    [
        ("chat_lora", "--use_peft False", LORA),
        ("chat_lora", "--peft_method prefix --batching_strategy padding", LORA),
        ("chat_lora", "--from_peft_checkpoint adapter", LORA),
        ("chat_qlora", "--quantization False", ("use_double_quant",)),
        ("chat_qlora", "--quantization 8bit", ("use_double_quant",)),
    ],
)
def test_a_recipes_settings_of_what_a_flag_chose_otherwise_are_left_out(recipe, given, left_out):
    config = parse_flags(["--config", recipe, "--model_name", "M", *given.split()])
    told = given.removesuffix(" adapter").removesuffix(" --batching_strategy padding")
    assert config.notes == tuple(f"--{name} of the recipe is left out with {told}" for name in left_out)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ("{gradient_clipping: True, gradient_clipping_threshold: 0.5}", "--gradient_clipping False"),
        ("{evals_per_epoch: 4, early_stopping_patience: 3, keep_best: True}", "--run_validation False"),
        ("{freeze_layers: True, num_freeze_layers: 2}", "--freeze_layers False"),
        ("{use_peft: True, peft_method: lora}", "--use_peft False"),
    ],
)
def test_a_flag_that_turns_something_off_leaves_out_the_recipes_settings_of_it(tmp_path, settings, given):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"train_config: {settings}\n")
    config = parse_flags(["--config", str(recipe), "--model_name", "M", *given.split()])
    assert config.notes
    assert all(note.endswith(f" of the recipe is left out with {given}") for note in config.notes)


def test_a_setting_of_an_adapter_that_a_flag_gives_is_refused_without_the_adapter():
    with pytest.raises(ConfigError, match="--lora_alpha: there is no adapter without --use_peft"):
        parse_flags(["--config", "chat_lora", "--model_name", "M", "--use_peft", "False", "--lora_alpha", "8"])
