"""The documented commands run as they are written, on a tiny model, and leave the run folder that they promise."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from run_folder.checkpoint_folder import shard_file
from tests.helpers.contract import FP16_KEYS, KEYS, PHASES
from tests.helpers.processes import ROOT, log_lines, read_metrics, run_command, run_forked

SAMPLES = ROOT / "datasets/samples/dialogue_summary"
NUM_TRAIN, NUM_EVAL = 40, 8

DEFAULT_EPOCHS, DEFAULT_LR, DEFAULT_GAMMA = 3, 1e-4, 0.85


@pytest.fixture(scope="session")
def few_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the sample dialogues."""
    folder = tmp_path_factory.mktemp("few_samples")
    for split, count in (("train", NUM_TRAIN), ("validation", NUM_EVAL)):
        lines = (SAMPLES / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    return folder


def run_documented(
    line: str,
    model: Path,
    data: Path,
    output: Path | None,
    *,
    nproc: int | None = None,
    cwd: Path,
) -> None:
    """Run one documented command with the model, the data and, if it has one, the output folder of this test."""
    flags = [*line.split(), "--model_name", str(model), "--samsum_dataset.data_path", str(data)]
    flags += [] if output is None else ["--output_dir", str(output)]
    done = run_command(*flags, nproc=nproc, cwd=cwd, timeout_seconds=500)
    assert done.returncode == 0, done.stderr
    assert not [text for text in done.stderr.split("\n") if text.startswith("error: ")], done.stderr
    assert "Traceback" not in done.stderr
    assert "finished" in done.stdout


def assert_run_folder_keeps_its_contract(folder: Path, *, world_size: int, num_samples: tuple[int, int]) -> None:
    """run.yaml and metrics.jsonl of a finished run with default schedule, epochs and learning rate."""
    events = read_metrics(folder)
    is_fp16 = yaml.safe_load((folder / "run.yaml").read_text())["resolved"]["precision"] == "fp16-mixed"
    of = {name: [event for event in events if event["event"] == name] for name in KEYS}
    assert sum(map(len, of.values())) == len(events), "an event of another name"
    for name, keys in KEYS.items():
        for event in of[name]:
            of_fp16 = FP16_KEYS.get(name, "").split() if is_fp16 else []
            assert set(event) == {"event", "time", *keys.split(), *of_fp16}, name
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    (start,), (end,) = of["start"], of["end"]

    assert start["world_size"] == world_size
    assert (start["num_train_samples"], start["num_eval_samples"]) == num_samples
    assert 0 < start["num_train_rows"] <= start["num_train_samples"]
    num_steps, steps_per_epoch = start["num_steps"], start["steps_per_epoch"]
    assert num_steps == DEFAULT_EPOCHS * steps_per_epoch

    assert [event["step"] for event in of["train"]] == list(range(1, num_steps + 1))
    for event in of["train"]:
        numbers = [value for key, value in event.items() if key not in ("event", "time")]
        assert all(type(value) in (int, float) and math.isfinite(value) for value in numbers), event
        assert event["epoch"] == (event["step"] - 1) // steps_per_epoch + 1
        assert event["lr"] == pytest.approx(DEFAULT_LR * DEFAULT_GAMMA ** (event["epoch"] - 1))
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))
        assert event["grad_norm"] > 0
        assert 0 < event["num_label_tokens"] < event["num_tokens"]
        assert event["tokens_per_second"] == pytest.approx(event["num_tokens"] / event["step_seconds"])
        assert event["tokens_per_second_per_device"] == pytest.approx(event["tokens_per_second"] / world_size)
        assert event["model_tflops_per_device"] > 0

    assert [event["epoch"] for event in of["epoch"]] == list(range(1, DEFAULT_EPOCHS + 1))
    assert [(event["epoch"], event["step"]) for event in of["eval"]] == [
        (epoch, epoch * steps_per_epoch) for epoch in range(1, DEFAULT_EPOCHS + 1)
    ]
    for epoch, evaluation in zip(of["epoch"], of["eval"], strict=True):
        assert epoch["eval_loss"] == evaluation["loss"]
        steps = [event for event in of["train"] if event["epoch"] == epoch["epoch"]]
        tokens = sum(event["num_label_tokens"] for event in steps)
        mean = sum(event["loss"] * event["num_label_tokens"] for event in steps) / tokens
        assert epoch["train_loss"] == pytest.approx(mean)
        assert 0 < epoch["seconds"] <= end["seconds"]
    assert len({event["num_label_tokens"] for event in of["eval"]}) == 1

    observed = {1, 2, *range(50, num_steps + 1, 50), *range(steps_per_epoch, num_steps + 1, steps_per_epoch)}
    expected = {(step, rank, phase) for step in observed for rank in range(world_size) for phase in PHASES}
    found = [(event["step"], event["rank"], event["phase"]) for event in of["memory"]]
    assert len(found) == len(expected)
    assert set(found) == expected
    for event in of["memory"]:
        parts = ("params_gib", "grads_gib", "optimizer_gib", "activations_gib", "other_gib")
        assert event["allocated_gib"] == pytest.approx(sum(event[part] for part in parts))
        assert event["params_gib"] > 0
        assert event["peak_allocated_gib"] >= event["allocated_gib"]
        assert event["phase"] == "after_forward" or event["activations_gib"] == 0

    assert end["status"] == "finished"
    assert end["step"] == num_steps
    assert end["best_eval_loss"] == min(event["loss"] for event in of["eval"])
    assert end["peak_allocated_gib"] == max(event["peak_allocated_gib"] for event in of["memory"])

    notes = yaml.safe_load((folder / "run.yaml").read_text())
    assert notes["world_size"] == world_size
    assert notes["settings"]["train_config"]["num_epochs"] == DEFAULT_EPOCHS
    assert {"torch", "transformers", "peft"} <= set(notes["versions"])
    assert any(Path(word).name == "finetuning.py" for word in shlex.split(notes["command"]))
    best = min(of["eval"], key=lambda event: event["loss"])
    assert notes["saved"] == {"step": best["step"], "folder": "adapter" if (folder / "adapter").exists() else "model"}


