"""A resume that would change the result is refused, and every difference is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing.comparison import DECIDE_TENSORS, MAY_CHANGE, check_same
from checkpointing.finding import Checkpoint
from configs.flags import parse_flags
from configs.run import SETTINGS
from run_folder.run_yaml import add_to_run_yaml
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.processes import ProcessGroup, run_command
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import as_if_killed_after, flags_of, results
from utils.errors import ConfigError

LORA = ["--use_peft", "--lora_config.r", "4"]
PLAIN = ["--run_validation", "False"]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"full": [], "lora": LORA}.items():
        whole = folder / f"whole-{name}"
        process_group.train(flags_of(tiny_model, whole, *PLAIN, *flags), 1)
        as_if_killed_after(3, whole, folder / name)
    return {name: folder / name for name in ("full", "lora")}


def refusal(group: ProcessGroup, run: Path, model: Path, *flags: str) -> str:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
    given = flags if "--resume" in flags else (*flags, "--resume", "auto")
    outcome = group.run(flags_of(model, run, *PLAIN, *given), 1)[0]
    assert outcome.status == 2, outcome.stdout + outcome.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()) == before
    (line,) = error_lines(outcome.stderr)
    assert "; " in line
    return line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--lr", "1e-3"], ["--lr 0.001 (there 0.005)"]),
        (["--seed", "1", "--weight_decay", "0.1"], ["--seed 1 (there 42)", "--weight_decay 0.1 (there 0.0)"]),
        (["--batching_strategy", "padding"], ["--batching_strategy padding (there packing)"]),
        (["--context_length", "64"], ["--context_length 64 (there 96)"]),
        (["--split_slice", "50%"], ["--split_slice 50% (there None)", "the training data: other samples"]),
        (["--use_fp16"], ["--use_fp16 True (there ", "the precision"]),
        (["--scheduler", "cosine", "--max_train_step", "9"], ["--scheduler cosine (there step)", "9 optimizer steps"]),
    ],
)
def test_a_changed_setting_that_changes_the_result_is_refused_by_name(
    flags: list[str], named: list[str], runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup
) -> None:
    line = refusal(process_group, runs["full"], tiny_model, *flags)
    for name in named:
        assert line.count(name) == 1
    assert "or --resume_anyway" in line


@pytest.mark.parametrize(
    ("run", "flags", "named"),
    [
        ("full", ["--optimizer", "SGD"], ["--optimizer SGD (there AdamW)", "--momentum 0.9 (there None)"]),
        ("full", ["--pure_bf16"], ["--pure_bf16 True (there False)", "the precision"]),
        ("full", ["--use_peft"], ["--use_peft True (there False)"]),
        ("full", ["--freeze_layers"], ["--freeze_layers True (there False)"]),
        ("lora", [*LORA, "--use_dora", "--lora_dropout", "0"], ["--use_dora True (there False)"]),
        ("lora", ["--use_peft", "--lora_config.r", "2"], ["--lora_config.r 2 (there 4)"]),
    ],
)
def test_where_other_tensors_would_be_needed_resume_anyway_is_not_recommended(
    run: str, flags: list[str], named: list[str], runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup
) -> None:
    """Because it could not help."""
    line = refusal(process_group, runs[run], tiny_model, *flags)
    for name in named:
        assert name in line
    assert "or --resume_anyway" not in line
    assert "or train on from the run's weights with --model_name" in line
    line = refusal(process_group, runs[run], tiny_model, *flags, "--resume_anyway")
    assert "or train on from the run's weights with --model_name" in line


@pytest.mark.slow
def test_layers_that_were_frozen_may_be_trained_anyway(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Layers that were not trained are not reported as other weights."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    process_group.train(flags_of(tiny_model, whole, *PLAIN, "--freeze_layers"), 1)
    as_if_killed_after(3, whole, run)
    assert refusal(process_group, run, tiny_model).endswith("or --resume_anyway")
    given = flags_of(tiny_model, run, *PLAIN, "--resume", "auto", "--resume_anyway")
    said = process_group.train(given, 1)[0].stdout
    assert "resume_anyway: --freeze_layers False (there True)" in said
    assert "other weights" not in said
    assert "another config.json" not in said


def test_a_default_that_was_saved_as_a_value_is_no_change() -> None:
    """Checkpoints from before unset settings were None hold the defaults themselves."""
    now = parse_flags(["--model_name", "m"])
    saved = now.to_dict()
    saved["train_config"] |= {"context_length": 4096, "mixed_precision": True, "use_fp16": False, "resume": "False"}
    saved["train_config"] |= {"async_save": "auto", "use_fast_kernels": False, "run_validation": True, "keep_last": 2}
    saved["train_config"] |= {"low_cpu_fsdp": False}
    saved["fsdp_config"] |= {"accumulate_unsharded": "auto", "mixed_precision": True, "use_fp16": False}
    saved["fsdp_config"] |= {"fsdp_activation_checkpointing": True, "hsdp": False}
    saved["llama_adapter_config"] |= {"adapter_layers": 30}
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": saved, "num_steps": 9})
    assert check_same(checkpoint, now, {}, num_steps=9) == []
    shorter = parse_flags(["--model_name", "m", "--context_length", "64"])
    with pytest.raises(ConfigError, match=r"--context_length 64 \(there 4096\)"):
        check_same(checkpoint, shorter, {}, num_steps=9)


def test_a_setting_that_the_checkpoint_does_not_know_yet_is_compared_with_its_default() -> None:
    saved = parse_flags(["--model_name", "m"]).to_dict()
    del saved["train_config"]["label_smoothing"], saved["fsdp_config"]["reduce_dtype"]
    del saved["lora_config"]["target_modules"], saved["planning_config"]
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": saved, "num_steps": 9})
    assert check_same(checkpoint, parse_flags(["--model_name", "m"]), {}, num_steps=9) == []
    now = parse_flags(["--model_name", "m", "--label_smoothing", "0.3", "--reduce_dtype", "bf16"])
    with pytest.raises(ConfigError, match=r"--label_smoothing 0\.3 \(there 0\.0\), --reduce_dtype bf16 \(there fp32\)"):
        check_same(checkpoint, now, {}, num_steps=9)


def test_a_warm_up_that_is_a_share_of_the_run_keeps_its_length() -> None:
    now = parse_flags(["--model_name", "m", "--warmup_ratio", "0.1"])
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": now.to_dict(), "num_steps": 9})
    with pytest.raises(ConfigError, match=r"20 optimizer steps \(there 9\), over which --warmup_ratio 0\.1 raises lr"):
        check_same(checkpoint, now, {}, num_steps=20)


@pytest.mark.parametrize("before", [["q_proj", "v_proj"], "q_proj,v_proj", "v_proj, q_proj"])
def test_target_modules_in_another_order_are_no_change(before: object) -> None:
    now = parse_flags(["--model_name", "m", "--use_peft", "--lora_config.target_modules", "v_proj,q_proj"])
    saved = now.to_dict()
    saved["lora_config"]["target_modules"] = before
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": saved, "num_steps": 9})
    assert check_same(checkpoint, now, {}, num_steps=9) == []
    more = parse_flags(["--model_name", "m", "--use_peft", "--lora_config.target_modules", "v_proj,q_proj,k_proj"])
    with pytest.raises(ConfigError, match=r"--target_modules v_proj,q_proj,k_proj \(there "):
        check_same(checkpoint, more, {}, num_steps=9)


def test_a_run_goes_on_with_its_target_modules_in_another_order(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs["lora"], tmp_path / "run"))
    swapped = ["--lora_config.target_modules", "v_proj,q_proj"]
    process_group.train(flags_of(tiny_model, run, *PLAIN, *LORA, *swapped, "--resume", "auto"), 1)
    assert results(run) == results(runs["lora"].parent / "whole-lora")


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, r"packs 300 weights of linear layers and 700 weights of experts \(there unsaid; earlier versions kept"),
        ({"packed_weights": {"linear": 300, "experts": 0}}, r"\(there 300 weights of linear layers and 0 weights of"),
        ({"packed_weights": {"linear": 300, "experts": 700}}, ""),
        ({"packed_weights": None}, ""),  # --quantization differs, which is said
    ],
    ids=["an earlier version", "without experts", "the same", "not quantized"],
)
def test_other_packed_weights_are_refused(there: dict[str, object], said: str) -> None:
    """What --quantization packs depends on the version."""
    flags = ["--model_name", "m", "--use_peft", "--quantization", "4bit"]
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": parse_flags(flags).to_dict(), **there})
    now = {"packed_weights": {"linear": 300, "experts": 700}}
    if not said:
        assert check_same(checkpoint, parse_flags(flags), now) == []
        return
    with pytest.raises(ConfigError, match=rf"--quantization .*{said}.*or --resume_anyway"):
        check_same(checkpoint, parse_flags(flags), now)
    (line,) = check_same(checkpoint, parse_flags([*flags, "--resume_anyway"]), now)
    assert re.search(said, line)


def test_rows_that_became_shorter_for_ranks_that_share_them_are_refused() -> None:
    """Three ranks made the default of 4,096 tokens 4,095, so one rank went on in rows packed otherwise."""
    config = parse_flags(["--model_name", "m"])
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": config.to_dict(), "row_length": 4095, "num_steps": 9})
    assert check_same(checkpoint, config, {"row_length": 4095}, num_steps=9) == []
    with pytest.raises(ConfigError, match=r"rows of another length: .* --context_parallel_size; give what was given"):
        check_same(checkpoint, config, {"row_length": 4096}, num_steps=9)
    longer = parse_flags(["--model_name", "m", "--context_length", "96"])
    with pytest.raises(ConfigError, match=r"--context_length 96 \(there 4096\); give what was given"):
        check_same(checkpoint, longer, {"row_length": 96}, num_steps=9)


def test_an_earlier_versions_base_without_experts_was_packed_as_now() -> None:
    config = parse_flags(["--model_name", "m", "--use_peft", "--quantization", "4bit"])
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": config.to_dict()})
    assert check_same(checkpoint, config, {"packed_weights": {"linear": 300, "experts": 0}}) == []


def test_settings_that_are_named_exist() -> None:
    assert set(SETTINGS) >= MAY_CHANGE | DECIDE_TENSORS


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--enable_fsdp", "--compile", "--activation_checkpointing", "full", "--loss_chunk_size", "0"],
            marks=pytest.mark.slow,  # compiles
        ),
        ["--num_workers_dataloader", "1", "--max_train_step", "9", "--save_every_steps", "1", "--keep_last", "1"],
    ],
)
def test_a_setting_that_leaves_the_result_alone_may_change(
    flags: list[str], runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["full"], run)
    argv = flags_of(tiny_model, run, *PLAIN, *flags, "--resume", "auto")
    process_group.train(with_aot_eager(argv) if "--compile" in flags else argv, 1)
    whole = results(runs["full"].parent / "whole-full")
    assert [r[2] for r in results(run)[: len(whole)]] == pytest.approx([r[2] for r in whole], rel=1e-5)


def test_resume_anyway_takes_the_new_settings_and_says_what_changed(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["full"], run)
    given = flags_of(tiny_model, run, *PLAIN, "--lr", "1e-3", "--resume", "auto", "--resume_anyway")
    outcome = process_group.train(given, 1)[0]
    assert "resume_anyway: --lr 0.001 (there 0.005)" in outcome.stdout
    assert [r[4] for r in results(run)] == [0.005] * 3 + [0.001] * 5


def test_another_global_batch_is_refused_even_so(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup
) -> None:
    line = refusal(process_group, runs["full"], tiny_model, "--global_batch_size", "8", "--resume_anyway")
    assert "--global_batch_size: the checkpoint was trained with 4 rows per optimizer step" in line


def test_another_optimizer_is_refused_even_so(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup
) -> None:
    for name in ("SGD", "anyprecision"):
        line = refusal(process_group, runs["full"], tiny_model, "--optimizer", name, "--resume_anyway")
        assert f"--resume_anyway: {name} cannot go on with the states of AdamW in " in line
        assert "give --optimizer AdamW" in line


def test_other_weights_under_an_adapter_are_refused(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros_like(weights["model.layers.1.mlp.up_proj.weight"])
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert "--model_name: other weights" in refusal(process_group, runs["lora"], other, *LORA)
    moved = tmp_path / "moved"  # the same weights elsewhere are the same base
    shutil.copytree(tiny_model, moved)
    run = tmp_path / "run"
    shutil.copytree(runs["lora"], run)
    process_group.train(flags_of(moved, run, *PLAIN, *LORA, "--resume", "auto"), 1)
    assert results(run) == results(runs["lora"].parent / "whole-lora")


def test_another_model_is_refused(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert "--model_name: another config.json" in refusal(process_group, runs["full"], other)


def test_an_adapter_of_another_rank_is_refused_by_every_tensor(
    runs: dict[str, Path], tiny_model: Path, process_group: ProcessGroup
) -> None:
    flags = ["--use_peft", "--lora_config.r", "2", "--lora_config.target_modules", "q_proj,k_proj", "--resume_anyway"]
    line = refusal(process_group, runs["lora"], tiny_model, *flags)
    for layer in (0, 1):
        attention = f"base_model.model.model.layers.{layer}.self_attn"
        for factor, shapes in {"A": "[4, 32] float32 there and [2, 32] float32", "B": "[32, 4] float32 there"}.items():
            assert f"{attention}.q_proj.lora_{factor}.default.weight is {shapes}" in line
    missing, extra = line[line.index("missing: ") :].split("; ")[:2]
    assert missing.count("k_proj") == 4
    assert extra.startswith("extra: ")
    assert extra.count("v_proj") == 4


@pytest.mark.parametrize(
    ("path", "named"),
    [("nowhere", "is not there"), ("model", "holds no complete checkpoint"), ("file", "holds no complete checkpoint")],
)
def test_a_path_that_holds_no_checkpoint_is_refused(
    path: str, named: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    given = tiny_model if path == "model" else tmp_path / path
    outcome = process_group.run(flags_of(tiny_model, tmp_path / "run", "--resume", str(given)), 1)[0]
    assert outcome.status == 2
    assert named in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_a_copy_without_the_optimizer_is_refused(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    copy = ["--dist_checkpoint_root_folder", str(tmp_path), "--dist_checkpoint_folder", "copy"]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *PLAIN, *copy), 1)
    outcome = process_group.run(
        flags_of(tiny_model, tmp_path / "b", *PLAIN, "--resume", str(tmp_path / "copy-tiny")), 1
    )[0]
    assert outcome.status == 0, "its step checkpoints hold the optimizer"
    (tmp_path / "alone").mkdir()
    for file in (tmp_path / "copy-tiny").iterdir():
        if not file.name.startswith("step-"):
            (shutil.copytree if file.is_dir() else shutil.copy)(file, tmp_path / "alone" / file.name)
    outcome = process_group.run(flags_of(tiny_model, tmp_path / "c", *PLAIN, "--resume", str(tmp_path / "alone")), 1)[0]
    assert outcome.status == 2
    assert "it holds no optimizer state (a copy made without --save_optimizer)" in outcome.stderr


def test_a_finished_run_without_checkpoints_is_not_trained_over(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = flags_of(tiny_model, tmp_path / "run", *PLAIN, "--save_every_minutes", "0", "--save_every_steps", "0")
    process_group.train(given, 1)
    assert not (tmp_path / "run/checkpoints").exists()
    outcome = process_group.run([*given, "--resume", "auto"], 1)[0]
    assert outcome.status == 2
    assert "holds a finished run without checkpoints" in outcome.stderr
    assert len(results(tmp_path / "run")) == 8


@pytest.mark.slow
def test_a_job_that_was_restarted_goes_on_by_itself_and_replaces_nothing(
    runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """Even with --overwrite, which the repeated command still has; restarted by torchrun and by Slurm."""
    restarts = (
        (None, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        ("slurm-7", {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}),
    )
    for number, (job, variables) in enumerate(restarts):
        run = tmp_path / f"run{number}"
        shutil.copytree(runs["full"], run)
        add_to_run_yaml(run, job=job)
        done = run_command(*flags_of(tiny_model, run, *PLAIN, "--overwrite"), **variables)
        assert done.returncode == 0, done.stderr
        assert "resume: auto, since the launcher has restarted this job" in done.stdout
        assert f"resume: from {run}/checkpoints/step-00000003" in done.stdout
        assert results(run) == results(runs["full"].parent / "whole-full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "started", "flags"),
    [
        ("none", "2026-01-01T00:00:00+00:00", []),
        ("none", "2026-01-01T00:00:00+00:00", ["--overwrite"]),
        ("another", None, ["--overwrite"]),
    ],
)
def test_a_job_that_was_restarted_before_it_had_a_folder_does_not_go_on_with_another_run(
    job: str, started: str | None, flags: list[str], runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """It is refused, or overwrites if told to. torchrun's default job id is "none", so times are compared too."""
    run = tmp_path / "run"
    shutil.copytree(runs["full"], run)
    add_to_run_yaml(run, job=job, **({"started": started} if started else {}))
    restart = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "none"}
    done = run_command(*flags_of(tiny_model, run, *PLAIN, *flags), **restart)
    if flags:
        assert done.returncode == 0, done.stderr
        assert "resume" not in done.stdout
        assert results(run) == results(runs["full"].parent / "whole-full")
    else:
        assert done.returncode == 2
        assert "already holds a run" in done.stderr
