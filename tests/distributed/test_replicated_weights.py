"""Frozen weights that stay whole on each rank: the numbers of the sharded run to the bit, and nothing to gather."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoTokenizer

from policies.replicated_weights import gathered_units, replicated_weights
from tests.helpers import random_pairs
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.made import Made
from tests.helpers.mixtures import mixture
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, log_lines, read_metrics, run_command
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of, results
from tests.helpers.seq2seq_models import save_seq2seq
from tests.helpers.small_card import on_small_card
from utils.errors import ConfigError

NUM_LAYERS = 2  # of every model here
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.target_modules"]
ON_ATTENTION, ON_ALL = [*LORA, "q_proj,v_proj"], [*LORA, "all-linear", "--lora_config.lora_dropout", "0"]
CASES: dict[str, list[str]] = {
    "mixture, experts adapted, bf16": [*ON_ALL, "--mixed_precision", "True"],
    "lora, fp32": ON_ATTENTION,
    "qlora": [*ON_ALL, "--quantization", "4bit"],
    "freeze_layers": ["--freeze_layers", "--num_freeze_layers", "1"],
    "dora, kept gathered": [*ON_ATTENTION, "--lora_config.use_dora", "--sharding_strategy", "SHARD_GRAD_OP"],
    "recomputed, in groups": [*ON_ATTENTION, "--activation_checkpointing", "full", "--hsdp"],
    "frozen adapters": [*ON_ATTENTION, "--freeze_layers", "--mixed_precision", "True"],
    "root, a checkpoint in one file": [*ON_ATTENTION, "--wrap", "root", "--checkpoint_type", "FULL_STATE_DICT"],
    "generating": [*ON_ATTENTION, "--eval_generate", "--max_new_tokens", "3", "--run_validation", "True"],
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether it is a mixture of experts."""
    folder = tmp_path_factory.mktemp("model") / "qwen3_moe"
    mixture("qwen3_moe", vocab_size=600).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return {False: tiny_model, True: folder}


