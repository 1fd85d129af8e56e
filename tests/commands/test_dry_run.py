"""--dry_run plans the run that its flags would start, from config.json alone, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.helpers.processes import ROOT, process_variables, run_command

NAMES = (
    *("verdict", "peak_gib", "peak_phase", "margin_gib", "params_gib", "grads_gib", "optimizer_gib"),
    *("activations_gib", "other_gib", "after_forward_gib", "host_gib", "seconds_per_step", "price"),
)
LAPTOP = """
import importlib.machinery, socket, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("bitsandbytes", "triton", "flash_attn", "xformers", "pynvml")
        return None if hidden else super().find_spec(name, path, target)

def connect(*args):
    raise AssertionError("a plan asks the network")

sys.meta_path = [Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
socket.socket.connect = connect
sys.path.insert(0, sys.argv[1])
import finetuning
for plan in ("full", "qlora"):
    more = [] if plan == "full" else ["--use_peft", "--quantization", "4bit"]
    assert finetuning.main([*sys.argv[2:], *more, "--dry_run_json", plan + ".json"]) == 0
from utils.host_memory import peak_resident
print("GiB", peak_resident() / 2**30)
"""


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of Llama 2 7B."""
    return save_config(tmp_path_factory.mktemp("models") / "seven_billion", num_layers=32)


def save_config(folder: Path, num_layers: int) -> Path:
    """The config.json of a model of Llama 2 7B's layers, in the folder."""
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    config = LlamaConfig(**shape, num_hidden_layers=num_layers, max_position_embeddings=4096)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_7b_is_planned_on_a_laptop_without_gpu_packages_network_and_memory_for_the_model(
    seven_billion: Path, tmp_path: Path
) -> None:
    flags = "--enable_fsdp --context_length 2048 --batch_size_training 1 --dry_run --dry_run_hardware 4xA100-80GB"
    flags += " --price_per_hour 12 --output_dir out --compile False"
    done = subprocess.run(
        [sys.executable, "-c", LAPTOP, str(ROOT), "--model_name", str(seven_billion), *flags.split()],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env=process_variables({}),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.json", "qlora.json"]
    full, qlora = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("full", "qlora"))
    assert set(NAMES) <= full.keys()
    assert full["verdict"] == "fits"
    # 6,738,415,616 weights, four ranks: fp32 masters, and two fp32 states of each.
    assert full["params_gib"] == pytest.approx(6738415616 * 4 / 4 / 2**30, rel=1e-3)
    assert full["optimizer_gib"] == pytest.approx(2 * full["params_gib"], rel=1e-3)
    assert full["peak_gib"] == pytest.approx(sum(full["at_peak"].values()))
    assert full["margin_gib"] == pytest.approx(full["capacity_gib"] - full["peak_gib"] - full["overhead_gib"])
    assert full["seconds_per_step"] > 0
    # Frozen layers stay whole where there is room: of all weights, in 4 bits, and the embeddings in 16.
    assert qlora["params_gib"] < 0.2 * 4 * full["params_gib"]
    assert float(done.stdout.rpartition("GiB ")[2]) < 2


def test_what_is_planned_is_shown_and_nothing_is_written(seven_billion: Path, tmp_path: Path) -> None:
    flags = "--use_peft --quantization 4bit --dry_run --dry_run_hardware V100-32GB --context_length 1024"
    done = run_command("--model_name", str(seven_billion), *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1xV100-32GB, 31.74 GiB each" in done.stdout
    assert "fp16-mixed" in done.stdout, "a V100 has no bf16"
    for phase in ("load", "forward", "backward", "optimizer step"):
        assert f"\n{phase} " in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        "--context_length 5000",
        "--global_batch_size 3",
        "--use_peft --peft_dtype bf16 --use_fp16",
        "--output_dir taken",
        "--samsum_dataset.data_path none.jsonl",
        "--freeze_layers --num_freeze_layers 99",
        "--use_peft --target_modules q_prog --samsum_dataset.data_path none.jsonl",
    ],
)
def test_what_a_run_is_refused_for_a_plan_for_this_machine_is_refused_for_in_the_same_line(
    flags: str, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken/model").mkdir(parents=True)
    (tmp_path / "taken/model/a.txt").write_text("mine")
    given = ["--model_name", str(tiny_model), *flags.split()]
    if "data_path" not in flags:
        given += ["--samsum_dataset.data_path", str(ROOT / "datasets/samples/dialogue_summary")]
    run, plan = (run_command(*given, *more, cwd=tmp_path) for more in ([], ["--dry_run"]))
    assert (run.returncode, plan.returncode) == (2, 2)
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert error in plan.stderr.splitlines()
    assert ("none.jsonl" in error) == flags.startswith("--samsum"), "names of layers are checked before data are read"
    for done in (run, plan):
        assert (done.stdout + done.stderr).count(error.removeprefix("error: ")) == 1


def test_every_verdict_is_an_exit_status_of_zero_and_the_json_has_it(tmp_path: Path) -> None:
    billion = save_config(tmp_path / "model", num_layers=4)
    for memory, verdict in (("8", "does_not_fit"), ("200", "fits")):
        flags = f"--pure_bf16 --optimizer anyprecision --context_length 512 --dry_run --device_memory_gib {memory}"
        report = tmp_path / "plan.json"
        done = run_command("--model_name", str(billion), *flags.split(), "--dry_run_json", str(report))
        assert done.returncode == 0, done.stderr
        assert json.loads(report.read_text())["verdict"] == verdict
        assert f"\n{verdict.replace('_', ' ')}: peak " in done.stdout


def test_json_that_the_disk_refuses_is_named_below_the_plan(tiny_model: Path) -> None:
    flags = ["--model_name", str(tiny_model), "--dry_run", "--dry_run_hardware", "H200"]
    done = run_command(*flags, "--dry_run_json", "/dev/full")
    assert (done.returncode, done.stdout.count("\nfits: peak ")) == (1, 1), done.stderr
    assert done.stderr.split("\n")[-2:] == [
        "error: /dev/full cannot be written (No space left on device); make room there",
        "",
    ]
    assert "Traceback" not in done.stderr


def test_a_load_only_check_shows_what_each_rank_holds_and_writes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--enable_fsdp", "--load_only", "--output_dir", str(tmp_path / "run"), "--model_name", str(tiny_model)]
    done = run_command(*flags, nproc=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["planned"], ["0"], ["1"])]
    assert [row[0] for row in rows] == ["planned", "0", "1"]
    assert len({row[1] for row in rows}) == 1, "parameters, as planned"
    assert not list(tmp_path.iterdir())