def assert_gives_finite_logits(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer.encode("Summarize this dialog:\nAnn: Hi!\n---\nSummary:\n")])
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape[:2] == ids.shape
    assert torch.isfinite(logits).all()


def assert_adapter_loads(folder: Path, base: Path) -> None:
    """With plain peft, on the model that it was trained on; it changes what that model says."""
    tensors = load_file(folder / "adapter_model.safetensors")
    assert tensors
    assert all("lora_" in name for name in tensors)
    assert all(tensor.any() for name, tensor in tensors.items() if "lora_B" in name), "not trained"
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert_gives_finite_logits(model, AutoTokenizer.from_pretrained(folder))


def assert_model_loads(folder: Path, base: Path, *, dtype: torch.dtype) -> None:
    """With plain transformers, every weight found and none too many, and not the weights it started from."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == dtype
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(tensor, before[name].to(dtype)) for name, tensor in model.state_dict().items())
    assert_gives_finite_logits(model, AutoTokenizer.from_pretrained(folder))


def read_sharded_copy(folder: Path, *, world_size: int) -> dict[str, torch.Tensor]:
    """The model in a sharded copy, which must be complete: its marker and a file of every rank."""
    assert (folder / "COMPLETE").is_file()
    assert {file.name for file in folder.glob("*.safetensors")} == {shard_file(rank) for rank in range(world_size)}
    reader = HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(name.startswith("model.") for name in state), "save_optimizer was not asked for"
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


FSDP_LORA = "--enable_fsdp --use_peft --peft_method lora"
SHARDED_COPY = "--dist_checkpoint_root_folder model_checkpoints --dist_checkpoint_folder fine-tuned --pure_bf16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "nproc"),
    [("", 2), pytest.param(" --use_fast_kernels", 2, marks=pytest.mark.full)],
    ids=["plain", "fast-kernels"],
)
def test_sharded_lora_writes_an_adapter(
    more: str, nproc: int, tiny_model: Path, few_samples: Path, tmp_path: Path
) -> None:
    run_documented(FSDP_LORA + more, tiny_model, few_samples, tmp_path / "run", nproc=nproc, cwd=tmp_path)
    assert_run_folder_keeps_its_contract(tmp_path / "run", world_size=nproc, num_samples=(NUM_TRAIN, NUM_EVAL))
    assert_adapter_loads(tmp_path / "run/adapter", tiny_model)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"], "written elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize(("more", "nproc"), [("--use_fast_kernels", 4), ("--low_cpu_fsdp --batch_size_training 1", 2)])
def test_sharded_full_fine_tuning_writes_a_sharded_copy(
    more: str, nproc: int, tiny_model: Path, few_samples: Path, tmp_path: Path
) -> None:
    line = f"--enable_fsdp {more} {SHARDED_COPY}"
    run_documented(line, tiny_model, few_samples, None, nproc=nproc, cwd=tmp_path)
    (folder,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"tiny-samsum-[0-9]{8}-[0-9]{6}", folder.name)
    assert_run_folder_keeps_its_contract(folder, world_size=nproc, num_samples=(NUM_TRAIN, NUM_EVAL))
    assert_model_loads(folder / "model", tiny_model, dtype=torch.bfloat16)
    copy = read_sharded_copy(tmp_path / "model_checkpoints/fine-tuned-tiny", world_size=nproc)
    saved = load_file(folder / "model/model.safetensors")
    assert set(saved) <= set(copy)
    assert all(copy[name].shape == tensor.shape for name, tensor in saved.items())
    last_step = read_metrics(folder)[-1]["step"]
    if yaml.safe_load((folder / "run.yaml").read_text())["saved"]["step"] == last_step:
        assert all(torch.equal(copy[name], tensor) for name, tensor in saved.items())


@pytest.mark.slow
def test_lora_on_a_named_dataset_writes_adapter_and_sharded_copy(
    tiny_model: Path, few_samples: Path, tmp_path: Path
) -> None:
    line = f"{FSDP_LORA} --dataset samsum_dataset --save_model {SHARDED_COPY}"
    run_documented(line, tiny_model, few_samples, tmp_path / "run", nproc=2, cwd=tmp_path)
    assert_run_folder_keeps_its_contract(tmp_path / "run", world_size=2, num_samples=(NUM_TRAIN, NUM_EVAL))
    assert_adapter_loads(tmp_path / "run/adapter", tiny_model)
    copy = read_sharded_copy(tmp_path / "model_checkpoints/fine-tuned-tiny", world_size=2)
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert len(copy) == len(saved), "the copy of an adapter holds the adapter alone"
    assert all("lora_" in name for name in copy)


def number_of_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "nproc"),
    [
        ("--split_slice 1% --use_peft --quantization True --use_fp16 True", None),
        pytest.param("--split_slice 1% --use_peft --quantization False --use_fp16 False", None, marks=pytest.mark.full),
        pytest.param("--split_slice 1% --use_peft --quantization False --use_fp16 True", None, marks=pytest.mark.full),
        ("--split_slice 1% --quantization False --use_fp16 False", None),
        ("--split_slice 1% --quantization False --use_fp16 True", None),
        ("--split_slice 1% --enable_fsdp --quantization False --use_fp16 False", 4),
        pytest.param(
            "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False --fsdp_config.optimizer SGD",
            2,
            marks=pytest.mark.full,
        ),
        ("--split_slice 1% --enable_fsdp --quantization False --use_fp16 True --fsdp_config.optimizer SGD", 2),
        pytest.param(
            "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False --fsdp_config.fsdp_cpu_offload True",
            2,
            marks=pytest.mark.full,
        ),
        ("--split_slice 10 --enable_fsdp --quantization False --use_fp16 False --fsdp_config.fsdp_cpu_offload True", 4),
    ],
    ids=[
        "one-process-qlora-fp16",
        "one-process-lora",
        "one-process-lora-fp16",
        "one-process-full",
        "one-process-full-fp16",
        "four-ranks-full",
        "two-ranks-full-SGD",
        "two-ranks-full-SGD-fp16",
        "two-ranks-full-offload",
        "four-ranks-full-offload-ten-samples",
    ],
)
def test_the_start_of_samsum_trains(line: str, nproc: int | None, tiny_model: Path, tmp_path: Path) -> None:
    counts = [number_of_lines(SAMPLES / f"{split}.jsonl") for split in ("train", "validation")]
    run_documented(line, tiny_model, SAMPLES, tmp_path / "run", nproc=nproc, cwd=tmp_path)
    num_samples = (round(counts[0] / 100), round(counts[1] / 100)) if "1%" in line else (10, 10)
    assert_run_folder_keeps_its_contract(tmp_path / "run", world_size=nproc or 1, num_samples=num_samples)
    if "--use_peft" in line:
        assert_adapter_loads(tmp_path / "run/adapter", tiny_model)
        assert not (tmp_path / "run/model").exists()
    else:
        assert_model_loads(tmp_path / "run/model", tiny_model, dtype=torch.float32)
        assert not (tmp_path / "run/adapter").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"], "written elsewhere"
    memory = [event for event in read_metrics(tmp_path / "run") if event["event"] == "memory"]
    states = [event["optimizer_gib"] for event in memory if event["phase"] == "after_optimizer_step"]
    trained = [event["grads_gib"] for event in memory if event["phase"] == "after_backward"]
    states_per_weight = 1 if "SGD" in line else 2  # SGD's momentum, or AdamW's two moments, as large as the gradients
    for state, gradient in zip(states, trained, strict=True):
        assert state == pytest.approx(states_per_weight * gradient, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [pytest.param("", marks=pytest.mark.full), " --low_cpu_fsdp True"],
    ids=["as-it-is", "low-cpu"],
)
def test_a_larger_model_is_the_same_command(more: str, tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model-13b"))
    line = "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False --fsdp_config.optimizer SGD" + more
    run_documented(line, model, SAMPLES, tmp_path / "run", nproc=2, cwd=tmp_path)
    num_samples = [round(number_of_lines(SAMPLES / f"{split}.jsonl") / 100) for split in ("train", "validation")]
    assert_run_folder_keeps_its_contract(tmp_path / "run", world_size=2, num_samples=tuple(num_samples))


def test_the_first_minute_of_the_readme_runs_as_written(tiny_model: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (rows,) = re.findall(r"```json\n(.*?)```", readme, flags=re.DOTALL)
    assert len(rows.splitlines()) == 3
    (tmp_path / "chats.jsonl").write_text(rows)
    command, *_ = re.findall(r"^python finetuning.py (.*)$", readme, flags=re.MULTILINE)
    words = shlex.split(command)
    model = shutil.copytree(tiny_model, tmp_path / "M")  # the README's has a chat template of its own
    shutil.copy(ROOT / "datasets/samples/formats/chat.jinja", model / "chat_template.jinja")
    words[words.index("--model_name") + 1] = str(model)
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"adapter", "run.yaml", "metrics.jsonl", "checkpoints"} <= {
        path.name for path in tmp_path.glob("outputs/first/*")
    }
    (shown,) = re.findall(r"```text\n(.*?)```", readme, flags=re.DOTALL)
    # The README's lines are of such a run: they start as this run's do, whatever their figures are.
    starts = {_start(line) for line in log_lines(done.stdout)}
    assert not {_start(line) for line in log_lines(shown) if line.strip() not in ("", "...")} - starts
    question, *_ = re.findall(r"^python -m tools.generate (.*)$", readme, flags=re.MULTILINE)
    answered = run_forked(["-m", "tools.generate", *shlex.split(question), "--max_new_tokens", "4"], cwd=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()
    (talk,) = re.findall(r"^python -m tools.chat (.*)$", readme, flags=re.MULTILINE)
    ended = run_forked(["-m", "tools.chat", *shlex.split(talk)], cwd=tmp_path)  # standard input has nothing
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def _start(line: str) -> str:
    """The first word of a printed line, figures aside."""
    return re.sub(r"[0-9].*", "", line.split()[0]) if line.split() else ""