@pytest.fixture(scope="module")
def runs(models: dict[bool, Path], process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folders of runs, by case and number of replicated layers."""

    def run(case: str, number: int) -> Path:
        folder = tmp_path_factory.mktemp("replicated") / "run"
        process_group.train(argv_of(models, folder, case, number), 2)
        return folder

    return Made(run)


def argv_of(models: dict[bool, Path], folder: Path, case: str, number: int) -> list[str]:
    flags = ["--enable_fsdp", "--num_replicated_layers", str(number), "--max_train_step", "4"]
    flags += [] if "--run_validation" in CASES[case] else ["--run_validation", "False"]
    return flags_of(models["mixture" in case], folder, *flags, "--save_every_steps", "2", *CASES[case])


def gathered_gb(run: Path) -> float:
    return float(next(e["all_gather_sent_gb"] for e in read_metrics(run) if e["event"] == "communication"))


@pytest.mark.parametrize("case", slow_but(3, list(CASES), num_slow=4))
def test_a_run_with_whole_weights_has_the_bits_of_the_sharded_one_and_gathers_less(case: str, runs: Made) -> None:
    assert_bit_equal(runs[case, NUM_LAYERS], runs[case, 0])
    assert gathered_gb(runs[case, NUM_LAYERS]) < gathered_gb(runs[case, 0])


def test_weights_of_one_layer_of_two_are_gathered(runs: Made) -> None:
    none, one, both = (runs["lora, fp32", number] for number in (0, 1, 2))
    assert_bit_equal(one, none)
    assert gathered_gb(both) < gathered_gb(one) < gathered_gb(none)
    assert gathered_gb(both) < 0.05 * gathered_gb(none), "adapters alone"


@pytest.mark.parametrize("case", slow_but(1, ["lora, fp32", "freeze_layers", "qlora"]))
@pytest.mark.parametrize(("before", "after"), [(0, NUM_LAYERS), (NUM_LAYERS, 0)])
def test_a_run_goes_on_with_other_weights_whole(
    case: str,
    before: int,
    after: int,
    runs: Made,
    models: dict[bool, Path],
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    killed = as_if_killed_after(2, runs[case, before], tmp_path / "killed")
    process_group.train([*argv_of(models, killed, case, after), "--resume", "auto"], 2)
    assert_bit_equal(killed, runs[case, before])


def test_all_ranks_take_what_the_plan_has_room_for(
    runs: Made, models: dict[bool, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = argv_of(models, tmp_path / "run", "lora, fp32", 0)
    place = argv.index("--num_replicated_layers")
    outcomes = process_group.train(on_small_card([*argv[:place], *argv[place + 2 :]], 10.0, 2), 2)
    assert_bit_equal(tmp_path / "run", runs["lora, fp32", 0])
    assert gathered_gb(tmp_path / "run") == gathered_gb(runs["lora, fp32", NUM_LAYERS])
    assert outcomes[0].stdout.count("num_replicated_layers: auto is 2 of 2: ") == 1
    assert "num_replicated_layers" not in outcomes[1].stdout
    resolved = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["resolved"]
    assert resolved["num_replicated_layers"] == NUM_LAYERS


@pytest.mark.slow
def test_gradients_of_an_encoders_output_are_added_in_another_order(
    process_group: ProcessGroup, tmp_path: Path
) -> None:
    model = save_seq2seq("bart", tmp_path / "bart")
    given = ["--dataset", f"{random_pairs.__file__}:get_custom_dataset", "--num_workers_dataloader", "0"]
    given += ["--enable_fsdp", *ON_ATTENTION, "--run_validation", "False", "--max_train_step", "4"]
    for number in (0, 4):
        argv = ["--model_name", str(model), "--output_dir", str(tmp_path / str(number)), *given]
        process_group.train([*argv, "--num_replicated_layers", str(number)], 2)
    found, wanted = results(tmp_path / "4"), results(tmp_path / "0")
    assert found[0][2] == wanted[0][2], "the first loss"
    for one, other in zip(found, wanted, strict=True):
        assert one[2:6] == pytest.approx(other[2:6], rel=1e-5)


@pytest.mark.slow
def test_compiled_layers_train_the_same(models: dict[bool, Path], process_group: ProcessGroup, tmp_path: Path) -> None:
    for number in (0, 1, NUM_LAYERS):
        argv = argv_of(models, tmp_path / str(number), "lora, fp32", number)
        process_group.train(with_aot_eager([*argv, "--compile"]), 2)
    for number in (1, NUM_LAYERS):
        assert_bit_equal(tmp_path / str(number), tmp_path / "0")


@pytest.mark.parametrize(("num_trained", "is_gathered"), [(0, False), (3, False), (5, True)])
def test_a_layer_is_gathered_by_itself_unless_most_of_it_stays_whole(num_trained: int, is_gathered: bool) -> None:
    frozen, trained = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Parameter(torch.zeros(num_trained))
    layer = nn.ParameterList([frozen, trained])
    assert gathered_units([layer], [frozen]) == ([layer] if is_gathered else [])
    assert gathered_units([layer], []) == [layer]


def test_a_model_without_layers_has_none_to_keep() -> None:
    with pytest.raises(ConfigError, match=r"^--num_replicated_layers: this model names no repeated layers"):
        replicated_weights(nn.Linear(2, 2).requires_grad_(False), [], 1)


def test_more_layers_than_there_are_are_refused(tiny_model: Path) -> None:
    flags = ["--model_name", str(tiny_model), "--use_peft", "--enable_fsdp", "--num_replicated_layers", "3"]
    done = run_command(*flags, "--dry_run", "--dry_run_hardware", "2xA100-40GB")
    assert done.returncode == 2
    assert "--num_replicated_layers: this model has 2 layers, not 3" in log_lines(done.stderr)[-1]
